"""Where rows lie: tensors of any leading strides as rows of one or two strides, so that views are read where they are.

x of shape (a, b, n), strides (s, t, 1)  ->  row i * b + j begins at i * s + j * t
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """How the rows of some tensors of one shape lie."""

    rows: int
    """How many there are."""
    inner: int
    """Rows are counted by i * inner + j; 1 where one stride is enough."""
    strides: tuple[tuple[int, int], ...]
    """Strides of each tensor its stride of i, and of j: in elements, the second alone where inner is 1."""

    @property
    def is_nested(self) -> bool:
        """Whether rows have two strides."""
        return self.inner != 1


def has_whole_rows(x: Tensor, axes: int) -> bool:
    """Whether each row of x, its last `axes` axes, lies in one piece."""
    expected = 1
    for size, stride in zip(reversed(x.shape[-axes:]), reversed(x.stride()[-axes:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_aligned(x: Tensor, axes: int, aligned: int) -> bool:
    """Whether rows of x begin at multiples of so many numbers, as far as strides tell."""
    leading = zip(x.shape[: x.dim() - axes], x.stride(), strict=False)
    return all(size == 1 or stride % aligned == 0 for size, stride in leading)


def layout(tensors: Sequence[Tensor], axes: int) -> Layout | None:
    """The layout of tensors of one shape that have whole rows; None if one of them takes more than two strides."""
    sizes = tensors[0].shape[: tensors[0].dim() - axes]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        strides = tuple(tensor.stride(axis) for tensor in tensors)
        if merged and all(outer == size * own for outer, own in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = merged[-1][0] * size, strides
        else:
            merged.append((size, strides))
    rows = math.prod(sizes)
    if len(merged) > 2:
        return None
    if len(merged) < 2:
        single = merged[0][1] if merged else (0,) * len(tensors)
        return Layout(rows, 1, tuple((0, stride) for stride in single))
    (_, outer), (inner, own) = merged
    return Layout(rows, inner, tuple(zip(outer, own, strict=True)))
