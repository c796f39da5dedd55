"""The contribution of each part of a sum to the norm of the sum: three answers that are easily mistaken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import ShapeError
from normkit.geometry.centring import split
from normkit.geometry.differential import jvp
from normkit.geometry.rows import require_floating, require_row
from normkit.geometry.scaling import length, row_scale
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Contributions:
    """The output of a norm, taken apart over the parts x_j that its input x is the sum of.

    Shapes (k, ..., n) for k parts of shape (..., n). C subtracts the mean where the spec's numerator does; m is 1 or
    sqrt(n), whichever the spec multiplies by, g the effective gain, b the bias, s(x) the scale of a row with eps.
    """

    total: Tensor
    """N(x), as the reference computes it, (..., n)."""
    bias: Tensor
    """b, (n,); zeros where there is none."""
    frozen: Tensor
    """m * g * C(x_j) / s(x): the scale of the whole. Their sum and b are N(x) exactly."""
    recomputed: Tensor
    """m * g * C(x_j) / s(x_j) = N(x_j) - b: each part at a scale of its own, as if it stood alone. They do not sum to
    anything. At eps = 0 a part of zeros gives NaN."""
    linearised: Tensor
    """J x_j, J the Jacobian at x: how N(x) moves when part j grows a little. The others shrink as it does, so that
    these sum to J x, which is 0 but for eps."""
    interference: Tensor
    """|D(x_j)| / |D(x - x_j)|, D subtracting the mean where the spec's statistics do: how much part j takes part in the
    scale that all share, (k, ...); infinite for the only part that is not 0."""
    remainder: Tensor
    """N(x) - sum of `frozen` - b, (..., n): 0 but for rounding, and the casts of 16-bit input."""


def contributions(
    parts: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> Contributions:
    """Take the output of a norm apart over what its input is the sum of.

    N(x_1 + ... + x_k) = sum over j of m * g * C(x_j) / s(x) + b: with s(x) kept as it is, a norm is affine. See
    `Contributions` for this and two other answers.

    Args:
        parts: The x_j, stacked along the first axis: shape (k, ..., n), such as the outputs of a model's blocks.
        spec: The norm of their sum; its row must be the last axis. A gain that stands before multiplies each part.
        weight: Stored gain of shape (n,), or None.
        bias: Bias of shape (n,), or None.

    Returns:
        The three lenses, in the parts' dtype.

    Raises:
        DtypeError: If parts is not of a floating dtype.
        ShapeError: If there is no axis, or no part along it.
        SpecError: If the spec's row is not the last axis.

    Example:
        >>> from normkit.geometry import contributions
        >>> found = contributions(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), NormSpec(eps=0.0))
        >>> found.total, found.frozen.sum(0)
        (tensor([-1.,  1.]), tensor([-1.,  1.]))
        >>> found.recomputed
        tensor([[ 1., -1.],
                [-1.,  1.]])

    Source:
        Kobayashi et al. 2021, arXiv:2109.07152, for the frozen scale; Menary, Kaski and Freitas 2024,
        arXiv:2406.17837, for interference; the rest is derived here.
    """
    require_row(spec)
    if require_floating(parts).dim() < 2 or not len(parts):
        raise ShapeError(
            f"parts of shape (k, ..., n), k >= 1, are needed, got {tuple(parts.shape)}; stack them along a first axis"
        )
    dtype, n = parts.dtype, parts.shape[-1]
    gain = torch.ones((), dtype=dtype, device=parts.device)
    if weight is not None:
        gain = spec.gain.effective(weight, dtype).to(dtype)
    before, after = spec.gain.sides(gain)
    inner = parts * before
    numerator, deviation = split(inner, spec.centring)
    numerator = numerator * (after * spec.divisor.factor(n))
    eps = reference.machine_eps(parts, spec)
    frozen = numerator / row_scale(inner.sum(0), spec, eps)
    x = parts.sum(0)
    total = reference.forward(x, spec, weight, bias).to(dtype)
    shift = x.new_zeros(n) if bias is None else bias.to(dtype).expand(n)
    return Contributions(
        total=total,
        bias=shift,
        frozen=frozen,
        recomputed=numerator / row_scale(inner, spec, eps),
        linearised=jvp(x.expand_as(parts), parts, spec, weight),
        interference=_interference(deviation),
        remainder=total - frozen.sum(0) - shift,
    )


def _interference(deviation: Tensor) -> Tensor:
    """|D(x_j)| / |D(sum of the others)|, given all D(x_j)."""
    # The others are added up by themselves: a difference from the whole would leave its rounding.
    nothing = torch.zeros_like(deviation[:1])
    earlier = torch.cat([nothing, deviation[:-1].cumsum(0)])
    later = torch.cat([deviation[1:].flip(0).cumsum(0).flip(0), nothing])
    return length(deviation) / length(earlier + later)
