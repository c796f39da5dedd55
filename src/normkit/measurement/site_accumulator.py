"""The accumulators of one norm: its input, its output and its eps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit.conventions.eps import eps_in
from normkit.measurement.moments import AttenuationAccumulator, RowAccumulator, RowMoments, row_moments, token_rows
from normkit.measurement.quantities import Attenuation, Peak, RowStatistics
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import dtype_name


@dataclass(frozen=True, kw_only=True)
class SiteMeasurement:
    """The measurement of one norm."""

    input: RowStatistics
    """Statistics of the input; empty if the norm was never called."""
    output: RowStatistics
    """Statistics of the output."""
    attenuation: Attenuation
    """Effect of eps."""
    calls: int
    left_out: int
    """Tensors that no statistic counts, because the token mask fits none of their axes."""
    dtype: str
    """Dtype of the input, as in "float32"; "" if the norm was never called."""
    headroom_bits: float
    """log2 of the dtype's largest number over the largest magnitude seen; infinite for zeros."""
    statistics_headroom_bits: float | None
    """The same for the sum of squares if it is accumulated in 16 bits, else None."""
    output_dtype: str
    """Dtype of the output; "" if the norm was never called."""


class SiteGauge:
    """The accumulators of one norm.

    Args:
        spec: The formula of the norm.
        gain: Its effective gain; it matters only where the spec multiplies by it before it normalizes.
    """

    def __init__(self, spec: NormSpec, gain: Tensor | None) -> None:
        self._spec = spec
        self._gain = gain if spec.gain.is_before else None
        self._input, self._output = RowAccumulator(), RowAccumulator()
        self._attenuation = AttenuationAccumulator(spec, 0.0)
        self._calls = self._left_out = 0
        self._dtype: torch.dtype | None = None
        self._output_dtype: torch.dtype | None = None

    def enter(self, x: Tensor, moments: RowMoments | None, mask: Tensor | None) -> None:
        """Count a call on x, whose `spec_moments` under the token mask are given."""
        self._calls += 1
        if self._dtype is None:
            self._dtype = x.dtype
            # Which number eps=None stands for depends on the input's dtype.
            self._attenuation = AttenuationAccumulator(self._spec, eps_in(x.dtype, self._spec.eps))
        if moments is None:
            self._left_out += 1
            return
        self._input.add(moments)
        scaled = moments if self._gain is None else spec_moments(x, self._spec, mask, self._gain)
        if scaled is not None:
            self._attenuation.add(scaled)

    def leave(self, y: Tensor, moments: RowMoments | None) -> None:
        """Count what the call returned, whose `spec_moments` are given."""
        self._output_dtype = y.dtype
        if moments is not None:
            self._output.add(moments)

    def result(self) -> SiteMeasurement:
        """The measurement so far."""
        entering, leaving = self._input.result(), self._output.result()
        in_half = self._dtype in HALF and self._spec.casts.has_narrow_statistics
        return SiteMeasurement(
            input=entering,
            output=leaving,
            attenuation=self._attenuation.result(),
            calls=self._calls,
            left_out=self._left_out,
            dtype=_name(self._dtype),
            headroom_bits=self._headroom(max(entering.absmax, leaving.absmax)),
            statistics_headroom_bits=self._headroom(self._attenuation.largest_sum()) if in_half else None,
            output_dtype=_name(self._output_dtype),
        )

    def _headroom(self, largest: float) -> float:
        return math.inf if self._dtype is None else headroom_bits(self._dtype, largest)


class StreamGauge:
    """The accumulators of the stream at one place."""

    def __init__(self) -> None:
        self._rows = RowAccumulator()
        self._peak: Peak | None = None
        self._token: int | None = None

    def add(self, stream: Tensor, moments: RowMoments, mask: Tensor | None, ids: Tensor | None) -> None:
        """Count a stream (B, T, n), whose moments under the token mask are given.

        Args:
            stream: The stream.
            moments: Of its rows that count.
            mask: Token mask (B, T), or None for all rows.
            ids: Token ids, or None; those of another shape than (B, T) are not its own.
        """
        self._rows.add(moments)
        if stream.dim() != 3 or not moments.absmax > (0.0 if self._peak is None else abs(self._peak.value)):
            return
        stream = stream.detach()
        is_largest = stream.abs().double() == moments.absmax
        if mask is not None:
            is_largest &= mask.to(stream.device)[..., None]
        sample, position, feature = is_largest.nonzero()[0].tolist()
        self._peak = Peak(value=float(stream[sample, position, feature]), feature=feature, position=position)
        self._token = int(ids[sample, position]) if ids is not None and ids.shape == stream.shape[:2] else None

    def result(self) -> RowStatistics:
        """The statistics so far."""
        return self._rows.result()

    def peak(self, decode: Callable[[int], str] | None) -> Peak | None:
        """The largest element so far, with its token in words where `decode` is given; None without one."""
        if self._peak is None or self._token is None or decode is None:
            return self._peak
        return replace(self._peak, token=decode(self._token))


def headroom_bits(dtype: torch.dtype, largest: float) -> float:
    """log2 of a dtype's largest number over the largest magnitude seen; infinite for zeros, NaN for NaN."""
    return math.inf if largest == 0 else math.log2(torch.finfo(dtype).max) - math.log2(largest)


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else dtype_name(dtype)


def spec_moments(x: Tensor, spec: NormSpec, mask: Tensor | None, gain: Tensor | None = None) -> RowMoments | None:
    """Moments of what is one row to a spec.

    Args:
        x: Input or output of the norm.
        spec: The formula of the norm.
        mask: Token mask (B, T), or None for all rows.
        gain: The gain that multiplies each row first, or None.

    Returns:
        The moments, or None where the mask does not tell the rows' tokens.
    """
    if mask is not None and spec.rows.are_samples:
        return None
    rows = spec.rows.split(x)
    selected = token_rows(rows.squeeze(-2) if spec.rows.groups == 1 else rows, mask)
    if selected is None:
        return None
    return row_moments(selected if gain is None else selected * gain.to(selected))
