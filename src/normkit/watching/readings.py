"""Tables read: the norms, blocks and attentions of a watched run as an inspection has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.identification.sites import NormSite
from normkit.inspection.blocks import block_of
from normkit.inspection.gauges import SiteMeasurement, headroom_bits
from normkit.inspection.moments import log_quantiles
from normkit.inspection.result import Attention, Attenuation, Block, RowStatistics, Site
from normkit.inspection.structure import Structure, measured_block, measured_site
from normkit.watching.instruments import Plan
from normkit.watching.logits import HEAD_PEAKS
from normkit.watching.tallies import (
    BINS_PER_OCTAVE,
    LOWEST_OCTAVE,
    ROW_PEAKS,
    ROW_SUMS,
    TAP_SUMS,
    attenuations,
    named,
)

_OFFSET = BINS_PER_OCTAVE * LOWEST_OCTAVE
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """The tables of one report.

    Attributes:
        step: The optimizer step that was measured.
        tables: By name, in float64 on the CPU, pooled over the processes.
    """

    step: int
    tables: Mapping[str, Tensor]

    def line(self, place: int) -> Mapping[str, float]:
        """Sums and peaks of one tally by name."""
        peaks = named(self.tables["row peaks"][place], ROW_PEAKS)
        return {**named(self.tables["rows"][place], ROW_SUMS), **{f"peak {name}": peaks[name] for name in peaks}}

    def rows(self, place: int, features: int) -> RowStatistics:
        """What one tally counted."""
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
        """What eps did to the rows that entered a norm."""
        line, counts = self.line(place), self.tables["bins"][place, 1].round().long()
        counted = int(counts.sum())
        if not counted:
            nothing = 1.0 if line["rows"] else math.nan
            share = 0.0 if line["rows"] else math.nan
            return Attenuation(median=nothing, smallest=nothing, share_below_99=share, share_below_90=share)
        ratio = torch.tensor(2 ** log_quantiles(counts, BINS_PER_OCTAVE, _OFFSET, 0.5)[0], dtype=torch.float64)
        smallest = -line["peak -attenuation"]
        return Attenuation(
            median=max(float(attenuations(ratio, site.spec)), smallest),
            smallest=smallest,
            share_below_99=line["below_99"] / counted,
            share_below_90=line["below_90"] / counted,
        )

    def summary(self) -> tuple[Sequence[float], ...]:
        """Of every tally at once, as `rows` and `attenuation` have them.

        Returns:
            Median rms, kurtosis, share below 99 %, largest magnitude.
        """
        rows = dict(zip(ROW_SUMS, self.tables["rows"].unbind(-1), strict=True))
        peaks = dict(zip(ROW_PEAKS, self.tables["row peaks"].unbind(-1), strict=True))
        counts = self.tables["bins"][:, 0].round()
        cumulative = counts.cumsum(-1)
        half = cumulative[:, -1:] / 2
        # Where nothing was counted no bin reaches the half.
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
        """Root mean square over rows and features of the gradient at one tap; NaN where none passed."""
        line = named(self.tables["taps"][place], TAP_SUMS)
        if line["nonfinite"]:
            return math.nan
        return math.sqrt(line["squares"] / line["rows"]) if line["rows"] else math.nan


@dataclass(frozen=True, eq=False, kw_only=True)
class Reader:
    """Makes the parts of an inspection of readings.

    Attributes:
        structure: What the model is made of.
        plan: What is measured where.
        gradient_errors: Of the gradient of each norm's gain, by path; see `Site.gain_gradient_error`.
    """

    structure: Structure
    plan: Plan
    gradient_errors: Mapping[str, float] = field(default_factory=dict)

    def sites(self, reading: Reading) -> tuple[Site, ...]:
        """The norms."""
        return tuple(self._site(reading, index, site) for index, site in enumerate(self.plan.sites))

    def _site(self, reading: Reading, index: int, site: NormSite) -> Site:
        features = math.prod(site.shape)
        entering, leaving = reading.rows(2 * index, features), reading.rows(2 * index + 1, features)
        before, after = self.structure.dtypes(site)
        in_half = before in _HALF and site.spec.statistics_dtype == "input"
        line = reading.line(2 * index)
        measured = SiteMeasurement(
            input=entering,
            output=leaving,
            attenuation=reading.attenuation(2 * index, site),
            calls=round(line["calls"]),
            left_out=0,
            dtype=str(before).removeprefix("torch."),
            headroom_bits=headroom_bits(before, max(entering.absmax, leaving.absmax)),
            statistics_headroom_bits=headroom_bits(before, max(line["peak sum"], 0.0)) if in_half else None,
            output_dtype=str(after).removeprefix("torch."),
        )
        error = self.gradient_errors.get(site.path, math.nan)
        return measured_site(self.structure, index, measured, site.parameters(), gain_gradient_error=error)

    def blocks(self, reading: Reading) -> tuple[Block, ...]:
        """The blocks."""
        first, found = 2 * len(self.plan.sites), []
        width = self._width()
        entering = reading.rows(first + len(self.plan.blocks), width)
        for block, swept in zip(self.plan.blocks, self.structure.sweeps, strict=True):
            leaving = reading.rows(first + block.index, width)
            found.append(measured_block(block, swept, entering, leaving))
            entering = leaving
        return tuple(found)

    def _width(self) -> int:
        widths = {call.path: call.input_shape[-1] for call in self.structure.called.modules if call.input_shape}
        return widths.get(self.plan.blocks[0].path, 0) if self.plan.blocks else 0

    def attentions(self, reading: Reading) -> tuple[Attention, ...]:
        """The attention calls."""
        return tuple(self._attention(reading, index) for index in range(len(self.plan.attentions)))

    def _attention(self, reading: Reading, index: int) -> Attention:
        place = self.plan.attentions[index]
        sums = reading.tables["heads"][index, : place.heads]
        peaks = reading.tables["head peaks"][index, : place.heads].clamp_min(0.0)
        rows, entropy, uniform, contested, spread, saturated = sums.unbind(-1)
        bounds, sampled = (peaks[:, HEAD_PEAKS.index(name)] for name in HEAD_PEAKS)
        total = float(rows.sum())
        return Attention(
            path=place.parent,
            block=block_of(place.parent, self.structure.blocks),
            source="sdpa" if place.function == "sdpa" else "softmax",
            heads=place.heads,
            head_dim=place.head_dim,
            bound=float(bounds.max()),
            bounds=tuple(bounds.tolist()),
            sampled_max=float(sampled.max()),
            sampled_rows=round(total),
            entropy=float(entropy.sum()) / total if total else math.nan,
            entropy_min=float((entropy / rows)[rows > 0].min()) if total else math.nan,
            uniform_entropy=float(uniform.sum()) / total if total else math.nan,
            spreads=tuple((spread / contested).tolist()),
            saturations=tuple((saturated / contested).tolist()),
        )
