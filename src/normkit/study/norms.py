"""What stands where a study's model normalizes: a spec's layer, BatchNorm over rows, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normkit import specs
from normkit.errors import InputError
from normkit.layers import LayerNorm, Norm
from normkit.spec import NormSpec

NormLayer = NormSpec | Callable[[int], nn.Module] | None
"""A spec, what makes a layer of a width, or None for no norm at all."""


def norm_layer(norm: NormLayer, width: int) -> nn.Module:
    """A norm over the last `width` features, gain 1 and bias 0; `nn.Identity` for None.

    Args:
        norm: What to build.
        width: Features of a row.
    """
    if norm is None:
        return nn.Identity()
    if not isinstance(norm, NormSpec):
        return norm(width)
    if norm.eps is not None and norm == specs.TORCH_LAYER_NORM.replace(eps=norm.eps):
        return LayerNorm(width, eps=norm.eps)
    return Norm(norm, width)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each feature over rows: all of (batch,), (batch, time) and so on, the features last.

    In training, with N rows x_i in all processes of the run together:

        mean = sum_i x_i / N,  variance = sum_i (x_i - mean)^2 / N,  y = weight (x - mean) / sqrt(variance + eps) + bias

    and the running mean and N / (N - 1) times the variance move by `momentum` towards these; in evaluation mode the
    running ones take their places. Parameters, buffers and arguments are those of `torch.nn.BatchNorm1d`.

    Raises:
        InputError: In training, on a single row: it has no variance.

    Source:
        Ioffe & Szegedy 2015 (arXiv:1502.03167), algorithm 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the features of x (..., n)."""
        rows = x.flatten(0, -2)
        pooled = self.training and dist.is_initialized() and dist.get_world_size() > 1
        if self.training and not pooled and len(rows) < 2:
            raise InputError("BatchNorm needs at least 2 rows in training, got 1; give a larger batch")
        normalized = self._pooled(rows) if pooled else super().forward(rows)
        return normalized.view_as(x)

    def _pooled(self, rows: Tensor) -> Tensor:
        """`forward` with the statistics of all processes, which the gradients go through too."""
        x = rows.float() if rows.dtype.itemsize < 4 else rows
        count = _sum_over_ranks(x.new_tensor(len(x)))
        mean = _sum_over_ranks(x.sum(0)) / count
        variance = _sum_over_ranks((x - mean).square().sum(0)) / count
        self._move(mean, variance * count / (count - 1))
        normalized = (x - mean) * torch.rsqrt(variance + self.eps)
        scaled = normalized * self.weight + self.bias if self.affine else normalized
        return scaled.to(rows.dtype)

    @torch.no_grad()
    def _move(self, mean: Tensor, variance: Tensor) -> None:
        """The running statistics, where there are any, towards those of a batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SumOverRanks(torch.autograd.Function):
    """The sum over processes. Each of them uses it, so its gradient is the sum over processes too."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return _sum_over_ranks(gradient)


def _sum_over_ranks(x: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x)  # type: ignore[no-untyped-call]
    return total
