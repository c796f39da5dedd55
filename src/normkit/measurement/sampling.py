"""The probe: one measured step over a text, with a sample of the rows of each norm.

A sample shows the angle that a norm turns its rows by, their lengths, and the error of its outputs. It has up to 64
rows a call, spread evenly over those that count, of at most 16 batches, spread evenly too. Four numbers a row are
kept; the rows themselves live from a norm's call to its return.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normkit import reference, units
from normkit.conventions.gain import Gain
from normkit.errors import InputError, ShapeError, SpecError
from normkit.geometry.image import image_of
from normkit.identification.offloading import device_of
from normkit.identification.passport import Passport
from normkit.identification.sites import NormSite
from normkit.measurement.attention import QueriesAndKeys, Selection, select
from normkit.measurement.facts import Peak, SiteGeometry
from normkit.measurement.hooks import observed
from normkit.measurement.instruments import Counts
from normkit.measurement.layout import BlockCall, Layout, MeasuredStep
from normkit.measurement.row_counters import ROW_PEAKS, TableReader, Tables, row_mask
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

    `batch` is its number, from 0; the token mask is (B, T), or None where all rows count.
    """

    def __init__(self, batch: int, mask: Tensor | None) -> None:
        self.batch = batch
        self._mask = mask
        self._places: dict[tuple[torch.Size, bool], tuple[Tensor, ...]] = {}

    def rows(self, x: Tensor, spec: NormSpec) -> Tensor:
        """A copy of up to 64 of what are rows to a spec, on the CPU, of all where the mask does not tell their tokens.

        Returns:
            Shape (rows, m), in float32 or in x's dtype if that is wider.
        """
        # With several groups the axis stays.
        rows = reference.to_rows(x.detach(), spec).squeeze(-2)
        leading, mask = rows.shape[:-1], None if spec.rows.are_samples else self._mask
        if (leading, mask is None) not in self._places:
            counted = None if mask is None else row_mask(leading, mask)
            valid = torch.arange(math.prod(leading)) if counted is None else counted.nonzero().flatten()
            self._places[leading, mask is None] = torch.unravel_index(valid[evenly(len(valid), _ROWS)], leading)
        picked = rows[self._places[leading, mask is None]].cpu()
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

    Outputs are compared with a formula, if there is one.
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
        if x is None or (left := picker.rows(y, self._spec)).shape != x.shape:
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
        """The geometry of what was sampled so far; None without a row."""
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


class Probe(Counts):
    """Measures the forward passes inside its context; nothing is kept but counts, sums and four numbers a sampled row.

    The hooks are gone when the context is left, also by an exception.

    Example:
        >>> from normkit.measurement.structure import survey
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 3, 4)
        >>> structure = survey(model, lambda: model(x))
        >>> with Probe(model, structure.layout(is_pooled=False)) as probe:
        ...     probe.batch(None)
        ...     _ = model(x)
        >>> probe.measured().sites(structure, {})[0].input.rows
        6
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(layout, Tables(layout.tables(), device_of(model)))
        self._model, self._exits = model, ExitStack()
        self._samples = {site.path: RowSample(site.spec, RowFormula.of(site.passport)) for site in layout.sites}
        # By path of a block: the largest magnitude so far, the element, and its token id.
        self._largest: dict[str, tuple[float, Peak | None, int | None]] = {}
        self._batches = 0
        self.batch(None)

    def __enter__(self) -> Probe:
        """Begin to measure."""
        layout = self.layout
        self._exits.enter_context(observed(self._model, layout.sites, layout.blocks, layout.callers, self))
        return self

    def __exit__(self, *_exception: object) -> None:
        """Remove the hooks; what was measured stays."""
        self._exits.close()

    def batch(self, mask: Tensor | None, ids: Tensor | None = None) -> None:
        """Say which tokens of the next forward pass count.

        Args:
            mask: Boolean, shape (B, T), False for padding; None counts all.
            ids: Their token ids, of the same shape, or None.

        Raises:
            InputError: If the mask is of another shape or dtype.
        """
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
            raise InputError(
                f"the token mask must be boolean of shape (B, T), got {mask.dtype} {tuple(mask.shape)}; use mask.bool()"
            )
        self._ids, self.mask = ids, None if mask is None or bool(mask.all()) else mask
        self._picker = RowPicker(self._batches, self.mask)
        self._batches += 1
        self._selection: tuple[weakref.ref[Tensor] | None, object, Selection] | None = None

    def measured(self, decode: Callable[[int], str] | None = None) -> MeasuredStep:
        """The measurements so far; `decode` turns a token id into text."""
        peaks = {}
        for path, (_, peak, token) in self._largest.items():
            named = peak is not None and token is not None and decode is not None
            peaks[path] = replace(peak, token=decode(token)) if named else peak  # type: ignore[misc, arg-type, type-var]
        return MeasuredStep(
            layout=self.layout,
            reader=TableReader(step=0, tables=self.tables.read()),
            features=self.features,
            samples=self._samples,
            peaks=peaks,
        )

    # The mode would look at each operation of these: they bypass it.
    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count and sample what enters a norm."""
        with torch._C.DisableTorchFunction():
            super().before_site(site, x)
            self._samples[site.path].enter(x, self._picker)

    def after_site(self, site: NormSite, y: Tensor, given: object) -> None:
        """Count and sample what leaves a norm."""
        with torch._C.DisableTorchFunction():
            super().after_site(site, y, given)
            self._samples[site.path].leave(y, self._picker)

    def after_block(self, block: BlockCall, y: Tensor, given: object) -> None:
        """Count what leaves a block, and look for its largest element."""
        with torch._C.DisableTorchFunction():
            super().after_block(block, y, given)
            self._find_largest(block, y.detach())

    def _find_largest(self, block: BlockCall, stream: Tensor) -> None:
        place = self.layout.places(block.index)[1]
        largest = float(self.tables["row peaks"][place, ROW_PEAKS.index("absmax")])
        before, peak, token = self._largest.get(block.path, (0.0, None, None))
        if largest > before and stream.dim() == 3:
            is_largest = stream.abs().double() == largest
            if self.mask is not None and self.mask.shape == stream.shape[:2]:
                is_largest &= self.mask.to(stream.device)[..., None]
            sample, position, feature = is_largest.nonzero()[0].tolist()
            peak = Peak(value=float(stream[sample, position, feature]), feature=feature, position=position)
            ids = self._ids
            token = int(ids[sample, position]) if ids is not None and ids.shape == stream.shape[:2] else None
        self._largest[block.path] = max(largest, before), peak, token

    def _selected(self, call: QueriesAndKeys, tokens: Tensor | None) -> Selection:
        """The sampled rows of a call; most layers have the same mask, so those of the last call are often reused."""
        mask = call.mask
        # Inference tensors do not count how often they were written to; nothing equals a new object.
        version = None if mask is None else object() if mask.is_inference() else mask._version
        key = (call.causal, call.query.shape, call.key.shape, version)
        if self._selection is not None:
            reference, held, selection = self._selection
            if held == key and (mask is None if reference is None else reference() is mask):
                return selection
        selection = select(call, tokens)
        self._selection = (None if mask is None else weakref.ref(mask), key, selection)
        return selection


def evenly(count: int, most: int) -> Tensor:
    """So many of the numbers from 0 to count - 1, or all of them, spread evenly from the first to the last."""
    return torch.linspace(0, max(count - 1, 0), min(count, most), dtype=torch.float64).round().long()


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
