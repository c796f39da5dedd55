"""Streaming statistics over the rows of tensors: two sums a row, then counts in float64; nothing is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.measurement.quantities import Attenuation, RowStatistics
from normkit.spec import NormSpec

# Rows that are counted together: small tensors cost more to handle than their numbers do.
_TOGETHER = 1 << 12
# Sums are taken in the input's own type or float32, whichever is wider: of each, the share of the mean square below
# which the variance E[x^2] - E[x]^2 has lost too many digits, and the range in which squares do not leave it.
_LIMITS = {torch.float32: (1e-2, 1e-30, 1e30), torch.float64: (1e-8, 1e-290, 1e290)}
# Fourth powers are taken of so many rows a tensor: they would cost more than all the rest.
_SAMPLED = 32
# A variance below this share of the mean square may be what rounding left.
_CONSTANT = 1e-12


@dataclass(frozen=True, eq=False, kw_only=True)
class RowMoments:
    """Sums over the rows of one tensor."""

    features: int
    """Features a row, n."""
    mean: Tensor
    """Mean of each finite row, float64 on the CPU."""
    std: Tensor
    """Root mean square of each finite row about its mean."""
    rms: Tensor
    """Root mean square of each finite row."""
    absmax: float
    """Largest magnitude of a finite element, 0 without one."""
    nonfinite: int
    """Elements that are NaN or infinite; their rows are left out of the rest."""
    kurtosis: Tensor
    """E[(x - mean)^4] / var^2 of up to 32 rows that are not constant, spread evenly."""


def row_moments(x: Tensor) -> RowMoments:
    """Moments of the rows of x, of shape (..., n) and any floating-point dtype."""
    # A shape of (-1, n) cannot be inferred for an empty tensor.
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if rows.device.type == "mps":
        # MPS has no float64.
        rows = rows.cpu()
    if not rows.numel():
        empty = torch.empty(0, dtype=torch.float64)
        return RowMoments(
            features=x.shape[-1], mean=empty, std=empty, rms=empty, absmax=0.0, nonfinite=0, kurtosis=empty
        )
    work = rows if rows.dtype in _LIMITS else rows.float()
    absmax, nonfinite = max(abs(float(end)) for end in torch.aminmax(work)), 0
    if not math.isfinite(absmax):
        finite = work.isfinite()
        nonfinite = work.numel() - int(finite.sum())
        absmax = float(torch.where(finite, work, 0.0).abs().max())
        work = work[finite.all(-1)]
    mean = work.mean(-1).double()
    square = torch.linalg.vector_norm(work, dim=-1).double().square_() / work.shape[-1]
    variance = square - mean.square()
    std, rms = variance.clamp_min(0.0).sqrt_(), square.sqrt()
    cancelled, tiny, huge = _LIMITS[work.dtype]
    careful = ~((variance > cancelled * square) & (square > tiny) & (square < huge))
    if bool(careful.any()):
        mean[careful], std[careful], rms[careful] = _two_pass(work[careful].double())
    return RowMoments(
        features=x.shape[-1],
        mean=mean.cpu(),
        std=std.cpu(),
        rms=rms.cpu(),
        absmax=absmax,
        nonfinite=nonfinite,
        kurtosis=_kurtosis(work),
    )


def token_rows(rows: Tensor, mask: Tensor | None) -> Tensor | None:
    """The rows that a token mask selects, or None where the mask does not fit.

    Args:
        rows: Shape (..., n).
        mask: Boolean, shape (B, T); None selects every row. It fits leading axes (B, T, ...), (B, H, T)
            and (B * T,). Where H = T, (B, T, H) and (B, H, T) cannot be told apart, and it fits neither.
    """
    if mask is None:
        return rows
    leading, (batch, tokens) = rows.shape[:-1], mask.shape
    mask = mask.to(rows.device)
    if leading == (batch, tokens, tokens) and tokens > 1:
        return None
    if leading[:2] == (batch, tokens):
        return rows[mask]
    if len(leading) == 3 and (leading[0], leading[2]) == (batch, tokens):
        return rows.transpose(1, 2)[mask]
    if leading == (batch * tokens,):
        return rows[mask.flatten()]
    return None


class _Waiting:
    """Moments of the rows of some tensors, on their way to be counted together.

    They wait in one buffer: small tensors that live for some batches among an activation's large ones would
    keep the allocator from using that memory again.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(3, 0, dtype=torch.float64)
        self._rows = 0

    def add(self, moments: RowMoments) -> None:
        end = self._rows + moments.mean.numel()
        if end > self._buffer.shape[1]:
            larger = torch.empty(3, max(end, _TOGETHER), dtype=torch.float64)
            larger[:, : self._rows] = self._buffer[:, : self._rows]
            self._buffer = larger
        for line, values in zip(self._buffer, (moments.mean, moments.std, moments.rms), strict=True):
            line[self._rows : end] = values
        self._rows = end

    def take(self, least: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Means, stds and rms if so many rows have come together; to be used before the next `add`."""
        if self._rows < least:
            return None
        mean, std, rms = self._buffer[:, : self._rows]
        self._rows = 0
        return mean, std, rms


class RowAccumulator:
    """Adds up the moments of many tensors with rows of one length."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        self._histogram = _Histogram(bins=8, lowest=-160, highest=130)
        self._features = self._rows = self._zero_rows = self._nonfinite = 0
        self._energy = self._angle = self._absmax = self._rms_max = self._kurtosis = 0.0
        self._sampled = 0
        self._rms_min = math.inf

    def add(self, moments: RowMoments) -> None:
        """Count the rows of one tensor."""
        self._features = moments.features
        self._nonfinite += moments.nonfinite
        self._absmax = max(self._absmax, moments.absmax)
        self._kurtosis += float(moments.kurtosis.sum())
        self._sampled += moments.kurtosis.numel()
        self._waiting.add(moments)
        self._count(_TOGETHER)

    def _count(self, least: int) -> None:
        if (taken := self._waiting.take(least)) is None:
            return
        mean, std, rms = taken
        self._rows += rms.numel()
        self._rms_min = min(self._rms_min, float(rms.min()))
        self._rms_max = max(self._rms_max, float(rms.max()))
        # A zero row has no direction.
        present = rms > 0
        mean, std, rms = mean[present], std[present], rms[present]
        self._zero_rows += present.numel() - rms.numel()
        self._histogram.add(rms.log2())
        self._energy += float((mean / rms).square().sum())
        # atan2 keeps its digits near 0 and 180 degrees, where acos loses half of them.
        self._angle += float(torch.atan2(std, mean).sum())

    def result(self) -> RowStatistics:
        """The statistics so far; NaN where no row was there to tell."""
        self._count(1)
        present = self._rows - self._zero_rows
        logs = self._histogram.quantiles(0.05, 0.5, 0.95)
        low, median, high = (min(max(2**log, self._rms_min), self._rms_max) for log in logs)
        return RowStatistics(
            rows=self._rows,
            features=self._features,
            rms_min=self._rms_min if self._rows else math.nan,
            rms_quantiles=(low, median, high) if present else (math.nan,) * 3,
            rms_max=self._rms_max if self._rows else math.nan,
            histogram=self._histogram.counted(),
            zero_rows=self._zero_rows,
            mean_energy=self._energy / present if present else math.nan,
            angle_to_ones=math.degrees(self._angle / present) if present else math.nan,
            absmax=self._absmax,
            nonfinite=self._nonfinite,
            kurtosis=self._kurtosis / self._sampled if self._sampled else math.nan,
        )


class AttenuationAccumulator:
    """The effect of one norm's eps on the length of its rows, with v as that norm computes it.

    Rows with v = 0 are left out: they are 0 with any eps.

    Args:
        spec: The formula of the norm.
        eps: Its eps as a number, also where the spec's is None.
    """

    def __init__(self, spec: NormSpec, eps: float) -> None:
        self._spec = spec
        self._unit = spec.placement.length(eps)
        self._waiting = _Waiting()
        self._histogram = _Histogram(bins=64, lowest=-64, highest=64)
        self._features = self._rows = self._below_99 = self._below_90 = 0
        self._smallest = 1.0
        self._largest_sum = 0.0

    def add(self, moments: RowMoments) -> None:
        """Count the rows of one tensor, as they enter the norm."""
        self._features = moments.features
        self._waiting.add(moments)
        self._count(_TOGETHER)

    def largest_sum(self) -> float:
        """The largest sum of squares under the root so far."""
        self._count(1)
        return self._largest_sum

    def _count(self, least: int) -> None:
        if (taken := self._waiting.take(least)) is None:
            return
        _, std, rms = taken
        divisor = self._spec.divisor.count(self._features)
        root = std if self._spec.centring.statistics else rms
        root = root[root > 0] * math.sqrt(self._features / divisor) if divisor else root[:0]
        if not root.numel():
            return
        self._largest_sum = max(self._largest_sum, float(root.max()) ** 2 * divisor)
        self._rows += root.numel()
        if not self._unit:
            return
        attenuation = self._spec.placement.shrink(root / self._unit)
        self._histogram.add((root / self._unit).log2())
        self._below_99 += int((attenuation < 0.99).sum())
        self._below_90 += int((attenuation < 0.9).sum())
        self._smallest = min(self._smallest, float(attenuation.min()))

    def result(self) -> Attenuation:
        """The attenuation so far; NaN where no row was there to tell."""
        self._count(1)
        if not self._rows:
            return Attenuation(median=math.nan, smallest=math.nan, share_below_99=math.nan, share_below_90=math.nan)
        median = 1.0
        if self._unit:
            # a grows with v, so the median of a is a at the median of v.
            ratio = torch.tensor(2 ** self._histogram.quantiles(0.5)[0], dtype=torch.float64)
            median = max(float(self._spec.placement.shrink(ratio)), self._smallest)
        return Attenuation(
            median=median,
            smallest=self._smallest,
            share_below_99=self._below_99 / self._rows,
            share_below_90=self._below_90 / self._rows,
        )


class _Histogram:
    """Counts of base-2 logarithms, so many bins an octave; what lies outside falls into the end bins."""

    def __init__(self, bins: int, lowest: int, highest: int) -> None:
        self._bins, self._offset = bins, bins * lowest
        self._counts = torch.zeros(bins * (highest - lowest), dtype=torch.int64)

    def add(self, logs: Tensor) -> None:
        index = (logs * self._bins).floor().to(torch.int64) - self._offset
        self._counts += torch.bincount(index.clamp_(0, len(self._counts) - 1), minlength=len(self._counts))

    def counted(self) -> tuple[tuple[int, int], ...]:
        """Pairs (bin, count) of the bins that hold anything."""
        filled = self._counts.nonzero().flatten()
        return tuple(zip((filled + self._offset).tolist(), self._counts[filled].tolist(), strict=True))

    def quantiles(self, *shares: float) -> tuple[float, ...]:
        """Quantiles of the logarithms; NaN where nothing was counted."""
        return log_quantiles(self._counts, self._bins, self._offset, *shares)


def log_quantiles(counts: Tensor, bins: int, offset: int, *shares: float) -> tuple[float, ...]:
    """Quantiles of base-2 logarithms that were counted in bins, taken as spread evenly within a bin.

    Args:
        counts: Number of logarithms from (i + offset) / bins on, for each bin i, int64.
        bins: Bins an octave.
        offset: Number of the first bin.
        shares: From 0 to 1.

    Returns:
        One a share; NaN where nothing was counted.
    """
    cumulative = counts.cumsum(0)
    total = int(cumulative[-1])
    if not total:
        return (math.nan,) * len(shares)
    result = []
    for share in shares:
        index = int(torch.searchsorted(cumulative, torch.tensor(max(1, math.ceil(share * total)))))
        count = int(counts[index])
        within = (share * total - (int(cumulative[index]) - count)) / count
        result.append((index + offset + min(max(within, 0.0), 1.0)) / bins)
    return tuple(result)


def _kurtosis(work: Tensor) -> Tensor:
    rows = work[:: max(1, math.ceil(len(work) / _SAMPLED))].double()
    mean = rows.mean(-1, keepdim=True)
    squares = (rows - mean).square_()
    variance = squares.mean(-1)
    kurtosis = squares.square_().mean(-1) / variance.square()
    varies = variance > _CONSTANT * (variance + mean.squeeze(-1).square())
    return kurtosis[varies & kurtosis.isfinite()].cpu()


def _two_pass(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std and rms of float64 rows that one pass cannot tell: in units of each one's largest element."""
    scale = rows.abs().amax(-1)
    scaled = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    centre = scaled.mean(-1)
    std = torch.linalg.vector_norm(scaled - centre[:, None], dim=-1) / math.sqrt(rows.shape[-1])
    return centre * scale, std * scale, torch.hypot(centre, std) * scale
