"""What a norm's divisor does to a row of a given length: the arithmetic that the formula rules share."""

from __future__ import annotations

import math

from normkit.inspection.result import Site
from normkit.spec import NormSpec


def eps_of(spec: NormSpec, dtype: str) -> float:
    """The eps as a number; None is the machine epsilon of the arithmetic."""
    if spec.eps is not None:
        return spec.eps
    return 2.0**-52 if dtype == "float64" else 2.0**-23


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
