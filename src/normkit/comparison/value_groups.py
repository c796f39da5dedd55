"""A gain or bias against its reference's; and many of them, told together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normkit.comparison.parameter_pairs import PairedBy
from normkit.comparison.relations import Relation
from normkit.text import significant, spread

Role = Literal["weight", "bias"]


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
    """What the relation means for who loads the port, in a few words; "" if there is nothing to add."""
    is_right: bool | None
    """Whether the port computes the reference's gain or bias; None if that is undecided."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": self.path,
            "reference_path": self.reference_path,
            "role": self.role,
            "name": self.name,
            "reference_name": self.reference_name,
            "paired_by": self.paired_by,
            "relation": self.relation.to_json(),
            "verdict": self.verdict,
            "is_right": self.is_right,
        }


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
