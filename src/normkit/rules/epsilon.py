"""Group A: eps. It is a lower bound or missing, follows the dtype, is lost in 16 bits, or grows with the row."""

from __future__ import annotations

import math

from normkit.conventions.eps import EPS, PLACEMENTS, eps_in
from normkit.measurement.facts import Site
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import Case, Facts, Outcome, Rule, hit, worst
from normkit.rules.scale import (
    HARMFUL,
    STEP,
    USUAL_PLACEMENT,
    as_divided,
    effect_of,
    in_words,
    ratios_at,
    severity_of,
)
from normkit.text import counted, percent

# Half of float16's smallest number, 2**-24: what is not larger rounds to 0.
_LOST = 2.0**-25
_COARSE = (EPS["bfloat16"], EPS["float16"])
_FELT = 0.01
_EPS = fields_of("A1")


def _clamp_or_none(facts: Facts) -> Outcome:
    """Max(sqrt(v), eps), or nothing at all, where an eps is meant to be added, or where nothing is known."""
    cases = []
    for site in facts.sites:
        if (case := _clamped(site, facts) or _without(site, facts)) is not None:
            cases.append(case)
    return hit(cases, f"no eps is added at {counted(len(cases), 'norm')}") or undecided(facts, _EPS)


def _clamped(site: Site, facts: Facts) -> Case | None:
    intended, eps = facts.intended(site), eps_in(site.dtype, site.spec.eps)
    meant = intended is not None and not intended.placement.shortens_every_row
    if site.spec.placement.shortens_every_row or meant or is_open(site, facts, _EPS):
        return None
    usual = site.spec.replace(**USUAL_PLACEMENT.conventions(eps**2))
    if (ratios := ratios_at(site, usual if intended is None else as_divided(intended, site))) is None:
        return None
    line = f"{site.path}: a row is divided by its length or by {eps:.3g}, whichever is larger; {in_words(site, ratios)}"
    severity: Severity = "note"
    if intended is not None:
        severity = worst((severity_of(effect_of(ratios)), "warning"))
    elif site.attenuation.share_below_99 > _FELT:
        severity = "warning"
        line += f"; {percent(site.attenuation.share_below_99)} of the rows lie below it"
    return Case(site.path, severity, effect_of(ratios), line)


def _without(site: Site, facts: Facts) -> Case | None:
    intended = facts.intended(site)
    if eps_in(site.dtype, site.spec.eps) != 0 or is_open(site, facts, _EPS):
        return None
    if intended is None:
        return Case(site.path, "note", 0.0, f"{site.path}: there is no eps: a row of zeros is divided by zero")
    if (wanted := eps_in(site.dtype, intended.eps)) == 0:
        return None
    line = f"{site.path}: there is no eps, {facts.source_at(site.path)} says {wanted:.3g}"
    line += ": a row of zeros is divided by zero"
    return Case(site.path, "warning", 0.0, line)


def _of_the_dtype(facts: Facts) -> Outcome:
    """Eps is a machine epsilon that nobody chose: of the input's dtype, or of torch's arithmetic."""
    cases = [case for site in facts.sites if (case := _by_dtype(site, facts) or _by_default(site, facts)) is not None]
    return hit(cases, f"eps is a machine epsilon at {counted(len(cases), 'norm')}")


def _by_dtype(site: Site, facts: Facts) -> Case | None:
    passport = facts.passports.get(site.path)
    found = None if passport is None else passport.readings.get("eps by dtype")
    if found is None and site.spec.eps not in _COARSE:
        return None
    by_dtype: dict[str, float] = {} if found is None else found.value
    now, intended = by_dtype.get(site.dtype, eps_in(site.dtype, site.spec.eps)), facts.intended(site)
    wanted = EPS["float32"] if intended is None else eps_in(site.dtype, intended.eps)
    # The ratio is of what this dtype's eps does to what the wanted one does.
    seen, meant = site.spec.replace(eps=now), site.spec.replace(eps=wanted)
    ratios = ratios_at(site, meant, seen)
    effect = 0.0 if ratios is None else effect_of(ratios)
    others = " and ".join(f"{eps:.3g} in {dtype}" for dtype, eps in by_dtype.items())
    line = f"{site.path}: eps is {now:.3g} in {site.dtype}" + (f", {others}" if others else "")
    if ratios is not None:
        line += f"; beside {wanted:.3g}, {in_words(site, ratios)}"
    return Case(site.path, worst((severity_of(effect), "warning")), effect, line)


