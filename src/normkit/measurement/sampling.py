"""The effect of one norm on a sample of its rows: the angle it turns them by, their lengths, the shape of the image.

The sample is up to 64 rows a call, spread evenly over those that count, of at most 16 batches, spread evenly too. Four
numbers a row are kept; the rows themselves live from a norm's call to its return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference, units
from normkit.conventions.gain import Gain
from normkit.errors import InputError, ShapeError, SpecError
from normkit.geometry.image import image_of
from normkit.identification.passport import Passport
from normkit.measurement.quantities import SiteGeometry
from normkit.measurement.row_counters import row_mask
from normkit.spec import NormSpec
from normkit.units import Exact

_ROWS = 64
_BATCHES = 16
# Outputs are held against the formula in the first batches: a program that is off is off in each.
_CHECKED = 4
_CHECKED_ROWS = 16
# A gain this much smaller than the largest is as good as 0: its feature is lost in the rounding of any float32 sum.
_VANISHING = 2.0**-24


class RowPicker:
    """Picks rows of one batch's tensors: the same ones of what enters a norm and of what leaves it.

    Args:
        batch: Number of the batch, from 0.
        mask: Token mask (B, T), or None where all rows count.
    """

    def __init__(self, batch: int, mask: Tensor | None) -> None:
        self.batch = batch
        self._mask = mask
        self._places: dict[torch.Size, tuple[Tensor, ...] | None] = {}

    def rows(self, x: Tensor, spec: NormSpec) -> Tensor | None:
        """A copy of up to 64 of what are rows to a spec, on the CPU; None where the mask does not tell them.

        Args:
            x: Input or output of the norm.
            spec: The formula of the norm.

        Returns:
            Shape (rows, m), in float32 or in x's dtype if that is wider.
        """
        if self._mask is not None and spec.rows.are_samples:
            return None
        # With several groups the axis stays.
        rows = reference.to_rows(x.detach(), spec).squeeze(-2)
        leading = rows.shape[:-1]
        if leading not in self._places:
            self._places[leading] = _spread(leading, self._mask)
        places = self._places[leading]
        if places is None:
            return None
        picked = rows[places].cpu()
        return picked if picked.dtype == torch.float64 else picked.float()


AffineRows = tuple[Tensor | None, Tensor | None]
"""Gain and bias of some rows, of the rows' shape."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowFormula:
    """The formula of a norm, with its effective gain and its bias: sampled outputs are compared with it in float64."""

    spec: NormSpec
    weight: Tensor | None
    """Effective gain, in its module's shape."""
    bias: Tensor | None
    dtype: torch.dtype | None
    """The dtype of the gain as it is stored; None without one."""

    @classmethod
    def of(cls, passport: Passport) -> RowFormula | None:
        """The formula that a passport gives; None where it leaves a part of it open."""
        spec, weight, bias, dtype = passport.spec, passport.weight, passport.bias, None
        if spec is None or "eps" in passport.undecidable:
            return None
        if (weight is None, bias is None) != (not spec.has_weight, not spec.has_bias):
            return None
        if weight is not None:
            dtype = weight.dtype
            weight = reference.effective_weight(weight, spec, torch.promote_types(torch.float32, weight.dtype))
        return cls(spec=spec, weight=weight, bias=bias, dtype=dtype)

    def beside(self, x: Tensor, pick: Callable[[Tensor], Tensor | None]) -> AffineRows | None:
        """Gain and bias of the rows that `pick` takes of a tensor of x's shape; None where they do not fit x."""
        found: list[Tensor | None] = []
        for part in (self.weight, self.bias):
            try:
                aligned = None if part is None else self.spec.rows.aligned(part, x).expand(x.shape)
            except RuntimeError:
                return None
            found.append(None if aligned is None else pick(aligned))
        return found[0], found[1]

    def error(self, x: Tensor, y: Tensor, beside: AffineRows, dtypes: Iterable[torch.dtype]) -> float:
        """The largest error of an output in units, as `normkit.units` counts plain code, over up to 16 of the rows.

        Args:
            x: Rows that entered, (rows, m), in float32 or wider.
            y: Rows that left, likewise.
            beside: Gain and bias of these rows.
            dtypes: The dtypes of the norm's input and output. The coarsest of these and the gain's sets the unit.

        Returns:
            The error: infinite where an output is NaN and should not be, NaN where no row can tell.
        """
        step = max(1, math.ceil(len(x) / _CHECKED_ROWS))
        exact = reference.unrounded(self.spec, x).replace(axes=(-1,), groups=1)
        weight, bias = (None if part is None else part[::step] for part in beside)
        right = units.output(x[::step], exact, weight, bias, plain=True)
        dtype = units.coarsest([*dtypes, *([] if self.dtype is None else [self.dtype])])
        # A normalized element may be rounded to a subnormal number, whose spacing the gain multiplies.
        floor = 0.0 if weight is None else torch.finfo(dtype).smallest_normal * weight.double().abs()
        # A number that is too large for the dtype has nothing to do with the formula.
        is_telling = right.size.isfinite().all(-1) & (right.value.abs().amax(-1) <= torch.finfo(dtype).max)
        if not bool(is_telling.any()):
            return math.nan
        found = Exact(right.value, right.size + floor).units(y[::step], dtype)
        return float(found[is_telling].max())


