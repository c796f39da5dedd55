"""Norms with running statistics: those statistics, how one batch changes them, and what the user's data has instead.

The data's statistics are counted where it enters each norm while the model runs in evaluation mode. Means and variances
of single samples are added up, in two halves: their difference shows what sampling alone does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, OtherNorm, is_within
from normkit.identification.state import undisturbed
from normkit.measurement.facts import BatchNorm
from normkit.measurement.hooks import Listener

# Far from the start 0, so that rounding does not count; enough rows for any axis.
_MEAN, _SAMPLES, _LENGTH = 3.0, 4, 2
_STEADY = 1e-3
_SEED = 0


def with_statistics(module: nn.Module) -> Any:
    """The one module in it, or itself, that keeps a running mean and variance of its channels; None without one."""
    holders = [
        part
        for part in module.modules()
        if isinstance(mean := getattr(part, "running_mean", None), Tensor)
        and isinstance(variance := getattr(part, "running_var", None), Tensor)
        and mean.dim() == 1
        and mean.shape == variance.shape
    ]
    return holders[0] if len(holders) == 1 else None


class _Channels:
    """Sums over samples of one channel each, of shape (channels,), in two halves of the samples."""

    def __init__(self, channels: int) -> None:
        # For each half: rows; rows times the mean; times the variance and the squared mean.
        self.rows = torch.zeros(2, dtype=torch.float64)
        self.sums = torch.zeros(2, 3, channels, dtype=torch.float64)
        self.samples, self.call_rows = 0, 0

    def add(self, x: Tensor, axis: int, of_calls: bool) -> None:
        """Count a call's input; `of_calls` where all samples of a call share their statistics."""
        rows = x.detach().movedim(axis, 1).flatten(2) if x.dim() > 2 else x.detach().movedim(axis, 1)[..., None]
        variance, mean = torch.var_mean(rows if rows.dtype == torch.float64 else rows.float(), -1, correction=0)
        variance, mean = variance.double().cpu(), mean.double().cpu()
        length = rows.shape[-1]
        for half in (0, 1):
            mine = slice((half + self.samples) % 2, None, 2)
            self.rows[half] += length * len(mean[mine])
            own = torch.stack([mean[mine], variance[mine], mean[mine].square()])
            self.sums[half] += length * own.sum(1)
        self.samples += len(mean)
        seen = length * (len(mean) if of_calls else 1)
        self.call_rows = min(self.call_rows or seen, seen)

    def statistics(self, halves: slice, of_calls: bool) -> tuple[Tensor, Tensor]:
        """Mean and variance of the channels, as the norm would have them in training."""
        mean, within, square = self.sums[halves].sum(0) / self.rows[halves].sum()
        between = square - mean.square() if of_calls else 0.0
        return mean, (within + between).clamp_min(0.0)


class DataStatistics(Listener):
    """Counts what enters the norms with running statistics of a model."""

    def __init__(self, model: nn.Module, others: Sequence[OtherNorm]) -> None:
        self.sites: list[NormSite] = []
        """What `observed` has to tell of."""
        self._counted: dict[str, _Channels] = {}
        self._shared: dict[str, Sequence[int]] = {}
        for other in others:
            module, reading = model.get_submodule(other.path), other.passport.readings.get("batch")
            holder = with_statistics(module)
            if holder is not None and reading is not None and reading.value is not None:
                # To be listened to, a norm that no spec describes needs its path and its module.
                self.sites.append(cast(NormSite, SimpleNamespace(path=other.path, module=module)))
                self._counted[other.path] = _Channels(len(holder.running_mean))
                self._shared[other.path] = reading.value["axes"]

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a norm."""
        counted, shared = self._counted[site.path], self._shared[site.path]
        axis = _channel_axis(x.shape, shared, counted.sums.shape[-1])
        if axis is not None and x.numel():
            # Hooks may run inside the mode that sees functions: it would look at each operation.
            with torch._C.DisableTorchFunction():
                counted.add(x, axis, 0 in shared)

    def of(self, path: str, mean: Tensor, variance: Tensor, eps: float) -> dict[str, Any]:
        """The fields of `BatchNorm` that tell of the data, against running statistics; none without data."""
        counted = self._counted.get(path)
        if counted is None or not counted.samples:
            return {}
        of_calls = 0 in self._shared[path]
        whole = counted.statistics(slice(0, 2), of_calls)
        change = _change(whole, (mean, variance), eps)
        halves = torch.full_like(change, math.nan)
        if counted.samples > 1:
            parts = (counted.statistics(slice(half, half + 1), of_calls) for half in (0, 1))
            halves = _change(next(parts), next(parts), eps)
        channel = int(change.nan_to_num(nan=-1.0).argmax())
        deviation = float((variance[channel] + eps).sqrt())
        return {
            "samples": counted.samples,
            "rows": int(counted.rows.sum()),
            "call_rows": counted.call_rows,
            "change": float(change.median()),
            "largest_change": float(change[channel]),
            "channel": channel,
            "shift": float(whole[0][channel] - mean[channel]) / deviation,
            "stretch": float((whole[1][channel] + eps).sqrt()) / deviation,
            "sampling": float(halves.median()) / 2,
        }


def _change(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Root mean square difference of what two pairs (mean, variance) make of the same rows, over the larger deviation.

    (x - m) / s with the one less the same with the other, over rows that have the one's statistics, times the other's
    s: sqrt((m - m')^2 + (s - s')^2), the Wasserstein distance of two normal distributions.
    """
    first, second = ((variance.clamp_min(0.0) + eps).sqrt() for _, variance in (one, other))
    return ((one[0] - other[0]).square() + (first - second).square()).sqrt() / torch.maximum(first, second)


