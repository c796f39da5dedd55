"""Group A, eps: its size and place, a lower bound or none, of the dtype, lost in 16 bits, multiplied by a rescale."""

from __future__ import annotations

import math

from normkit.conventions.eps import EPS, PLACEMENTS, eps_in
from normkit.measurement.facts import Site
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import Case, NotChecked, Outcome, Rule, hit, worst
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
# The default of Keras; no library has a larger one.
_LARGEST = 1e-3
# Half of float16's smallest number, 2**-24: anything not larger rounds to 0.
_LOST = 2.0**-25
_COARSE = (EPS["bfloat16"], EPS["float16"])
_FELT = 0.01
_EPS, _PLACEMENT = fields_of("A1"), fields_of("A2")


@Rule(
    id="A1",
    title="Eps is not the one meant, or is large for the input",
    severity="error",
    threshold=(
        f"output length changed against the eps of the config's class or the intent file by more than "
        f"{percent(VISIBLE)} (warning) or {percent(HARMFUL)} (error); without either, more than "
        f"{percent(_SHORT_ROWS)} of the rows keep less than 90 % of their length (warning), or the median row less "
        f"than {percent(_DOMINATED)} (error; with the eps that is meant a warning, in an untrained model "
        f"a note; so is one over {_LARGEST:g} that shortens the median row by more than {percent(HARMFUL)})"
    ),
    source=f"meta-llama/llama#771, pytorch/torchtune#152 and #290; {STEP}",
    why=(
        "Eps only guards the division by zero. If it is not small beside the mean square of a row, the output is too "
        "short, and more so for short rows: the weights behind it were trained on another length. It shows first "
        "where inputs are small: behind the embedding, and at queries and keys."
    ),
    remedy=(
        "set eps to the value in the checkpoint's config",
        "if the config itself is wrong, take an eps below 1 % of the input's mean square",
    ),
    confirm="nk.identify(module, shape) shows the eps that is computed; compare it with the one that is meant",
    follows=("A3", "A6", "A9", "A11", "A12"),
    is_of_text=True,
)
def wrong_eps(facts: Facts) -> Outcome:
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
        return NotChecked("no config or intent file to compare eps with; eps is small beside the inputs of all norms")
    return undecided(facts, _EPS)


def _other_eps(site: Site, facts: Facts) -> Case | None:
    """Not the intended eps; the severity is that of the effect at the observed scale."""
    intended, n = facts.intended(site), site.input.features
    if intended is None or intended.placement is not site.spec.placement or is_open(site, facts, _EPS):
        return None
    if intended.divisor.rms(n) != site.spec.divisor.rms(n):
        # An eps beside a sum of squares is none beside their mean.
        return None
    meant = as_divided(intended, site)
    actual, wanted = eps_in(site.dtype, site.spec.eps), eps_in(site.dtype, meant.eps)
    ratios = ratios_at(site, meant)
    if abs(actual - wanted) <= _SAME_EPS * max(abs(actual), abs(wanted)) or ratios is None:
        return None
    effect = effect_of(ratios)
    words = f"eps is {actual:.3g}, {facts.source_at(site.path)} says {wanted:.3g}; {in_words(site, ratios)}"
    return Case(site.path, severity_of(effect), words, effect)


def _dominating_eps(site: Site, facts: Facts) -> Case | None:
    """Eps is large beside the input. If it is the one that is meant, the weights were trained with it."""
    median, share = site.attenuation.median, site.attenuation.share_below_90
    severity: Severity
    if facts.intended(site) is None and (median < _DOMINATED or share > _SHORT_ROWS):
        severity = "error" if median < _DOMINATED else "warning"
    elif median < _DOMINATED:
        # Small models start with tiny branches, which training lengthens.
        severity = "note" if facts.is_untrained else "warning"
    elif eps_in(site.dtype, site.spec.eps) > _LARGEST and 1 - median > HARMFUL:
        severity = "note" if facts.is_untrained else "warning"
    else:
        return None
    words = (
        f"eps {eps_in(site.dtype, site.spec.eps):.3g} beside a median input rms of {site.input.rms_median:.3g}: the "
        f"median row keeps {percent(median)} of its length, {percent(share)} of the rows keep less than 90 %"
    )
    return Case(site.path, severity, words, 1.0 - median)


