"""A gain or bias against its reference's; many of them told together; and whose they are if they are another norm's."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import PairedBy, kind_of, numbers_of
from normkit.comparison.relations import ROUNDINGS, Relation, relation
from normkit.text import shortened, significant, spread

Role = Literal["weight", "bias"]

LEAST = 3
"""The fewest layers out of place where a layer has one kind of norm: two norms of one kind may be swapped alone."""

_OFFSETS = (0.0, 1.0, -1.0, 2.0, -2.0)


@dataclass(frozen=True, kw_only=True)
class TensorValue:
    """A gain or bias of the port against the reference's."""

    path: str
    """Path of the norm in the port."""
    reference_path: str
    """Path of the norm in the reference."""
    role: Role
    name: str
    """Name of the tensor in the port; "" if it is missing."""
    reference_name: str
    """Name of the tensor in the reference; "" if the port's is extra."""
    paired_by: PairedBy
    relation: Relation
    verdict: str
    """The consequence for a reader who loads the port, in a few words; "" if there is nothing to add."""
    is_right: bool | None
    """Whether the port computes the reference's gain or bias; None if that is undecided."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "relation": self.relation.to_json()}


@dataclass(frozen=True, kw_only=True)
class ValueGroup:
    """The tensors with one relation and one verdict."""

    title: str
    """Their number and kind: "36 gains of query and key norms"."""
    words: str
    """Their relation, in words."""
    verdict: str
    is_right: bool | None
    names: tuple[str, ...]
    """Names of the tensors in the port, or in the reference if the port lacks them."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "title": self.title,
            "relation": self.words,
            "verdict": self.verdict,
            "is_right": self.is_right,
            "names": [*self.names],
        }


def grouped(tensors: Sequence[TensorValue]) -> tuple[ValueGroup, ...]:
    """The tensors with one relation and one verdict together: wrong ones first, then undecided, then right ones."""
    groups: dict[tuple[Any, ...], list[TensorValue]] = defaultdict(list)
    for each in tensors:
        groups[(each.role, each.verdict, each.is_right, each.relation.key)].append(each)
    made = [
        ValueGroup(
            title=_title(members, tensors),
            words=_words(members),
            verdict=members[0].verdict,
            is_right=members[0].is_right,
            names=tuple(each.name for each in members),
        )
        for members in groups.values()
    ]
    rank = {False: 0, None: 1, True: 2}
    return tuple(sorted(made, key=lambda group: (rank[group.is_right], -len(group.names))))


def _title(members: Sequence[TensorValue], tensors: Sequence[TensorValue]) -> str:
    """The number and kind of the norms, or the name of the only one."""
    if len(members) == 1:
        return members[0].name
    plural = "gains" if members[0].role == "weight" else "biases"
    if len(members) == sum(each.role == members[0].role for each in tensors):
        return f"all {len(members)} {plural}"
    kinds = _kinds(members)
    return f"{len(members)} {plural} of {' and '.join(kinds)}" if len(kinds) <= 2 else f"{len(members)} other {plural}"


def _kinds(members: Sequence[TensorValue]) -> list[str]:
    """The kinds of some norms in words; norms over the heads of queries and keys are one kind."""
    last = {each.path.rpartition(".")[2] for each in members}
    heads = {name for name in last if re.search(r"(?:^|_)(?:q|k|query|key)_?(?:layer)?_?norm", name)}
    of_keys = {name for name in heads if re.search(r"(?:^|_)k", name)}
    names = sorted(last - heads)
    if heads:
        both = "query and key norms" if of_keys and heads - of_keys else "key norms" if of_keys else "query norms"
        names = [both, *names]
    return names


def _words(members: Sequence[TensorValue]) -> str:
    """The relation of some tensors; numbers that differ among them as a spread."""
    first = members[0].relation
    if first.kind == "different" and not first.reason:
        return f"different by {spread(each.relation.distance for each in members)} of the largest"
    if first.kind == "scaled":
        return first.words.replace(
            significant(first.constant or 0.0), spread(e.relation.constant or 0.0 for e in members)
        )
    return first.words


def origins(
    strangers: Mapping[str, tuple[Tensor, str]],
    references: Mapping[str, tuple[Tensor, str]],
    stands_for: Mapping[str, str],
) -> dict[str, Relation]:
    """Find the reference's norm that each vector is copied from, or swapped with; those of none are left out.

    Args:
        strangers: Name of a vector of the port that differs from its reference -> its values and dtype.
        references: Path of each norm of the reference -> its values and dtype.
        stands_for: Name of a vector of the port -> path of the reference's norm that it stands for.

    Returns:
        Name of the vector -> its relation, "copied" or "swapped", exact or after rounding, with 1 or 2 added too.
    """
    known: dict[bytes, list[str]] = defaultdict(list)
    dtypes = {dtype for _, dtype in strangers.values()} if strangers else set[str]()
    sizes = {len(values) for values, _ in strangers.values()}
    for path, (values, _) in references.items():
        if len(values) in sizes:
            for digest in _digests(values, dtypes):
                known[digest].append(path)
    found = {}
    for name, (values, dtype) in strangers.items():
        candidates = known.get(_digest(values), [])
        for path in sorted(candidates, key=lambda path: _distance(stands_for[name], path)):
            other, other_dtype = references[path]
            made = relation(values, other, dtype, other_dtype)
            if path != stands_for[name] and made.kind in ("equal", "offset"):
                shift = made.constant if made.kind == "offset" else None
                found[name] = replace(made, kind="copied", constant=shift, other=path)
                break
    held = {(stands_for[name], each.other) for name, each in found.items()}
    for name, each in found.items():
        is_swapped = (each.other, stands_for[name]) in held
        place = place_of(stands_for[name], each.other)
        found[name] = replace(each, kind="swapped" if is_swapped else "copied", place=place)
    return found


