"""What a norm's divisor does to a row of a given length: the arithmetic that the formula rules share."""

from __future__ import annotations

import math

from normkit.inspection.result import Severity, Site
from normkit.spec import NormSpec
from normkit.text import percent

VISIBLE, HARMFUL = 1e-3, 1e-2
"""Relative changes of an output's length that are worth a warning, and an error."""

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of one rounding."""

HALF = frozenset({"float16", "bfloat16"})
"""The 16-bit dtypes, by name."""

STEP = "one step of bfloat16 is 0.4 to 0.8 %: a change of 0.1 % drowns in it, one of 1 % does not"
"""Why these."""


def eps_of(spec: NormSpec, dtype: str) -> float:
    """The eps as a number; None is the machine epsilon of the arithmetic."""
    if spec.eps is not None:
        return spec.eps
    return 2.0**-52 if dtype == "float64" else 2.0**-23


def length_factor(spec: NormSpec, features: int) -> float:
    """Root mean square of a normalized row far above eps, but for the divisor's correction: 1, sqrt(n) or its inverse.

    sqrt(n) of the multiplier and of a sum in place of a mean cancel.
    """
    power = (spec.multiplier == "sqrt_n") - (spec.reduction == "sum")
    return math.sqrt(features) ** power


def as_divided(intended: NormSpec, site: Site) -> NormSpec:
    """The site's own spec with the eps that is meant and its place, in units of the site's own divisor.

    Beside a sum of squares an eps counts n times as much as beside their mean, outside the root sqrt(n) times.
    """
    power = 1.0 if intended.eps_placement == "inside" else 0.5
    sums = (site.spec.reduction == "sum") - (intended.reduction == "sum")
    eps = eps_of(intended, site.dtype) * float(site.input.features) ** (power * sums)
    return site.spec.replace(eps_placement=intended.eps_placement, eps=eps)


def divisor(spec: NormSpec, site: Site, rms: float) -> float:
    """What a row of this rms entering the site is divided by if the site followed `spec`.

    sqrt(v + eps), sqrt(v) + eps or max(sqrt(v), eps); v = k * rms**2 * (1 - mean_energy), where mean_energy
    counts only for a standard deviation, and k is 1, n / (n - 1) or n for mean, unbiased mean and sum.
    """
    features = site.input.features
    energy = site.input.mean_energy if spec.centre_statistics else 0.0
    multiple = features if spec.reduction == "sum" else features / max(features - spec.correction, 1)
    variance = multiple * rms**2 * max(1.0 - energy, 0.0)
    eps = eps_of(spec, site.dtype)
    match spec.eps_placement:
        case "inside":
            return math.sqrt(variance + eps)
        case "outside":
            return math.sqrt(variance) + eps
        case "clamp":
            return max(math.sqrt(variance), eps)


def output_ratio(actual: NormSpec, intended: NormSpec, site: Site, rms: float) -> float:
    """Length of the site's output over the intended one for a row of this rms; 1 where both divisors are 0."""
    mine, wanted = divisor(actual, site, rms), divisor(intended, site, rms)
    if mine == wanted:
        return 1.0
    return wanted / mine if mine > 0 else math.inf


def ratios_at(site: Site, intended: NormSpec, actual: NormSpec | None = None) -> tuple[float, float, float] | None:
    """Output length over the intended one at the 5 %, 50 % and 95 % quantile of the input's rms.

    None where no row tells; `actual` is the site's own spec unless given.
    """
    if not all(math.isfinite(rms) for rms in site.input.rms_quantiles):
        return None
    spec = actual or site.spec
    low, middle, high = (output_ratio(spec, intended, site, rms) for rms in site.input.rms_quantiles)
    return low, middle, high


def effect_of(ratios: tuple[float, float, float]) -> float:
    """The largest relative change of an output's length."""
    return max(abs(ratio - 1.0) for ratio in ratios)


def severity_of(effect: float) -> Severity:
    """How bad a relative change of the output's length is."""
    return "error" if effect > HARMFUL else "warning" if effect > VISIBLE else "note"


def in_words(site: Site, ratios: tuple[float, float, float]) -> str:
    """The effect at the median row, and where it is worst if that is another one."""
    words = f"at the median input rms of {site.input.rms_median:.3g} this {_changes(ratios[1])}"
    low = site.input.rms_quantiles[0]
    if abs(ratios[0] - 1.0) > max(2 * abs(ratios[1] - 1.0), VISIBLE):
        words += f", at the 5 % quantile of {low:.3g} it {_changes(ratios[0])}"
    return words


def _changes(ratio: float) -> str:
    if abs(ratio - 1.0) < VISIBLE:
        return "changes the output by less than 0.1 %"
    return f"{'shortens' if ratio < 1 else 'lengthens'} the output to {percent(ratio)}"
