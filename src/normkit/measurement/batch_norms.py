"""Norms with running statistics: those statistics, how one batch changes them, and what the user's data has instead.

The data's statistics are counted where it enters each norm while the model runs in evaluation mode. Means and variances
of single samples are added up, in two halves: their difference shows what sampling alone does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, OtherNorm
from normkit.identification.state import undisturbed
from normkit.measurement.facts import BatchNorm
from normkit.measurement.hooks import Listener
from normkit.measurement.running import Batch, first_of, tensors
from normkit.measurement.samples import heard, repetitions
from normkit.measurement.weights import spectrum

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


class Channels:
    """Sums over samples of one channel each, of shape (channels,), in two halves of the samples."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        # For each half: rows; rows times the mean; times the variance and the squared mean.
        self.rows = [0, 0]
        self.sums = torch.zeros(2, 3, channels, dtype=torch.float64)
        self.samples, self.call_rows, self.call_samples = 0, 0, 0
        self.masked = 0
        """Rows under a mask."""
        self.padded: Tensor | int = 0
        """Those of them that are padding."""

    def add(self, x: Tensor, axis: int, of_calls: bool) -> None:
        """Count a call's input; `of_calls` where all samples of a call share their statistics."""
        rows = x.detach().movedim(axis, 1).flatten(2) if x.dim() > 2 else x.detach().movedim(axis, 1)[..., None]
        variance, mean = torch.var_mean(rows if rows.dtype == torch.float64 else rows.float(), -1, correction=0)
        if mean.device.type == "mps":
            # It has no float64.
            variance, mean = variance.cpu(), mean.cpu()
        variance, mean, self.sums = variance.double(), mean.double(), self.sums.to(mean.device)
        length = rows.shape[-1]
        for half in (0, 1):
            mine = slice((half + self.samples) % 2, None, 2)
            self.rows[half] += length * len(mean[mine])
            own = torch.stack([mean[mine], variance[mine], mean[mine].square()])
            self.sums[half] += length * own.sum(1)
        self.samples += len(mean)
        seen = length * (len(mean) if of_calls else 1)
        self.call_rows = min(self.call_rows or seen, seen)
        self.call_samples = min(self.call_samples or len(mean), len(mean))

    def statistics(self, halves: slice, of_calls: bool) -> tuple[Tensor, Tensor]:
        """Mean and variance of the channels, as the norm would have them in training."""
        mean, within, square = self.sums[halves].sum(0).cpu() / sum(self.rows[halves])
        between = square - mean.square() if of_calls else 0.0
        return mean, (within + between).clamp_min(0.0)

    def change(self, running: tuple[Tensor, Tensor], eps: float, of_calls: bool) -> Tensor:
        """How far each channel's output moves where these statistics replace the running ones, as in `BatchNorm`."""
        return _change(self.statistics(slice(0, 2), of_calls), running, eps)


