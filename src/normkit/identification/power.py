"""Norms with a wrong power: rows turn as a norm turns them, yet grow or shrink with what enters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.maps import drawn
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec

_SAMPLES = 16
_SCALE = 4.0
"""Rows of this length are far from eps, and what is left of them after a division by v^2 is not lost beside a bias."""
_ROUNDS = 20
_FITS = 1e-3
"""A direction that is not a norm's leaves 0.03 or more; rounding beside a bias, 1e-5."""
_STRAIGHT = 0.02
_IS_OTHER = 0.05


def degree_reading(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "degree" of what turns a row as a norm does, and leaves it as long as it was to a power other than 0.

    f(x) = g * (x - m) / s * s**degree + b with m and s of a norm: -3 where v**2 divides in place of its root, -1 where
    v does, 2 where the reciprocal root divides in place of the root. Nothing for anything else, a power of 1 included.
    """
    lengths = _SCALE * 2 ** (3 * torch.rand(_SAMPLES, *shape[1:-1], 1, generator=generator) - 1.5)
    x = lengths * torch.randn(_SAMPLES, *shape[1:], generator=generator)
    with drawn(specimen, generator):
        odd = (specimen(x.to(specimen.device)) - specimen(-x.to(specimen.device))).cpu().double() / 2
    rows, odd = x.double().flatten(0, -2), odd.flatten(0, -2)
    size = odd.square().mean(-1, keepdim=True).sqrt()
    if not bool(torch.isfinite(odd).all()) or not bool((size > 0).all()):
        return {}
    for centred in (True, False):
        spec = NormSpec(centre_numerator=centred, centre_statistics=centred, eps=0.0, has_weight=False, has_bias=False)
        factors = _factors(odd / size, reference.forward(rows, spec))
        if factors is None:
            continue
        scale = reference.statistics(rows, spec, 0.0).scale
        degree, residual = _slope(scale.log().flatten(), (factors.abs() * size).log().flatten())
        if residual < _STRAIGHT and min(abs(degree), abs(degree - 1)) > _IS_OTHER:
            divides = "standard deviation" if centred else "root mean square"
            line = f"a row turns as in a norm, and leaves as long as its {divides} to the power {degree:.2f}, not 0"
            return {"degree": Reading(value=round(degree, 2), evidence=(line,))}
    return {}


def _factors(odd: Tensor, normalized: Tensor) -> Tensor | None:
    """c of odd = c * gain * normalized, one a row, for one gain a feature; None if there is none such."""
    gain = torch.ones_like(normalized[:1])
    factors = gain[:, :1]
    for _ in range(_ROUNDS):
        along = gain * normalized
        factors = (odd * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
        along = factors * normalized
        gain = (odd * along).sum(0, keepdim=True) / along.square().sum(0, keepdim=True)
    residual = float((odd - factors * gain * normalized).square().mean().sqrt())
    return factors if residual < _FITS else None


def _slope(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Of the straight line through y over x, and the root mean square of what it leaves."""
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / x.square().sum())
    return slope, float((y - slope * x).square().mean().sqrt())