class RowSample:
    """The sampled rows of one norm.

    Args:
        spec: The formula of the norm.
        formula: The formula that its outputs are compared with, or None.
    """

    def __init__(self, spec: NormSpec, formula: RowFormula | None = None) -> None:
        self.error = math.nan
        """The largest error of an output, as in `RowFormula.error`; NaN where none was compared with its formula."""
        self._spec = spec
        self._formula = formula
        self._entered: Tensor | None = None
        self._beside: AffineRows | None = None
        self._dtype = torch.float32
        self._kept: dict[int, list[Tensor]] = {}
        self._every = 1
        self._features = 0

    def enter(self, x: Tensor, picker: RowPicker) -> None:
        """Pick from what a call is given, before it can overwrite that."""
        self._entered = None if picker.batch % self._every else picker.rows(x, self._spec)
        self._beside = None
        if self._formula is not None and self._entered is not None and picker.batch < _CHECKED:
            self._dtype = x.dtype
            self._beside = self._formula.beside(x, lambda values: picker.rows(values, self._spec))

    def leave(self, y: Tensor, picker: RowPicker) -> None:
        """Pick the same rows of what the call returned, and compare."""
        x, self._entered = self._entered, None
        left = None if x is None else picker.rows(y, self._spec)
        if x is None or left is None or left.shape != x.shape:
            return
        self._features = x.shape[-1]
        self._kept.setdefault(picker.batch, []).append(_compared(x, left, self._spec))
        if self._formula is not None and self._beside is not None:
            error = self._formula.error(x, left, self._beside, (self._dtype, y.dtype))
            # Written so that NaN, which stands for nothing yet, gives way.
            self.error = error if not self.error >= error and not math.isnan(error) else self.error
        if len(self._kept) > _BATCHES:
            self._every *= 2
            self._kept = {batch: kept for batch, kept in self._kept.items() if batch % self._every == 0}

    def result(self, gain: Tensor | None) -> SiteGeometry | None:
        """The geometry of what was sampled so far; None without a row.

        Args:
            gain: The effective gain, of shape (n,) or (heads, n), or None.
        """
        kept = [numbers.double() for batch in self._kept.values() for numbers in batch]
        numbers = torch.cat([torch.empty(4, 0, dtype=torch.float64), *kept], 1)
        # A row that is zero or not finite has no direction, and neither has its angle.
        numbers = numbers[:, numbers.isfinite().all(0)]
        if not numbers.numel():
            return None
        rotation, by_centring, entering, leaving = numbers
        vanishing = torch.zeros(0) if gain is None else gain.abs() <= _VANISHING * gain.abs().max()
        standing = None if gain is None else gain.masked_fill(vanishing, 0.0)
        dimension, semi_axes = _image(self._spec, self._features, standing)
        return SiteGeometry(
            rows=len(rotation),
            rotation=_quantiles(rotation.rad2deg(), 0.05, 0.5, 0.95),
            rotation_without_affine=_quantiles(by_centring.rad2deg(), 0.05, 0.5, 0.95),
            spread_in=_spread_of(entering),
            spread_out=_spread_of(leaving),
            dimension=dimension,
            semi_axes=semi_axes,
            vanishing_gains=int(vanishing.sum()),
        )


def evenly(count: int, most: int) -> Tensor:
    """So many of the numbers from 0 to count - 1, or all of them, spread evenly from the first to the last."""
    return torch.linspace(0, max(count - 1, 0), min(count, most), dtype=torch.float64).round().long()


def _spread(leading: torch.Size, mask: Tensor | None) -> tuple[Tensor, ...] | None:
    """Up to 64 places along the leading axes, spread evenly over those that a token mask selects."""
    counted = None if mask is None else row_mask(leading, mask)
    if mask is not None and counted is None:
        return None
    valid = torch.arange(math.prod(leading)) if counted is None else counted.nonzero().flatten()
    return torch.unravel_index(valid[evenly(len(valid), _ROWS)], leading)


def _compared(x: Tensor, y: Tensor, spec: NormSpec) -> Tensor:
    """Four numbers for each row: its angle to what left and to its own centred part, its length, that of what left.

    The angle is that of `normkit.geometry.angle_between`, in a few passes over the rows: this runs beside the model.
    """
    length, left = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1)
    u, v = x / length[:, None], y / left[:, None]
    rotation = 2 * torch.atan2(torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1))
    by_centring = torch.zeros_like(rotation)
    if spec.centring.numerator:
        mean = u.mean(-1, keepdim=True)
        across = torch.linalg.vector_norm(u - mean, dim=-1)
        by_centring = torch.atan2(mean.abs().squeeze(-1) * math.sqrt(x.shape[-1]), across)
    return torch.stack([rotation, by_centring, length, left])


def _image(spec: NormSpec, features: int, gain: Tensor | None) -> tuple[int | None, tuple[float, float, float] | None]:
    """Dimension of a norm's image at eps = 0; its smallest, median and largest semi-axis over sqrt(n).

    None where the image is no single ellipsoid, or only a point.
    """
    # The gain is as it acts, so that the spec's offset is in it; where a row lies in x does not matter here.
    acting = Gain(is_present=gain is not None, placement=spec.gain.placement, has_bias=spec.has_bias)
    row = spec.replace(axes=(-1,), **acting.conventions())
    try:
        surface = image_of(row, features, gain).surface
    except (InputError, ShapeError, SpecError):
        return None, None
    rank = surface.rank
    if not rank or not bool(surface.gain.isfinite().all()):
        return None, None
    ends_and_middle = surface.semi_axes(torch.tensor([0, (rank - 1) // 2, rank // 2, rank - 1]))
    return surface.dimension, _quantiles(ends_and_middle.double() / math.sqrt(features), 0.0, 0.5, 1.0)


def _quantiles(values: Tensor, *shares: float) -> tuple[float, float, float]:
    low, median, high = values.quantile(torch.tensor(shares, dtype=values.dtype)).tolist()
    return low, median, high


def _spread_of(lengths: Tensor) -> float:
    short, _, long = _quantiles(lengths, 0.05, 0.5, 0.95)
    return long / short
