"""The tensors of two models that are not of norms: which are missing, of another shape, or other matrices.

Tensors are paired by name, then by values. Of matrices a few rows are read. Rows of a right port correlate with the
reference's: by 0.8 or more where they were quantized to two bits. Unrelated ones correlate by about
`1 / sqrt(numbers)`. Between the two nothing is claimed. Some converters store rows in another order, so a matrix is
called unrelated only if the sums of its rows and those of its columns are unrelated too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from normkit.checkpoint.plan import FLOATS
from normkit.comparison.folded_gains import CHUNK
from normkit.comparison.joined import Joined, JoinedSource, find_joined, with_views
from normkit.comparison.matrix_rows import (
    LEAST,
    RELATED,
    SIDE,
    blocks_of,
    correlation,
    few_rows,
    rows_of,
    transposed_correlation,
)
from normkit.comparison.parameter_pairs import numbers_of, pair_kinds, pair_paths
from normkit.comparison.parameters import NormTensors
from normkit.comparison.quantized import MlxSource, Rounded, has_other_scales, rounding
from normkit.comparison.runtimes import reorders
from normkit.comparison.weights import Weights
from normkit.errors import ModelError
from normkit.text import counted, rounded_percent, shortened

Finding = Literal[
    "transposed", "not transposed", "rows in rotary order", "unrelated", "scales of other groups", "other values"
]

_QUANTIZES = ("llama.cpp", "MLX", "ONNX")
"""Runtimes whose files hold quantized matrices."""

_EITHER_WAY = ("ONNX",)
"""Runtimes whose graphs multiply by a matrix or by its transpose, so that neither is wrong."""

BUDGET = 2**28
"""The most numbers of matrices that are read whole, to see whether their rows stand in another order."""

_ALIKE, _FEWEST_TELLING = 0.99, 16
"""The least correlation of two vectors that are one, rounded, and the fewest numbers for which that is no chance."""

_COUNTER = re.compile(r"onnx::\w+_\d+$|(?:^|/)(?:const|constant|initializer|tensor|val|arg|t|_v|)_?\d+$", re.IGNORECASE)
"""Names that torch.onnx and onnx's optimizers give: onnx::MatMul_920, /const_12, val_3, 417."""


@dataclass(frozen=True, kw_only=True)
class OtherTensors:
    """The tensors that are not of norms, by name and shape, and a few rows of each matrix."""

    paired: int = 0
    """How many have a counterpart."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name in the port -> name in the reference, of those that values or sizes paired, as the names do not tell."""
    missing: tuple[str, ...] = ()
    """Names in the reference without a counterpart in the port."""
    undecided: tuple[str, ...] = ()
    """Those of them of whose shape the port has tensors without a counterpart: they may be there under another name."""
    extra: tuple[str, ...] = ()
    """Names in the port without a counterpart in the reference."""
    joined: tuple[Joined, ...] = ()
    """Tensors of one model that hold several of the other."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Name in the port -> its shape there and in the reference, where these differ."""

    matrices: Mapping[str, Finding] = field(default_factory=dict)
    """Name in the port -> what is wrong with a matrix of the reference's shape; the right ones are left out."""
    rounded: Mapping[str, Rounded] = field(default_factory=dict)
    """Name in the port -> how a matrix that is the reference's otherwise differs by more than rounding to 16 bits.
    Files of runtimes that quantize are left out: there rounding is expected."""
    is_compared: bool = True
    """False where the reference has matrices and not one of them could be compared."""
    notes: tuple[str, ...] = ()
    """Which matrices could not be looked at, and why."""

    @property
    def near(self) -> Mapping[str, tuple[str, ...]]:
        """The kind of matrices that differ by more than rounding to 16 bits, with the relative error -> their names."""
        made: dict[str, tuple[str, ...]] = {}
        for words in dict.fromkeys(each.words for each in self.rounded.values()):
            alike = {name: each.error for name, each in self.rounded.items() if each.words == words}
            most = "" if len(alike) == 1 else "at most "
            made[f"{words} (relative error {most}{rounded_percent(max(alike.values()))})"] = (*alike,)
        return made

    @property
    def are_wrong(self) -> bool:
        """Whether a matrix is not the reference's: transposed or unrelated. Of other values that is not claimed."""
        return any(each != "other values" for each in self.matrices.values())


