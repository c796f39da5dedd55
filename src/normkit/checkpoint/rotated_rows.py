"""Matrices and tables in rotated coordinates: in float64, rounded once, with little more memory than one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import CHUNK, rounded
from normkit.checkpoint.hadamard import compiled, rotate_runs
from normkit.checkpoint.orthogonal import TOGETHER
from normkit.checkpoint.plan import Rotation, TensorEdit
from normkit.checkpoint.reader import TORCH, Source, TensorInfo
from normkit.errors import ModelError
from normkit.kernels import cpu
from normkit.kernels.hadamard import turn

Gains = Callable[[int, int], Tensor]
"""From a first row and the row after the last to their factors: one a column, or a column with one a row."""


def slab_rows(edit: TensorEdit, info: TensorInfo) -> int:
    """How many rows are made at a time: all that a step along another axis than the last mixes."""
    axis, down, _ = _steps(edit, info)
    columns, chunk = max(1, info.matrix[1]), _chunk(edit)
    if axis is None:
        return max(1, chunk // columns)
    inner = math.prod(info.shape[axis + 1 : -1])
    if down is not None and down.rows is None and edit.centred_axis != axis:
        return down.size * inner * max(1, chunk // (down.size * inner * columns))
    return info.shape[axis] * inner


def _chunk(edit: TensorEdit) -> int:
    """How many numbers are rotated at a time."""
    return TOGETHER if any(rotation.matrix is not None for rotation in edit.rotations) else CHUNK


def rotated_rows(
    edit: TensorEdit, source: Source, info: TensorInfo, gains: Gains | None
) -> Iterator[tuple[Tensor, float, float]]:
    """(rows, largest |rounding error|, largest |value|) of a rotated tensor, in order, in its dtype.

    Rows are multiplied by their gains, centred, then rotated: by torch as many columns at a time as fit the cache, if
    no step mixes all of them.
    """
    axis, down, across = _steps(edit, info)
    rows_in_all, columns = info.matrix
    for rotation in edit.rotations:
        whole, rest = divmod(info.shape[rotation.axis], rotation.rows.blocks if rotation.rows else 1)
        taken = rotation.rows.tail if rotation.rows else whole
        if rest or whole % rotation.size or taken % rotation.size or taken > whole:
            raise ModelError(
                f"expected a multiple of {rotation.size} along axis {rotation.axis} of {edit.source}, found the shape "
                f"{info.shape}; the checkpoint does not fit its config"
            )
    slab = slab_rows(edit, info)
    inner = math.prod(info.shape[axis + 1 : -1]) if axis is not None else 1
    is_compiled = inner == 1 and all(each.matrix is None for each in edit.rotations) and cpu.load() is None
    is_mixed = across is not None and (across.rows is not None or across.size == columns)
    strip = columns
    if axis is not None and not is_mixed and edit.centred_axis in ((axis,) if is_compiled else (None, axis)):
        unit = across.size if across else 1
        strip = unit * max(1, _chunk(edit) // (slab * unit), 8 // unit)
    # Signs and columns are made once for all blocks.
    turned = [compiled(each) if is_compiled and each is not None else None for each in (down, across)]
    for start in range(0, rows_in_all, slab):
        stop = min(start + slab, rows_in_all)
        # A parameter in memory may be transposed.
        stored = source.rows(edit.source, start, stop).contiguous()
        written = torch.empty(stop - start, columns, dtype=TORCH[edit.dtype])
        factors = None if gains is None else gains(start, stop)
        length = stop - start
        if axis is not None:
            length = info.shape[axis] if length % (info.shape[axis] * inner) == 0 else down.size if down else 1
        error = largest = 0.0
        for left in range(0, columns, strip):
            block, to = stored[:, left : left + strip], written[:, left : left + strip]
            by = factors[left : left + strip] if factors is not None and factors.dim() == 1 else factors
            if not is_compiled or edit.centred_axis is not None:
                block, by = _wide(block, by, edit.centred_axis, axis, (length, inner)), None
            if is_compiled:
                measured = turn(block, to, factors=by, length=length, down=turned[0], across=turned[1])
            else:
                measured = _by_torch(block, to, (length, inner), down, across)
            largest, error = max(largest, measured[0]), max(error, measured[1])
        yield written, error, largest


def _wide(
    block: Tensor, factors: Tensor | None, centred_axis: int | None, axis: int | None, other: tuple[int, int]
) -> Tensor:
    """In float64, times the factors, minus the mean; `other` is the length of the other axis, and what lies between."""
    wide = block.to(torch.float64, copy=True).contiguous()
    if factors is not None:
        wide *= factors
    values = wide.numpy()
    if centred_axis is not None:
        if centred_axis == axis:
            values = values.reshape(-1, other[0], other[1] * values.shape[1])
        values -= np.add.reduce(values, axis=1, keepdims=True) / values.shape[1]
    return wide


def _by_torch(
    wide: Tensor, to: Tensor, other: tuple[int, int], down: Rotation | None, across: Rotation | None
) -> tuple[float, float]:
    """The same as `turn` of the kernels, for any rotation; `wide` is overwritten."""
    values = wide.numpy()
    if down is not None:
        rotate_runs(values.reshape(-1, other[0], other[1] * values.shape[1]), down)
    if across is not None:
        rotate_runs(values.reshape(*values.shape, 1), across)
    to.copy_(part := rounded(wide, to.dtype))
    largest = max(abs(float(end)) for end in wide.aminmax())
    return largest, float(wide.sub_(part).abs_().max())


def _steps(edit: TensorEdit, info: TensorInfo) -> tuple[int | None, Rotation | None, Rotation | None]:
    """The axis but the last along which numbers are mixed, the rotation along it, and the one along the last axis."""
    last = max(0, len(info.shape) - 1)
    down = next((rotation for rotation in edit.rotations if rotation.axis != last), None)
    axis = down.axis if down is not None else None if edit.centred_axis in (None, last) else edit.centred_axis
    return axis, down, next((rotation for rotation in edit.rotations if rotation.axis == last), None)
