"""The effect of a norm's divisor on a row of a given length: the arithmetic that the formula rules share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.conventions.eps import EPS, PLACEMENTS, eps_in
from normkit.measurement.facts import Site
from normkit.rules.finding import Severity
from normkit.spec import NormSpec
from normkit.text import percent

VISIBLE, HARMFUL = 1e-3, 1e-2
"""Relative changes of an output's length that are worth a warning, and an error."""

ROUNDING = {name: eps / 2 for name, eps in EPS.items()}
"""The largest relative error of one rounding."""

HALF = frozenset({"float16", "bfloat16"})
"""The 16-bit dtypes, by name."""

USUAL_PLACEMENT = PLACEMENTS["inside"]
"""The placement of eps that is meant if nothing else is known."""

STEP = "one step of bfloat16 is 0.4 to 0.8 %: a change of 0.1 % is lost in it, one of 1 % is not"
"""Why these."""


def as_divided(intended: NormSpec, site: Site) -> NormSpec:
    """The site's own spec with the eps that is meant and its place, in units of the site's own divisor.

    Beside a sum of squares an eps counts n times as much as beside their mean, outside the root sqrt(n) times.
    """
    longer = math.sqrt(site.input.features) ** (site.spec.divisor.is_sum - intended.divisor.is_sum)
    eps = intended.placement.rescaled(eps_in(site.dtype, intended.eps), longer)
    return site.spec.replace(**intended.placement.conventions(eps))


def scales(spec: NormSpec, site: Site, rms: Tensor) -> Tensor:
    """The divisor of rows with this rms if the site followed `spec`.

    v = k * rms**2 * (1 - mean_energy), where mean_energy counts only for a standard deviation, and k is 1, n / (n - 1)
    or n for mean, unbiased mean and sum.
    """
    features = site.input.features
    energy = site.input.mean_energy if spec.centring.statistics else 0.0
    multiple = features / max(spec.divisor.count(features), 1)
    root = rms * math.sqrt(multiple * max(1.0 - energy, 0.0))
    return spec.placement.scale_of_root(root, eps_in(site.dtype, spec.eps))


def ratios_at(site: Site, intended: NormSpec, actual: NormSpec | None = None) -> tuple[float, float, float] | None:
    """Output length over the intended one at the 5 %, 50 % and 95 % quantile of the input's rms.

    1 where both divide by the same number, 0 too. None where no row tells; `actual` is the site's own spec unless
    given.
    """
    rms = torch.tensor(site.input.rms_quantiles, dtype=torch.float64)
    if not bool(rms.isfinite().all()):
        return None
    mine, wanted = scales(actual or site.spec, site, rms), scales(intended, site, rms)
    low, middle, high = torch.where(mine == wanted, 1.0, wanted / mine).tolist()
    return low, middle, high


def effect_of(ratios: tuple[float, float, float]) -> float:
    """The largest relative change of an output's length."""
    return max(abs(ratio - 1.0) for ratio in ratios)


def severity_of(effect: float) -> Severity:
    """The severity of a relative change of the output's length."""
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
