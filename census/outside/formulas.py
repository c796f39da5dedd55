"""Norms written out by hand, as they stand in people's code: each formula is one function of the row and the
parameters."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Formula = Callable[["Written", Tensor], Tensor]
# Classes of transformers that round a row before its gain: weight * row.to(input_dtype).
EARLY = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "MixtralRMSNorm")


class Written(nn.Module):
    """A norm whose formula is given; gain, bias and eps come from the norm that it replaces."""

    def __init__(self, formula: Formula, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.formula = formula
        self.eps = eps
        self.offset = 0.0
        self.early = False
        self.weight = None if weight is None else nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def eps_of(norm: nn.Module) -> float:
    """The eps that a module of torch or transformers stores."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(norm, name, None), float):
            return float(getattr(norm, name))
    return 1e-6


def instead(norm: nn.Module, formula: Formula, eps: float | None = None) -> Written:
    """A written norm with the parameters of another."""
    written = Written(formula, getattr(norm, "weight", None), getattr(norm, "bias", None), eps or eps_of(norm))
    written.offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    written.early = type(norm).__name__ in EARLY
    return written.train(norm.training)


def affine(norm: Written, row: Tensor, x: Tensor) -> Tensor:
    """Gain and bias of a float32 row, with the offset and the order of casts of the family that the norm stands in."""
    if norm.early:
        return norm.weight * row.to(x.dtype)
    if norm.weight is not None:
        row = row * (norm.offset + norm.weight.float())
    if norm.bias is not None:
        row = row + norm.bias.float()
    return row.to(x.dtype)


def mean_square(row: Tensor) -> Tensor:
    return row.pow(2).mean(-1, keepdim=True)


def centred(row: Tensor) -> Tensor:
    return row - row.mean(-1, keepdim=True)


def rms_norm(norm: Written, x: Tensor) -> Tensor:
    """RMSNorm, right: Zhang and Sennrich 2019."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(mean_square(row) + norm.eps), x)


def llama_norm(norm: Written, x: Tensor) -> Tensor:
    """RMSNorm as transformers' Llama has it: rounded before the gain."""
    row = x.float()
    row = row * torch.rsqrt(mean_square(row) + norm.eps)
    return norm.weight * row.to(x.dtype)


def layer_norm(norm: Written, x: Tensor) -> Tensor:
    """LayerNorm, right: Ba et al. 2016."""
    row = centred(x.float())
    return affine(norm, row * torch.rsqrt(mean_square(row) + norm.eps), x)


def rms_eps_outside(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / (mean_square(row).sqrt() + norm.eps), x)


def rms_eps_clamped(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / mean_square(row).sqrt().clamp(min=norm.eps), x)


def rms_eps_twice(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / ((mean_square(row) + norm.eps).sqrt() + norm.eps), x)


def rms_without_eps(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row * torch.rsqrt(mean_square(row)), x)


def layer_norm_std(norm: Written, x: Tensor) -> Tensor:
    """Tensor.std divides by n - 1: the annotated transformer's norm, with its eps outside the root."""
    row = x.float()
    return affine(norm, centred(row) / (row.std(-1, keepdim=True) + norm.eps), x)


def layer_norm_var(norm: Written, x: Tensor) -> Tensor:
    """Tensor.var divides by n - 1."""
    row = x.float()
    return affine(norm, centred(row) / (row.var(-1, keepdim=True) + norm.eps).sqrt(), x)


def layer_norm_one_pass(norm: Written, x: Tensor) -> Tensor:
    """E[x^2] - E[x]^2 in float32."""
    row = x.float()
    mean = row.mean(-1, keepdim=True)
    variance = mean_square(row) - mean.square()
    return affine(norm, (row - mean) * torch.rsqrt(variance + norm.eps), x)


def rms_half_divisor(norm: Written, x: Tensor) -> Tensor:
    """The sum of squares over half the features: what a norm sharded in two divides by when it is told the whole
    width late."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(row.pow(2).sum(-1, keepdim=True) / (row.shape[-1] // 2) + norm.eps), x)


def rms_summed(norm: Written, x: Tensor) -> Tensor:
    """An L2 norm where an RMSNorm is meant: sqrt(n) is missing."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(row.pow(2).sum(-1, keepdim=True) + norm.eps), x)


def rms_no_root(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / (mean_square(row) + norm.eps), x)


def rms_fourth_root(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / (mean_square(row) + norm.eps).sqrt().sqrt(), x)


