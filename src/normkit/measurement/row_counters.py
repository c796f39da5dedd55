"""How rows are counted into tables on a device, by the kernels or in plain torch, and how the tables are read.

Counting reads nothing back and no shape depends on data, so no device is waited for. A row that holds NaN or infinity
is only counted as such; so is a row whose mean square leaves the range of float32. Processes pool their tables in the
same way: one vector holds all tables, the summed ones first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.conventions.eps import eps_in
from normkit.measurement.facts import Attenuation, RowStatistics
from normkit.ops import counting
from normkit.spec import NormSpec

ROW_SUMS = ("calls", "rows", "zero", "nonfinite", "energy", "angle", "kurtosis", "varying", "below_99", "below_90")
ROW_PEAKS = ("absmax", "rms", "-rms", "-attenuation", "sum")
BINS_PER_OCTAVE, LOWEST_OCTAVE, OCTAVES = 8, -64, 128
_BINS = BINS_PER_OCTAVE * OCTAVES
# A deviation below this share of a row's rms is what rounding of the mean left; fourth powers of deviations below
# the second number, or above the third, leave the range of float32.
_CONSTANT, _LEAST_DEVIATION, _LARGEST_DEVIATION = 1e-6, 1e-8, 1e8
# For a ratio this large, eps shortens a row by less than any rounding.
_UNTOUCHED = 1e30
_LARGEST = torch.finfo(torch.float64).max

_OFFSET = BINS_PER_OCTAVE * LOWEST_OCTAVE

GRADIENT_SUMS = ("rows", "squares", "nonfinite")


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of all sums on a device: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, kw_only=True)
class Table:
    """The shape of one table."""

    name: str
    shape: tuple[int, ...]
    keeps_largest: bool = False
    """Two tables are merged by keeping the larger entries; otherwise they are added."""

    @property
    def empty(self) -> float:
        """An entry before anything was counted."""
        return -math.inf if self.keeps_largest else 0.0


class Tables:
    """Tables on one device.

    Example:
        >>> tables = Tables([Table(name="counts", shape=(2,))], torch.device("cpu"))
        >>> tables["counts"].add_(1)
        tensor([1., 1.], dtype=torch.float64)
        >>> tables.packed()
        tensor([1., 1.], dtype=torch.float64)
    """

    def __init__(self, layout: Sequence[Table], device: torch.device) -> None:
        self.layout = tuple(sorted(layout, key=lambda table: table.keeps_largest))
        dtype = widest_dtype(device)
        self._tables = {
            table.name: torch.full(table.shape, table.empty, dtype=dtype, device=device) for table in self.layout
        }

    def __getitem__(self, name: str) -> Tensor:
        """The table of this name, to be written to in place."""
        return self._tables[name]

    def clear(self) -> None:
        """Reset all tables."""
        for table in self.layout:
            self._tables[table.name].fill_(table.empty)

    def packed(self) -> Tensor:
        """A copy of all tables as one vector, on their device."""
        return torch.cat([self._tables[table.name].flatten() for table in self.layout])

    def part(self, vector: Tensor, name: str) -> Tensor:
        """One table within a packed vector, to be written to in place."""
        return self.unpacked(vector)[name]

    def stacked(self, vectors: Tensor) -> Mapping[str, Tensor]:
        """The tables within several packed vectors, (vectors, *shape) each, to be written to in place."""
        found, start = {}, 0
        for table in self.layout:
            end = start + math.prod(table.shape)
            found[table.name] = vectors[:, start:end].view(len(vectors), *table.shape)
            start = end
        return found

    def merged(self, vectors: Tensor) -> Tensor:
        """Several packed vectors, (vectors, entries), as one: sums added, of the other tables the largest kept."""
        sums = sum(math.prod(table.shape) for table in self.layout if not table.keeps_largest)
        return torch.cat([vectors[:, :sums].sum(0), vectors[:, sums:].amax(0)])

    def unpacked(self, vector: Tensor) -> Mapping[str, Tensor]:
        """The tables that a vector holds, by name."""
        return {name: table[0] for name, table in self.stacked(vector[None]).items()}

    def read(self) -> Mapping[str, Tensor]:
        """The tables as they are, by name, in float64 on the CPU."""
        return self.unpacked(self.packed().double().cpu())


def row_tables(places: int) -> tuple[Table, ...]:
    """The tables of so many row counters: sums and peaks, and how many rows lie in each eighth of an octave.

    The first histogram is of the rows' rms, the second of what a norm divides by, without eps, over sqrt(eps) or eps.
    """
    return (
        Table(name="rows", shape=(places, len(ROW_SUMS))),
        Table(name="bins", shape=(places, 2, _BINS)),
        Table(name="row peaks", shape=(places, len(ROW_PEAKS)), keeps_largest=True),
    )


def gradient_table(places: int) -> Table:
    """The table of the gradients of so many activations."""
    return Table(name="activation gradients", shape=(places, len(GRADIENT_SUMS)))


@dataclass(frozen=True, eq=False, kw_only=True)
class RowCounter:
    """Counts the rows of what enters or leaves one place."""

    place: int
    """Line of the tables."""
    spec: NormSpec
    """Says what one row is; for the input of a norm also what eps does to it."""
    enters_norm: bool
    """Whether the effect of eps is counted too."""

    def add(self, tables: Tables, x: Tensor, mask: Tensor | None, gain: Tensor | None = None) -> int:
        """Count the rows of one tensor, and return the features of a row.

        Args:
            tables: The tables of `row_tables`.
            x: Of any floating-point dtype.
            mask: True where a token counts, (B, T), or None. Rows whose tokens it does not tell count all.
            gain: Gain that multiplies the rows before the norm divides them; it matters to the effect of eps alone.
        """
        x = x.detach()
        rows = (x if self.spec.rows.are_last else self.spec.rows.split(x).squeeze(-2)).to(tables["rows"].device)
        # With all axes but the first, rows are groups of a sample and not tokens.
        is_told = mask is not None and not self.spec.rows.are_samples
        counted = row_mask(rows.shape[:-1], mask.to(rows.device)) if is_told and mask is not None else None
        if counting.can_count(rows, tables["rows"]):
            what = self.counted(rows) if gain is None else counting.Counted(enters_norm=True)
            counting.count_rows(rows, counted, what, self.place, tables["rows"], tables["bins"], tables["row peaks"])
        else:
            self._count_plainly(tables, rows, counted, gain)
        if self.enters_norm and gain is not None and rows.numel():
            self._add_scaled(tables, rows, counted, gain)
        return rows.shape[-1]

    def counted(self, rows: Tensor) -> counting.Counted:
        """The quantities that the kernels are to count of these rows."""
        spec = self.spec
        if not self.enters_norm:
            return counting.Counted(enters_norm=True)
        return counting.Counted(
            enters_norm=True,
            is_centred=spec.centring.statistics,
            placement=spec.placement.code,
            divisor=float(spec.divisor.count(rows.shape[-1])),
            unit=spec.placement.length(eps_in(rows.dtype, spec.eps)),
            limit_99=spec.placement.ratio_at(0.99),
            limit_90=spec.placement.ratio_at(0.9),
        )

    def _count_plainly(self, tables: Tables, given: Tensor, counted: Tensor | None, gain: Tensor | None = None) -> None:
        largest = _LARGEST if given.dtype == torch.float64 else torch.finfo(torch.float32).max ** 0.5
        rows = given if given.dtype == torch.float64 else given.float()
        kind, features = tables["rows"].dtype, rows.shape[-1]
        rows = rows.reshape(math.prod(rows.shape[:-1]), features)
        sums, peaks = tables["rows"][self.place], tables["row peaks"][self.place]
        if not len(rows):
            sums[0].add_(1.0)
            return
        # A vector_norm of order infinity takes ten times as long on a CPU.
        absmax = torch.maximum(rows.amax(-1), -rows.amin(-1)) if features else rows.new_zeros(len(rows))
        mean = rows.mean(-1)
        deviation = rows - mean[:, None]
        length, mean = torch.linalg.vector_norm(deviation, dim=-1).to(kind), mean.to(kind)
        length = length / math.sqrt(features) if features else mean
        std = torch.where(length > _CONSTANT * mean.abs(), length, 0.0) if rows.dtype == torch.float32 else length
        # A vector_norm has left the range of float64 where these squares do; torch.hypot takes twice as long.
        rms = (mean.square() + std.square()).sqrt()
        # The rms of a row with NaN or infinity is NaN or infinite, and this comparison is false.
        finite = rms <= largest
        kept = finite if counted is None else finite & counted
        present = kept & (rms > 0)
        weights, rows_kept = present.to(kind), kept.sum()
        total = rows_kept.new_full((), len(rows)) if counted is None else counted.sum()
        cosine = torch.where(present, mean / rms, 0.0)
        angle = torch.where(present, torch.atan2(std, mean), 0.0)
        # The deviation is not used after this.
        fourth = torch.linalg.vector_norm(deviation.square_(), dim=-1).to(kind).square() / features
        varying = present & (std > _LEAST_DEVIATION) & (std < _LARGEST_DEVIATION) & (fourth < math.inf)
        found = torch.stack(
            [
                torch.ones((), dtype=kind, device=rows.device),
                rows_kept,
                rows_kept - present.sum(),
                total - rows_kept,
                cosine @ cosine,
                angle @ weights,
                torch.where(varying, fourth / std.square().square(), 0.0).sum(),
                varying.sum(),
            ]
        )
        sums[: len(found)].add_(found)
        extremes = torch.where(kept, torch.stack([absmax.to(kind), rms, -rms]), -math.inf).amax(-1)
        peaks[: len(extremes)].copy_(torch.maximum(peaks[: len(extremes)], extremes))
        tables["bins"][self.place, 0].index_add_(0, _bin(torch.where(present, rms, 1.0)), weights)
        if self.enters_norm and gain is None:
            root = std if self.spec.centring.statistics else rms
            self._add_attenuation(tables, given.dtype, root, features, present)

    def _add_scaled(self, tables: Tables, given: Tensor, counted: Tensor | None, gain: Tensor) -> None:
        """Count the effect of eps on rows that the gain multiplies first."""
        kind, features = tables["rows"].dtype, given.shape[-1]
        rows = (given.to(kind) * gain.to(device=given.device, dtype=kind)).reshape(-1, features)
        if self.spec.centring.statistics:
            rows = rows - rows.mean(-1, keepdim=True)
        root = torch.linalg.vector_norm(rows, dim=-1) / math.sqrt(features)
        present = root.isfinite() if counted is None else root.isfinite() & counted
        self._add_attenuation(tables, given.dtype, root, features, present)

    def _add_attenuation(
        self, tables: Tables, dtype: torch.dtype, root: Tensor, features: int, present: Tensor
    ) -> None:
        placement, divisor = self.spec.placement, self.spec.divisor.count(features)
        unit = placement.length(eps_in(dtype, self.spec.eps))
        if divisor < 1:
            return
        root = torch.where(present, root, 0.0) * math.sqrt(features / divisor)
        peaks = tables["row peaks"][self.place]
        largest, smallest = peaks[ROW_PEAKS.index("sum")], peaks[ROW_PEAKS.index("-attenuation")]
        largest.copy_(torch.maximum(largest, root.amax().square() * divisor))
        if not unit:
            return
        # Zero rows get an infinite ratio, above every threshold, so they are not counted.
        ratio = torch.where(root > 0, root / unit, math.inf)
        # The smallest ratio has the strongest attenuation. Without any row it is infinite: no attenuation.
        smallest.copy_(torch.maximum(smallest, -placement.shrink(ratio.amin().clamp_max(_UNTOUCHED))))
        bins = tables["bins"][self.place, 1]
        bins.index_add_(0, _bin(ratio), (root > 0).to(root.dtype))
        below = torch.stack([(ratio < placement.ratio_at(share)).sum() for share in (0.99, 0.9)])
        tables["rows"][self.place, ROW_SUMS.index("below_99") :].add_(below)


def named(values: Tensor, names: tuple[str, ...]) -> Mapping[str, float]:
    """One line of a table as Python numbers by name."""
    return dict(zip(names, values.tolist(), strict=True))


def row_mask(leading: Sequence[int], mask: Tensor) -> Tensor | None:
    """True for each row whose token counts, flat; None where the mask does not fit the rows.

    Args:
        leading: The axes of the rows without their features.
        mask: Boolean, (B, T). It fits leading axes (B, T, ...), (B, H, T) and (B * T,). Where H = T, (B, T, H) and
            (B, H, T) cannot be told apart, and it fits neither.
    """
    batch, tokens = mask.shape
    leading = tuple(leading)
    if leading == (batch, tokens, tokens) and tokens > 1:
        return None
    if leading == (batch * tokens,):
        return mask.flatten()
    if leading[:2] == (batch, tokens):
        return mask.reshape(batch, tokens, *(1,) * (len(leading) - 2)).expand(leading).flatten()
    if len(leading) == 3 and (leading[0], leading[2]) == (batch, tokens):
        return mask[:, None, :].expand(leading).flatten()
    return None


def _bin(values: Tensor) -> Tensor:
    """The eighth of an octave that each value is in; values are positive or infinite."""
    # Values below the lowest octave go to the first bin, those above the highest to the last; a cast rounds towards 0.
    return (values.log2() * BINS_PER_OCTAVE - BINS_PER_OCTAVE * LOWEST_OCTAVE).clamp_(0, _BINS - 1).long()


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
        low, median, high = (min(max(2**log, smallest), largest) for log in log_quantiles(counts, 0.05, 0.5, 0.95))
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

    def attenuation(self, place: int, spec: NormSpec) -> Attenuation:
        """How eps shortened the rows that entered a norm."""
        line, counts = self.line(place), self.tables["bins"][place, 1].round().long()
        counted = int(counts.sum())
        if not counted:
            nothing = 1.0 if line["rows"] else math.nan
            share = 0.0 if line["rows"] else math.nan
            return Attenuation(median=nothing, smallest=nothing, share_below_99=share, share_below_90=share)
        ratio = torch.tensor(2 ** log_quantiles(counts, 0.5)[0], dtype=torch.float64)
        smallest = -line["peak -attenuation"]
        return Attenuation(
            median=max(float(spec.placement.shrink(ratio)), smallest),
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


def log_quantiles(counts: Tensor, *shares: float) -> tuple[float, ...]:
    """Quantiles of base-2 logarithms that a histogram of `row_tables` counts, spread evenly within each bin.

    Args:
        counts: One line of the table "bins", int64.
        shares: From 0 to 1.

    Returns:
        One quantile per share; NaN where nothing was counted.
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
        result.append((index + _OFFSET + min(max(within, 0.0), 1.0)) / BINS_PER_OCTAVE)
    return tuple(result)
