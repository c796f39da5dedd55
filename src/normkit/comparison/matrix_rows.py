"""A few rows of two matrices, and how they correlate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.comparison.weights import Weights

RELATED = 0.5
"""The least correlation of rows that belong together."""

LEAST = 256
"""The fewest numbers of a matrix that is looked at."""

SIDE = 32
"""The rows and columns of a corner of a matrix that may be transposed."""

_NUMBERS, _ROWS = 4096, 8
"""The numbers and the most rows of each of the two blocks that are read first."""


def few_rows(columns: int) -> int:
    """How many rows of this many columns are read of each of the two blocks."""
    return min(_ROWS, max(1, _NUMBERS // columns))


def rows_of(weights: Weights, name: str, count: int) -> Tensor:
    """A block of rows from the beginning of a matrix and one from its middle, in float64."""
    blocks = blocks_of(weights.source.tensors[name].matrix[0], count)
    return torch.cat([weights.source.rows(name, *block) for block in blocks]).to(torch.float64)


def blocks_of(rows: int, count: int) -> list[tuple[int, int]]:
    """The beginning and the end of these two blocks."""
    middle = max(count, rows // 2)
    blocks = [(0, min(count, rows)), (middle, min(middle + count, rows))]
    return [block for block in blocks if block[0] < block[1]]


def transposed_correlation(port: Tensor, reference: Tensor) -> tuple[float | None, int]:
    """The correlation of a square matrix with the other's transpose, where the rows at hand and their columns meet."""
    rows, size = port.shape
    count = rows // 2 if rows < size else rows
    middle = max(count, size // 2)
    at = [*range(count), *range(middle, middle + rows - count)]
    return correlation(port[:, at], reference[:, at].T)


def correlation(one: Tensor, other: Tensor) -> tuple[float | None, int]:
    """Pearson's correlation of two blocks, and of how many numbers; None where one is constant or not finite."""
    one, other = one - one.mean(), other - other.mean()
    size = float(one.norm() * other.norm())
    found = float((one * other).sum()) / size if size > 0 and math.isfinite(size) else None
    return found, one.numel()
