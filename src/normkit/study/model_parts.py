"""Parts of the studies' models: norms of a spec, the norms that no spec describes, and initial weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normkit import functional, reference, specs
from normkit.errors import InputError
from normkit.geometry import centre
from normkit.layers import LayerNorm, Norm
from normkit.spec import NormSpec

NormLayer = NormSpec | Callable[[int], nn.Module] | None
"""A spec, a function width -> layer, or None for no norm."""


_EMBEDDING_DEVIATION = 0.5


def norm_layer(norm: NormLayer, width: int) -> nn.Module:
    """A norm over the last `width` features, with gain 1 and bias 0; `nn.Identity` for None."""
    if norm is None:
        return nn.Identity()
    if not isinstance(norm, NormSpec):
        return norm(width)
    if norm.eps is not None and norm == specs.TORCH_LAYER_NORM.replace(eps=norm.eps):
        return LayerNorm(width, eps=norm.eps)
    return Norm(norm, width)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each feature, the last axis, over all other axes.

    In training, with N rows x_i in all processes of the run:

        mean = sum_i x_i / N,  variance = sum_i (x_i - mean)^2 / N,  y = weight (x - mean) / sqrt(variance + eps) + bias

    and the running mean and variance move by `momentum` towards the mean and N / (N - 1) times the variance. Evaluation
    mode uses the running statistics. Parameters, buffers and arguments are those of `torch.nn.BatchNorm1d`.

    Raises:
        InputError: In training, for a single row, which has no variance.

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
        """`forward` with the statistics of all processes, and gradients through them; moves the running statistics."""
        x = rows.float() if rows.dtype.itemsize < 4 else rows
        count = _sum_over_ranks(x.new_tensor(len(x)))
        mean = _sum_over_ranks(x.sum(0)) / count
        variance = _sum_over_ranks((x - mean).square().sum(0)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), share)
        normalized = (x - mean) * torch.rsqrt(variance + self.eps)
        scaled = normalized * self.weight + self.bias if self.affine else normalized
        return scaled.to(rows.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum over processes; each uses it, so the gradient is summed over processes too."""

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


class NoisyBatchNorm(BatchNorm):
    """BatchNorm whose output is scaled and shifted in training by random numbers, new for each step and feature.

        y = s_t BatchNorm(x) + m_t,  m_t uniform in (-noise, noise),  s_t uniform in (1, 1 + noise)

    Step t is the number of batches that the norm has seen, a buffer; each step has a generator of its own, so that a
    continued run draws the same numbers. In evaluation mode there is no noise.

    Args:
        width: Features.
        noise: Its size, in units of the deviation of the output.
        seed: The seed of the run and the number of the layer.

    Source:
        After Santurkar et al. 2018, arXiv:1805.11604, section 2.1; their noise also has a part for each sample, which
        is left out here.
    """

    def __init__(self, width: int, *, noise: float, seed: tuple[int, int]) -> None:
        super().__init__(width)
        self.noise, self.seed = noise, seed

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., n), then disturb it."""
        normalized = super().forward(x)
        if not self.training or self.num_batches_tracked is None:
            return normalized
        run, layer = self.seed
        generator = torch.Generator().manual_seed((run * 1000 + layer) * 1_000_003 + int(self.num_batches_tracked))
        first, second = torch.rand(2, self.num_features, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
        disturbed: Tensor = normalized * (1 + self.noise * first) + self.noise * (2 * second - 1)
        return disturbed


class HyperplaneNorm(nn.Module):
    """Project some directions out of each row, then divide by the root mean square of the rest.

    y = weight * p / sqrt(mean(p**2) + eps) + bias with p = x - Q Q^T x. With the one column 1 / sqrt(n) it is
    LayerNorm, without columns RMSNorm with a bias.

    Args:
        directions: Q of shape (n, k), k < n, with orthonormal columns.
        eps: Added under the root.

    Raises:
        InputError: If Q has as many columns as rows, so that the projection is 0.
    """

    directions: Tensor
    """Q, a buffer."""

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
        count: Directions that each norm projects out, k.
        seed: Of the directions.
        is_shared: Every norm of a width has the same directions, as all LayerNorms have all-ones; otherwise each norm
            has its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(width: int) -> HyperplaneNorm:
        drawn = generator.manual_seed(seed) if is_shared else generator
        gaussian = torch.randn(width, count, generator=drawn, dtype=torch.float64)
        return HyperplaneNorm(torch.linalg.qr(gaussian).Q.float())

    return make


class Centring(nn.Module):
    """LayerNorm without its division: y = weight * (x - mean(x)) + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Centre x of shape (..., width)."""
        return self.weight * centre(x) + self.bias


class DetachedNorm(nn.Module):
    """LayerNorm whose backward pass treats mean and scale of a row as constants: dx = weight * dy / s.

    Source:
        Xu et al. 2019, arXiv:1911.07013, DetachNorm.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (..., width)."""
        mean, scale = reference.statistics(x.detach(), specs.TORCH_LAYER_NORM, 1e-5)
        return self.weight * ((x - mean) / scale) + self.bias


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw the weights of linear, convolutional and embedding layers anew, in place.

    A matrix of fan-in i and fan-out o gets variance 2 / (i + o), an embedding 1 / 4, and biases are 0. The generator of
    a parameter is seeded by its path and `seed`, so that parameters of two models with the same path and shape are
    equal. Gains and biases of norms are left as they are.

    Source:
        Glorot & Bengio 2010, equation 16.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d):
            continue
        weight = module.weight
        if isinstance(module, nn.Embedding):
            deviation = _EMBEDDING_DEVIATION
        else:
            places = weight[0, 0].numel()
            deviation = math.sqrt(2 / (places * (weight.shape[0] + weight.shape[1])))
        digest = hashlib.sha256(f"{path}:{seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        weight.copy_(deviation * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        bias = None if isinstance(module, nn.Embedding) else module.bias
        if bias is not None:
            nn.init.zeros_(bias)