def _by_default(site: Site, facts: Facts) -> Case | None:
    if site.spec.eps is not None or facts.intended(site) is not None:
        return None
    line = f"{site.path}: eps is torch's default, {eps_in(site.dtype, site.spec.eps):.3g} for {site.dtype} input"
    return Case(site.path, "note", 0.0, line)


def _lost(facts: Facts) -> Outcome:
    """Eps becomes 0 where it is added in float16."""
    cases = []
    for site in facts.sites:
        passport, intended = facts.passports.get(site.path), facts.intended(site)
        eps = eps_in(site.dtype, site.spec.eps)
        found = None if passport is None else passport.readings.get("degenerate rows")
        rows = {} if found is None else found.value
        vanishes = rows.get("zeros") == "finite" != rows.get("zeros in float16", "finite")
        if eps <= 0 or not (vanishes or (site.spec.casts.has_narrow_statistics and eps <= _LOST)):
            continue
        is_half = site.dtype == "float16"
        if not is_half and intended is not None and intended.casts.has_narrow_statistics:
            continue
        line = f"{site.path}: eps {eps:.3g} is added in the input's dtype, where float16 has no number below 6e-08"
        zeros = site.input.zero_rows
        line += f"; {counted(zeros, 'row')} of zeros entered" if zeros else ""
        cases.append(Case(site.path, "error" if is_half else "note", -math.log10(eps), line))
    where = "is" if any(case.severity == "error" for case in cases) else "would be, in float16,"
    return hit(cases, f"eps {where} 0 at {counted(len(cases), 'norm')}")


def _rescaled(facts: Facts) -> Outcome:
    """Rows are divided by their largest element first, and eps is added to what is left."""
    cases = []
    for other in facts.others:
        if (found := other.passport.readings.get("rescaled eps")) is None:
            continue
        features = other.passport.shape[-1]
        # The square of a row's largest element is at most n times its mean square.
        effect = 1.0 - 1.0 / math.sqrt(1.0 + found.value * features)
        line = (
            f"{other.path}: eps {found.value:.3g} acts as {found.value:.3g} times the square of a row's largest "
            f"element: a row with one large element is {percent(effect)} too short"
        )
        cases.append(Case(other.path, worst((severity_of(effect), "warning")), effect, line))
    return hit(cases, f"eps grows with the row at {counted(len(cases), 'norm')}")


RULES = (
    Rule(
        id="A3",
        title="Eps is a lower bound of the divisor, or missing",
        severity="error",
        threshold=(
            "max(sqrt(v), eps) or no eps where the config's class or the intent file adds one (warning); the output's "
            f"length changes by more than {percent(HARMFUL)} (error); without either a note, or a warning where more "
            f"than {percent(_FELT)} of the rows lie near or below the bound"
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
        check=_clamp_or_none,
        follows=("A12",),
    ),
    Rule(
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
        check=_of_the_dtype,
    ),
    Rule(
        id="A7",
        title="Eps is lost in float16",
        severity="error",
        threshold=(
            f"eps of {_LOST:.2g} or less added in float16, or zeros that turn NaN there (error; in other dtypes a note)"
        ),
        source="pytorch/pytorch#86580, tensorflow#24979",
        why=(
            "The smallest number above 0 that float16 has is 6e-08. An eps of 1e-08 is 0 there, and a row of zeros, or "
            "one whose squares vanish, is divided by zero."
        ),
        remedy=("compute the statistics in float32", "or take an eps of at least 1e-05 in float16"),
        confirm="the module's output for a row of zeros in float16",
        check=_lost,
    ),
    Rule(
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
            "and so acts as eps times that square: rows with one large element, which every large model has, leave "
            "shorter than others."
        ),
        remedy=("divide eps by the square of the same element", "or compute the squares in float32, without a rescale"),
        confirm="nk.identify(module, shape).readings['rescaled eps']",
        check=_rescaled,
        looks_at=("norms", "other norms"),
    ),
)
"""The rules of this group, in order."""
