"""Groups A and B: each convention of a norm, and the factor of its output, against what is meant there.

`RULE_OF` says which rule compares which field of `NormSpec`: a field without a rule would never be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from normkit.identification.passport import CONVENTIONS, Passport
from normkit.measurement.facts import Site
from normkit.measurement.quantities import Spectrum
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_INTENT, Case, Facts, NotChecked, Outcome, Rule, hit, worst
from normkit.rules.scale import HARMFUL, ROUNDING, severity_of
from normkit.spec import NormSpec
from normkit.text import counted, percent

_RULES_OF: dict[str, tuple[str, ...]] = {
    "rows": ("C1", "C1"),
    "centring": ("A11", "A11"),
    "divisor": ("A4", "A12", "A12"),
    "eps": ("A1", "A2"),
    "gain": ("B11", "B1", "B13"),
    "bias": ("B12",),
    "offset dtype": ("B3",),
    "casts": ("E2", "E1", "E1"),
    "output dtype": ("E6",),
}
"""The rules that compare the fields of `CONVENTIONS`, in the order in which they are there."""

RULE_OF: Mapping[str, str] = MappingProxyType(
    {
        field: rule
        for reading, fields in CONVENTIONS.items()
        for field, rule in zip(fields, _RULES_OF[reading], strict=True)
    }
)
"""The rule that compares each field. B2 compares the offset as B1 does, A3 the place of eps as A2 does."""

_READING_OF = {field: reading for reading, fields in CONVENTIONS.items() for field in fields}

Judge = Callable[[Site, NormSpec, Facts], Case | None]
"""Makes a case of a site's difference from the spec that is meant there; None if the difference is no fault."""


def fields_of(rule: str) -> tuple[str, ...]:
    """The fields of `NormSpec` that a rule compares."""
    return tuple(field for field, name in RULE_OF.items() if name == rule)


def compared(facts: Facts, fields: tuple[str, ...], judge: Judge, words: str) -> Outcome:
    """Hold some fields of each norm's spec against the one that is meant: the one function behind all such rules.

    Args:
        facts: All that was measured.
        fields: Fields of `NormSpec`.
        judge: Called if one of the fields differs.
        words: The fault in words, to follow "3 norms".

    Returns:
        The sites that differ as one hit. Else `NotChecked` where identification left one of the fields open at a norm
        that is not the stock class's own, or where nothing is known of what is meant.
    """
    cases = []
    for site in facts.sites:
        meant = facts.intended(site)
        if meant is None or is_open(site, facts, fields):
            continue
        if any(getattr(site.spec, field) != getattr(meant, field) for field in fields):
            case = judge(site, meant, facts)
            cases += [] if case is None else [case]
    if not cases and not facts.is_intent_known:
        return NO_INTENT
    return hit(cases, f"{counted(len(cases), 'norm')} {words}") or undecided(facts, fields)


def is_open(site: Site, facts: Facts, fields: tuple[str, ...]) -> bool:
    """Identification could not decide one of these fields at a site."""
    passport = facts.passports.get(site.path)
    return passport is not None and any(_open_reading(passport, field) for field in fields)


def _open_reading(passport: Passport, field: str) -> str | None:
    """The reading that should decide a field of the spec and does not; None where the field is known."""
    name = _READING_OF[field]
    return name if name in passport.undecidable and field not in (passport.readings[name].value or ()) else None


def undecided(facts: Facts, fields: tuple[str, ...]) -> NotChecked | None:
    """Why some fields could not be compared at a norm whose intent is known; None where all were.

    A norm that is of the stock class and runs its forward computes what is meant, whatever was decided of it.
    """
    reasons: dict[str, str] = {}
    for site in facts.sites:
        if facts.intended(site) is None or facts.is_stock(site.path):
            continue
        passport = facts.passports.get(site.path)
        for field in fields:
            if passport is not None and (reading := _open_reading(passport, field)) is not None:
                reasons.setdefault(site.path, passport.undecidable[reading])
    if not reasons:
        return None
    path, reason = next(iter(reasons.items()))
    return NotChecked(f"not decided at {counted(len(reasons), 'norm')}, first at {path}: {reason}")


