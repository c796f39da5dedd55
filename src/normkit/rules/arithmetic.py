"""Group A, the arithmetic: a wrong power, a variance that cancels, rows that are constant or zero."""

from __future__ import annotations

import math

from normkit.conventions.eps import eps_in
from normkit.measurement.facts import Site
from normkit.rules.finding import Severity
from normkit.rules.rule import Case, Facts, Outcome, Rule, hit
from normkit.rules.scale import ROUNDING
from normkit.text import counted, percent

_WRONG, _VISIBLE = 1e-2, 1e-3
# Limits of mean^2 / variance: the digits that a row has left after the rounding of its dtype.
_LARGE_MEAN = {"float32": 1e6, "float16": 1e2, "bfloat16": 1e2}
_DEGREE = 0.05


def _wrong_power(facts: Facts) -> Outcome:
    """Rows turn as in a norm, and grow or shrink with their input."""
    cases = []
    for other in facts.others:
        if (found := other.passport.readings.get("degree")) is None or abs(found.value) <= _DEGREE:
            continue
        power = (1 - found.value) / 2
        line = (
            f"{other.path}: rows twice as long leave {2.0**found.value:.3g} times as long (power {found.value:g}): "
            f"what divides is the mean square or variance to the power {power:g}, in place of 0.5"
        )
        cases.append(Case(other.path, "error", abs(found.value), line))
    return hit(cases, f"the output's length follows the input's at {counted(len(cases), 'norm')}")


def _cancels(facts: Facts) -> Outcome:
    """The variance is a difference of two large numbers; or a mean so large that the row has few digits left."""
    cases = []
    for site in facts.sites:
        if not (site.spec.centring.numerator and site.spec.centring.statistics):
            continue
        passport = facts.passports.get(site.path)
        found = None if passport is None else passport.readings.get("conditioning")
        ratio = _mean_over_variance(site)
        if found is not None and found.value["cancels"]:
            rounding = ROUNDING[site.dtype if site.spec.casts.has_narrow_statistics else "float32"]
            error = min(ratio * rounding, 1.0)
            severity: Severity = "error" if error > _WRONG else "warning"
            line = (
                f"{site.path}: E[x^2] - E[x]^2; with means {found.value['mean_over_std']:g} times the deviations its "
                f"outputs are off by {percent(found.value['error'])}; at the mean^2 / variance of {ratio:.3g} that "
                f"enters, the variance by about {percent(error)}"
            )
            cases.append(Case(site.path, severity, ratio, line))
        elif ratio > _LARGE_MEAN.get(site.dtype, math.inf):
            line = (
                f"{site.path}: mean^2 / variance of what enters is {ratio:.3g}, so that {site.dtype} leaves "
                f"{_digits(ratio, site.dtype)} to what the mean is subtracted from"
            )
            cases.append(Case(site.path, "warning", ratio, line))
    return hit(cases, f"a mean takes the variance's digits at {counted(len(cases), 'norm')}")


def _mean_over_variance(site: Site) -> float:
    """n mean^2 / |x|^2 of the average row over its complement; 0 if no row has a direction."""
    energy = site.input.mean_energy
    if math.isnan(energy):
        return 0.0
    return energy / (1.0 - energy) if energy < 1.0 else math.inf


def _digits(ratio: float, dtype: str) -> str:
    bits = -math.log2(ROUNDING[dtype]) - 0.5 * math.log2(ratio) if math.isfinite(ratio) else 0.0
    return f"{max(bits, 0.0):.0f} of {-math.log2(ROUNDING[dtype]):.0f} bits"