def compare_others(
    port: Weights,
    reference: Weights,
    names: Sequence[str],
    names_there: Sequence[str],
    progress: Callable[[str, int, int], None],
    factors: Mapping[str, Tensor] = MappingProxyType({}),
) -> OtherTensors:
    """Pair tensors by name, whatever stands before it, by the runtime's table of names, by values; compare matrices.

    `factors` are gains of the reference that a matrix of the port holds, by its name: in its columns, or in its rows,
    those as one column.
    """
    counters = [name for name in names if _is_counter(name, port)]
    names = [name for name in names if name not in {*counters}]
    names_there = [name for name in names_there if not _is_counter(name, reference)]
    held, held_there = {*names}, {*names_there}
    ours = [_known(name, port.names, held_there) for name in names]
    theirs = [_known(name, reference.names, held) for name in names_there]
    shapes = [(names[one], names_there[other]) for one, other in pair_paths(ours, theirs)]
    taken, taken_there = ({pair[side] for pair in shapes} for side in (0, 1))
    extra, missing = (
        [name for name in names if name not in taken],
        [name for name in names_there if name not in taken_there],
    )
    joined = find_joined(port, reference, extra, missing) if extra and missing else []
    held = {name for each in joined for name in (each.whole, *each.parts)}
    extra, missing = ([name for name in names if name not in held] for names in (extra, missing))
    renamed = _renamed(port, reference, extra, missing) if extra and missing else {}
    shapes += renamed.items()
    paired = len(shapes)
    extra = [name for name in extra if name not in renamed]
    missing = [name for name in missing if name not in {*renamed.values()}]
    port, reference = (
        with_views(side, [each for each in joined if each.is_of_port == is_port])
        for side, is_port in ((port, True), (reference, False))
    )
    shapes += [pair if each.is_of_port else pair[::-1] for each in joined for pair in each.views.items()]
    factors = {**factors} | {
        view: factors[each.whole] for each in joined if each.whole in factors and not each.axis for view in each.views
    }
    left = {_shape(port, name) for name in extra}
    made = compare_matrices(port, reference, shapes, progress, factors)
    notes = made.notes
    if counters:
        notes += (f"{counted(len(counters), 'tensor')} with a number for a name, as {counters[0]}, not paired",)
    has_matrices = any(_is_matrix(reference.source.tensors[name].shape) for name in names_there)
    return replace(
        made,
        paired=paired,
        renamed=renamed,
        missing=tuple(missing),
        undecided=tuple(name for name in missing if _shape(reference, name) in left),
        extra=tuple(extra),
        joined=tuple(joined),
        reshaped={
            name: (port.source.tensors[name].shape, reference.source.tensors[other].shape)
            for name, other in shapes
            if port.source.tensors[name].shape != reference.source.tensors[other].shape
        },
        is_compared=made.is_compared or not has_matrices,
        notes=notes,
    )


def _renamed(port: Weights, reference: Weights, names: Sequence[str], names_there: Sequence[str]) -> dict[str, str]:
    """Name in the port -> name in the reference, of tensors whose names do not tell.

    Kinds of tensors belong together whose values are related in most layers, matrices either way round, or which alone
    have their shape in several layers; what stands beside a tensor that is paired goes with it.
    """
    ours, theirs = cache(partial(rows_of, port)), cache(partial(rows_of, reference))

    def related(one: NormTensors, other: NormTensors) -> bool:
        shape, shape_there = port.source.tensors[one.path].shape, reference.source.tensors[other.path].shape
        try:
            if len(shape) < 2 or math.prod(shape) < LEAST:
                vectors = [read(each.path, math.prod(shape)) for read, each in ((ours, one), (theirs, other))]
                return math.prod(shape) >= _FEWEST_TELLING and (correlation(*vectors)[0] or 0.0) > _ALIKE
            few = few_rows(shape[-1])
            if (
                shape == shape_there
                and (correlation(ours(one.path, few), theirs(other.path, few))[0] or 0.0) >= RELATED
            ):
                return True
            if len(shape) != 2 or shape != shape_there[::-1]:
                return False
            corners = [read(each.path, SIDE)[:SIDE, :SIDE] for read, each in ((ours, one), (theirs, other))]
            return (correlation(corners[0], corners[1].T)[0] or 0.0) >= RELATED
        except ModelError:
            return False

    one_side, other_side = (
        [NormTensors(path=name, weight=name, bias=None, shape=_shape(side, name), is_named=False) for name in each]
        for side, each in ((port, names), (reference, names_there))
    )
    found = {
        one.path: other.path
        for pairs, by in pair_kinds(one_side, other_side, related)
        if by == "values" or (by == "size" and len(pairs) > 1)
        for one, other in pairs
    }
    beside = {name.rpartition(".")[0]: other.rpartition(".")[0] for name, other in found.items()}
    taken = {*found.values()}
    for name in names:
        parent, _, last = name.rpartition(".")
        other = f"{beside[parent]}.{last}" if parent in beside else ""
        is_free = name not in found and other in names_there and other not in taken
        if is_free and _shape(port, name) == _shape(reference, other):
            found[name] = other
    return found


