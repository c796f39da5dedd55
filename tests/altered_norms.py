"""Norms of a model that compute something else than they should, with the model's own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CENTRED = {"LayerNorm", "CohereLayerNorm", "OlmoLayerNorm", "NemotronLayerNorm1P"}
OFFSET = {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "NemotronLayerNorm1P"}
EARLY = {"LlamaRMSNorm", "MixtralRMSNorm", "Qwen3RMSNorm", "T5LayerNorm"}
"""What the classes compute, by name, read in their source: a mean is subtracted; 1 is added to the weight; the row is
rounded before the gain."""


class Altered(nn.Module):
    """A norm with eps, weight and bias of another, which computes a given formula."""

    def __init__(self, norm: nn.Module, formula: Callable[[Altered, Tensor], Tensor]) -> None:
        super().__init__()
        name = type(norm).__name__
        self.is_centred = name in CENTRED
        self.offset, self.is_early = float(name in OFFSET), name in EARLY
        self.eps = eps_of(norm)
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        """The formula."""
        return self.formula(self, x)

    def rows(self, x: Tensor, axes: Any = -1) -> tuple[Tensor, Tensor]:
        """What is divided, and its mean square."""
        wide = x.float()
        if self.is_centred:
            wide = wide - wide.mean(axes, keepdim=True)
        return wide, wide.square().mean(axes, keepdim=True)

    def affine(self, row: Tensor, x: Tensor) -> Tensor:
        """Gain and bias, rounded as the original does."""
        if self.weight is None:
            return row.to(x.dtype)
        if self.is_early:
            return self.weight * row.to(x.dtype)
        y = (self.offset + self.weight.float()) * row
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def eps_of(norm: nn.Module) -> float:
    """The eps that a norm keeps, under either of its usual names."""
    return float(getattr(norm, eps_name(norm)))


def eps_name(norm: nn.Module) -> str:
    """Name of the attribute that holds it."""
    return next(name for name in ("eps", "variance_epsilon") if isinstance(getattr(norm, name, None), float))


def right(norm: Altered, x: Tensor) -> Tensor:
    """The formula as it is: no fault."""
    row, square = norm.rows(x)
    return norm.affine(row * torch.rsqrt(square + norm.eps), x)


def eps_outside(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row / (square.sqrt() + norm.eps**0.5), x)


def eps_as_clamp(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row / square.sqrt().clamp_min(norm.eps), x)


def no_eps(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row / square.sqrt(), x)


def unbiased(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    n = x.shape[-1]
    return norm.affine(row * torch.rsqrt(square * n / (n - 1) + norm.eps), x)


def squared(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row / (square + norm.eps) ** 2, x)


def rootless(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row / (square + norm.eps), x)


def eps_of_the_dtype(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return norm.affine(row * torch.rsqrt(square + torch.finfo(x.dtype).eps), x)


def eps_lost(norm: Altered, x: Tensor) -> Tensor:
    """Eps of 1e-8 added in the input's dtype, to statistics that are summed in float32."""
    row, square = norm.rows(x)
    return norm.affine(row * torch.rsqrt(square.to(x.dtype) + torch.tensor(1e-8).to(x.dtype)).float(), x)


def rescaled(norm: Altered, x: Tensor) -> Tensor:
    wide = x.float()
    row, square = norm.rows(wide / wide.abs().amax(-1, keepdim=True).clamp_min(1e-30))
    return norm.affine(row * torch.rsqrt(square + 1e-3), x)


def cancelling(norm: Altered, x: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return norm.affine((wide - mean) * torch.rsqrt(variance + norm.eps), x)


def negative(norm: Altered, x: Tensor) -> Tensor:
    """A variance that rounding makes negative where a row is constant."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return norm.affine((wide - mean) * torch.rsqrt(variance + 1e-12), x)


def offset_missed(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    y = row * torch.rsqrt(square + norm.eps) * norm.weight.float()
    return (y if norm.bias is None else y + norm.bias.float()).to(x.dtype)


def offset_doubled(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    y = row * torch.rsqrt(square + norm.eps) * (1.0 + norm.offset + norm.weight.float())
    return (y if norm.bias is None else y + norm.bias.float()).to(x.dtype)


def offset_in_16_bits(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    y = row * torch.rsqrt(square + norm.eps) * (norm.offset + norm.weight).float()
    return (y if norm.bias is None else y + norm.bias.float()).to(x.dtype)


def over(*axes: int) -> Callable[[Altered, Tensor], Tensor]:
    """The formula with statistics over other axes."""

    def formula(norm: Altered, x: Tensor) -> Tensor:
        row, square = norm.rows(x, axes)
        return norm.affine(row * torch.rsqrt(square + norm.eps), x)

    return formula


over_samples, over_time, over_the_batch, over_time_and_features = over(0), over(1), over(0, 1), over(1, 2)
# Of a (B, T, heads, features) input: over the heads of each feature, and over all of them.
over_heads, over_all_heads = over(2), over(-2, -1)


def per_head(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x.unflatten(-1, (4, -1)))
    return norm.affine((row * torch.rsqrt(square + norm.eps)).flatten(-2), x)


def in_16_bits(norm: Altered, x: Tensor) -> Tensor:
    """Statistics in the input's dtype."""
    row = x - x.mean(-1, keepdim=True) if norm.is_centred else x
    return norm.affine((row * torch.rsqrt(row.square().mean(-1, keepdim=True) + norm.eps)).float(), x)


def other_cast(norm: Altered, x: Tensor) -> Tensor:
    """Rounded late where the original rounds early, and the other way round."""
    row, square = norm.rows(x)
    row = row * torch.rsqrt(square + norm.eps)
    if norm.is_early:
        return (norm.weight.float() * row).to(x.dtype)
    y = norm.weight * row.to(x.dtype)
    return y if norm.bias is None else y + norm.bias


def kept_wide(norm: Altered, x: Tensor) -> Tensor:
    """What leaves is float32."""
    return right(norm, x.float())


def one_per_cent_more(norm: Altered, x: Tensor) -> Tensor:
    return right(norm, x) * 1.01


def tail_off(norm: Altered, x: Tensor) -> Tensor:
    """A kernel whose rows past the sixteenth token are 1 % too long."""
    y = right(norm, x)
    return torch.cat([y[:, :16], y[:, 16:] * 1.01], 1)


def tail_lost(norm: Altered, x: Tensor) -> Tensor:
    """A kernel that does not write the rows past the sixteenth token."""
    y = right(norm, x)
    return torch.cat([y[:, :16], torch.zeros_like(y[:, 16:])], 1)


def in_place(norm: Altered, x: Tensor) -> Tensor:
    """What `x.float()` returns is x itself in float32, and is written to."""
    wide = x.float()
    wide.sub_(wide.mean(-1, keepdim=True) if norm.is_centred else 0.0)
    return norm.affine(wide.mul_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)), x)


class _GainInSixteenBits(torch.autograd.Function):
    """weight * row, whose weight gradient is summed row by row in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(row, weight)
        return row * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        row, weight = ctx.saved_tensors
        products = (gradient * row).flatten(0, -2)
        total = torch.zeros_like(weight)
        for product in products:
            total = total + product.to(weight.dtype)
        return gradient * weight, total


def gain_gradient_in_16_bits(norm: Altered, x: Tensor) -> Tensor:
    row, square = norm.rows(x)
    return _GainInSixteenBits.apply((row * torch.rsqrt(square + norm.eps)).to(x.dtype), norm.weight)
