"""Batch norms as a scale and a shift of channels, moved into the convolution or linear map beside them; in float64.

x -> a (W x + b - m) + c    is W' = a W per output channel, b' = (b - m) a + c
x -> W (a x + s) + b        is W' = W a per input channel, b' = b + sum W s, if s reaches all outputs alike
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.plan import BatchNorm
from normkit.checkpoint.reader import Source, vector
from normkit.identification.state import random_numbers_kept
from normkit.text import dtype_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
MAPS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine:
    """A BatchNorm in evaluation mode: y = scale (x - mean) + bias = scale x + shift, in float64, of shape (n,)."""

    scale: Tensor
    mean: Tensor
    bias: Tensor

    @property
    def shift(self) -> Tensor:
        """Its value at 0."""
        return self.bias - self.mean * self.scale


@dataclass(frozen=True, eq=False)
class Values:
    """Weight and bias of a convolution or linear map in float64."""

    weight: Tensor
    bias: Tensor


def affine(norm: Any) -> Affine:
    """Scale, mean and bias of a BatchNorm with running statistics."""
    weight, bias = (None if each is None else each.detach().double() for each in (norm.weight, norm.bias))
    return _affine(weight, bias, norm.running_mean.double(), norm.running_var.double(), norm.eps)


def stored_affine(norm: BatchNorm, source: Source) -> Affine:
    """The same of a batch norm among the tensors of a checkpoint."""
    weight, bias = (None if name is None else vector(source, name) for name in (norm.weight, norm.bias))
    return _affine(weight, bias, vector(source, norm.mean), vector(source, norm.var), norm.eps)


def _affine(weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Affine:
    gain = torch.ones_like(mean) if weight is None else weight
    return Affine(scale=gain / (var + eps).sqrt(), mean=mean, bias=torch.zeros_like(mean) if bias is None else bias)


def values_of(layer: Any) -> Values:
    """Weight and bias of a map, with zeros for a bias that it lacks."""
    weight = layer.weight.detach().double().cpu()
    if layer.bias is None:
        size = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        return Values(weight, torch.zeros(size, dtype=torch.float64))
    return Values(weight, layer.bias.detach().double().cpu())


def against_shift(layer: Any) -> str | None:
    """Why a constant per channel that is added to the input of a map is none in its output; None if it is.

    A convolution gives each output b + sum over taps of W x. Where all taps meet the input, x + s gives sum W s more:
    one number for each output channel. Padded zeros are not shifted; a padding that repeats the input is.
    """
    if isinstance(layer, nn.Linear):
        return None
    is_point = set(layer.kernel_size) == {1}
    if isinstance(layer, TRANSPOSED):
        if is_point and set(layer.stride) == {1} and set(layer.output_padding) == {0}:
            return None
        return "into a transposed convolution a shift cannot go: its outputs meet different weights"
    is_padded = not is_point if layer.padding == "same" else layer.padding != "valid" and any(layer.padding)
    if not is_padded or layer.padding_mode != "zeros":
        return None
    return "its shift cannot go into a convolution that pads zeros: at the border it would meet fewer weights"


def multiplied(layer: Any, old: Values, by: Affine, *, is_after: bool) -> Values:
    """The values of a map that does what it and the norm before or after it did.

    Args:
        layer: The map: its class and its groups.
        old: Its values so far.
        by: The norm.
        is_after: The map stands after the norm.
    """
    scale, mean, bias, shift = (each.cpu() for each in (by.scale, by.mean, by.bias, by.shift))
    weight, groups = old.weight, getattr(layer, "groups", 1)
    tail = [1] * (weight.dim() - 2)

    def table(values: Tensor) -> Tensor:
        # The second axis of a weight counts the channels of one group, the first all channels of the other side.
        if isinstance(layer, TRANSPOSED) is is_after:
            return values.view(-1, 1, *tail)
        return (
            values.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0).view(*weight.shape[:1], -1, *tail)
        )

    if not is_after:
        return Values(weight * table(scale), (old.bias - mean) * scale + bias)
    moved = weight * table(shift)
    if isinstance(layer, TRANSPOSED):
        added = moved.view(groups, weight.shape[0] // groups, weight.shape[1], -1).sum((1, 3)).flatten()
    else:
        added = moved.flatten(1).sum(1)
    return Values(weight * table(scale), old.bias + added if bool((shift != 0).any()) else old.bias)


def lost(layer: Any, new: Values) -> str | None:
    """Why values do not fit into the dtype of a map; None if they do.

    Rounding moves each weight by half a unit at most, so that a row moves by no more than half a unit of its length.
    Twice that means that its weights fell below the range of the dtype.
    """
    dtype = layer.weight.dtype
    kept = [rounded(each.contiguous(), dtype).double() for each in (new.weight, new.bias)]
    if not all(bool(each.isfinite().all()) for each in kept):
        return f"the folded weights do not fit into {dtype_name(dtype)}; fold the model in float32"
    moved, length = ((each.flatten(1).norm(dim=1)) for each in (kept[0] - new.weight, new.weight))
    if bool((moved > torch.finfo(dtype).eps * length).any()):
        return f"the folded weights fall below the range of {dtype_name(dtype)}; fold the model in float32"
    return None


def is_plain(norm: nn.Module) -> bool:
    """Whether a BatchNorm has torch's own forward."""
    return type(norm).forward in _NORMS and "forward" not in vars(norm)


def is_norm_then_parts(norm: Any, x: Tensor) -> bool:
    """Whether a norm with a forward of its own gives what its parts make of the normalized input, bit for bit.

    It is run in float64. So do those of timm, whose parts are a dropout and an activation.
    """
    wide, x = copy.deepcopy(norm).double(), x.detach().double()
    if not list(wide.children()):
        return False
    with torch.no_grad(), random_numbers_kept():
        y = F.batch_norm(x, wide.running_mean, wide.running_var, wide.weight, wide.bias, eps=wide.eps)
        for part in wide.children():
            y = part(y)
        return torch.equal(wide(x), y)
