"""The accumulators of one norm: its input, its output and its eps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit.measurement.quantities import Attenuation, Peak, RowStatistics
from normkit.measurement.row_counters import ROW_PEAKS, RowCounter, TableReader, row_tables
from normkit.measurement.tables import Tables
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


def site_measurement(
    reader: TableReader,
    place: int,
    spec: NormSpec,
    features: int,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    left_out: int = 0,
) -> SiteMeasurement:
    """The measurement of a norm whose input is counted in one line of the tables, and its output in the next.

    Args:
        reader: Reads the tables.
        place: The line of the input.
        spec: The formula of the norm.
        features: Features of a row.
        dtypes: Dtypes of input and output; None if the norm was never called.
        left_out: Tensors that were not counted.
    """
    entering, leaving = reader.rows(place, features), reader.rows(place + 1, features)
    line, dtype = reader.line(place), dtypes[0]
    in_half = dtype in HALF and spec.casts.has_narrow_statistics
    largest = max(entering.absmax, leaving.absmax)
    return SiteMeasurement(
        input=entering,
        output=leaving,
        attenuation=reader.attenuation(place, spec),
        calls=round(line["calls"]) + left_out,
        left_out=left_out,
        dtype="" if dtype is None else dtype_name(dtype),
        headroom_bits=math.inf if dtype is None else headroom_bits(dtype, largest),
        statistics_headroom_bits=None
        if dtype is None or not in_half
        else headroom_bits(dtype, max(line["peak sum"], 0.0)),
        output_dtype="" if dtypes[1] is None else dtype_name(dtypes[1]),
    )


class RowTables:
    """Some row counters with tables of their own, on the device of the first tensor that they count."""

    def __init__(self, *counters: RowCounter) -> None:
        self._counters = counters
        self._tables: Tables | None = None
        self.features = [0] * len(counters)
        """Features of a row at each place; 0 before the first tensor."""

    def add(self, place: int, x: Tensor, mask: Tensor | None) -> bool:
        """Count a tensor at one place; False, and nothing is counted, if the mask does not tell the rows' tokens."""
        counter = self._counters[place]
        if self._tables is None:
            self._tables = Tables(row_tables(len(self._counters)), x.device)
        tables = self._tables
        rows = counter.rows(x).to(tables["rows"].device)
        counted = counter.counted(rows, None if mask is None else mask.to(rows.device))
        if mask is not None and counted is None:
            return False
        self.features[place] = rows.shape[-1]
        counter.count(tables, rows, counted)
        return True

    def absmax(self, place: int) -> float:
        """The largest magnitude so far; negative if there is none."""
        return -1.0 if self._tables is None else float(self._tables["row peaks"][place, ROW_PEAKS.index("absmax")])

    def reader(self) -> TableReader:
        """What was counted so far."""
        tables = self._tables or Tables(row_tables(len(self._counters)), torch.device("cpu"))
        return TableReader(step=0, tables=tables.read())

    def rows(self, place: int) -> RowStatistics:
        """The statistics at one place so far."""
        return self.reader().rows(place, self.features[place])


class SiteCounter:
    """Counts what enters and leaves one norm.

    Args:
        spec: The formula of the norm.
        gain: Its effective gain; it matters only where the spec multiplies by it before it normalizes.
    """

    def __init__(self, spec: NormSpec, gain: Tensor | None) -> None:
        self._spec = spec
        entering = RowCounter(place=0, spec=spec, enters_norm=True, gain=gain if spec.gain.is_before else None)
        self._rows = RowTables(entering, RowCounter(place=1, spec=spec, enters_norm=False, has_deviations=True))
        self._left_out = 0
        self._dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)

    def enter(self, x: Tensor, mask: Tensor | None) -> None:
        """Count a call on x."""
        self._dtypes = (self._dtypes[0] or x.dtype, self._dtypes[1])
        self._left_out += not self._rows.add(0, x, mask)

    def leave(self, y: Tensor, mask: Tensor | None) -> None:
        """Count what the call returned."""
        self._dtypes = (self._dtypes[0], y.dtype)
        self._rows.add(1, y, mask)

    def result(self) -> SiteMeasurement:
        """The measurement so far."""
        return site_measurement(
            self._rows.reader(), 0, self._spec, self._rows.features[0], self._dtypes, self._left_out
        )


class StreamCounter:
    """Counts the stream at one place, and finds its largest element."""

    def __init__(self) -> None:
        self._rows = RowTables(RowCounter(place=0, spec=NormSpec(), enters_norm=False, has_deviations=True))
        self._peak: Peak | None = None
        self._token: int | None = None

    def add(self, stream: Tensor, mask: Tensor | None, ids: Tensor | None) -> None:
        """Count a stream (B, T, n).

        Args:
            stream: The stream.
            mask: Token mask (B, T), or None for all rows.
            ids: Token ids, or None; those of another shape than (B, T) are not its own.
        """
        before = self._rows.absmax(0)
        if not self._rows.add(0, stream, mask):
            return
        largest = self._rows.absmax(0)
        if stream.dim() != 3 or not largest > max(before, 0.0):
            return
        stream = stream.detach()
        is_largest = stream.abs().double() == largest
        if mask is not None:
            is_largest &= mask.to(stream.device)[..., None]
        sample, position, feature = is_largest.nonzero()[0].tolist()
        self._peak = Peak(value=float(stream[sample, position, feature]), feature=feature, position=position)
        self._token = int(ids[sample, position]) if ids is not None and ids.shape == stream.shape[:2] else None

    def result(self) -> RowStatistics:
        """The statistics so far."""
        return self._rows.rows(0)

    def peak(self, decode: Callable[[int], str] | None) -> Peak | None:
        """The largest element so far, with its token in words where `decode` is given; None without one."""
        if self._peak is None or self._token is None or decode is None:
            return self._peak
        return replace(self._peak, token=decode(self._token))


def headroom_bits(dtype: torch.dtype, largest: float) -> float:
    """log2 of a dtype's largest number over the largest magnitude seen; infinite for zeros, NaN for NaN."""
    return math.inf if largest == 0 else math.log2(torch.finfo(dtype).max) - math.log2(largest)