@Rule(
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
    confirm=f"nk.identify(module, shape).spec.{_PLACEMENT[0]}",
    follows=("A11", "A12"),
)
def misplaced_eps(facts: Facts) -> Outcome:
    """Outside the root where it is meant inside, or where nothing is known; inside where it is meant elsewhere."""
    cases, is_outside = [], True
    for site in facts.sites:
        intended, eps = facts.intended(site), eps_in(site.dtype, site.spec.eps)
        own, placement = site.spec.placement, USUAL_PLACEMENT if intended is None else intended.placement
        # A3 reports a lower bound in place of an eps that is added.
        if own is placement or not own.shortens_every_row or eps == 0 or is_open(site, facts, _PLACEMENT):
            continue
        usual = site.spec.replace(**USUAL_PLACEMENT.conventions(site.spec.eps))
        if (ratios := ratios_at(site, usual if intended is None else as_divided(intended, site))) is None:
            continue
        words = f"eps {eps:.3g} is added {own.words}"
        words += f", {facts.source_at(site.path)} says {placement.words}" if placement is not USUAL_PLACEMENT else ""
        effect = effect_of(ratios)
        severity = worst((severity_of(effect), "warning"))
        cases.append(Case(site.path, severity, f"{words}; {in_words(site, ratios)}", effect))
        is_outside &= own is PLACEMENTS["outside"]
    where = "eps outside the root" if is_outside else "eps at another place than meant"
    return hit(cases, f"{where} at {counted(len(cases), 'norm')}") or undecided(facts, _PLACEMENT)


@Rule(
    id="A3",
    title="Eps is a lower bound of the divisor, or missing",
    severity="error",
    threshold=(
        "max(sqrt(v), eps) or no eps where the config's class or the intent file adds one (warning); the output's "
        f"length changes by more than {percent(HARMFUL)} (error); without either a note, or a warning where more "
        f"than {percent(_FELT)} of the rows are near or below the bound"
    ),
    source=f"lucidrains/x-transformers, allenai/OLMo-core l2_normalize, pytorch/pytorch#86580; {STEP}",
    why=(
        "Below a lower bound a row keeps its own scale, and the gradient along it jumps where the bound begins. "
        "Without any eps a row of zeros is 0 / 0, and its NaN reaches every token that attends to it."
    ),
    remedy=(
        "add eps under the root: x * rsqrt(v + eps)",
        f"if the weights were trained this way, keep it and say so: nk.NormSpec({PLACEMENTS['clamp'].argument})",
    ),
    confirm="nk.identify(module, shape).readings['eps'], and its output for a row of zeros",
    follows=("A12",),
)
def no_added_eps(facts: Facts) -> Outcome:
    """max(sqrt(v), eps), or nothing at all, where an eps is meant to be added, or where nothing is known."""
    seen = (_lower_bound(site, facts) or _without_eps(site, facts) for site in facts.sites)
    cases = [case for case in seen if case is not None]
    return hit(cases, f"no eps is added at {counted(len(cases), 'norm')}") or undecided(facts, _EPS)


def _lower_bound(site: Site, facts: Facts) -> Case | None:
    intended, eps = facts.intended(site), eps_in(site.dtype, site.spec.eps)
    is_meant = intended is not None and not intended.placement.shortens_every_row
    if site.spec.placement.shortens_every_row or is_meant or is_open(site, facts, _EPS):
        return None
    usual = site.spec.replace(**USUAL_PLACEMENT.conventions(eps**2))
    if (ratios := ratios_at(site, usual if intended is None else as_divided(intended, site))) is None:
        return None
    words = f"a row is divided by its length or by {eps:.3g}, whichever is larger; {in_words(site, ratios)}"
    severity: Severity = "note"
    if intended is not None:
        severity = worst((severity_of(effect_of(ratios)), "warning"))
    elif site.attenuation.share_below_99 > _FELT:
        severity = "warning"
        words += f"; {percent(site.attenuation.share_below_99)} of the rows are below it"
    return Case(site.path, severity, words, effect_of(ratios))


def _without_eps(site: Site, facts: Facts) -> Case | None:
    intended = facts.intended(site)
    if eps_in(site.dtype, site.spec.eps) != 0 or is_open(site, facts, _EPS):
        return None
    if intended is None:
        return Case(site.path, "note", "there is no eps: a row of zeros is divided by zero")
    if (wanted := eps_in(site.dtype, intended.eps)) == 0:
        return None
    words = f"there is no eps, {facts.source_at(site.path)} says {wanted:.3g}: a row of zeros is divided by zero"
    return Case(site.path, "warning", words)


