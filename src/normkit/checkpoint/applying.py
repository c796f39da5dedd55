"""A plan carried out on a source: the vectors first, then each matrix a chunk of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import (
    Factor,
    add_rows,
    all_finite,
    factor,
    partition,
    quotient,
    rounded,
    row_sums,
    scaled,
    underflow,
    wide_room,
)
from normkit.checkpoint.channel_maps import stored_affine
from normkit.checkpoint.plan import (
    FLOATS,
    BatchNorm,
    Constant,
    Edit,
    FoldPlan,
    Gain,
    Mantissa,
    Product,
    Quotient,
    Reference,
    Rows,
    Shift,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.reader import TORCH, Source, TensorInfo, check_finite, found, vector
from normkit.errors import ModelError

if TYPE_CHECKING:
    from normkit.checkpoint.folding import Workers


@dataclass(frozen=True, eq=False)
class MadeVector:
    """A gain or a bias as it is written."""

    value: Tensor
    """In the dtype of the output."""
    residual: float
    """Largest |written - float64 value| / largest |float64 value|; 0 for constants."""


@dataclass
class Outcome:
    """The measurements made along with a tensor; filled in at the end."""

    residual: float = 0.0
    """Largest |mean along the centred axis| of what is written / its root mean square; of products with powers of two
    the largest error that underflow leaves / the largest |value|, so that 0 says that no bit is lost; else 0."""


def vectors(plan: FoldPlan, source: Source, workers: Workers) -> dict[str, MadeVector]:
    """Every gain and bias of a plan, in the order of its edits; the same bits with any number of threads.

    The workers count the vectors that are done.

    Raises:
        ModelError: If a tensor is missing, does not fit, holds a NaN, or a result does not fit its dtype.
    """
    edits = {edit.name: edit for edit in plan.edits if isinstance(edit, VectorEdit)}
    values: dict[str, Tensor] = {}
    finished: dict[str, MadeVector] = {}
    workers.begin("gains and biases", len(edits))

    def make(name: str) -> None:
        values[name], finished[name] = _vector(edits[name], source, values)
        workers.step(1)

    # A bias may need the float64 value of another.
    awaited: dict[str, set[str]] = {}
    for name, edit in edits.items():
        referred = [term.vector for term in edit.value.terms] if isinstance(edit.value, Sum) else []
        awaited[name] = {each.name for each in referred if isinstance(each, Reference) and each.is_folded}
    order = TopologicalSorter(awaited)
    order.prepare()
    while order.is_active():
        ready = order.get_ready()
        workers.map([partial(make, name) for name in ready])
        order.done(*ready)
    return {name: finished[name] for name in edits}


def contents(edit: Edit, source: Source, vectors: Mapping[str, MadeVector], outcome: Outcome) -> Iterator[Tensor]:
    """The values that an edit writes, a chunk at a time: a vector that is made already, or the chunks of `made`."""
    if isinstance(edit, TensorEdit):
        return made(edit, source, outcome)
    vector = vectors[edit.name]
    outcome.residual = vector.residual
    return iter([vector.value])


def made(edit: TensorEdit, source: Source, outcome: Outcome) -> Iterator[Tensor]:
    """The rows of an output tensor in order, a chunk at a time, in its dtype.

    The source is read in order too, a second time if the mean is taken along another axis than the last.

    Raises:
        ModelError: If the tensor is missing, has other axes or another dtype than the edit needs, or holds a NaN.
    """
    info = found(source, edit.source)
    if edit.relation == "identical" and edit.dtype == info.dtype:
        for start, stop in partition(*info.matrix):
            yield source.rows(edit.source, start, stop)
        return
    if info.dtype not in FLOATS:
        raise ModelError(f"{edit.source} is {info.dtype}, and only {', '.join(FLOATS)} are folded; give its source")
    if not math.prod(info.shape):
        yield torch.empty(info.matrix, dtype=TORCH[edit.dtype])
        return
    if edit.centred_axis is not None:
        _check_axis(edit, info, edit.centred_axis)
        centring = _Centring(edit, source, info)
        is_last = edit.centred_axis == len(info.shape) - 1
        yield from centring.by_rows() if is_last else centring.by_columns(info.shape, edit.centred_axis)
        outcome.residual = centring.residual
        return
    gain = _GainByRow(edit, source, info, TORCH[edit.dtype]) if edit.gain else None
    lost = largest = 0.0
    for start, stop in partition(*info.matrix):
        rows = source.rows(edit.source, start, stop)
        if gain is None:
            yield rows.to(TORCH[edit.dtype])
            continue
        by = gain.at(start, stop)
        product = scaled(rows, by)
        _check_written(edit, product, rows)
        if edit.relation == "power":
            lost = max(lost, underflow(rows, by.values, product))
            largest = max(largest, float(product.abs().max()))
        yield product
    outcome.residual = lost / largest if largest else lost


def factors(gain: Gain, weight: Tensor) -> Tensor:
    """The stored gain `weight` plus the offset, in float64, and 1 at the coordinates that the norm keeps.

    Of a `gain` that is a power of two: the one that leaves a mantissa in [0.707, 1.415), and 1 for a gain of zero.
    """
    values = weight.to(torch.float64) + gain.offset
    if gain.is_power:
        mantissas, exponents = torch.frexp(values.abs())
        # Mantissas are in [0.5, 1).
        values = torch.ldexp(torch.ones_like(values), exponents - (mantissas < math.sqrt(0.5)).to(exponents.dtype))
        values[mantissas == 0] = 1.0
    values[list(gain.kept)] = 1.0
    return values


def _vector(edit: VectorEdit, source: Source, values: Mapping[str, Tensor]) -> tuple[Tensor, MadeVector]:
    """The float64 value before any rows are set to zero, and the vector that is written."""
    dtype = TORCH[edit.dtype]
    start = vector(source, edit.source) if edit.source else torch.zeros(edit.size, dtype=torch.float64)
    if edit.source:
        _check_size(edit, edit.source, start)
    match edit.value:
        case Constant(value=number, kept=kept):
            value = target = torch.full((edit.size,), number, dtype=torch.float64)
            value[list(kept)] = start[list(kept)]
            written = rounded(target, dtype)
        case Quotient(gain=gain):
            divisor = factors(gain, vector(source, gain.weight))
            _check_size(edit, gain.weight, divisor)
            if bool(((divisor == 0) & (start != 0)).any()):
                raise ModelError(
                    f"{gain.weight} is zero where {edit.source} is not, so the bias cannot be divided by it"
                )
            value = target = torch.where(start == 0, start, start / divisor)
            written = quotient(start, divisor, dtype)
        case Mantissa(gain=gain):
            value = target = (start + gain.offset) / factors(gain, start) - gain.offset
            written = rounded(target, dtype)
        case Shift(norm=norm, added=added):
            by = stored_affine(norm, source)
            _check_size(edit, norm.mean, by.mean)
            value = target = ((0.0 if added is None else start) - by.mean) * by.scale + by.bias
            written = rounded(target, dtype)
        case Sum(terms=terms, is_centred=is_centred, zeroed=zeroed):
            value = start
            for term in terms:
                product = _product(term, source, _referred(term.vector, source, values))
                _check_size(edit, term.matrix, product)
                value = value + product
            if is_centred:
                value = value - row_sums(value.unsqueeze(0)) / edit.size
            target = value.clone()
            if zeroed:
                _tail(target, zeroed).zero_()
            written = rounded(target, dtype)
    if not all_finite(written):
        raise ModelError(f"{edit.name} does not fit into {edit.dtype} once folded; fold with --dtype float32")
    if isinstance(edit.value, Constant) or not bool(target.any()):
        return value, MadeVector(written, 0.0)
    return value, MadeVector(written, float((written.to(torch.float64) - target).abs().max() / target.abs().max()))


def _check_size(edit: VectorEdit, name: str, values: Tensor) -> None:
    if values.numel() != edit.size:
        raise ModelError(
            f"expected {edit.size} elements for {edit.name}, {name} gives {values.numel()}; the checkpoint does not "
            "fit its config"
        )


def _referred(reference: Reference | BatchNorm, source: Source, values: Mapping[str, Tensor]) -> Tensor:
    """The vector that a matrix is multiplied by."""
    if isinstance(reference, BatchNorm):
        return stored_affine(reference, source).shift
    value = values[reference.name] if reference.is_folded else vector(source, reference.name)
    if reference.rows:
        value = _tail(value, reference.rows).reshape(-1)
    if reference.heads:
        value = value.view(reference.heads, -1).repeat_interleave(reference.repeat, 0).reshape(-1)
    return value


def _tail(values: Tensor, rows: Rows) -> Tensor:
    """The last rows of each block, as a view."""
    return values.view(rows.blocks, -1)[:, -rows.tail :]


def _product(term: Product, source: Source, by: Tensor) -> Tensor:
    """W v in float64."""
    info = found(source, term.matrix)
    axes = len(info.shape)
    is_matrix = axes == 2 or (axes > 2 and term.in_axis == 1)
    if not is_matrix or info.dtype not in FLOATS or info.shape[term.in_axis] != by.numel():
        raise ModelError(
            f"expected a matrix with {by.numel()} along axis {term.in_axis} in {term.matrix}, found {info.dtype} of "
            f"shape {info.shape}; the checkpoint does not fit its config"
        )
    # A convolution has the weights of each of its outputs on several rows of the stored matrix.
    held, rows_in_all, columns = math.prod(info.shape[1:-1]), info.shape[0], math.prod(info.shape[1:])
    by = by.repeat_interleave(math.prod(info.shape[2:]))
    result = torch.zeros(info.shape[1 - term.in_axis], dtype=torch.float64)
    for start, stop in partition(rows_in_all, columns):
        # The first row is room for the total.
        block = wide_room(1 + stop - start, columns)
        rows = source.rows(term.matrix, start * held, stop * held).view(stop - start, columns)
        products = block[1:].copy_(rows)
        if term.in_axis == 1:
            result[start:stop] = part = row_sums(products.mul_(by))
        else:
            products.mul_(by[start:stop].unsqueeze(1))
            add_rows(result, block)
            part = result
        _check_sum(term.matrix, part, rows)
    return result


class _GainByRow:
    """The gain of an edit, and the factors of the rows of a chunk."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo, output: torch.dtype) -> None:
        assert edit.gain is not None
        assert edit.gain_axis is not None
        if isinstance(edit.gain, BatchNorm):
            name, values = edit.gain.mean, stored_affine(edit.gain, source).scale
        else:
            name, values = edit.gain.weight, factors(edit.gain, vector(source, edit.gain.weight))
        _check_axis(edit, info, edit.gain_axis)
        if info.shape[edit.gain_axis] != values.numel():
            raise ModelError(
                f"expected {values.numel()} along axis {edit.gain_axis} of {edit.source}, the size of "
                f"{name}, found shape {info.shape}; the checkpoint does not fit its config"
            )
        self._is_last = edit.gain_axis == len(info.shape) - 1
        if not self._is_last:
            values = values.repeat_interleave(math.prod(info.shape[edit.gain_axis + 1 : -1]))
        self._factor = factor(values, TORCH[info.dtype], output)

    def at(self, start: int, stop: int) -> Factor:
        """The factors of rows start..stop."""
        if self._is_last:
            return self._factor
        period = self._factor.values.numel()
        if start // period == (stop - 1) // period:
            return self._factor.part(slice(start % period, (stop - 1) % period + 1))
        return self._factor.part(torch.arange(start, stop) % period)