def batch_norms(
    model: nn.Module, others: Sequence[OtherNorm], data: DataStatistics | None = None
) -> tuple[BatchNorm, ...]:
    """The norms of a model that keep running statistics, in forward order, and then those with gains of 0.

    Args:
        model: The model, in the modes that are to be told.
        others: Its norms that no spec describes.
        data: What was counted of the data, or None.
    """
    known = {other.path: other.passport for other in others if other.passport.readings.get("batch") is not None}
    # With gains of 0 a norm is constant in these channels, and may not be identified.
    silent = [
        path
        for path, part in model.named_modules()
        if with_statistics(part) is part
        and not any(is_within(path, each) for each in known)
        and isinstance(gain := getattr(part, "weight", None), Tensor)
        and not gain.is_meta
        and bool((gain == 0).any())
    ]
    found = []
    for path in (*known, *silent):
        module, shape = model.get_submodule(path), known[path].shape if path in known else ()
        holder, conventions = with_statistics(module), known[path].readings["batch"].value if path in known else {}
        if holder is None or conventions is None or holder.running_mean.is_meta:
            continue
        mean, variance = (part.detach().double().cpu() for part in (holder.running_mean, holder.running_var))
        gain, bias = getattr(holder, "weight", None), getattr(holder, "bias", None)
        parts = [part for part in (gain, bias) if isinstance(part, Tensor)]
        counted, eps = getattr(holder, "num_batches_tracked", None), float(conventions.get("eps", math.nan))
        share, batches = _share(module, shape, conventions.get("axes", ())), -1
        if isinstance(counted, Tensor):
            batches = int(counted)
        left = (1 - share) ** batches if batches > 0 else math.nan
        is_moved = isinstance(bias, Tensor) and bool(bias.any())
        is_moved |= isinstance(gain, Tensor) and bool((gain != 1).any() and gain.any())
        found.append(
            BatchNorm(
                path=path,
                channels=len(mean),
                eps=eps,
                share=share,
                batches=batches,
                is_gathered=bool((mean != 0).any() or (variance != 1).any()),
                is_moved=is_moved,
                is_live=holder.training,
                is_trained=any(part.requires_grad for part in parts) or not parts,
                zero_gains=int((gain == 0).sum()) if isinstance(gain, Tensor) else 0,
                flat=int((variance < eps).sum()),
                start_share=min(left / max(float(variance.median()), left), 1.0) if left > 0 else left,
                eps_share=float((eps / (variance + eps)).median()),
                **(data.of(path, mean, variance, eps if eps > 0 else 0.0) if data is not None else {}),
            )
        )
    return tuple(found)


def _channel_axis(shape: Sequence[int], shared: Sequence[int], channels: int) -> int | None:
    """The only axis of that length that shares no statistics, and not that of the samples; else None."""
    own = [axis for axis, size in enumerate(shape) if axis > 0 and axis not in shared and size == channels]
    return own[0] if len(own) == 1 else None


def _share(module: nn.Module, shape: Sequence[int], shared: Sequence[int]) -> float:
    """Share of the running mean that a batch replaces, seen on a copy; NaN where it changes, or the copy cannot run."""
    with undisturbed():
        try:
            trial = copy.deepcopy(module).cpu().double().train()
            holder = with_statistics(trial)
            axis = _channel_axis(shape, shared, len(holder.running_mean))
            if axis is None:
                return math.nan
            sizes = [size if place == axis else _LENGTH for place, size in enumerate(shape)]
            sizes[0] = _SAMPLES
            generator, shares = torch.Generator().manual_seed(_SEED), []
            holder.running_mean.zero_()
            for _ in range(2):
                x = _MEAN + torch.randn(sizes, generator=generator, dtype=torch.float64)
                before = holder.running_mean.clone()
                trial(x)
                given = x.movedim(axis, 0).flatten(1).mean(1)
                shares.append(float(((holder.running_mean - before) / (given - before)).median()))
        # A class of one's own may refuse such a batch, and a SyncBatchNorm any on the CPU.
        except Exception:
            return math.nan
    return shares[0] if abs(shares[0] - shares[1]) < _STEADY else math.nan