@Rule(
    id="A6",
    title="Eps follows the dtype",
    severity="error",
    threshold=(
        f"eps is {_COARSE[0]:.3g} (bfloat16) or {_COARSE[1]:.3g} (float16), or changes with the input's dtype "
        f"(warning); the output's length changes by more than {percent(HARMFUL)} against the eps that is meant, "
        "or else that of float32 (error); torch's default where none is known is a note"
    ),
    source=f"pytorch/pytorch#140092, #142848 and #189581; {STEP}",
    why=(
        "An eps that nobody chose is a machine epsilon. Older torch took that of the input's dtype: 0.0078 in "
        "bfloat16, which shortens a row of rms 0.055 to 53 % of its length, and is another function than in "
        "float32."
    ),
    remedy=("pass eps explicitly, with the value of the checkpoint's config",),
    confirm="nk.identify(module, shape, dtype=torch.bfloat16).spec.eps beside that of torch.float32",
)
def eps_of_the_dtype(facts: Facts) -> Outcome:
    """Eps is a machine epsilon that nobody chose: of the input's dtype, or of torch's arithmetic."""
    cases = []
    for site in facts.sites:
        intended, own = facts.intended(site), eps_in(site.dtype, site.spec.eps)
        found = facts.reading(site.path, "eps by dtype")
        if found is None and site.spec.eps not in _COARSE:
            if site.spec.eps is None and intended is None:
                words = f"eps is torch's default, {own:.3g} for {site.dtype} input"
                cases.append(Case(site.path, "note", words))
            continue
        by_dtype: dict[str, float] = {} if found is None else found.value
        now = by_dtype.get(site.dtype, own)
        wanted = EPS["float32"] if intended is None else eps_in(site.dtype, intended.eps)
        # The effect of this dtype's eps over that of the wanted one.
        ratios = ratios_at(site, site.spec.replace(eps=wanted), site.spec.replace(eps=now))
        effect = 0.0 if ratios is None else effect_of(ratios)
        words = f"eps is {now:.3g} in {site.dtype}"
        words += ", " + " and ".join(f"{eps:.3g} in {dtype}" for dtype, eps in by_dtype.items()) if by_dtype else ""
        words += f"; compared with {wanted:.3g}, {in_words(site, ratios)}" if ratios is not None else ""
        cases.append(Case(site.path, worst((severity_of(effect), "warning")), words, effect))
    return hit(cases, f"eps is a machine epsilon at {counted(len(cases), 'norm')}")


@Rule(
    id="A7",
    title="Eps is lost in float16",
    severity="error",
    threshold=(
        f"eps of {_LOST:.2g} or less added in float16, or zeros that turn NaN there (error; in other dtypes a note)"
    ),
    source="pytorch/pytorch#86580, tensorflow#24979",
    why=(
        "The smallest number above 0 in float16 is 6e-08. An eps of 1e-08 is 0 there, and a row of zeros, or one "
        "whose squares vanish, is divided by zero."
    ),
    remedy=("compute the statistics in float32", "or take an eps of at least 1e-05 in float16"),
    confirm="the module's output for a row of zeros in float16",
)
def lost_eps(facts: Facts) -> Outcome:
    """Eps becomes 0 where it is added in float16."""
    cases = []
    for site in facts.sites:
        intended, eps = facts.intended(site), eps_in(site.dtype, site.spec.eps)
        found = facts.reading(site.path, "degenerate rows")
        rows = {} if found is None else found.value
        vanishes = rows.get("zeros") == "finite" != rows.get("zeros in float16", "finite")
        if eps <= 0 or not (vanishes or (site.spec.casts.has_narrow_statistics and eps <= _LOST)):
            continue
        is_half = site.dtype == "float16"
        if not is_half and intended is not None and intended.casts.has_narrow_statistics:
            continue
        words = f"eps {eps:.3g} is added in the input's dtype; float16 has no number between 0 and 6e-08"
        zeros = site.input.zero_rows
        words += f"; {counted(zeros, 'row')} of zeros entered" if zeros else ""
        cases.append(Case(site.path, "error" if is_half else "note", words, -math.log10(eps)))
    where = "is" if any(case.severity == "error" for case in cases) else "would be, in float16,"
    return hit(cases, f"eps {where} 0 at {counted(len(cases), 'norm')}")


@Rule(
    id="A8",
    title="Eps is multiplied by a rescale",
    severity="error",
    threshold=(
        "eps acts in proportion to the square of the row's largest element (warning); a row with one large element "
        f"becomes more than {percent(HARMFUL)} too short (error)"
    ),
    source=f"coremltools#2822; {STEP}",
    why=(
        "Dividing a row by its largest element keeps the squares in range. Eps is then added to a smaller number, "
        "and so acts as eps times that square: rows with one large element, which every large model has, come out "
        "shorter than others."
    ),
    remedy=("divide eps by the square of the same element", "or compute the squares in float32, without a rescale"),
    confirm="nk.identify(module, shape).readings['rescaled eps']",
    looks_at=("norms", "other norms"),
)
def rescaled_eps(facts: Facts) -> Outcome:
    """Rows are divided by their largest element before eps is added."""
    cases = []
    for other in facts.others:
        if (found := other.passport.readings.get("rescaled eps")) is None:
            continue
        # The square of a row's largest element is at most n times its mean square.
        effect = 1.0 - 1.0 / math.sqrt(1.0 + found.value * other.passport.shape[-1])
        words = (
            f"eps {found.value:.3g} acts as {found.value:.3g} times the square of a row's largest "
            f"element: a row with one large element is {percent(effect)} too short"
        )
        cases.append(Case(other.path, worst((severity_of(effect), "warning")), words, effect))
    return hit(cases, f"eps grows with the row at {counted(len(cases), 'norm')}")


RULES = (wrong_eps, misplaced_eps, no_added_eps, eps_of_the_dtype, lost_eps, rescaled_eps)
"""The rules of this file."""