class _Centring:
    """source * gain in float64, minus its mean, rounded; and how large a mean the rounding leaves."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo) -> None:
        self._edit, self._source = edit, source
        self._columns = info.matrix[1]
        self._gain = _GainByRow(edit, source, info, torch.float64) if edit.gain else None
        self._largest, self._squares, self._count = 0.0, 0.0, math.prod(info.shape)

    @property
    def residual(self) -> float:
        """Largest mean / root mean square of all that was written."""
        return self._largest / math.sqrt(self._squares / self._count) if self._squares else 0.0

    def by_rows(self) -> Iterator[Tensor]:
        """Subtract from each row of the matrix its own mean."""
        rows_in_all = self._count // self._columns
        for start, stop in partition(rows_in_all, self._columns):
            block = wide_room(stop - start, self._columns)
            rows = self._fill(block, start, stop)
            block.sub_(row_sums(block).div_(self._columns).unsqueeze(1))
            written = self._round(block, rows)
            self._measure(row_sums(block).div_(self._columns))
            self._add_squares(block)
            yield written

    def by_columns(self, shape: tuple[int, ...], axis: int) -> Iterator[Tensor]:
        """Subtract the mean along an axis that is not the last: a first pass takes all means."""
        groups, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 : -1])
        width = inner * self._columns
        chunks = list(partition(length, width))
        means = torch.zeros(groups, width, dtype=torch.float64)
        for group, mean in enumerate(means):
            for start, stop in chunks:
                # The first row is room for the total.
                block = wide_room(1 + stop - start, width)
                first = group * length
                rows = self._fill(block[1:], (first + start) * inner, (first + stop) * inner)
                add_rows(mean, block)
                _check_sum(self._edit.source, mean, rows)
            mean.div_(length)
        for group, mean in enumerate(means):
            total = torch.zeros(width, dtype=torch.float64)
            for start, stop in chunks:
                block = wide_room(1 + stop - start, width)
                first = group * length
                rows = self._fill(block[1:], (first + start) * inner, (first + stop) * inner)
                written = self._round(block[1:].sub_(mean), rows)
                add_rows(total, block)
                self._add_squares(block[1:])
                yield written
            self._measure(total.div_(length))

    def _fill(self, block: Tensor, start: int, stop: int) -> Tensor:
        """Put the products of rows start..stop into a contiguous float64 block; return the rows."""
        rows = self._source.rows(self._edit.source, start, stop)
        products = block.view(stop - start, self._columns).copy_(rows)
        if self._gain:
            products.mul_(self._gain.at(start, stop).values)
        return rows

    def _round(self, block: Tensor, rows: Tensor) -> Tensor:
        """The block rounded; afterwards the block holds what was written."""
        written = rounded(block, TORCH[self._edit.dtype])
        _check_written(self._edit, written, rows)
        if written.data_ptr() == block.data_ptr():
            # Float64 is its own rounding, and measuring overwrites the block.
            written = written.clone()
        block.copy_(written)
        return written.view(-1, self._columns)

    def _add_squares(self, block: Tensor) -> None:
        """Add up the squares of a block that was written; this overwrites it."""
        self._squares += float(row_sums(row_sums(block.mul_(block)).unsqueeze(0)))

    def _measure(self, means: Tensor) -> None:
        self._largest = max(self._largest, float(means.abs().max()))


def _check_axis(edit: TensorEdit, info: TensorInfo, axis: int) -> None:
    if axis >= len(info.shape):
        raise ModelError(
            f"expected {axis + 1} axes or more in {edit.source}, found shape {info.shape}; the checkpoint does not fit "
            "its config"
        )


def _check_sum(name: str, sums: Tensor, rows: Tensor) -> None:
    """Look for weights that are not finite, which a sum that is not finite shows."""
    if not all_finite(sums):
        check_finite(name, rows)


def _check_written(edit: TensorEdit, written: Tensor, rows: Tensor) -> None:
    if not all_finite(written):
        check_finite(edit.source, rows)
        raise ModelError(f"{edit.name} does not fit into {edit.dtype} once folded; fold with --dtype float32")
