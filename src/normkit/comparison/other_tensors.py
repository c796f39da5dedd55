"""The tensors of two models that are not of norms: which are missing, of another shape, or other matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normkit.comparison.matrices import Finding, compare_matrices
from normkit.comparison.parameter_pairs import pair_paths
from normkit.comparison.weights import Weights
from normkit.text import counted

_COUNTER = re.compile(r"onnx::\w+_\d+$|(?:^|/)(?:const|constant|initializer|tensor|val|arg|t|_v|)_?\d+$", re.IGNORECASE)
"""Names that torch.onnx and onnx's optimizers give: onnx::MatMul_920, /const_12, val_3, 417."""


@dataclass(frozen=True, kw_only=True)
class OtherTensors:
    """The tensors that are not of norms, by name and shape, and a few rows of each matrix."""

    paired: int = 0
    """How many have a counterpart."""
    missing: tuple[str, ...] = ()
    """Names in the reference without a counterpart in the port."""
    extra: tuple[str, ...] = ()
    """Names in the port without a counterpart in the reference."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Name in the port -> its shape there and in the reference, where these differ."""

    matrices: Mapping[str, Finding] = field(default_factory=dict)
    """Name in the port -> what is wrong with a matrix of the reference's shape; the right ones are left out."""
    notes: tuple[str, ...] = ()
    """Which matrices could not be looked at, and why."""

    @property
    def are_wrong(self) -> bool:
        """Whether a matrix is not the reference's: transposed or unrelated. Of other values that is not claimed."""
        return any(each != "other values" for each in self.matrices.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "paired": self.paired,
            "missing": [*self.missing],
            "extra": [*self.extra],
            "reshaped": {name: [[*one], [*other]] for name, (one, other) in self.reshaped.items()},
            "matrices": {**self.matrices},
            "notes": [*self.notes],
        }


def compare_others(
    port: Weights,
    reference: Weights,
    names: Sequence[str],
    names_there: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> OtherTensors:
    """Pair tensors by name, whatever stands before it, and by the runtime's table of names; compare the matrices."""
    counters = [name for name in names if _is_counter(name, port)]
    names = [name for name in names if name not in {*counters}]
    names_there = [name for name in names_there if not _is_counter(name, reference)]
    held, held_there = {*names}, {*names_there}
    ours = [_known(name, port.names, held_there) for name in names]
    theirs = [_known(name, reference.names, held) for name in names_there]
    pairs = pair_paths(ours, theirs)
    shapes = [(names[one], names_there[other]) for one, other in pairs]
    taken, taken_there = {one for one, _ in pairs}, {other for _, other in pairs}
    matrices, notes = compare_matrices(port, reference, shapes, progress)
    if counters:
        notes += (f"{counted(len(counters), 'tensor')} with a number for a name, as {counters[0]}, not paired",)
    return OtherTensors(
        paired=len(pairs),
        missing=tuple(name for place, name in enumerate(names_there) if place not in taken_there),
        extra=tuple(name for place, name in enumerate(names) if place not in taken),
        reshaped={
            name: (port.source.tensors[name].shape, reference.source.tensors[other].shape)
            for name, other in shapes
            if port.source.tensors[name].shape != reference.source.tensors[other].shape
        },
        matrices=matrices,
        notes=notes,
    )


def _is_counter(name: str, weights: Weights) -> bool:
    """Whether a name is an exporter's number and an operator's word: two exports number the same tensor otherwise."""
    return weights.runtime == "ONNX" and name not in weights.names and bool(_COUNTER.search(name))


def _known(name: str, table: Mapping[str, Sequence[str]], others: Collection[str]) -> str:
    """The name that the other side has, of those that the runtime's table gives; the likeliest if it has none."""
    known = table.get(name, ())
    return next((each for each in (name, *known) if each in others), known[0] if known else name)
