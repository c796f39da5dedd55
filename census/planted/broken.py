"""Norms as people write them wrongly, each in place of a healthy one and with its parameters."""

from __future__ import annotations

import torch
from torch import nn

from kit import replace


class LayerNorm(nn.Module):
    """A norm written by hand: `formula(rows, gain, bias, eps)`."""

    def __init__(self, norm: nn.Module, formula, eps: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        bias = getattr(norm, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        found = getattr(norm, "eps", getattr(norm, "variance_epsilon", 1e-5))
        self.eps, self.formula = found if eps is None else eps, formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x, self.weight, self.bias, self.eps)


def plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


def unbiased(x, gain, bias, eps):
    """Tensor.var and Tensor.std divide by n - 1."""
    return plus(gain * (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + eps), bias)


def annotated(x, gain, bias, eps):
    """The LayerNorm of The Annotated Transformer: std with n - 1, and eps added to it."""
    return plus(gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps), bias)


def uncentred(x, gain, bias, eps):
    """An RMSNorm where a LayerNorm belongs."""
    return plus(gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), bias)


def centred(x, gain, bias, eps):
    """A LayerNorm where an RMSNorm belongs."""
    return plus(gain * nn.functional.layer_norm(x, x.shape[-1:], eps=eps), bias)


def over_tokens(x, gain, bias, eps):
    """Statistics over the axis of tokens."""
    mean, var = x.mean(-2, keepdim=True), x.var(-2, keepdim=True, correction=0)
    return plus(gain * (x - mean) / torch.sqrt(var + eps), bias)


def over_batch(x, gain, bias, eps):
    """Statistics over the axis of samples."""
    mean, var = x.mean(0, keepdim=True), x.var(0, keepdim=True, correction=0)
    return plus(gain * (x - mean) / torch.sqrt(var + eps), bias)


def over_all(x, gain, bias, eps):
    """Statistics over everything but the samples."""
    axes = tuple(range(1, x.dim()))
    mean, var = x.mean(axes, keepdim=True), x.var(axes, keepdim=True, correction=0)
    return plus(gain * (x - mean) / torch.sqrt(var + eps), bias)


def twice(x, gain, bias, eps):
    """The same norm applied two times."""
    first = nn.functional.layer_norm(x, x.shape[-1:], gain, bias, eps)
    return nn.functional.layer_norm(first, x.shape[-1:], gain, bias, eps)


def half_statistics(x, gain, bias, eps):
    """The statistics of a root mean square summed in the 16 bits of the input."""
    small = x.to(torch.bfloat16)
    return plus(gain * (small * torch.rsqrt(small.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype), bias)


def no_gain(x, gain, bias, eps):
    """The parameters are there, and are not applied."""
    return nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def plus_one(x, gain, bias, eps):
    """An RMSNorm that adds 1 to gains that have it already."""
    return plus((1 + gain) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), bias)


def eps_outside(x, gain, bias, eps):
    """Eps behind the root."""
    var = x.var(-1, keepdim=True, correction=0)
    return plus(gain * (x - x.mean(-1, keepdim=True)) / (var.sqrt() + eps), bias)


def variance_only(x, gain, bias, eps):
    """The root forgotten."""
    var = x.var(-1, keepdim=True, correction=0)
    return plus(gain * (x - x.mean(-1, keepdim=True)) / (var + eps), bias)


def write(model: nn.Module, path: str, formula, eps: float | None = None) -> None:
    """Put a norm written by hand in place of the one at a path."""
    replace(model, path, LayerNorm(model.get_submodule(path), formula, eps))


def method(module: nn.Module, function) -> None:
    """Give one module another forward."""
    import types

    module.forward = types.MethodType(function, module)
