"""Group A: the formula. Eps has the wrong size or place, or the variance the wrong divisor."""

from __future__ import annotations

import math

from normkit.conventions.eps import PLACEMENTS, eps_in
from normkit.measurement.facts import Site
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import Case, Facts, NotChecked, Outcome, Rule, hit, worst
from normkit.rules.scale import (
    HARMFUL,
    STEP,
    USUAL_PLACEMENT,
    VISIBLE,
    as_divided,
    effect_of,
    in_words,
    ratios_at,
    severity_of,
)
from normkit.text import counted, percent

# Two eps closer than this are one number seen through the rounding of float32, in which norms are identified.
_SAME_EPS = 1e-3
_SHORT_ROWS, _DOMINATED = 0.01, 0.5


def _wrong_eps(facts: Facts) -> Outcome:
    """Against the eps that is meant where that is known, and against the observed scale always."""
    differing = {site.path: case for site in facts.sites if (case := _other_eps(site, facts))}
    too_large = {site.path: case for site in facts.sites if (case := _dominating_eps(site, facts))}
    if differing:
        largest = max(case.effect for case in differing.values())
        measured = (
            f"{counted(len(differing), 'norm')} with another eps than is meant, which changes the length of an output "
            f"by up to {percent(largest)}"
        )
        both = too_large | differing
        return hit([both[site.path] for site in facts.sites if site.path in both], measured)
    if too_large:
        least = 1.0 - max(case.effect for case in too_large.values())
        measured = f"eps shortens the median row to as little as {percent(least)} at {counted(len(too_large), 'norm')}"
        return hit([*too_large.values()], measured)
    if not facts.is_intent_known:
        return NotChecked("no config or intent file to compare eps with; beside what enters, no eps is too large")
    return undecided(facts, ("eps",))


def _other_eps(site: Site, facts: Facts) -> Case | None:
    """Not the intended eps; the severity is that of the effect at the observed scale."""
    intended = facts.intended(site)
    if intended is None or intended.placement is not site.spec.placement or is_open(site, facts, ("eps",)):
        return None
    n = site.input.features
    if intended.divisor.rms(n) != site.spec.divisor.rms(n):
        # An eps beside a sum of squares is none beside their mean.
        return None
    meant = as_divided(intended, site)
    actual, wanted = eps_in(site.dtype, site.spec.eps), eps_in(site.dtype, meant.eps)
    ratios = ratios_at(site, meant)
    if abs(actual - wanted) <= _SAME_EPS * max(abs(actual), abs(wanted)) or ratios is None:
        return None
    effect = effect_of(ratios)
    line = f"{site.path}: eps is {actual:.3g}, {facts.source_at(site.path)} says {wanted:.3g}; {in_words(site, ratios)}"
    return Case(site.path, severity_of(effect), effect, line)


def _dominating_eps(site: Site, facts: Facts) -> Case | None:
    """Eps is large beside what enters. Where it is the one that is meant, the weights were trained with it."""
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
        f"{site.path}: eps {eps_in(site.dtype, site.spec.eps):.3g} beside a median input rms of "
        f"{site.input.rms_median:.3g}: the median row keeps {percent(median)} of its length, "
        f"{percent(share)} of the rows keep less than 90 %"
    )
    return Case(site.path, severity, 1.0 - median, line)


def _eps_elsewhere(facts: Facts) -> Outcome:
    """Outside the root where it is meant inside, or where nothing is known; inside where it is meant elsewhere."""
    cases = []
    for site in facts.sites:
        intended, eps = facts.intended(site), eps_in(site.dtype, site.spec.eps)
        placement = USUAL_PLACEMENT if intended is None else intended.placement
        # A lower bound in place of an eps that is added is another rule's.
        own = site.spec.placement
        if own is placement or not own.shortens_every_row or eps == 0 or is_open(site, facts, fields_of("A2")):
            continue
        usual = site.spec.replace(**USUAL_PLACEMENT.conventions(site.spec.eps))
        if (ratios := ratios_at(site, usual if intended is None else as_divided(intended, site))) is None:
            continue
        effect = effect_of(ratios)
        line = f"{site.path}: eps {eps:.3g} is added {own.words}"
        line += f", {facts.source_at(site.path)} says {placement.words}" if placement is not USUAL_PLACEMENT else ""
        line += f"; {in_words(site, ratios)}"
        cases.append(Case(site.path, worst((severity_of(effect), "warning")), effect, line))
    outside = all(site.spec.placement.name == "outside" for site in facts.sites if site.path in {c.path for c in cases})
    where = "eps outside the root" if outside else "eps at another place than meant"
    return hit(cases, f"{where} at {counted(len(cases), 'norm')}") or undecided(facts, fields_of("A2"))