def _otherwise_centred(facts: Facts) -> Outcome:
    """A LayerNorm where an RMSNorm is meant, the reverse, and the two halves of each."""
    return compared(facts, fields_of("A11"), _centring, "centred otherwise than meant")


def _centring(site: Site, meant: NormSpec, facts: Facts) -> Case:
    # The mean's share of a row's energy: what is subtracted, or left in, is the root of that share of the length.
    share = site.input.mean_energy
    effect = math.sqrt(share) if share > 0 else 0.0
    if effect <= ROUNDING.get(site.dtype, 0.0) and not math.isnan(share):
        line = f"{site.path}: the mean is {site.spec.centring.words}; what enters has none, so both formulas agree"
        return Case(site.path, "note", effect, line)
    line = f"{site.path}: the mean is {site.spec.centring.words}, {facts.source_at(site.path)} says "
    line += meant.centring.words
    line += f"; the mean is {percent(effect)} of the length of the rows that enter"
    return Case(site.path, worst((severity_of(effect), "warning")), effect, line)


def _otherwise_long(facts: Facts) -> Outcome:
    """An L2 norm in place of a root mean square, or the reverse: sqrt(n) is missing or there twice."""
    return compared(facts, fields_of("A12"), _length, "with rows of another length than meant")


def _length(site: Site, meant: NormSpec, facts: Facts) -> Case | None:
    n = site.input.features
    mine, wanted = site.spec.divisor.rms(n), meant.divisor.rms(n)
    if mine == wanted:
        return None
    ratio = mine / wanted
    line = f"{site.path}: the sum of squares is {site.spec.divisor.words}, {facts.source_at(site.path)} says "
    line += f"{meant.divisor.words}: the output is {ratio:.3g} times as long (n = {n})"
    return Case(site.path, "error", abs(math.log(ratio)), line)


def _gain_presence(facts: Facts) -> Outcome:
    """A gain that is never applied, or one too many."""
    return compared(facts, fields_of("B11"), _gain, "with or without a gain, against what is meant")


def _gain(site: Site, meant: NormSpec, facts: Facts) -> Case:
    words = ("no gain acts on its output", "a gain acts on its output", "all of its entries are 1")
    return _presence(site, meant, facts, site.gain, meant.has_weight, words)


def _bias_presence(facts: Facts) -> Outcome:
    """A bias that was dropped, or one too many."""
    return compared(facts, fields_of("B12"), _bias, "with or without a bias, against what is meant")


def _bias(site: Site, meant: NormSpec, facts: Facts) -> Case:
    words = ("no bias is added", "a bias is added", "all of its entries are 0")
    return _presence(site, meant, facts, site.bias, meant.has_bias, words)


def _presence(
    site: Site, meant: NormSpec, facts: Facts, found: Spectrum | None, is_meant: bool, words: tuple[str, str, str]
) -> Case:
    """A parameter that is missing, one too many, or one too many that changes nothing, in these words."""
    missing, superfluous, neutral = words
    line = f"{site.path}: {missing if is_meant else superfluous}, {facts.source_at(site.path)} says {meant}"
    if not is_meant and found is not None and found.at_initialisation:
        return Case(site.path, "note", 0.0, f"{line}; {neutral}")
    return Case(site.path, "error", 1.0, line)


def _gain_placement(facts: Facts) -> Outcome:
    """A gain in front of the division, where one behind it is meant, or the reverse."""
    return compared(facts, fields_of("B13"), _placement, "with the gain on the other side of the division")


def _placement(site: Site, meant: NormSpec, facts: Facts) -> Case | None:
    if not (site.spec.has_weight and meant.has_weight):
        return None
    # A gain of one number cancels in front of the division, and multiplies behind it.
    severity: Severity = "warning" if site.gain is not None and site.gain.at_initialisation else "error"
    line = f"{site.path}: the gain multiplies {site.spec.gain.placement} the row is normalized, "
    line += f"{facts.source_at(site.path)} says {meant.gain.placement}"
    return Case(site.path, severity, 1.0, line)


