"""A matrix in the making: which gain its rows are multiplied by, and their mean taken away."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import Factor, add_rows, all_finite, factor, partition, rounded, row_sums, wide_room
from normkit.checkpoint.header import TensorInfo
from normkit.checkpoint.plan import Gain, TensorEdit
from normkit.checkpoint.source import TORCH, Source, check_finite, vector
from normkit.errors import ModelError


def factors(gain: Gain, weight: Tensor) -> Tensor:
    """weight + offset in float64, 1 at the coordinates that the norm keeps.

    Args:
        gain: Which.
        weight: Its stored values.
    """
    values = weight.to(torch.float64) + gain.offset
    values[list(gain.kept)] = 1.0
    return values


class GainByRow:
    """The gain of an edit, and which of it the rows of a chunk are multiplied by."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo, output: torch.dtype) -> None:
        assert edit.gain is not None
        assert edit.gain_axis is not None
        values = factors(edit.gain, vector(source, edit.gain.weight))
        check_axis(edit, info, edit.gain_axis)
        if info.shape[edit.gain_axis] != values.numel():
            raise ModelError(
                f"expected {values.numel()} along axis {edit.gain_axis} of {edit.source}, the size of "
                f"{edit.gain.weight}, found shape {info.shape}; the checkpoint does not fit its config"
            )
        self.is_last = edit.gain_axis == len(info.shape) - 1
        if not self.is_last:
            values = values.repeat_interleave(math.prod(info.shape[edit.gain_axis + 1 : -1]))
        self.factor = factor(values, TORCH[info.dtype], output)

    def at(self, start: int, stop: int) -> Factor:
        """What rows start..stop are multiplied by."""
        if self.is_last:
            return self.factor
        period = self.factor.values.numel()
        if start // period == (stop - 1) // period:
            return self.factor.part(slice(start % period, (stop - 1) % period + 1))
        return self.factor.part(torch.arange(start, stop) % period)


class Centring:
    """source * gain in float64, then its mean gone, then rounded; and how large a mean the rounding leaves."""

    def __init__(self, edit: TensorEdit, source: Source, info: TensorInfo) -> None:
        self.edit, self.source = edit, source
        self.columns = info.matrix[1]
        self.gain = GainByRow(edit, source, info, torch.float64) if edit.gain else None
        self.largest, self.squares, self.count = 0.0, 0.0, math.prod(info.shape)

    def fill(self, block: Tensor, start: int, stop: int) -> Tensor:
        """Put the products of rows start..stop into a contiguous block of float64; the rows themselves are returned."""
        rows = self.source.rows(self.edit.source, start, stop)
        products = block.view(stop - start, self.columns).copy_(rows)
        if self.gain:
            products.mul_(self.gain.at(start, stop).values)
        return rows

    def write(self, block: Tensor, rows: Tensor) -> Tensor:
        """The block rounded; afterwards the block holds what was written."""
        written = rounded(block, TORCH[self.edit.dtype])
        check_written(self.edit, written, rows)
        if written.data_ptr() == block.data_ptr():
            # Float64 is its own rounding, and the block is used up by what is measured on it.
            written = written.clone()
        block.copy_(written)
        return written.view(-1, self.columns)

    def measure(self, block: Tensor) -> None:
        """Count the squares of a block that was written; it is used up."""
        self.squares += float(row_sums(row_sums(block.mul_(block)).unsqueeze(0)))

    def see(self, means: Tensor) -> None:
        """Take note of means of what was written."""
        self.largest = max(self.largest, float(means.abs().max()))

    def by_rows(self) -> Iterator[Tensor]:
        """Each row of the matrix loses its own mean."""
        rows_in_all = self.count // self.columns
        for start, stop in partition(rows_in_all, self.columns):
            block = wide_room(stop - start, self.columns)
            rows = self.fill(block, start, stop)
            block.sub_(row_sums(block).div_(self.columns).unsqueeze(1))
            written = self.write(block, rows)
            self.see(row_sums(block).div_(self.columns))
            self.measure(block)
            yield written

    def by_columns(self, shape: tuple[int, ...], axis: int) -> Iterator[Tensor]:
        """The mean along an axis that is not the last: first all means, in a sweep of their own."""
        groups, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 : -1])
        width = inner * self.columns
        chunks = list(partition(length, width))
        means = torch.zeros(groups, width, dtype=torch.float64)
        for group, mean in enumerate(means):
            for start, stop in chunks:
                # The first row is room for the total.
                block = wide_room(1 + stop - start, width)
                first = group * length
                rows = self.fill(block[1:], (first + start) * inner, (first + stop) * inner)
                add_rows(mean, block)
                check_sum(self.edit.source, mean, rows)
            mean.div_(length)
        for group, mean in enumerate(means):
            total = torch.zeros(width, dtype=torch.float64)
            for start, stop in chunks:
                block = wide_room(1 + stop - start, width)
                first = group * length
                rows = self.fill(block[1:], (first + start) * inner, (first + stop) * inner)
                written = self.write(block[1:].sub_(mean), rows)
                add_rows(total, block)
                self.measure(block[1:])
                yield written
            self.see(total.div_(length))

    @property
    def residual(self) -> float:
        """Largest mean / root mean square of all that was written."""
        return self.largest / math.sqrt(self.squares / self.count) if self.squares else 0.0


def check_axis(edit: TensorEdit, info: TensorInfo, axis: int) -> None:
    """The tensor has that axis."""
    if axis >= len(info.shape):
        raise ModelError(
            f"expected {axis + 1} axes or more in {edit.source}, found shape {info.shape}; the checkpoint does not fit "
            "its config"
        )


def check_sum(name: str, sums: Tensor, rows: Tensor) -> None:
    """A sum that is not finite is the sign of a weight that is not."""
    if not all_finite(sums):
        check_finite(name, rows)


def check_written(edit: TensorEdit, written: Tensor, rows: Tensor) -> None:
    """What is written is finite, or it is known why not."""
    if not all_finite(written):
        check_finite(edit.source, rows)
        raise ModelError(f"{edit.name} does not fit into {edit.dtype} once folded; fold with --dtype float32")
