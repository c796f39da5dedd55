"""Whether the matrices of a model are as some distribution gave them, or were trained."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn

# Enough for a spread, and little beside a forward pass.
_ROWS, _MATRICES = 256, 64
_FEWEST = 32


def row_scatter(model: nn.Module) -> float:
    """How much more the rows of a model's matrices differ in length than rows of independent entries do.

    The variance of the mean squares s_i of a matrix's rows, over (m4 - s^2) / n, which it is where all n entries are
    independent and of one distribution with second and fourth moments s and m4: 1 in fresh weights, whatever they were
    drawn from, and 0 where the rows are orthogonal by construction. The median over up to 64 matrices, of up to 256 of
    their rows each; rows of zeros, as of padding, are left out.

    Args:
        model: It is only looked at.

    Returns:
        The median; NaN without a matrix of 32 rows and columns.
    """
    matrices = [one for one in model.parameters() if one.dim() == 2 and min(one.shape) >= _FEWEST]
    chosen = matrices[:: math.ceil(len(matrices) / _MATRICES) or 1]
    found = [scatter for one in chosen if math.isfinite(scatter := _scatter(one.detach()))]
    return statistics.median(found) if found else math.nan


def _scatter(matrix: Tensor) -> float:
    if matrix.is_meta or not matrix.is_floating_point():
        return math.nan
    rows = matrix[:: math.ceil(len(matrix) / _ROWS)].to("cpu", torch.float64)
    squares = rows[rows.any(-1)].square()
    if len(squares) < _FEWEST:
        return math.nan
    expected = squares.var() / squares.shape[-1]
    return float(squares.mean(-1).var() / expected)
