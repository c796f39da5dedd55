"""How rows are counted into tables while a model trains: by the kernels in one reading, else in plain torch.

Nothing is read back and no shape depends on data, so no device is waited for. A row that holds NaN or infinity is only
counted as such; so is a row whose mean square leaves the range of float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.conventions.eps import eps_in
from normkit.ops import counting
from normkit.spec import NormSpec
from normkit.watching.tables import Table, Tables

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

GRADIENT_SUMS = ("rows", "squares", "nonfinite")


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
    """Whether the effect of eps and the kurtosis are counted too."""

    def add(self, tables: Tables, x: Tensor, mask: Tensor | None) -> None:
        """Count the rows of one tensor.

        Args:
            tables: The tables of `row_tables`.
            x: Of any floating-point dtype.
            mask: True where a token counts, (B, T), or None for all.
        """
        x = x.detach()
        rows = x if self.spec.rows.are_last else self.spec.rows.split(x).squeeze(-2)
        # With all axes but the first, rows are groups of a sample and not tokens.
        counted = _counted(rows, None if self.spec.rows.are_samples else mask)
        if counting.can_count(rows, tables["rows"]):
            what = self._what(x, rows.shape[-1])
            counting.count_rows(rows, counted, what, self.place, tables["rows"], tables["bins"], tables["row peaks"])
        else:
            self._add_plainly(tables, x, rows, counted)

    def _what(self, x: Tensor, features: int) -> counting.Counted:
        """What the kernels are to count."""
        if not self.enters_norm:
            return counting.Counted(enters_norm=False)
        spec = self.spec
        return counting.Counted(
            enters_norm=True,
            is_centred=spec.centring.statistics,
            placement=spec.placement.code,
            divisor=float(spec.divisor.count(features)),
            unit=spec.placement.length(eps_in(x.dtype, spec.eps)),
            limit_99=spec.placement.ratio_at(0.99),
            limit_90=spec.placement.ratio_at(0.9),
        )

    def _add_plainly(self, tables: Tables, x: Tensor, rows: Tensor, counted: Tensor | None) -> None:
        largest = _LARGEST if rows.dtype == torch.float64 else torch.finfo(torch.float32).max ** 0.5
        rows = rows if rows.dtype == torch.float64 else rows.float()
        kind, features = tables["rows"].dtype, rows.shape[-1]
        rows = rows.reshape(math.prod(rows.shape[:-1]), features)
        sums, peaks = tables["rows"][self.place], tables["row peaks"][self.place]
        if not len(rows):
            sums[0].add_(1.0)
            return
        # A vector_norm of order infinity takes ten times as long on a CPU.
        absmax = torch.maximum(rows.amax(-1), -rows.amin(-1)) if features else rows.new_zeros(len(rows))
        mean = rows.mean(-1)
        deviation = rows - mean[:, None] if self.enters_norm else None
        length = torch.linalg.vector_norm(rows if deviation is None else deviation, dim=-1).to(kind)
        mean, length = mean.to(kind), length / math.sqrt(features) if features else mean.to(kind)
        if deviation is None:
            rms, std = length, None
        else:
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
        angle = cosine.clamp(-1, 1).acos() if std is None else torch.where(present, torch.atan2(std, mean), 0.0)
        found = torch.stack(
            [
                torch.ones((), dtype=kind, device=rows.device),
                rows_kept,
                rows_kept - present.sum(),
                total - rows_kept,
                cosine @ cosine,
                angle @ weights,
            ]
        )
        sums[: len(found)].add_(found)
        extremes = torch.where(kept, torch.stack([absmax.to(kind), rms, -rms]), -math.inf).amax(-1)
        peaks[: len(extremes)].copy_(torch.maximum(peaks[: len(extremes)], extremes))
        tables["bins"][self.place, 0].index_add_(0, _bin(torch.where(present, rms, 1.0)), weights)
        if deviation is not None and std is not None:
            # The deviation is not used after this.
            fourth = torch.linalg.vector_norm(deviation.square_(), dim=-1).to(kind).square() / features
            varying = present & (std > _LEAST_DEVIATION) & (std < _LARGEST_DEVIATION) & (fourth < math.inf)
            kurtosis = torch.where(varying, fourth / std.square().square(), 0.0)
            first = ROW_SUMS.index("kurtosis")
            sums[first : first + 2].add_(torch.stack([kurtosis.sum(), varying.sum()]))
            self._add_attenuation(tables, x, std if self.spec.centring.statistics else rms, features, present)

    def _add_attenuation(self, tables: Tables, x: Tensor, root: Tensor, features: int, present: Tensor) -> None:
        placement, divisor = self.spec.placement, self.spec.divisor.count(features)
        unit = placement.length(eps_in(x.dtype, self.spec.eps))
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


def add_gradient(table: Tensor, gradient: Tensor) -> None:
    """Count the rows of the loss's gradient with respect to an activation into one line of `gradient_table`."""
    given = gradient.detach()
    given = given if given.dtype == torch.float64 else given.float()
    squares = torch.linalg.vector_norm(given, dim=-1).to(table.dtype).square()
    # NaN is not less than infinity.
    finite = squares < math.inf
    rows, total = finite.sum(), torch.where(finite, squares, 0.0).sum() / gradient.shape[-1]
    table.add_(torch.stack([rows, total, squares.numel() - rows]))


def named(values: Tensor, names: tuple[str, ...]) -> Mapping[str, float]:
    """One line of a table as Python numbers by name."""
    return dict(zip(names, values.tolist(), strict=True))


def _counted(rows: Tensor, mask: Tensor | None) -> Tensor | None:
    """True for each row of a token that counts, False for padding; None where the mask does not fit the rows."""
    if mask is None:
        return None
    leading = rows.shape[:-1]
    batch, tokens = mask.shape
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
