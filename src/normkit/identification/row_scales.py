"""The scales that the factors of recorded rows may come from: each place of eps and each divisor, with the eps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from normkit.conventions.divisor import DIVISORS
from normkit.conventions.eps import PLACEMENTS, Placement
from normkit.conventions.rows import CENTRINGS
from normkit.identification.eps_and_divisor import row_rms
from normkit.identification.row_fits import OFFSETS, TINY, Fit, GainFit, Recording, gain_of, parts_of

_SIGMAS = 16.0
"""Square of the standard deviations by which a scale may fit worse than the best: four."""
_FAR = 0.01
"""Mean square of a misfit that no eps between those of the grid makes good."""


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


def scales_of(rows: Recording, fit: Fit) -> Iterator[Scale]:
    """Each way in which a spec could come by these factors, with the eps that fits it best."""
    felt = (fit.factor > 0).flatten()
    target = -fit.factor.flatten()[felt].log()
    parts = parts_of(rows.x, fit.groups)
    gain = gain_of(rows, fit)
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
    """The quantity that eps is added to, or bounds."""
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
            """The eps at which the misfit passes the limit."""
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
        moved = self.rounding * step * float(slope.abs().sum() / slope.square().sum().clamp_min(TINY))
        return max(first - moved, 0.0), last + moved