def _degenerate_rows(facts: Facts) -> Outcome:
    """Rows of zeros, or of one number, come out NaN or infinite."""
    cases = []
    for site in facts.sites:
        passport, intended = facts.passports.get(site.path), facts.intended(site)
        found = None if passport is None else passport.readings.get("degenerate rows")
        is_bare = eps_in(site.dtype, site.spec.eps) == 0 and (passport is None or "eps" not in passport.undecidable)
        rows = {"zeros": "NaN" if is_bare else "finite", "constant": "finite"} if found is None else found.value
        zeros, constant = rows["zeros"] != "finite", rows["constant"] != "finite"
        if not zeros and not constant:
            continue
        meant = intended is not None and eps_in(site.dtype, intended.eps) == 0
        severity: Severity = "warning" if constant or (intended is not None and not meant) else "note"
        kinds = [what for what, bad in (("zeros", zeros), ("one number", constant)) if bad]
        line = f"{site.path}: a row of {' or of '.join(kinds)} leaves as {rows['constant' if constant else 'zeros']}"
        if zeros and site.input.zero_rows:
            severity = "error"
            line += f"; {site.input.zero_rows:,} of {counted(site.input.rows, 'row')} that entered are zeros"
        cases.append(Case(site.path, severity, float(site.input.zero_rows), line))
    return hit(cases, f"rows without a variance are divided by zero at {counted(len(cases), 'norm')}")


RULES = (
    Rule(
        id="A5",
        title="A row's length leaves with it: a wrong power divides",
        severity="error",
        threshold=f"slope of log |f(s x)| over log s at large s other than 0 by more than {_DEGREE:g}",
        source="TPlinker#37, viewset-diffusion#1",
        why=(
            "** 2 for ** 0.5, rsqrt for sqrt, or no root at all: rows keep their direction, so the model trains, but "
            "long rows leave too short or too long. The norm holds no scale, and gradients through it explode or "
            "vanish."
        ),
        remedy=(
            "divide by the root of the variance or mean square: x * rsqrt(v + eps)",
            "weights trained with the wrong power do not fit the right one: train again, or rescale the gains",
        ),
        confirm="nk.identify(module, shape).readings['degree']; the output for x and for 2 * x",
        check=_wrong_power,
        looks_at=("norms", "other norms"),
    ),
    Rule(
        id="A9",
        title="The variance cancels",
        severity="error",
        threshold=(
            "E[x^2] - E[x]^2, seen from rows with means of 128 to 8192 deviations (warning), and a variance off by "
            f"more than {percent(_WRONG)} at what enters (error); any norm that subtracts a mean with mean^2 / "
            f"variance above {_LARGE_MEAN['float32']:g} in float32 or {_LARGE_MEAN['bfloat16']:g} in 16 bits (warning)"
        ),
        source="patrick-kidger/equinox#314, keras-core#866, tracel-ai/burn#5607, pytorch/pytorch#197089",
        why=(
            "Where the mean dwarfs the deviations, E[x^2] and E[x]^2 agree in nearly all digits, and their difference "
            "is rounding: the output has the wrong length, or is NaN where it comes out negative. Clamping it at 0 "
            "hides that."
        ),
        remedy=(
            "subtract the mean first, then square: two passes, or Welford's update",
            "where the row itself has a huge mean, find what adds it: a bias that drifted, an embedding",
        ),
        confirm="nk.identify(module, shape).readings['conditioning']; compare norm(x + 1000) with norm(x)",
        check=_cancels,
    ),
    Rule(
        id="A10",
        title="Rows without variance come out NaN",
        severity="error",
        threshold=(
            "a row of one number leaves as NaN or infinite, or one of zeros where an eps is meant (warning); "
            "rows of zeros do enter (error); where none is known a note"
        ),
        source="microsoft/onnxruntime#21935, TIM-VX#589",
        why=(
            "Padding, a masked token or a dead feature gives rows of zeros or of one number. Divided by a root of 0, "
            "or of a variance that rounding made negative, they are NaN, and so is all that attends to them."
        ),
        remedy=(
            "add an eps that the statistics' dtype can hold",
            "subtract the mean before squaring, so that the variance of a constant row is 0 and never negative",
            "mask padding rows behind the norm as well",
        ),
        confirm="the module's output for torch.zeros and torch.full of a row",
        check=_degenerate_rows,
        follows=("A3", "A7", "A9"),
    ),
)
"""The rules of this group, in order."""
