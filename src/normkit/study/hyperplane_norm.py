"""A norm that centres along other directions than all-ones: what LayerNorm would be, had it another hyperplane."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit import functional
from normkit.errors import InputError


class HyperplaneNorm(nn.Module):
    """Project some directions out of each row, then divide by the root mean square of what is left.

    y = weight * p / sqrt(mean(p**2) + eps) + bias with p = x - Q Q^T x. With the one column 1 / sqrt(n) it is
    LayerNorm, without a column RMSNorm with a bias.

    Args:
        directions: Q of shape (n, k), k < n, with orthonormal columns.
        eps: Added under the root.

    Attributes:
        directions: Q, a buffer.
        weight: Gain of shape (n,), 1 at the start.
        bias: Bias of shape (n,), 0 at the start.

    Raises:
        InputError: If Q has as many columns as rows, which would leave nothing.
    """

    directions: Tensor

    def __init__(self, directions: Tensor, eps: float = 1e-5) -> None:
        super().__init__()
        width, count = directions.shape
        if count >= width:
            raise InputError(f"{count} directions leave nothing of a row of {width} features; project out fewer")
        self.eps = eps
        self.register_buffer("directions", directions.contiguous())
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (..., n)."""
        projected = x - (x @ self.directions) @ self.directions.mT
        return functional.rms_norm(projected, self.weight.shape, self.weight, self.eps) + self.bias


def random_hyperplanes(count: int = 1, *, seed: int, is_shared: bool = True) -> Callable[[int], HyperplaneNorm]:
    """A maker of norms that centre along random directions, for `TransformerConfig.norm`.

    Args:
        count: Directions that are projected out at once, k.
        seed: Of the directions.
        is_shared: Every norm of a width has the same directions, as LayerNorms all have all-ones; else each that is
            made has its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(width: int) -> HyperplaneNorm:
        drawn = generator.manual_seed(seed) if is_shared else generator
        gaussian = torch.randn(width, count, generator=drawn, dtype=torch.float64)
        return HyperplaneNorm(torch.linalg.qr(gaussian).Q.float())

    return make
