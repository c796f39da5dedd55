"""The stored gains and biases of a port against its reference's: the relation of each, and whether it is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import PairedBy, TensorPair, kind_of, pair_norms
from normkit.comparison.parameters import NormTensors, norm_tensors
from normkit.comparison.relations import Relation, relation
from normkit.comparison.weights import Weights

Progress = Callable[[str, int, int], None]
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


@dataclass(frozen=True, kw_only=True)
class Values:
    """All gains and biases of a port against the reference's."""

    port: str
    reference: str
    tensors: tuple[TensorValue, ...]
    """In the port's order."""
    missing: tuple[str, ...]
    """Names of the reference's gains and biases of norms that have no counterpart in the port."""
    extra: tuple[str, ...]
    """Names of the port's gains and biases of norms that have no counterpart in the reference."""
    left_out: Mapping[str, str]
    """Name of a vector of the port that is not taken for a norm's -> why."""
    others_missing: tuple[str, ...] = ()
    """Names of the reference's other tensors for which the port has none of that name."""
    others_extra: tuple[str, ...] = ()
    """Names of the port's other tensors for which the reference has none of that name."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    """Name of another tensor -> its shapes in the port and in the reference, where these differ."""
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[ValueGroup, ...]:
        """The tensors by relation and verdict: wrong ones first, then undecided ones, then right ones."""
        return _grouped(self.tensors)

    @property
    def is_right(self) -> bool | None:
        """Whether every gain and bias is right; None if none is wrong and some are undecided."""
        if self.missing or any(each.is_right is False for each in self.tensors):
            return False
        return True if self.tensors and all(each.is_right for each in self.tensors) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "port": self.port,
            "reference": self.reference,
            "is_right": self.is_right,
            "groups": [each.to_json() for each in self.groups],
            "tensors": [each.to_json() for each in self.tensors],
            "missing": [*self.missing],
            "extra": [*self.extra],
            "left_out": {**self.left_out},
            "others_missing": [*self.others_missing],
            "others_extra": [*self.others_extra],
            "reshaped": {name: [[*one], [*other]] for name, (one, other) in (self.reshaped or {}).items()},
            "notes": [*self.notes],
        }


class _Vectors:
    """The gains and biases of one side, each read once."""

    def __init__(self, weights: Weights) -> None:
        self._source = weights.source
        self._read: dict[str, Tensor] = {}

    def of(self, name: str) -> Tensor:
        if name not in self._read:
            info = self._source.tensors[name]
            rows = self._source.rows(name, 0, info.matrix[0])
            self._read[name] = rows.reshape(-1).to(torch.float64)
        return self._read[name]

    def dtype(self, name: str) -> str:
        return self._source.tensors[name].dtype


def compare_values(port: Weights, reference: Weights, progress: Progress | None = None) -> Values:
    """Find the relation of every gain and bias of a port to the reference's; nothing is run.

    Only the vectors of norms are read.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        progress: Called with a stage's name, the steps done and the steps in all.

    Raises:
        ModelError: If a file cannot be read to its end.

    Example:
        >>> from normkit.comparison.weight_sources import weights_of
        >>> gain = torch.randn(64)
        >>> found = compare_values(weights_of({"norm.weight": gain + 1}), weights_of({"norm.weight": gain}))
        >>> [group.words for group in found.groups]
        ['reference + 1']
    """
    report = progress or (lambda _stage, _done, _total: None)
    ours, theirs = norm_tensors(port.source.tensors), norm_tensors(reference.source.tensors)
    held, held_there = _Vectors(port), _Vectors(reference)

    def related(one: NormTensors, other: NormTensors) -> bool:
        for name, name_there in ((one.weight, other.weight), (one.bias, other.bias)):
            if name is not None and name_there is not None:
                found = _relation(held, held_there, name, name_there)
                return found.kind not in ("different", "undecided", "constant", "not finite")
        return False

    pairs = pair_norms(ours.norms, theirs.norms, related, names=port.names, reference_names=reference.names)
    found, missing, extra = [], [], []
    for done, pair in enumerate(pairs):
        report("values", done, len(pairs))
        for role in ("weight", "bias"):
            name, name_there = getattr(pair.norm, role), getattr(pair.reference, role)
            if name is None or name_there is None:
                missing += [name_there] if name_there else []
                extra += [name] if name else []
                continue
            found.append(_value(pair, role, name, name_there, _relation(held, held_there, name, name_there)))
    paired = {id(each) for pair in pairs for each in (pair.norm, pair.reference)}
    missing += [name for norm in theirs.norms if id(norm) not in paired for name in _names(norm)]
    extra += [name for norm in ours.norms if id(norm) not in paired for name in _names(norm)]
    return Values(
        port=port.name,
        reference=reference.name,
        tensors=tuple(found),
        missing=tuple(missing),
        extra=tuple(extra),
        left_out=ours.left_out,
        notes=(*port.notes, *reference.notes),
    )


def _names(norm: NormTensors) -> list[str]:
    return [name for name in (norm.weight, norm.bias) if name is not None]


def _relation(held: _Vectors, held_there: _Vectors, name: str, name_there: str) -> Relation:
    one, other = held.of(name), held_there.of(name_there)
    if one.shape != other.shape:
        return Relation(kind="different", reason=f"it has {len(one)} numbers, the reference {len(other)}")
    return relation(one, other, held.dtype(name), held_there.dtype(name_there))


def _value(pair: TensorPair, role: Role, name: str, name_there: str, found: Relation) -> TensorValue:
    return TensorValue(
        path=pair.norm.path,
        reference_path=pair.reference.path,
        role=role,
        name=name,
        reference_name=name_there,
        paired_by=pair.paired_by,
        relation=found,
        verdict="",
        is_right=True if found.kind == "equal" else None if found.kind == "undecided" else False,
    )


def _grouped(tensors: Sequence[TensorValue]) -> tuple[ValueGroup, ...]:
    groups: dict[tuple[Any, ...], list[TensorValue]] = defaultdict(list)
    for each in tensors:
        groups[(each.role, each.verdict, each.is_right, each.relation.key)].append(each)
    made = [_group(members, tensors) for members in groups.values()]
    rank = {False: 0, None: 1, True: 2}
    return tuple(sorted(made, key=lambda group: (rank[group.is_right], -len(group.names))))


def _group(members: Sequence[TensorValue], tensors: Sequence[TensorValue]) -> ValueGroup:
    first = members[0]
    kinds = {kind_of(each.path) for each in members}
    noun = "gain" if first.role == "weight" else "bias"
    plural = {"gain": "gains", "bias": "biases"}[noun]
    of_role = sum(each.role == first.role for each in tensors)
    count = len(members)
    if count == 1:
        title = first.name
    elif count == of_role:
        title = f"all {count} {plural}"
    else:
        title = f"{count} {plural} of {', '.join(sorted({_kind_words(kind) for kind in kinds}))}"
    return ValueGroup(
        title=title,
        words=first.relation.words,
        verdict=first.verdict,
        is_right=first.is_right,
        names=tuple(each.name for each in members),
    )


def _kind_words(kind: str) -> str:
    """A kind of norms in words: "query and key norms", or the last word of its path."""
    return kind.rpartition(".")[2]
