"""Matrices and tables in rotated coordinates: in float64, rounded once, with little more memory than one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import CHUNK, rounded
from normkit.checkpoint.hadamard import rotate_runs
from normkit.checkpoint.plan import Rotation, TensorEdit
from normkit.checkpoint.reader import TORCH, Source, TensorInfo
from normkit.errors import ModelError

Gains = Callable[[int, int], Tensor]
"""From a first row and the row after the last to their factors: one a column, or a column with one a row."""


def slab_rows(edit: TensorEdit, info: TensorInfo) -> int:
    """How many rows are made at a time: all that a step along another axis than the last mixes."""
    axis, down, _ = _steps(edit, info)
    columns = max(1, info.matrix[1])
    if axis is None:
        return max(1, CHUNK // columns)
    inner = math.prod(info.shape[axis + 1 : -1])
    if down is not None and down.rows is None and edit.centred_axis != axis:
        return down.size * inner * max(1, CHUNK // (down.size * inner * columns))
    return info.shape[axis] * inner


def rotated_rows(
    edit: TensorEdit, source: Source, info: TensorInfo, gains: Gains | None
) -> Iterator[tuple[Tensor, float, float]]:
    """(rows, largest |rounding error|, largest |value|) of a rotated tensor, in order, in its dtype.

    Rows are multiplied by their gains, centred, then rotated: as many columns at a time as fit the cache, if no step
    mixes all of them.
    """
    axis, down, across = _steps(edit, info)
    rows_in_all, columns = info.matrix
    for rotation in edit.rotations:
        taken = rotation.rows.tail if rotation.rows else info.shape[rotation.axis]
        if taken % rotation.size:
            raise ModelError(
                f"expected a multiple of {rotation.size} along axis {rotation.axis} of {edit.source}, found the shape "
                f"{info.shape}; the checkpoint does not fit its config"
            )
    slab = slab_rows(edit, info)
    inner = math.prod(info.shape[axis + 1 : -1]) if axis is not None else 1
    is_mixed = across is not None and (across.rows is not None or across.size == columns)
    strip = columns
    if axis is not None and not is_mixed and edit.centred_axis in (None, axis):
        unit = across.size if across else 1
        strip = unit * max(1, CHUNK // (slab * unit), 8 // unit)
    for start in range(0, rows_in_all, slab):
        stop = min(start + slab, rows_in_all)
        stored = source.rows(edit.source, start, stop)
        written = torch.empty(stop - start, columns, dtype=TORCH[edit.dtype])
        factors = None if gains is None else gains(start, stop)
        error = largest = 0.0
        for left in range(0, columns, strip):
            block = stored[:, left : left + strip].to(torch.float64, copy=True).contiguous()
            if factors is not None:
                block *= factors[left : left + strip] if factors.dim() == 1 else factors
            values = block.numpy()
            if edit.centred_axis is not None and edit.centred_axis != axis:
                values -= np.add.reduce(values, axis=1, keepdims=True) / columns
            if axis is not None:
                whole = info.shape[axis] * inner
                length = info.shape[axis] if (stop - start) % whole == 0 else down.size if down else 1
                turned = values.reshape(-1, length, inner * values.shape[1])
                if edit.centred_axis == axis:
                    turned -= np.add.reduce(turned, axis=1, keepdims=True) / length
                if down is not None:
                    rotate_runs(turned, down)
            if across is not None:
                rotate_runs(values.reshape(*values.shape, 1), across)
            part = rounded(block, TORCH[edit.dtype])
            written[:, left : left + strip] = part
            largest = max(largest, *(abs(float(end)) for end in block.aminmax()))
            error = max(error, float(block.sub_(part).abs_().max()))
        yield written, error, largest


def _steps(edit: TensorEdit, info: TensorInfo) -> tuple[int | None, Rotation | None, Rotation | None]:
    """The axis but the last along which numbers are mixed, the rotation along it, and the one along the last axis."""
    last = max(0, len(info.shape) - 1)
    down = next((rotation for rotation in edit.rotations if rotation.axis != last), None)
    axis = down.axis if down is not None else None if edit.centred_axis in (None, last) else edit.centred_axis
    return axis, down, next((rotation for rotation in edit.rotations if rotation.axis == last), None)
