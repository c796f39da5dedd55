"""Matrices and tables of a result, made of the rows of a source a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import (
    Factor,
    add_rows,
    all_finite,
    factor,
    nearest_powers,
    partition,
    rounded,
    row_sums,
    scaled,
    underflow,
    wide_room,
)
from normkit.checkpoint.channel_maps import stored_affine
from normkit.checkpoint.plan import FLOATS, BatchNorm, Gain, TensorEdit
from normkit.checkpoint.reader import TORCH, Source, TensorInfo, check_finite, found, vector
from normkit.checkpoint.rotated_rows import rotated_rows
from normkit.errors import ModelError


@dataclass
class Outcome:
    """The measurements made along with a tensor; filled in at the end."""

    residual: float = 0.0
    """Largest |mean along the centred axis| of what is written / its root mean square; of products with powers of two
    the largest error that underflow leaves / the largest |value|, so that 0 says that no bit is lost; of what is
    rotated the largest rounding error / the largest |value|; else 0."""


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
    if edit.rotations:
        factor_of = _GainByRow(edit, source, info, torch.float64) if edit.gain or edit.exponent else None
        gains = None if factor_of is None else lambda start, stop: factor_of.at(start, stop).values
        for axis in (edit.centred_axis or 0, *(rotation.axis for rotation in edit.rotations)):
            _check_axis(edit, info, axis)
        error = largest = 0.0
        for rows, *measured in rotated_rows(edit, source, info, gains):
            if not all_finite(rows):
                check_finite(edit.source, source.rows(edit.source, 0, info.matrix[0]))
                raise ModelError(f"{edit.name} does not fit into {edit.dtype} once rotated; fold with --dtype float32")
            error, largest = max(error, measured[0]), max(largest, measured[1])
            yield rows
        outcome.residual = error / largest if largest else 0.0
        return
    if edit.centred_axis is not None:
        _check_axis(edit, info, edit.centred_axis)
        centring = _Centring(edit, source, info)
        is_last = edit.centred_axis == len(info.shape) - 1
        yield from centring.by_rows() if is_last else centring.by_columns(info.shape, edit.centred_axis)
        outcome.residual = centring.residual
        return
    gain = _GainByRow(edit, source, info, TORCH[edit.dtype]) if edit.gain or edit.exponent else None
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
    """The stored gain `weight` plus the offset, in float64, its powers of two, or the scales in its place.

    They are 1 at the coordinates that the norm keeps.
    """
    values = weight.to(torch.float64) + gain.offset
    if gain.scales is not None:
        values = gain.scales.values.clone()
    elif gain.is_power:
        values = nearest_powers(values)
    values[list(gain.kept)] = 1.0
    return values


class _GainByRow:
    """The gain and the power of two of an edit, and the factors of the rows of a chunk."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo, output: torch.dtype) -> None:
        power = 2.0 ** (edit.exponent or 0)
        if edit.gain is None:
            self._is_last = True
            self._factor = factor(torch.full((info.matrix[1],), power, dtype=torch.float64), TORCH[info.dtype], output)
            return
        assert edit.gain_axis is not None
        if isinstance(edit.gain, BatchNorm):
            name, values = edit.gain.mean, stored_affine(edit.gain, source).scale
        else:
            name, values = edit.gain.weight, factors(edit.gain, vector(source, edit.gain.weight)) * power
            values = values.repeat(edit.gain.times or 1)
        _check_axis(edit, info, edit.gain_axis)
        if info.shape[edit.gain_axis] != values.numel():
            raise ModelError(
                f"expected {values.numel()} along axis {edit.gain_axis} of {edit.source}, the size of "
                f"{name}, found shape {info.shape}; the checkpoint does not fit its config"
            )
        self._is_last = edit.gain_axis == len(info.shape) - 1
        # Rows of the matrix that follow each other with one factor: a convolution has many of each output.
        self._rows = math.prod(info.shape[edit.gain_axis + 1 : -1])
        self._factor = factor(values, TORCH[info.dtype], output)

    def at(self, start: int, stop: int) -> Factor:
        """The factors of rows start..stop."""
        if self._is_last:
            return self._factor
        size = self._factor.values.numel()
        if self._rows == 1 and start // size == (stop - 1) // size:
            return self._factor.part(slice(start % size, (stop - 1) % size + 1))
        return self._factor.part(torch.arange(start, stop) // self._rows % size)


class _Centring:
    """source * gain in float64, minus its mean, rounded; and how large a mean the rounding leaves."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo) -> None:
        self._edit, self._source = edit, source
        self._columns = info.matrix[1]
        self._gain = _GainByRow(edit, source, info, torch.float64) if edit.gain or edit.exponent else None
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
                check_sum(self._edit.source, mean, rows)
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


def check_sum(name: str, sums: Tensor, rows: Tensor) -> None:
    """Look for weights that are not finite, which a sum that is not finite shows."""
    if not all_finite(sums):
        check_finite(name, rows)


def _check_written(edit: TensorEdit, written: Tensor, rows: Tensor) -> None:
    if not all_finite(written):
        check_finite(edit.source, rows)
        raise ModelError(f"{edit.name} does not fit into {edit.dtype} once folded; fold with --dtype float32")
