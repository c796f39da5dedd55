"""Fits of recorded rows: y = a * (x - m) * G + B, and what the gain G is in terms of the stored weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.conventions.rows import CENTRINGS
from normkit.errors import InputError
from normkit.identification.specimen import Precision, as_tensor, precision_of
from normkit.reference import HALF
from normkit.text import dtype_name

_FEWEST = 8
"""Fewer rows than this do not tell a gain from the factors of the rows."""
_MOST_ELEMENTS = 2**20
"""The most rows of a fit; of more, every second is taken, or every third, and so on."""
_ROUNDS = 60
"""Alternations of the fit at most: each takes most of what is left."""
_MOST_GROUPS = 256
_NO_MORE = 1.02
"""The residual without a shift over the residual with it, where the shift is a fifth of the residual."""
OFFSETS = (0.0, 1.0, -1.0, 2.0)
"""The offsets of a weight: by design 0 or 1, by mistake the others."""
_CERTAIN = 5.0
"""Standard deviations beyond which nothing is chance."""
_UNTOLD = 1e-3
"""Weights that vary less than this, relative to their size or to 1, do not tell an offset from a factor."""
TINY = 1e-300


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Rows as they were recorded, all finite."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    bias: Tensor | None
    left_out: int
    axes: tuple[int, ...]
    """Sizes of the axes that make a row, as the weight has them."""

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
        span = max(1, *(part.dim() for part in (weight, bias) if part is not None), 1)
        axes = tuple(x.shape[-span:])
        for name, part in (("weight", weight), ("bias", bias)):
            if part is not None and part.shape not in (axes, ()):
                last = "the last axis" if span == 1 else f"the last {span} axes"
                advice = ""
                if x.dim() > 2 and part.shape == x.shape[1:2]:
                    advice = "; if it has a number for each channel, give x.movedim(1, -1) where places are normalized "
                    advice += "one by one, and nothing here tells group norms"
                raise InputError(f"{name} must have shape {axes} as {last} of x, got {tuple(part.shape)}{advice}")
        n = math.prod(axes)
        x, y = x.reshape(-1, n), y.reshape(-1, n)
        kept = x.isfinite().all(1) & y.isfinite().all(1) & (x != 0).any(1)
        if int(kept.sum()) < _FEWEST or n < 2:
            raise InputError(
                f"expected at least {_FEWEST} finite rows of 2 features or more, got {int(kept.sum())} of {n}"
            )
        weight, bias = (None if part is None else part.expand(axes).reshape(n) for part in (weight, bias))
        (places,) = kept.nonzero(as_tuple=True)
        places = places[:: math.ceil(len(places) / max(64, _MOST_ELEMENTS // n))]
        return cls(x=x[places], y=y[places], weight=weight, bias=bias, left_out=int((~kept).sum()), axes=axes)

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
    """Shape (rows, groups, m)."""
    factor: Tensor
    """Shape (rows, groups, 1): 1 / the numerator's root mean square in the middle of the rows."""
    gain: Tensor
    """Shape (groups, m)."""
    shift: Tensor
    """Shape (groups, m)."""
    noise: tuple[Tensor, Tensor]
    """How far chance and rounding may move each gain and each shift, each of shape (groups, m)."""
    residual: float
    """Root mean square of what is left over that of y."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GainFit:
    """The gain of a fit in terms of the stored weight: gain = unit * (weight + offset)."""

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


def parts_of(rows: Tensor, groups: int) -> Tensor:
    """Rows of shape (rows, n) as (rows, groups, n / groups), in float64."""
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
    numerator, _ = CENTRINGS[centred, centred].split(parts_of(rows.x, groups))
    y = parts_of(rows.y, groups)
    root = numerator.square().mean(-1, keepdim=True).sqrt()
    # A row without deviations has no factor of its own.
    factor = torch.where(root > 0, 1 / root, 0.0)
    size, last = float(y.square().mean().sqrt()) or 1.0, math.inf
    for _ in range(_ROUNDS):
        row = factor * numerator
        mean, level = row.mean(0), y.mean(0)
        if not is_shifted:
            mean = level = torch.zeros_like(mean)
        gain = ((row - mean) * (y - level)).sum(0) / (row - mean).square().sum(0).clamp_min(TINY)
        shift = level - gain * mean
        along = numerator * gain
        factor = (along * (y - shift)).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp_min(TINY)
        residual = float((factor * along + shift - y).square().mean().sqrt()) / size
        # The right fit is all but there at once; a wrong one creeps.
        if residual > (0.97 if residual > rows.precision.fits else 0.999) * last:
            break
        last = residual
    # A group's factor and its gain have one scale together: that of the rows which feel eps least.
    unit = (factor * root).median() if groups == 1 else (factor * root).sort(0).values[-len(root) // 4][None]
    unit = torch.where(unit != 0, unit, 1.0)
    row = factor * numerator
    left, spread = (row * gain + shift - y).square().mean(0).sqrt(), row.std(0).clamp_min(TINY)
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
        gain=gain * unit.reshape(-1, 1),
        shift=shift,
        noise=(unit.reshape(-1, 1).abs() * noise / spread, noise * (1 + (row.mean(0) / spread).square()).sqrt()),
        residual=residual,
    )


def gain_of(rows: Recording, fit: Fit) -> GainFit:
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
        along = float((gain * acting * certain).sum() / (acting.square() * certain).sum().clamp_min(TINY))
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
