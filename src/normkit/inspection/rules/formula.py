"""Group A: the formula. Eps has the wrong size or place, or the variance the wrong divisor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normkit.inspection.result import Severity, Site
from normkit.inspection.rules.rule import Facts, Hit, NotChecked, Outcome, Rule, counted, percent, shortened, worst
from normkit.inspection.rules.scale import eps_of, output_ratio
from normkit.spec import NormSpec

# Two eps closer than this are one number seen through the rounding of float32, in which norms are identified.
_SAME_EPS = 1e-3
_VISIBLE, _HARMFUL = 1e-3, 1e-2
_SHORT_ROWS, _DOMINATED = 0.01, 0.5

_STEP = "one step of bfloat16 is 0.4 to 0.8 %: a change of 0.1 % drowns in it, one of 1 % does not"


@dataclass(frozen=True)
class _Case:
    """One deviating site: how bad, the largest relative change of its output's length, and a line in words."""

    site: Site
    severity: Severity
    effect: float
    line: str


def _wrong_eps(facts: Facts) -> Outcome:
    """Against the config's eps where there is one, and against the observed scale always."""
    differing = {site.path: case for site in facts.sites if (case := _other_eps(site, facts.intended(site)))}
    too_large = {site.path: case for site in facts.sites if (case := _dominating_eps(site, facts))}
    if differing:
        largest = max(case.effect for case in differing.values())
        measured = (
            f"{counted(len(differing), 'norm')} with another eps than the config's, which changes the length of an "
            f"output by up to {percent(largest)}"
        )
        return _hit([*(too_large | differing).values()], measured)
    if too_large:
        least = min(case.site.attenuation.median for case in too_large.values())
        measured = f"eps shortens the median row to as little as {percent(least)} at {counted(len(too_large), 'norm')}"
        return _hit([*too_large.values()], measured)
    if facts.intent is None:
        return NotChecked("no stock config to compare eps with; beside what enters, no eps is too large")
    return None


def _other_eps(site: Site, intended: NormSpec | None) -> _Case | None:
    """Not the intended eps; the severity is that of the effect at the observed scale."""
    if intended is None or intended.eps_placement != site.spec.eps_placement:
        return None
    actual, wanted = eps_of(site.spec, site.dtype), eps_of(intended, site.dtype)
    ratios = _ratios(site, site.spec.replace(eps=wanted))
    if abs(actual - wanted) <= _SAME_EPS * max(abs(actual), abs(wanted)) or ratios is None:
        return None
    effect = _effect(ratios)
    line = f"{site.path}: eps is {actual:.3g}, the config says {wanted:.3g}; {_in_words(site, ratios)}"
    return _Case(site, _severity(effect), effect, line)


def _dominating_eps(site: Site, facts: Facts) -> _Case | None:
    """Eps is large beside what enters. Where it is the config's, the weights were trained with it."""
    median, share = site.attenuation.median, site.attenuation.share_below_90
    severity: Severity
    if facts.intended(site) is None and (median < _DOMINATED or share > _SHORT_ROWS):
        severity = "error" if median < _DOMINATED else "warning"
    elif median < _DOMINATED:
        # Small models start with tiny branches, which training lengthens.
        severity = "note" if facts.is_untrained else "warning"
    else:
        return None
    line = (
        f"{site.path}: eps {eps_of(site.spec, site.dtype):.3g} beside a median input rms of "
        f"{site.input.rms_median:.3g}: the median row keeps {percent(median)} of its length, "
        f"{percent(share)} of the rows keep less than 90 %"
    )
    return _Case(site, severity, 1.0 - median, line)


def _eps_outside(facts: Facts) -> Outcome:
    """Outside the root where the config's class has it inside, or where nothing is known."""
    cases = []
    for site in facts.sites:
        intended, eps = facts.intended(site), eps_of(site.spec, site.dtype)
        wanted = site.spec.replace(eps_placement="inside", eps=eps if intended is None else intended.eps)
        meant = intended is not None and intended.eps_placement != "inside"
        if site.spec.eps_placement != "outside" or eps == 0 or meant or (ratios := _ratios(site, wanted)) is None:
            continue
        effect = _effect(ratios)
        line = f"{site.path}: eps {eps:.3g} is added to the root; {_in_words(site, ratios)}"
        cases.append(_Case(site, worst((_severity(effect), "warning")), effect, line))
    return _hit(cases, f"eps outside the root at {counted(len(cases), 'norm')}") if cases else None


def _unbiased_variance(facts: Facts) -> Outcome:
    """Another divisor than the config's class has, or than n where nothing is known."""
    cases = []
    for site in facts.sites:
        intended, n = facts.intended(site), site.input.features
        wanted = 0 if intended is None else intended.correction
        if site.spec.correction == wanted or site.spec.reduction == "sum" or n < 2:
            continue
        effect = math.sqrt(n / (n - 1)) - 1.0
        divisor = "n - 1" if site.spec.correction else "n"
        line = (
            f"{site.path}: the variance divides by {divisor}; for n = {n} the output's length is {percent(effect)} off"
        )
        cases.append(_Case(site, worst((_severity(effect), "warning")), effect, line))
    return _hit(cases, f"another divisor of the variance at {counted(len(cases), 'norm')}") if cases else None