class DataStatistics(Listener):
    """Counts what enters the norms with running statistics of a model."""

    def __init__(self, model: nn.Module, others: Sequence[OtherNorm]) -> None:
        self.sites: list[NormSite] = []
        """The norms whose calls `observed` tells."""
        self.dropout: dict[str, tuple[float, str]] = {}
        """By path: `BatchNorm.dropout` and `BatchNorm.behind`."""
        self.given: int = 0
        """Samples of the batches."""
        self.repeated: Tensor | int = 0
        """Those of them that are equal to an earlier one of their batch."""
        self._masks: list[Tensor] = []
        self._counted: dict[str, Channels] = {}
        self._shared: dict[str, Sequence[int]] = {}
        for other in others:
            module, reading = model.get_submodule(other.path), other.passport.readings.get("batch")
            holder = with_statistics(module)
            if holder is not None and reading is not None and reading.value is not None:
                # To be listened to, a norm that no spec describes needs its path and its module.
                self.sites.append(cast(NormSite, SimpleNamespace(path=other.path, module=module)))
                self._counted[other.path] = Channels(len(holder.running_mean))
                self._shared[other.path] = reading.value["axes"]

    def batch(self, batch: Batch) -> None:
        """Tell of the next batch, before the model runs on it."""
        if not self.sites:
            return
        samples = first_of(batch)
        # A mask of (B, T, T) tells pairs.
        named = [mask for name, mask in tensors(batch) if name.endswith("mask") and mask.dim() in (2, 3)]
        masks = [mask.detach().bool() for mask in named if len(mask) == len(samples)] or heard(batch)
        self._masks = [mask for mask in masks if mask.dim() == 2 or mask.shape[1] != mask.shape[2] or samples.dim() > 3]
        self.given += len(samples)
        if samples.dim() > 1:
            self.repeated = self.repeated + repetitions(samples)

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a norm."""
        counted, shared = self._counted[site.path], self._shared[site.path]
        axis = _channel_axis(x.shape, shared, counted.channels)
        if axis is not None and x.numel():
            # Hooks may run inside the mode that sees functions: it would look at each operation.
            with torch._C.DisableTorchFunction():
                counted.add(x, axis, 0 in shared)
                if padding := [each for mask in self._masks for each in _padding(mask, x, axis)]:
                    counted.masked += padding[0].numel()
                    counted.padded = torch.stack([each.sum() for each in padding]).amax() + counted.padded

    def forget(self, path: str) -> None:
        """Count anew what enters a norm."""
        self._counted[path] = Channels(self._counted[path].channels)

    def variance(self, path: str) -> Tensor:
        """Variance of what entered a norm, of shape (channels,)."""
        return self._counted[path].statistics(slice(0, 2), 0 in self._shared[path])[1]

    def of(self, path: str, mean: Tensor, variance: Tensor, eps: float, gain: Tensor | None = None) -> dict[str, Any]:
        """The fields of `BatchNorm` that tell of the data, against running statistics; none without data."""
        counted = self._counted.get(path)
        if counted is None or not counted.samples:
            return {}
        of_calls = 0 in self._shared[path]
        whole = counted.statistics(slice(0, 2), of_calls)
        change = counted.change((mean, variance), eps, of_calls)
        halves = torch.full_like(change, math.nan)
        if counted.samples > 1:
            parts = (counted.statistics(slice(half, half + 1), of_calls) for half in (0, 1))
            halves = _change(next(parts), next(parts), eps)
        channel = int(change.nan_to_num(nan=-1.0).argmax())
        deviation = float((variance[channel] + eps).sqrt())
        refolded = math.nan
        if gain is not None:
            off = ((whole[1] + eps) / (variance + eps)).log() / 2
            folded = off - (gain.detach().double().cpu().square() / (variance + eps)).log() / 2
            refolded = float((folded.square().mean() / off.square().mean()).sqrt())
        return {
            "samples": counted.samples,
            "rows": sum(counted.rows),
            "call_rows": counted.call_rows,
            "call_samples": counted.call_samples if of_calls else 0,
            "change": float(change.median()),
            "largest_change": float(change[channel]),
            "channel": channel,
            "shift": float(whole[0][channel] - mean[channel]) / deviation,
            "stretch": float((whole[1][channel] + eps).sqrt()) / deviation,
            "sampling": float(halves.median()) / 2,
            "refolded": refolded,
            "repeated": float(self.repeated) / self.given if self.given else math.nan,
            "padding": float(counted.padded) / counted.masked if counted.masked else math.nan,
        }


def _padding(mask: Tensor, x: Tensor, axis: int) -> Iterator[Tensor]:
    """The rows of a norm's input that a mask tells to be padding, where it tells of these rows."""
    places = [size for place, size in enumerate(x.shape) if place not in (0, axis)]
    if (len(places), len(x)) in ((mask.dim() - 1, len(mask)), (0, mask.numel())):
        mask = mask.to(x.device, non_blocking=True)
        # Strides make fewer places of them.
        yield ~(nn.functional.interpolate(mask[:, None].float(), places).bool() if places else mask)


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
    """The norms of a model that keep running statistics, in forward order.

    Args:
        model: The model, in the modes that are to be told.
        others: Its norms that no spec describes.
        data: What was counted of the data, or None.
    """
    found = []
    for other in others:
        path, reading, shape = other.path, other.passport.readings.get("batch"), other.passport.shape
        module = model.get_submodule(path)
        holder, conventions = with_statistics(module), None if reading is None else reading.value
        if holder is None or conventions is None or holder.running_mean.is_meta:
            continue
        mean, variance = (part.detach().double().cpu() for part in (holder.running_mean, holder.running_var))
        gain, bias = getattr(holder, "weight", None), getattr(holder, "bias", None)
        parts = [part for part in (gain, bias) if isinstance(part, Tensor)]
        counted, eps = getattr(holder, "num_batches_tracked", None), float(conventions.get("eps", math.nan))
        (share, correction), batches = _updates(module, shape, conventions["axes"]), -1
        if isinstance(counted, Tensor):
            batches = int(counted)
        left = (1 - share) ** batches if batches > 0 else math.nan
        # A channel with less than what such batches leave of the start was gathered otherwise, as by an average.
        left = math.nan if float(variance.min()) < (1 - _STEADY) * left else left
        is_moved = isinstance(bias, Tensor) and bool(bias.any())
        is_moved |= isinstance(gain, Tensor) and bool((gain != 1).any() and gain.any())
        dropout, behind = (data.dropout if data is not None else {}).get(path, (math.nan, ""))
        found.append(
            BatchNorm(
                path=path,
                channels=len(mean),
                gain=spectrum(gain, 1.0) if isinstance(gain, Tensor) else None,
                bias=spectrum(bias, 0.0) if isinstance(bias, Tensor) else None,
                mean=spectrum(mean, 0.0),
                variance=spectrum(variance, 1.0),
                eps=eps,
                share=share,
                batches=batches,
                is_gathered=bool((mean != 0).any() or (variance != 1).any()),
                is_moved=is_moved,
                is_live=holder.training,
                is_trained=any(part.requires_grad for part in parts) or not parts,
                zero_gains=int((gain == 0).sum()) if isinstance(gain, Tensor) else 0,
                flat=int((variance < eps).sum()),
                start_share=left / float(variance.median()) if left > 0 else left,
                eps_share=float((eps / (variance + eps)).median()),
                correction=correction,
                own_correction=float(conventions.get("correction", math.nan)),
                dropout=dropout,
                behind=behind,
                **({} if data is None else data.of(path, mean, variance, max(eps, 0.0), gain)),
            )
        )
    return tuple(found)