def _unbiased_variance(facts: Facts) -> Outcome:
    """Another divisor than is meant, or than n where nothing is known."""
    cases = []
    for site in facts.sites:
        intended, n = facts.intended(site), site.input.features
        own, meant = site.spec.divisor, 0 if intended is None else intended.divisor.correction
        if own.correction == meant or own.is_sum or n < 2 or is_open(site, facts, fields_of("A4")):
            continue
        effect = math.sqrt(n / (n - 1)) - 1.0
        line = f"{site.path}: the sum of squares is {own.words}; "
        line += f"for n = {n} the output's length is {percent(effect)} off"
        cases.append(Case(site.path, worst((severity_of(effect), "warning")), effect, line))
    return hit(cases, f"another divisor of the variance at {counted(len(cases), 'norm')}") or undecided(
        facts, fields_of("A4")
    )


RULES = (
    Rule(
        id="A1",
        title="Eps is not the one meant, or large beside what enters",
        severity="error",
        threshold=(
            f"output length changed against the eps of the config's class or the intent file by more than "
            f"{percent(VISIBLE)} (warning) or {percent(HARMFUL)} (error); without either, more than "
            f"{percent(_SHORT_ROWS)} of the rows keep less than 90 % of their length (warning), or the median row less "
            f"than {percent(_DOMINATED)} (error; with the eps that is meant a warning, in an untrained model a note)"
        ),
        source=f"meta-llama/llama#771, pytorch/torchtune#152 and #290; {STEP}",
        why=(
            "Eps only guards the division by zero. Where it is not small beside the mean square of a row, the row "
            "leaves too short, and small rows shorter than large ones: the weights behind it were trained on another "
            "length. It shows first where inputs are small: behind the embedding, and at queries and keys."
        ),
        remedy=(
            "set eps to the value in the checkpoint's config",
            "if the config itself is at fault, take an eps below 1 % of the mean square that enters",
        ),
        confirm="nk.identify(module, shape) shows the eps that is computed; compare it with the one that is meant",
        check=_wrong_eps,
        follows=("A3", "A6", "A9", "A11", "A12"),
        is_of_text=True,
    ),
    Rule(
        id="A2",
        title="Eps is added outside the root, or not where it is meant",
        severity="error",
        threshold=(
            "eps outside the root where the config's class or the intent file has it inside, or where there is "
            "neither, or inside where they have it outside or as a lower bound (warning); "
            f"the output's length changes by more than {percent(HARMFUL)} (error)"
        ),
        source=f"tracel-ai/burn#2185, hkproj/pytorch-transformer#31; {STEP}",
        why=(
            "x / (sqrt(v) + eps) and x / sqrt(v + eps) agree for large rows only: a small one is shorter by the share "
            "eps / sqrt(v) in the first, eps / (2 v) in the second. Weights trained with one do not fit the other."
        ),
        remedy=(
            "move eps under the root: x * rsqrt(v + eps)",
            f"if the weights were trained this way, keep it and say so: nk.NormSpec({PLACEMENTS['outside'].argument})",
        ),
        confirm=f"nk.identify(module, shape).spec.{fields_of('A2')[0]}",
        check=_eps_elsewhere,
        follows=("A11", "A12"),
    ),
    Rule(
        id="A4",
        title="The variance is divided by the wrong number",
        severity="error",
        threshold=(
            "n - 1 where the config's class or the intent file divides by n, or where there is neither, and the "
            "reverse (warning); "
            f"the output's length changes by more than {percent(HARMFUL)} (error)"
        ),
        source=f"harvardnlp/annotated-transformer#119, FluxML/Flux.jl#529; {STEP}",
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
        follows=("A11", "A12"),
    ),
)
"""The rules of this group, in order."""
