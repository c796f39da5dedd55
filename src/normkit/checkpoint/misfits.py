"""Differences between a checkpoint and its configuration: the number of layers, and a head without weights.

Weights that are left over or missing are healthy in many files (heads of other tasks, positions that are computed
now). These are not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normkit.checkpoint.build_model import BuiltModel

ATTRIBUTE = "normkit_misfits"
"""A model that normkit loads carries its `Misfit`s under this name; no other model has the attribute."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A part of a model of which the file has another number than the configuration."""

    path: str
    """The list of layers, or the head."""
    in_file: int
    """Members of the list in the file; 0 for a head."""
    in_model: int
    """Members by the configuration; 1 for a head."""
    is_head: bool = False
    """It is a head whose weights the configuration does not tie, and the file lacks."""


def misfits(built: BuiltModel) -> tuple[Misfit, ...]:
    """The misfits of a model that was just loaded, in the order of its modules; a head last."""
    head = [Misfit(path=built.head, in_file=0, in_model=1, is_head=True)] if built.head else []
    return (*_lists(built), *head)


def _lists(built: BuiltModel) -> Iterator[Misfit]:
    """Lists with further members in the file, whose weights are those of a member; and with fewer."""
    from torch import nn

    missing, prefix = set(built.missing), f"{built.model.base_model_prefix}."
    for path, members in built.model.named_modules():
        if not isinstance(members, nn.ModuleList) or not len(members):
            continue
        own = [{name for name, _ in member.named_parameters(remove_duplicate=False)} for member in members]
        # A body reads the file of a model with a head, whose names have a prefix, and the other way round.
        found: dict[int, set[str]] = defaultdict(set)
        for place in {path, path.removeprefix(prefix), prefix + path}:
            for name in built.unexpected:
                member, _, tail = name.removeprefix(f"{place}.").partition(".")
                if name.startswith(f"{place}.") and member.isdecimal():
                    found[int(member)].add(tail)
        # Layers that predict further tokens, which transformers does not run, have weights that no other layer has.
        known = set().union(*own, *(tails for index, tails in found.items() if index < len(members)))
        known |= {name.partition(".")[2] for name, _ in members.named_buffers()}
        further = 0
        for index, tails in found.items():
            # Experts, which a file numbers, may be one tensor of the model.
            unnumbered = {tail for tail in tails if not re.search(r"(^|\.)\d+\.", tail)}
            further += index >= len(members) and bool(unnumbered) and unnumbered <= known
        absent = [i for i, names in enumerate(own) if names and {f"{path}.{i}.{tail}" for tail in names} <= missing]
        if further:
            yield Misfit(path=path, in_file=len(members) + further, in_model=len(members))
        elif absent and 0 < absent[0] == len(members) - len(absent):
            yield Misfit(path=path, in_file=absent[0], in_model=len(members))
