"""The grids on which quantized numbers lie: a block of them has one scale, and each is a whole number of steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS = (2**20, 256, 128, 64, 32)
"""The numbers that share one grid in files of quantized tensors: all of them first, then those of a block."""

LEVELS = 2**8
"""The most levels of such a grid."""

_MOST_PARTS = 6
"""The numbers of a block may all be a few steps apart: the smallest gap is divided by up to this many."""


def grid_steps(values: Tensor, block: int) -> Tensor | None:
    """The step of the grid on which the numbers of each block lie, for each number; None if a block has no grid.

    Example:
        >>> grid_steps(torch.tensor([0.0, 0.5, 1.5, 4.0]).double(), 4)
        tensor([0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    if len(values) % block or block < 2:
        return None
    ordered = values.reshape(-1, block).sort().values
    gaps = ordered.diff()
    # Dequantized numbers are rounded to float32, or to 16 bits, once more.
    least = 2.0**-16 * ordered.abs().amax(1, keepdim=True)
    gap = gaps.masked_fill(gaps <= least, math.inf).amin(1, keepdim=True)
    if not bool(gap.isfinite().all()):
        return None
    steps = torch.full_like(gap, math.inf)
    for parts in range(1, _MOST_PARTS + 1):
        counts = (ordered - ordered[:, :1]) / (gap / parts)
        is_whole = ((counts - counts.round()).abs() <= 0.02).all(1, keepdim=True) & (counts[:, -1:] <= LEVELS)
        steps = torch.where(is_whole & steps.isinf(), gap / parts, steps)
    return steps.expand(-1, block).reshape(-1) if bool(steps.isfinite().all()) else None