def place_of(path: str, other: str) -> str:
    """The place of another norm relative to a norm, so that the same mistake in many layers has the same words.

    Example:
        >>> place_of("h.3.ln_1", "h.4.ln_1"), place_of("h.3.ln_1", "h.3.ln_2"), place_of("h.3.ln_1", "ln_f")
        ('the next layer', 'ln_2 of the same layer', 'ln_f')
    """
    here, there = numbers_of(path), numbers_of(other)
    last = other.rpartition(".")[2]
    if here == there and here:
        return f"{last} of the same layer"
    apart = [two - one for one, two in zip(here, there, strict=False) if two != one]
    if kind_of(path) != kind_of(other) or len(apart) != 1:
        return other
    step = apart[0]
    if abs(step) == 1:
        return "the next layer" if step > 0 else "the layer before"
    return f"{abs(step)} layers {'further' if step > 0 else 'before'}"


def _distance(path: str, other: str) -> tuple[bool, int]:
    gaps = [abs(one - two) for one, two in zip(numbers_of(path), numbers_of(other), strict=False)]
    return kind_of(path) != kind_of(other), sum(gaps)


def _digests(values: Tensor, dtypes: Sequence[str] | set[str]) -> set[bytes]:
    found = set()
    for constant in _OFFSETS:
        image = values + constant
        found.add(_digest(image))
        for rounding in ROUNDINGS.values():
            once = image.to(rounding)
            found.add(_digest(once.to(torch.float64)))
            found |= {_digest(once.to(ROUNDINGS[each]).to(torch.float64)) for each in dtypes if each in ROUNDINGS}
    return found


def _digest(values: Tensor) -> bytes:
    # A negative zero equals zero.
    return hashlib.blake2b((values + 0.0).numpy().tobytes(), digest_size=16).digest()


def with_layer_order(found: Sequence[TensorValue]) -> list[TensorValue]:
    """The tensors; where all that come from another layer follow one order of the layers, each says which order."""
    sources = layer_sources(found)
    if not sources:
        return list(found)
    layers = sorted({layer for each in found if (layer := _layer(each.reference_path)) is not None})
    order = [sources.get(layer, layer) for layer in layers]
    words = order_in_words(order)
    return [
        replace(each, relation=replace(each.relation, kind="copied", place="another layer", order=words))
        if each.relation.kind in ("copied", "swapped")
        else each
        for each in found
    ]


def layer_sources(found: Sequence[TensorValue]) -> Mapping[int, int]:
    """Layer -> the layer whose gains it holds, for layers out of place; none where the tensors do not say one order."""
    sources: dict[int, set[int]] = defaultdict(set)
    kinds: dict[str, set[int]] = defaultdict(set)
    for each in found:
        here, kind = _layer(each.reference_path), kind_of(each.reference_path)
        if each.relation.kind in ("copied", "swapped"):
            there = _layer(each.relation.other)
            if here is None or there is None or kind_of(each.relation.other) != kind:
                return {}
            sources[here].add(there)
            kinds[kind].add(here)
    moved = {layer: next(iter(others)) for layer, others in sources.items() if len(others) == 1}
    if len(moved) < max(2, len(sources)) or {*moved} != {*moved.values()}:
        return {}
    # A norm of a layer out of place that is in its own place says that it is not the layers.
    present: dict[str, set[int]] = defaultdict(set)
    for each in found:
        if (layer := _layer(each.reference_path)) in moved:
            assert layer is not None
            present[kind_of(each.reference_path)].add(layer)
    is_whole = all(kinds[kind] == layers for kind, layers in present.items())
    return moved if is_whole and (len(present) > 1 or len(moved) >= LEAST) else {}


def order_in_words(order: Sequence[int]) -> str:
    """An order of layers, with its rule where it is a common one.

    Example:
        >>> order_in_words([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9])
        '0, 1, 10, 11, 2, 3 and 6 more: sorted as text'
    """
    ordered = sorted(order)
    rule = {
        tuple(sorted(ordered, key=str)): ": sorted as text",
        tuple(reversed(ordered)): ": reversed",
    }.get(tuple(order), "")
    return f"{shortened([*map(str, order)], 6)}{rule}"


def _layer(path: str) -> int | None:
    """The number of the layer, or None where the path has no number or several."""
    numbers = numbers_of(path)
    return numbers[0] if len(numbers) == 1 else None