def _channel_axis(shape: Sequence[int], shared: Sequence[int], channels: int) -> int | None:
    """The only axis of that length that shares no statistics, and not that of the samples; else None."""
    own = [axis for axis, size in enumerate(shape) if axis > 0 and axis not in shared and size == channels]
    return own[0] if len(own) == 1 else None


def _updates(module: nn.Module, shape: Sequence[int], shared: Sequence[int]) -> tuple[float, float]:
    """`BatchNorm.share` and `BatchNorm.correction`, seen on a copy; NaN where they change, or the copy cannot run."""
    with undisturbed():
        try:
            trial = copy.deepcopy(module).cpu().double().train()
            holder = with_statistics(trial)
            axis = _channel_axis(shape, shared, len(holder.running_mean))
            if axis is None:
                return math.nan, math.nan
            sizes = [size if place == axis else _LENGTH for place, size in enumerate(shape)]
            sizes[0] = _SAMPLES
            generator = torch.Generator().manual_seed(_SEED)
            shares, corrections = [], []
            holder.running_mean.zero_()
            for _ in range(2):
                x = _MEAN + torch.randn(sizes, generator=generator, dtype=torch.float64)
                before = holder.running_mean.clone(), holder.running_var.clone()
                trial(x)
                rows = x.movedim(axis, 0).flatten(1)
                given = rows.mean(1)
                share = ((holder.running_mean - before[0]) / (given - before[0])).median()
                shares.append(float(share))
                entered = (holder.running_var - (1 - share) * before[1]) / share
                # Statistics of single samples are averaged over samples.
                counted = rows.shape[1] if 0 in shared else rows.shape[1] // _SAMPLES
                if 0 not in shared:
                    rows = x.movedim(axis, 1).flatten(2).movedim(1, 0)
                squares = rows.var(-1, correction=0).reshape(len(given), -1).mean(1) * counted
                corrections.append(float((counted - squares / entered).median()))
        # A class of one's own may refuse such a batch, and a SyncBatchNorm any on the CPU.
        except Exception:
            return math.nan, math.nan
    share = shares[0] if abs(shares[0] - shares[1]) < _STEADY else math.nan
    correction = round(corrections[0]) if all(math.isfinite(each) for each in corrections) else math.nan
    is_whole = all(abs(each - correction) < _STEADY for each in corrections)
    return share, float(correction) if is_whole and not math.isnan(share) else math.nan