_MEANT = "of the config's class or the intent file"

RULES = (
    Rule(
        id="A11",
        title="The mean is subtracted, or kept, against what is meant",
        severity="error",
        threshold=(
            f"another centring of numerator or statistics than that {_MEANT} (warning); the mean is more than "
            f"{percent(HARMFUL)} of the length of the rows that enter (error), or no more than rounding (note)"
        ),
        source="Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450",
        why=(
            "LayerNorm subtracts each row's mean and divides by the standard deviation; RMSNorm does neither. Names "
            "do not tell which one a class computes. Weights trained with one read other vectors from the other: "
            "shapes fit, and every output is turned."
        ),
        remedy=(
            "compute the norm that the checkpoint was trained with: torch.nn.RMSNorm or torch.nn.LayerNorm",
            "if the weights were trained this way, declare it in an intent file",
        ),
        confirm="nk.identify(module, shape).readings['centring']; compare norm(x + 1) with norm(x)",
        check=_otherwise_centred,
    ),
    Rule(
        id="A12",
        title="Normalized rows have another length than meant",
        severity="error",
        threshold=f"a factor of sqrt(n) more or less than that {_MEANT}",
        source="Nguyen and Salazar 2019, arXiv:1910.05895; torch.nn.functional.normalize",
        why=(
            "An L2 norm gives rows of length 1, a root mean square rows of length sqrt(n). Without the factor every "
            "output is sqrt(n) times too short or too long: gain and following weights were trained on the other."
        ),
        remedy=(
            "divide by the root of the mean square, or multiply the L2-normalized row by sqrt(n)",
            "if the weights were trained this way, declare it in an intent file",
        ),
        confirm="nk.identify(module, shape).readings['divisor']; the length of an output row beside sqrt(n)",
        check=_otherwise_long,
    ),
    Rule(
        id="B11",
        title="A gain is not applied, or is one too many",
        severity="error",
        threshold=f"a gain where the norm {_MEANT} has none (a note while it is 1), or the reverse (error)",
        source="torch.nn.LayerNorm(elementwise_affine=False); Ba et al. 2016, arXiv:1607.06450",
        why=(
            "A norm that never multiplies by its gain gives every feature the same weight. Loading does not fail: the "
            "parameter is there, and nothing reads it."
        ),
        remedy=(
            "multiply the normalized row by the gain in forward",
            "check that elementwise_affine is as in the config",
        ),
        confirm="nk.identify(module, shape).readings['gain']; double the weight and compare the outputs",
        check=_gain_presence,
        follows=("A11",),
    ),
    Rule(
        id="B12",
        title="A bias is dropped, or is one too many",
        severity="error",
        threshold=f"a bias where the norm {_MEANT} has none (a note while it is 0), or the reverse (error)",
        source="torch.nn.LayerNorm(bias=False); Ba et al. 2016, arXiv:1607.06450",
        why=(
            "The bias moves every row by the same vector, and a trained one may be longer than what varies. A port "
            "that drops it shifts the input of all that follows."
        ),
        remedy=("add the bias of the checkpoint in forward", "check that bias= of the norm is as in the config"),
        confirm="nk.identify(module, shape).readings['bias']; the output for a constant row",
        check=_bias_presence,
        follows=("A11",),
    ),
    Rule(
        id="B13",
        title="The gain is on the other side of the division",
        severity="error",
        threshold=f"a gain in front of the division where that {_MEANT} is behind it, or the reverse",
        source="MuseSparkTextInputScaledRMSNorm of transformers; Zhang and Sennrich 2019, arXiv:1910.07467",
        why=(
            "In front of the division the gain changes the statistics too, and its length cancels: only its direction "
            "counts. Behind it, it multiplies what was normalized."
        ),
        remedy=("multiply by the gain where the checkpoint's own code does",),
        confirm=f"nk.identify(module, shape).spec.{fields_of('B13')[0]}; double the weight and compare the outputs",
        check=_gain_placement,
        follows=("B11",),
    ),
)
"""The rules of this group, in order."""