def _hit(cases: list[_Case], measured: str) -> Hit:
    """The cases as one hit: sites in forward order, lines by effect."""
    telling = sorted(cases, key=lambda case: -case.effect)
    return Hit(
        severity=worst([case.severity for case in cases]),
        sites=tuple(case.site.path for case in sorted(cases, key=lambda case: case.site.order)),
        measured=measured,
        evidence=shortened([case.line for case in telling]),
    )


def _severity(effect: float) -> Severity:
    return "error" if effect > _HARMFUL else "warning" if effect > _VISIBLE else "note"


def _ratios(site: Site, intended: NormSpec) -> tuple[float, float, float] | None:
    """Output length over the intended one at the 5 %, 50 % and 95 % quantile of the input's rms."""
    if not all(math.isfinite(rms) for rms in site.input.rms_quantiles):
        return None
    low, middle, high = (output_ratio(site.spec, intended, site, rms) for rms in site.input.rms_quantiles)
    return low, middle, high


def _effect(ratios: tuple[float, float, float]) -> float:
    return max(abs(ratio - 1.0) for ratio in ratios)


def _in_words(site: Site, ratios: tuple[float, float, float]) -> str:
    """The effect at the median row, and where it is worst if that is another one."""
    words = f"at the median input rms of {site.input.rms_median:.3g} this {_changes(ratios[1])}"
    low = site.input.rms_quantiles[0]
    if abs(ratios[0] - 1.0) > max(2 * abs(ratios[1] - 1.0), _VISIBLE):
        words += f", at the 5 % quantile of {low:.3g} it {_changes(ratios[0])}"
    return words


def _changes(ratio: float) -> str:
    if abs(ratio - 1.0) < _VISIBLE:
        return "changes the output by less than 0.1 %"
    return f"{'shortens' if ratio < 1 else 'lengthens'} the output to {percent(ratio)}"


RULES = (
    Rule(
        id="A1",
        title="Eps is not the config's, or large beside what enters",
        severity="error",
        threshold=(
            f"output length changed against the config's eps by more than {percent(_VISIBLE)} (warning) or "
            f"{percent(_HARMFUL)} (error); without a config, more than {percent(_SHORT_ROWS)} of the rows keep less "
            f"than 90 % of their length (warning), or the median row less than {percent(_DOMINATED)} (error; with the "
            "config's eps a warning, in an untrained model a note)"
        ),
        source=f"meta-llama/llama#771, pytorch/torchtune#152 and #290; {_STEP}",
        why=(
            "Eps only guards the division by zero. Where it is not small beside the mean square of a row, the row "
            "leaves too short, and small rows shorter than large ones: the weights behind it were trained on another "
            "length. It shows first where inputs are small: behind the embedding, and at queries and keys."
        ),
        remedy=(
            "set eps to the value in the checkpoint's config",
            "if the config itself is at fault, take an eps below 1 % of the mean square that enters",
        ),
        confirm="nk.identify(module, shape) shows the eps that is computed; compare it with the config's",
        check=_wrong_eps,
    ),
    Rule(
        id="A2",
        title="Eps is added outside the root",
        severity="error",
        threshold=(
            "eps outside the root where the config's class has it inside, or where there is no config (warning); "
            f"the output's length changes by more than {percent(_HARMFUL)} (error)"
        ),
        source=f"tracel-ai/burn#2185, hkproj/pytorch-transformer#31; {_STEP}",
        why=(
            "x / (sqrt(v) + eps) and x / sqrt(v + eps) agree for large rows only: a small one is shorter by the share "
            "eps / sqrt(v) in the first, eps / (2 v) in the second. Weights trained with one do not fit the other."
        ),
        remedy=(
            "move eps under the root: x * rsqrt(v + eps)",
            "if the weights were trained this way, keep it and say so: nk.NormSpec(eps_placement='outside')",
        ),
        confirm="nk.identify(module, shape).spec.eps_placement",
        check=_eps_outside,
    ),
    Rule(
        id="A4",
        title="The variance is divided by the wrong number",
        severity="error",
        threshold=(
            "n - 1 where the config's class divides by n, or where there is no config, and the reverse (warning); "
            f"the output's length changes by more than {percent(_HARMFUL)} (error)"
        ),
        source=f"harvardnlp/annotated-transformer#119, FluxML/Flux.jl#529; {_STEP}",
        why=(
            "A norm describes the row it has and estimates nothing, so it divides by n. Tensor.var and Tensor.std "
            "divide by n - 1 unless told otherwise, which shortens every output by sqrt((n - 1) / n): 0.8 % for n = 64."
        ),
        remedy=(
            "compute the variance with correction=0, or call torch.nn.functional.layer_norm",
            "if the weights were trained this way, keep it and say so: nk.NormSpec(correction=1)",
        ),
        confirm="nk.identify(module, shape).spec.correction",
        check=_unbiased_variance,
    ),
)
"""The rules of this group, in order."""