def _shape(weights: Weights, name: str) -> tuple[int, ...]:
    """The shape of a tensor, that of a matrix without the order of its axes: it may be stored either way round."""
    shape = weights.source.tensors[name].shape
    return tuple(sorted(shape)) if len(shape) == 2 else shape


def _is_counter(name: str, weights: Weights) -> bool:
    """Whether a name is an exporter's number and an operator's word: two exports number the same tensor otherwise."""
    return weights.runtime == "ONNX" and name not in weights.names and bool(_COUNTER.search(name))


def _known(name: str, table: Mapping[str, Sequence[str]], others: Collection[str]) -> str:
    """The name that the other side has, of those that the runtime's table gives; the likeliest if it has none."""
    known = table.get(name, ())
    return next((each for each in (name, *known) if each in others), known[0] if known else name)


def compare_matrices(
    port: Weights,
    reference: Weights,
    pairs: Sequence[tuple[str, str]],
    progress: Callable[[str, int, int], None],
    factors: Mapping[str, Tensor] = MappingProxyType({}),
) -> OtherTensors:
    """The faults of matrices that are paired and have one shape.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        pairs: Names of tensors, in the port and in the reference.
        progress: Called with a stage's name, the steps done and the steps in all.
        factors: Name in the port -> the gain of the reference that is folded into the columns of that matrix, or, as
            one column, into its rows.

    Returns:
        What was found of matrices, those that are the reference's left out; and why some were not looked at.
    """
    shapes = [(port.source.tensors[one].shape, reference.source.tensors[two].shape) for one, two in pairs]
    is_transposed = _are_transposed(pairs, shapes)
    may_be_either = port.runtime in _EITHER_WAY or reference.runtime in _EITHER_WAY
    quantizes = bool({port.runtime, reference.runtime} & {*_QUANTIZES})
    budget, found, failed = BUDGET, dict[str, Finding](), list[str]()
    rounded, is_compared = dict[str, Rounded](), False
    for done, ((name, other), (shape, shape_there)) in enumerate(zip(pairs, shapes, strict=True)):
        progress("matrices", done, len(pairs))
        dtypes = {port.source.tensors[name].dtype, reference.source.tensors[other].dtype}
        size = math.prod(shape)
        if len(shape) == 2 and not _is_square(shape) and numbers_of(name) and not may_be_either:
            if shape == shape_there[::-1] and not is_transposed:
                found[name] = "transposed"
            elif shape == shape_there and is_transposed:
                found[name] = "not transposed"
        if name in found or shape != shape_there or not _is_matrix(shape) or not dtypes <= {*FLOATS}:
            is_compared |= name in found
            continue
        both = (port, name), (reference, other)
        try:
            few = few_rows(shape[1])
            rows, rows_there = (rows_of(*each, few) for each in both)
            if name in factors:
                rows_there *= _of_rows(factors[name], shape[0], few)
            group = port.source.group(name) if isinstance(port.source, (MlxSource, JoinedSource)) else 0
            if group and has_other_scales(rows, rows_there, group):
                found[name], is_compared = "scales of other groups", True
                continue
            plain, count = correlation(rows, rows_there)
            # A constant matrix has nothing to compare.
            is_compared |= plain is not None or bool((rows_there == rows_there[0, 0]).all())
            is_judged = (plain or 0.0) >= RELATED and not quantizes
            how = rounding(rows, rows_there, port.forms.get(name, "")) if is_judged else None
            # How exactly a matrix holds a gain has been judged where the fold was found.
            if how is not None and (how.bits or name not in factors):
                rounded[name] = how
            if plain is None or (plain >= RELATED and not is_transposed):
                continue
            turned, count_turned = (
                transposed_correlation(*(rows_of(*each, SIDE) for each in both)) if _is_square(shape) else (None, 1)
            )
            if may_be_either and max(plain, turned or 0.0) >= RELATED:
                continue
            if plain >= RELATED:
                # A symmetric matrix is its own transpose, and what stands in no layer may be a table of embeddings.
                if numbers_of(name) and turned is not None and turned < RELATED:
                    found[name] = "not transposed"
            elif turned is not None and turned >= RELATED:
                if not is_transposed:
                    found[name] = "transposed"
            elif reorders(port, other) or reorders(reference, name):
                continue
            elif port.runtime == reference.runtime == "transformers" and _are_in_rotary_order(*both):
                found[name] = "rows in rotary order"
            elif abs(plain) > _chance(count) or abs(turned or 0.0) > _chance(count_turned) or size > budget:
                found[name] = "other values"
            else:
                budget -= size
                if not _are_reordered(*(_sums(*each) for each in both)):
                    found[name] = "unrelated"
        except ModelError as error:
            failed.append(f"{name} ({error})")
    return OtherTensors(
        matrices=found,
        rounded={name: how for name, how in rounded.items() if name not in found},
        is_compared=is_compared,
        notes=(f"not looked at: {shortened(failed, 1)}",) if failed else (),
    )


