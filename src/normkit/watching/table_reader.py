"""The tables of one report, read as statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.identification.sites import NormSite
from normkit.measurement.moments import log_quantiles
from normkit.measurement.quantities import Attenuation, RowStatistics
from normkit.watching.row_counters import (
    BINS_PER_OCTAVE,
    GRADIENT_SUMS,
    LOWEST_OCTAVE,
    ROW_PEAKS,
    ROW_SUMS,
    named,
)

_OFFSET = BINS_PER_OCTAVE * LOWEST_OCTAVE


@dataclass(frozen=True, eq=False, kw_only=True)
class TableReader:
    """Reads the tables of one report."""

    step: int
    """The optimizer step that was measured."""
    tables: Mapping[str, Tensor]
    """By name, in float64 on the CPU, pooled over the processes."""

    def line(self, place: int) -> Mapping[str, float]:
        """Sums and peaks of one row counter by name."""
        peaks = named(self.tables["row peaks"][place], ROW_PEAKS)
        return {**named(self.tables["rows"][place], ROW_SUMS), **{f"peak {name}": peaks[name] for name in peaks}}

    def rows(self, place: int, features: int) -> RowStatistics:
        """The statistics of the rows that one row counter counted."""
        line, counts = self.line(place), self.tables["bins"][place, 0].round().long()
        present = line["rows"] - line["zero"]
        smallest, largest = -line["peak -rms"], line["peak rms"]
        low, median, high = (
            min(max(2**log, smallest), largest)
            for log in log_quantiles(counts, BINS_PER_OCTAVE, _OFFSET, 0.05, 0.5, 0.95)
        )
        filled = counts.nonzero().flatten()
        return RowStatistics(
            rows=round(line["rows"]),
            features=features,
            rms_min=smallest if line["rows"] else math.nan,
            rms_quantiles=(low, median, high) if present else (math.nan,) * 3,
            rms_max=largest if line["rows"] else math.nan,
            histogram=tuple(zip((filled + _OFFSET).tolist(), counts[filled].tolist(), strict=True)),
            zero_rows=round(line["zero"]),
            mean_energy=line["energy"] / present if present else math.nan,
            angle_to_ones=math.degrees(line["angle"] / present) if present else math.nan,
            absmax=max(line["peak absmax"], 0.0),
            nonfinite=round(line["nonfinite"]),
            kurtosis=line["kurtosis"] / line["varying"] if line["varying"] else math.nan,
        )

    def attenuation(self, place: int, site: NormSite) -> Attenuation:
        """How eps shortened the rows that entered a norm."""
        line, counts = self.line(place), self.tables["bins"][place, 1].round().long()
        counted = int(counts.sum())
        if not counted:
            nothing = 1.0 if line["rows"] else math.nan
            share = 0.0 if line["rows"] else math.nan
            return Attenuation(median=nothing, smallest=nothing, share_below_99=share, share_below_90=share)
        ratio = torch.tensor(2 ** log_quantiles(counts, BINS_PER_OCTAVE, _OFFSET, 0.5)[0], dtype=torch.float64)
        smallest = -line["peak -attenuation"]
        return Attenuation(
            median=max(float(site.spec.placement.shrink(ratio)), smallest),
            smallest=smallest,
            share_below_99=line["below_99"] / counted,
            share_below_90=line["below_90"] / counted,
        )

    def summary(self) -> tuple[Sequence[float], ...]:
        """Four numbers of every row counter at once, as `rows` and `attenuation` have them.

        Returns:
            Median rms, kurtosis, share below 99 %, largest magnitude.
        """
        rows = dict(zip(ROW_SUMS, self.tables["rows"].unbind(-1), strict=True))
        peaks = dict(zip(ROW_PEAKS, self.tables["row peaks"].unbind(-1), strict=True))
        counts = self.tables["bins"][:, 0].round()
        cumulative = counts.cumsum(-1)
        half = cumulative[:, -1:] / 2
        # Without any counted row, no bin reaches the half.
        place = torch.searchsorted(cumulative, half.ceil().clamp_min(1.0)).clamp_max(counts.shape[-1] - 1)
        count, up_to = counts.gather(-1, place), cumulative.gather(-1, place)
        within = ((half - (up_to - count)) / count).clamp(0.0, 1.0)
        median = (((place + within + _OFFSET) / BINS_PER_OCTAVE).exp2().squeeze(-1)).clamp(-peaks["-rms"], peaks["rms"])
        median[rows["rows"] == rows["zero"]] = math.nan
        counted = self.tables["bins"][:, 1].sum(-1)
        share = torch.where(counted > 0, rows["below_99"] / counted, torch.where(rows["rows"] > 0, 0.0, math.nan))
        largest = peaks["absmax"].clamp_min(0.0)
        return median.tolist(), (rows["kurtosis"] / rows["varying"]).tolist(), share.tolist(), largest.tolist()

    def gradient(self, place: int) -> float:
        """Root mean square, over rows and features, of one activation's gradient; NaN where none passed."""
        line = named(self.tables["activation gradients"][place], GRADIENT_SUMS)
        if line["nonfinite"]:
            return math.nan
        return math.sqrt(line["squares"] / line["rows"]) if line["rows"] else math.nan