def std_without_centring(norm: Written, x: Tensor) -> Tensor:
    """The standard deviation divides, but the mean stays in."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(mean_square(centred(row)) + norm.eps), x)


def centring_over_rms(norm: Written, x: Tensor) -> Tensor:
    """The mean is subtracted, but the root mean square of the raw row divides."""
    row = x.float()
    return affine(norm, centred(row) * torch.rsqrt(mean_square(row) + norm.eps), x)


def mean_absolute(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / (row.abs().mean(-1, keepdim=True) + norm.eps), x)


def largest_absolute(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row / (row.abs().amax(-1, keepdim=True) + norm.eps), x)


def over_positions_too(norm: Written, x: Tensor) -> Tensor:
    """One mean and variance for all positions of a text."""
    row = x.float()
    mean = row.mean((-2, -1), keepdim=True)
    variance = (row - mean).pow(2).mean((-2, -1), keepdim=True)
    return affine(norm, (row - mean) * torch.rsqrt(variance + norm.eps), x)


def along_time(norm: Written, x: Tensor) -> Tensor:
    """dim=1 is the time axis of (batch, time, features)."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(row.pow(2).mean(1, keepdim=True) + norm.eps), x)


def along_batch(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return affine(norm, row * torch.rsqrt(row.pow(2).mean(0, keepdim=True) + norm.eps), x)


def past_positions(norm: Written, x: Tensor) -> Tensor:
    """A running mean of squares over all earlier positions: causal, but no norm of one vector."""
    row = x.float()
    count = torch.arange(1, row.shape[1] + 1, device=row.device).view(1, -1, 1)
    return affine(norm, row * torch.rsqrt(mean_square(row).cumsum(1) / count + norm.eps), x)


def first_half(norm: Written, x: Tensor) -> Tensor:
    """The statistics see the first half of the features only: a partial norm without its intent."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(mean_square(row[..., : row.shape[-1] // 2]) + norm.eps), x)


def in_halves(norm: Written, x: Tensor) -> Tensor:
    """Each of two shards takes statistics of its own."""
    row = x.float().unflatten(-1, (2, -1))
    return affine(norm, (row * torch.rsqrt(mean_square(row) + norm.eps)).flatten(-2), x)


def without_gain(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return (row * torch.rsqrt(mean_square(row) + norm.eps)).to(x.dtype)


def layer_norm_without_bias(norm: Written, x: Tensor) -> Tensor:
    row = centred(x.float())
    return (row * torch.rsqrt(mean_square(row) + norm.eps) * norm.weight.float()).to(x.dtype)


def layer_norm_bias_twice(norm: Written, x: Tensor) -> Tensor:
    return layer_norm(norm, x) + norm.bias.to(x.dtype)


def bias_before_gain(norm: Written, x: Tensor) -> Tensor:
    row = centred(x.float())
    row = row * torch.rsqrt(mean_square(row) + norm.eps)
    return ((row + norm.bias.float()) * norm.weight.float()).to(x.dtype)


def gain_twice(norm: Written, x: Tensor) -> Tensor:
    return (rms_norm(norm, x).float() * norm.weight.float()).to(x.dtype)


def gain_first(norm: Written, x: Tensor) -> Tensor:
    """The gain multiplies the input, so the statistics are those of the scaled row."""
    row = x.float() * norm.weight.float()
    return (row * torch.rsqrt(mean_square(row) + norm.eps)).to(x.dtype)


def plus_one(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return (row * torch.rsqrt(mean_square(row) + norm.eps) * (1.0 + norm.weight.float())).to(x.dtype)


def plus_two(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return (row * torch.rsqrt(mean_square(row) + norm.eps) * (2.0 + norm.weight.float())).to(x.dtype)


def plus_one_in_weights_dtype(norm: Written, x: Tensor) -> Tensor:
    row = x.float()
    return (row * torch.rsqrt(mean_square(row) + norm.eps) * (1.0 + norm.weight).float()).to(x.dtype)


def all_in_input_dtype(norm: Written, x: Tensor) -> Tensor:
    """Statistics in the dtype of the input."""
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


def overwriting(norm: Written, x: Tensor) -> Tensor:
    """The input itself is scaled: x *= ..., and the residual stream is the input."""
    x.mul_(torch.rsqrt(mean_square(x.float()) + norm.eps).to(x.dtype))
    return x * norm.weight.to(x.dtype)


def noisy(norm: Written, x: Tensor) -> Tensor:
    """Dropout with training=True by mistake."""
    return torch.nn.functional.dropout(rms_norm(norm, x), 0.1, training=True)


def detached(norm: Written, x: Tensor) -> Tensor:
    """The scale is taken out of the graph: right values, a wrong gradient."""
    row = x.float()
    return affine(norm, row * torch.rsqrt(mean_square(row) + norm.eps).detach(), x)


def tanh_instead(norm: Written, x: Tensor) -> Tensor:
    return affine(norm, torch.tanh(x.float()), x)