def _are_transposed(
    pairs: Sequence[tuple[str, str]], shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """Whether the port stores the matrices of its layers the other way round, as those that are not square show."""
    votes = [
        (shape == shape_there) - (shape == shape_there[::-1])
        for (name, _), (shape, shape_there) in zip(pairs, shapes, strict=True)
        if len(shape) == len(shape_there) == 2 and shape[0] != shape[1] and numbers_of(name)
    ]
    return sum(votes) < 0


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and math.prod(shape) >= LEAST


def _is_square(shape: tuple[int, ...]) -> bool:
    return shape[0] == shape[1]


def _of_rows(factor: Tensor, rows: int, count: int) -> Tensor:
    """The factors of the rows that `rows_of` reads; those of columns are of all rows."""
    if factor.dim() == 1:
        return factor
    return torch.cat([factor[start:stop] for start, stop in blocks_of(rows, count)])


def _chance(count: int) -> float:
    """The correlation that unrelated numbers may show: five standard deviations."""
    return max(0.1, 5 / math.sqrt(count))


def _sums(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    """The sums of the rows and of the columns of a matrix; a few rows are held at once."""
    rows, columns = weights.source.tensors[name].matrix
    step, of_rows, of_columns = max(1, CHUNK // columns), [], torch.zeros(columns, dtype=torch.float64)
    for start in range(0, rows, step):
        chunk = weights.source.rows(name, start, min(rows, start + step)).to(torch.float64)
        of_rows.append(chunk.sum(1))
        of_columns += chunk.sum(0)
    return torch.cat(of_rows), of_columns


def _are_in_rotary_order(one: tuple[Weights, str], other: tuple[Weights, str]) -> bool:
    """Whether the first head's rows are the reference's, its two halves interleaved or its pairs parted."""
    rows, there = (
        weights.source.rows(name, 0, min(256, weights.source.tensors[name].matrix[0])).to(torch.float64)
        for weights, name in (one, other)
    )
    for width in (256, 192, 128, 96, 80, 64, 32, 16):
        if width > len(rows):
            continue
        for sizes in ((2, width // 2), (width // 2, 2)):
            turned = there[:width].reshape(*sizes, -1).transpose(0, 1).reshape(width, -1)
            if (correlation(rows[:width], turned)[0] or 0.0) >= RELATED:
                return True
    return False


def _are_reordered(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether rows in another order explain a difference, as the columns then have the same sums, or columns do."""
    return any((correlation(*sums)[0] or 0.0) >= RELATED for sums in zip(one, other, strict=True))
