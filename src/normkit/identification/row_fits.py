"""Fits of recorded rows: y = a * (x - m) * G + B, and the scales that the factors a of the rows may come from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from normkit.conventions.divisor import DIVISORS
from normkit.conventions.eps import PLACEMENTS, Placement
from normkit.conventions.rows import CENTRINGS
from normkit.errors import InputError
from normkit.identification.eps_and_divisor import row_rms
from normkit.identification.specimen import Precision, as_tensor, precision_of
from normkit.reference import HALF
from normkit.text import dtype_name

_FEWEST = 8
"""Fewer rows than this do not tell a gain from the factors of the rows."""
_MOST_ELEMENTS = 2**20
"""Of more rows than this, every second is taken, or every third, ..."""
_ROUNDS = 60
"""Alternations of the fit at most: each takes most of what is left."""
_SIGMAS = 16.0
"""Square of the standard deviations by which a scale may fit worse than the best: four."""
_MOST_GROUPS = 256
_NO_MORE = 1.02
"""Of a shift of a fifth of what is left, the fit without it leaves so many times as much."""
OFFSETS = (0.0, 1.0, -1.0, 2.0)
"""What is added to a weight: by design 0 or 1, by mistake the others."""
_CERTAIN = 5.0
"""Standard deviations beyond which nothing is chance."""
_UNTOLD = 1e-3
"""Weights that vary less than this, relative to their size or to 1, do not tell an offset from a factor."""
_FAR = 0.01
"""Mean square of a misfit that no eps between those of the grid makes good."""
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Rows as they were recorded, all finite."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    bias: Tensor | None
    left_out: int

    @classmethod
    def checked(cls, x: Any, y: Any, weight: Any, bias: Any) -> Recording:
        """The rows of tensors or arrays of shape (..., n) that belong together.

        Raises:
            InputError: If they do not.
        """
        parts: dict[str, Tensor] = {}
        for name, given in (("x", x), ("y", y), ("weight", weight), ("bias", bias)):
            tensor = as_tensor(given)
            if given is not None and not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
                got = dtype_name(tensor.dtype) if isinstance(tensor, Tensor) else f"{given!r:.40}"
                raise InputError(f"{name} must be a tensor or an array of floating point, got {got}")
            if isinstance(tensor, Tensor):
                parts[name] = tensor.detach().cpu()
        if "x" not in parts or "y" not in parts or parts["x"].shape != parts["y"].shape or parts["x"].dim() < 1:
            shapes = " and ".join(str(tuple(parts[name].shape)) if name in parts else "None" for name in ("x", "y"))
            raise InputError(f"x and y must have one shape (..., n), got {shapes}")
        x, y, weight, bias = (parts.get(name) for name in ("x", "y", "weight", "bias"))
        n = x.shape[-1]
        for name, part in (("weight", weight), ("bias", bias)):
            if part is not None and part.shape not in ((n,), ()):
                raise InputError(f"{name} must have shape ({n},) as the last axis of x, got {tuple(part.shape)}")
        x, y = x.reshape(-1, n), y.reshape(-1, n)
        kept = x.isfinite().all(1) & y.isfinite().all(1) & (x != 0).any(1)
        if int(kept.sum()) < _FEWEST or n < 2:
            raise InputError(
                f"expected at least {_FEWEST} finite rows of 2 features or more, got {int(kept.sum())} of {n}"
            )
        weight, bias = (None if part is None else part.expand(n) for part in (weight, bias))
        (places,) = kept.nonzero(as_tuple=True)
        places = places[:: math.ceil(len(places) / max(64, _MOST_ELEMENTS // n))]
        return cls(x=x[places], y=y[places], weight=weight, bias=bias, left_out=int((~kept).sum()))

    @property
    def precision(self) -> Precision:
        """That of the coarser dtype of x and y."""
        return precision_of(max((self.x.dtype, self.y.dtype), key=lambda dtype: torch.finfo(dtype).eps))

    @property
    def rounding(self) -> float:
        """An error that the factors of all rows may share: half a machine epsilon of float32, a quarter of one of y."""
        return max(torch.finfo(self.y.dtype).eps / 4, torch.finfo(torch.float32).eps / 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """y = factor * numerator * gain + shift, fitted without a model of the factor."""

    centred: bool
    groups: int
    numerator: Tensor
    """Of shape (rows, groups, m)."""
    factor: Tensor
    """Of shape (rows, groups, 1); 1 / the numerator's root mean square in the middle of the rows."""
    gain: Tensor
    """Of shape (groups, m)."""
    shift: Tensor
    """Of shape (groups, m)."""
    noise: tuple[Tensor, Tensor]
    """How far chance and rounding may move each gain and each shift, each of shape (groups, m)."""
    residual: float
    """Root mean square of what is left over that of y."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GainFit:
    """What the gain of a fit is in terms of the stored weight: gain = unit * (weight + offset)."""

    unit: float | None
    """None where no weight is known."""
    offset: float = 0.0
    visible: bool = True
    """It is not the same for all features."""
    ignored: bool = False
    """A weight was given and does not act."""
    misfit: str | None = None
    """Why it is no such gain."""
    untold: str | None = None
    """Why the offset is not shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale:
    """How the factors may follow from the rows: 1 / factor = s(v, eps) * unit / length, v a mean of squares."""

    fit: Fit
    gain: GainFit
    centred: bool
    """v is taken of deviations from the mean."""
    before: bool
    """v is taken of the row times the gain."""
    placement: Placement
    length: float | None
    """Root mean square of a normalized row per unit of gain, as a divisor gives it; None where it was fitted."""
    stretch: float
    """The fitted gain times this multiplies normalized rows."""
    eps: float
    misfit: float
    """Mean square of what is left of the logarithms."""
    curve: _Curve
    level: float | None
    """The logarithm of the length, beside which the curve is measured; None where the length was fitted."""

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The least and the most eps that fit as well; sought when asked for, as few scales are left by then."""
        return self.curve.interval(self.eps, self.misfit, self.level)


def fits_of(rows: Recording) -> list[Fit]:
    """The fits with the mean taken out and with it left in: of whole rows, then of the fewest groups that fit."""
    n = rows.x.shape[-1]
    fits = [_fitted(rows, centred, 1) for centred in (True, False)]
    for groups in range(2, min(_MOST_GROUPS, n // 2) + 1):
        if min(fit.residual for fit in fits) <= rows.precision.fits:
            break
        if n % groups == 0:
            fits += [_fitted(rows, centred, groups) for centred in (True, False)]
    return fits


def _parts(rows: Tensor, groups: int) -> Tensor:
    return rows.double().reshape(len(rows), groups, -1)


def _fitted(rows: Recording, centred: bool, groups: int) -> Fit:
    """The fit with a shift; without one where that leaves no more of the outputs.

    Where one feature is nearly the same in all rows and nearly as long as they are, its gain and its shift can hardly
    be told apart, and the fit of both creeps.
    """
    fit = _alternated(rows, centred, groups, is_shifted=True)
    if rows.y.dtype in HALF or not bool((fit.shift.abs() > fit.noise[1]).any()):
        return fit
    bare = _alternated(rows, centred, groups, is_shifted=False)
    return bare if bare.residual <= max(_NO_MORE * fit.residual, torch.finfo(rows.y.dtype).eps / 2) else fit


def _alternated(rows: Recording, centred: bool, groups: int, *, is_shifted: bool) -> Fit:
    """Factors, gain and shift by alternating least squares; each step is exact for what it fits."""
    numerator, _ = CENTRINGS[centred, centred].split(_parts(rows.x, groups))
    y = _parts(rows.y, groups)
    root = numerator.square().mean(-1, keepdim=True).sqrt()
    # A row without deviations has no factor of its own.
    factor = torch.where(root > 0, 1 / root, 0.0)
    size, last = float(y.square().mean().sqrt()) or 1.0, math.inf
    for _ in range(_ROUNDS):
        row = factor * numerator
        mean, level = row.mean(0), y.mean(0)
        if not is_shifted:
            mean = level = torch.zeros_like(mean)
        gain = ((row - mean) * (y - level)).sum(0) / (row - mean).square().sum(0).clamp_min(_TINY)
        shift = level - gain * mean
        along = numerator * gain
        factor = (along * (y - shift)).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp_min(_TINY)
        residual = float((factor * along + shift - y).square().mean().sqrt()) / size
        # The right fit is all but there at once; a wrong one creeps.
        if residual > (0.97 if residual > rows.precision.fits else 0.999) * last:
            break
        last = residual
    unit = (factor * root).median()
    unit = unit if unit != 0 else torch.ones_like(unit)
    row = factor * numerator
    left, spread = (row * gain + shift - y).square().mean(0).sqrt(), row.std(0).clamp_min(_TINY)
    # Equal rows err alike. Roundings of a feature that hardly varies err alike too: they do not average out.
    freedom = max(len(torch.unique(rows.x, dim=0)) - 2, 1)
    # The quantile of Student's t that has the probability of so many standard deviations.
    chance = left * math.sqrt(math.expm1(min(_CERTAIN**2 / freedom, 50.0)))
    noise = chance + torch.finfo(rows.y.dtype).eps * y.square().mean(0).sqrt()
    return Fit(
        centred=centred,
        groups=groups,
        numerator=numerator,
        factor=factor / unit,
        gain=gain * unit,
        shift=shift,
        noise=(unit.abs() * noise / spread, noise * (1 + (row.mean(0) / spread).square()).sqrt()),
        residual=residual,
    )


def _gain_of(rows: Recording, fit: Fit) -> GainFit:
    """The fitted gain in terms of the weight that was given, or of 1 where it is the same for all features."""
    gain, tolerance = fit.gain.flatten(), max(rows.precision.offset, 4 * fit.residual)
    if rows.weight is None:
        middle = float(gain.mean())
        if float((gain - middle).abs().max()) <= tolerance * abs(middle):
            return GainFit(unit=middle, visible=False)
        return GainFit(unit=None)
    weight = rows.weight.double()
    level, deviation = float(weight.mean()), weight - weight.mean()
    size = float(deviation.square().mean().sqrt())
    if size <= _UNTOLD * max(1.0, abs(level)):
        # Any offset of equal weights is a factor; a factor that a divisor has tells them apart later.
        middle = float(gain.mean())
        if float((gain - middle).abs().max()) > tolerance * abs(middle):
            return GainFit(unit=None, misfit="the gain that acts differs from feature to feature; the weight does not")
        return GainFit(unit=middle, visible=False)
    # A feature counts by how well its gain is known: the largest do not decide alone.
    floor = rows.precision.offset / 4 * (gain.abs() + 0.1 * gain.square().mean().sqrt())
    certain = 1 / (fit.noise[0].flatten() + floor).clamp_min(1e-100).square()
    level, middle = (float((part * certain).sum() / certain.sum()) for part in (weight, gain))
    deviation = weight - level
    unit = float((gain * deviation * certain).sum() / (deviation.square() * certain).sum())

    def apart(acting: Tensor) -> float:
        """The largest distance of a gain from a multiple of what may act, over what its feature may be off."""
        along = float((gain * acting * certain).sum() / (acting.square() * certain).sum().clamp_min(_TINY))
        return float(((gain - along * acting).square() * certain).max().sqrt())

    if apart(torch.ones_like(weight)) <= 1 and abs(unit) * size <= tolerance * abs(middle):
        return GainFit(unit=float(gain.mean()), visible=False, ignored=True)
    offset = middle / unit - level
    near = [each for each in OFFSETS if apart(weight + each) <= 1]
    if len(near) != 1:
        left = gain - unit * (deviation + level + offset)
        if not near and float(left.square().mean().sqrt()) > 3 * tolerance * float(gain.square().mean().sqrt()):
            return GainFit(unit=None, misfit="the gain that acts is no multiple of weight + offset")
        words = f"the weight is moved by {offset:.4g} before it multiplies"
        return GainFit(unit=unit, offset=offset, untold=words if not near else "the weights vary too little")
    acting = weight + near[0]
    return GainFit(unit=float((gain * acting * certain).sum() / (acting.square() * certain).sum()), offset=near[0])


def scales_of(rows: Recording, fit: Fit) -> Iterator[Scale]:
    """Each way in which a spec could come by these factors, with the eps that fits it best."""
    felt = (fit.factor > 0).flatten()
    target = -fit.factor.flatten()[felt].log()
    parts = _parts(rows.x, fit.groups)
    gain = _gain_of(rows, fit)
    size = gain.unit or float(fit.gain.square().mean().sqrt()) or 1.0
    for before in (False, True) if gain.visible and not fit.centred else (False,):
        scaled = parts * (fit.gain / size) if before else parts
        for centred, placement in itertools.product((True, False), PLACEMENTS.values()):
            _, deviation = CENTRINGS[centred, centred].split(scaled)
            square = deviation.square().mean(-1).flatten()[felt]
            curve = _Curve.of(placement, target, square, rows.rounding)
            for each, length, level in [(gain, None, None), *_known_lengths(rows, fit, gain)]:
                if (nearest := curve.nearest(level)) is None:
                    continue
                eps, misfit, mean = nearest
                yield Scale(
                    fit=fit,
                    gain=each,
                    centred=centred,
                    before=before,
                    placement=placement,
                    length=length,
                    stretch=math.exp(-mean),
                    eps=eps,
                    misfit=misfit,
                    curve=curve,
                    level=level,
                )


def _known_lengths(rows: Recording, fit: Fit, gain: GainFit) -> Iterator[tuple[GainFit, float, float]]:
    """The lengths that a divisor gives to normalized rows, each with the gain it is measured by and log(unit / it)."""
    if gain.unit is None:
        return
    n = fit.numerator.shape[-1]
    lengths = {round(row_rms(each, n), 12): row_rms(each, n) for each in DIVISORS.values()}
    offsets: tuple[float, ...] = (gain.offset,)
    level = 1.0
    if rows.weight is not None and not (gain.visible or gain.ignored):
        offsets, level = OFFSETS, float(rows.weight.double().mean())
    for offset, length in itertools.product(offsets, lengths.values()):
        acting = level + offset if len(offsets) > 1 else 1.0
        if acting != 0 and gain.unit / acting > 0:
            unit = gain.unit / acting
            yield replace(gain, unit=unit, offset=offset), length, math.log(unit / length)


def still_fits(least: float, count: int, rounding: float) -> float:
    """The mean square up to which so many factors fit as well as those with the least: chance, and rounding alike."""
    return least + _SIGMAS / count * max(least, (rounding / 8) ** 2) + (rounding / 2) ** 2


@dataclass(frozen=True, eq=False)
class _Curve:
    """How far the factors are from one place of eps, as a function of eps."""

    placement: Placement
    target: Tensor
    """-log of the factors."""
    value: Tensor
    """What eps is added to, or bounds."""
    rounding: float
    grid: Tensor
    """None, and from far below what rows feel to a thousand times their size."""
    levels: tuple[Tensor, Tensor]
    """Variance and mean of target - log s on the grid."""

    @classmethod
    def of(cls, placement: Placement, target: Tensor, square: Tensor, rounding: float) -> _Curve:
        """The curve for factors and the mean squares of their rows."""
        usable = square > 0
        target, square = target[usable], square[usable]
        value = square if placement.power == 2 else square.sqrt()
        grid = torch.cat([torch.zeros(1), float(value.median()) * torch.logspace(-12, 3, 301)]).double()
        curve = cls(placement, target, value, rounding, grid, (grid, grid))
        return replace(curve, levels=curve.at(grid))

    def at(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and mean of target - log s for each eps."""
        return torch.var_mean(self.target - self.placement.scale(self.value, eps[:, None]).log(), -1, correction=0)

    def misfit(self, levels: tuple[Tensor, Tensor], level: float | None) -> Tensor:
        """Mean square of what is left. A mean is taken out; beside a level, only what rounding explains of it."""
        variance, mean = levels
        if level is None:
            return variance
        return variance + ((mean - level).abs() - self.rounding).clamp_min(0.0).square()

    def nearest(self, level: float | None) -> tuple[float, float, float] | None:
        """The eps that fits best, and the mean square and the mean that are left; None if even the best is far off."""
        grid, coarse = self.grid, self.misfit(self.levels, level)
        if float(coarse.min()) > _FAR:
            return None
        misfit, best, least, mean = coarse, 0.0, math.inf, 0.0
        for _ in range(7):
            place = int(misfit.argmin())
            best, least = float(grid[place]), float(misfit[place])
            ends = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
            grid = torch.linspace(*ends, 21).double()
            levels = self.at(grid)
            misfit, mean = self.misfit(levels, level), float(levels[1][10])
        return best, least, mean

    def interval(self, best: float, least: float, level: float | None) -> tuple[float, float]:
        """The least and the most eps that fit as well as the best one, with this mean square left."""
        coarse = self.misfit(self.levels, level)
        limit = still_fits(least, len(self.target), self.rounding)

        def edge(inside: float, outside: float) -> float:
            """Where the misfit passes the limit."""
            for _ in range(30):
                middle = (inside + outside) / 2
                fits = float(self.misfit(self.at(torch.tensor([middle]).double()), level)) <= limit
                inside, outside = (middle, outside) if fits else (inside, middle)
            return inside

        far = self.grid[coarse > limit]
        below, above = far[far < best], far[far > best]
        first = edge(best, float(below[-1])) if len(below) else 0.0
        last = edge(best, float(above[0])) if len(above) else float(self.grid[-1])
        # v + eps is rounded alike in many rows: so much it may move the eps that fits them.
        step = 1e-3 * max(best, 1e-9 * float(self.value.median()))
        slope = self.placement.scale(self.value, best + step).log() - self.placement.scale(self.value, best).log()
        slope = slope - slope.mean() if level is None else slope
        moved = self.rounding * step * float(slope.abs().sum() / slope.square().sum().clamp_min(_TINY))
        return max(first - moved, 0.0), last + moved
