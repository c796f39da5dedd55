"""Groups A and B: each convention of a norm against the one that is meant there.

`RULE_OF` says which rule compares which field of `NormSpec`: a field without a rule would never be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from normkit.identification.passport import Passport
from normkit.identification.spec_readings import CONVENTIONS
from normkit.measurement.facts import Site, Spectrum
from normkit.rules.facts import Facts
from normkit.rules.finding import Severity
from normkit.rules.rule import NO_INTENT, Case, Hit, NotChecked, Outcome, Rule, hit, worst
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
"""The rule that compares each field of `CONVENTIONS`, in the order of the fields there."""

RULE_OF: Mapping[str, str] = MappingProxyType(
    {
        field: rule
        for reading, fields in CONVENTIONS.items()
        for field, rule in zip(fields, _RULES_OF[reading], strict=True)
    }
)
"""The rule that compares each field. B2 compares the offset as B1 does, A3 the place of eps as A2 does."""

_READING_OF = {field: reading for reading, fields in CONVENTIONS.items() for field in fields}
_MEANT = "of the config's class or the intent file"
# Names of classes that promise a mean of squares; "rms" in small letters ends other words, as "norms".
_AVERAGES = re.compile(r"RMS|Rms|Layer_?[Nn]orm")

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


def undecided(facts: Facts, fields: tuple[str, ...]) -> NotChecked | None:
    """Why some fields could not be compared at a norm whose intent is known; None where all were.

    A norm of the stock class that runs the class's forward computes what is meant, even where a field is undecided.
    """
    reasons: dict[str, str] = {}
    for site in facts.sites:
        passport = facts.passports.get(site.path)
        if passport is None or facts.intended(site) is None or facts.is_stock(site.path):
            continue
        for field in fields:
            if (reading := _open_reading(passport, field)) is not None:
                reasons.setdefault(site.path, passport.undecidable[reading])
    if not reasons:
        return None
    path, reason = next(iter(reasons.items()))
    return NotChecked(f"not decided at {counted(len(reasons), 'norm')}, first at {path}: {reason}")


def _open_reading(passport: Passport, field: str) -> str | None:
    """The reading that should decide a field of the spec and does not; None where the field is known."""
    name = _READING_OF[field]
    return name if name in passport.undecidable and field not in (passport.readings[name].value or ()) else None


@Rule(
    id="A11",
    title="The mean is subtracted, or kept, against what is meant",
    severity="error",
    threshold=(
        f"another centring of numerator or statistics than that {_MEANT} (warning); the mean is more than "
        f"{percent(HARMFUL)} of the length of the rows that enter (error), or no more than rounding (note)"
    ),
    source="Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450",
    why=(
        "LayerNorm subtracts each row's mean and divides by the standard deviation; RMSNorm does neither. The name "
        "of a class does not tell which one it computes. Weights trained with one read other vectors from the other: "
        "shapes fit, and every output has another direction."
    ),
    remedy=(
        "compute the norm that the checkpoint was trained with: torch.nn.RMSNorm or torch.nn.LayerNorm",
        "if the weights were trained this way, declare it in an intent file",
    ),
    confirm="nk.identify(module, shape).readings['centring']; compare norm(x + 1) with norm(x)",
)
def other_centring(facts: Facts) -> Outcome:
    """A LayerNorm where an RMSNorm is meant, the reverse, and the two halves of each."""

    def judge(site: Site, meant: NormSpec, facts: Facts) -> Case:
        # The mean's share of a row's energy: its root is the share of the length that is subtracted or kept.
        share = site.input.mean_energy
        effect = math.sqrt(share) if share > 0 else 0.0
        words = f"the mean is {site.spec.centring.words}"
        if effect <= ROUNDING.get(site.dtype, 0.0) and not math.isnan(share):
            return Case(site.path, "note", f"{words}; its input has no mean, so both formulas agree", effect)
        words += f", {facts.source_at(site.path)} says {meant.centring.words}"
        words += f"; the mean is {percent(effect)} of the length of the rows that enter"
        return Case(site.path, worst((severity_of(effect), "warning")), words, effect)

    return compared(facts, fields_of("A11"), judge, "centred otherwise than meant")


@Rule(
    id="A12",
    title="Normalized rows have another length than meant",
    severity="error",
    threshold=(
        f"a factor of sqrt(n) more or less than that {_MEANT} (error); without either, rows of length 1 at a norm "
        "whose class is called a root mean square or layer norm and whose gain does not make up for it, but for norms "
        "of queries and keys (warning)"
    ),
    source=(
        "Nguyen and Salazar 2019, arXiv:1910.05895; torch.nn.functional.normalize; Zhang and Sennrich 2019, "
        "arXiv:1910.07467 (the root of the mean)"
    ),
    why=(
        "An L2 norm gives rows of length 1, a root mean square rows of length sqrt(n). Without the factor every "
        "output is sqrt(n) times too short or too long: the gain and the following weights were trained on the other "
        "length."
    ),
    remedy=(
        "divide by the root of the mean square, or multiply the L2-normalized row by sqrt(n)",
        "if the weights were trained this way, declare it in an intent file",
    ),
    confirm="nk.identify(module, shape).readings['divisor']; the length of an output row beside sqrt(n)",
)
def other_length(facts: Facts) -> Outcome:
    """An L2 norm in place of a root mean square, or the reverse: sqrt(n) is missing or there twice."""

    def judge(site: Site, meant: NormSpec, facts: Facts) -> Case | None:
        n = site.input.features
        ratio = site.spec.divisor.rms(n) / meant.divisor.rms(n)
        words = f"the sum of squares is {site.spec.divisor.words}, {facts.source_at(site.path)} says "
        words += f"{meant.divisor.words}: the output is {ratio:.3g} times as long (n = {n})"
        return None if ratio == 1 else Case(site.path, "error", words, abs(math.log(ratio)))

    found = compared(facts, fields_of("A12"), judge, "with rows of another length than meant")
    return found if isinstance(found, Hit) else _shorter_than_called(facts) or found


def _shorter_than_called(facts: Facts) -> Hit | None:
    """Rows of length 1 where nothing but the name of the class tells what is meant.

    A gain of about sqrt(n) makes up for it: then they leave nearer to 1 than to 1 / sqrt(n). Queries and keys of length
    1 are those of cosine attention, also where attention was not seen: then they are no rows of the stream.
    """
    cases = []
    for site in facts.sites:
        n, leaves = site.input.features, site.output.rms_median
        is_beside = site.role == "query-key" or (site.role == "unknown" and n != facts.model.width)
        if is_beside or facts.intended(site) is not None or is_open(site, facts, fields_of("A12")):
            continue
        if site.spec.divisor.is_unit and leaves < n**-0.25 and _AVERAGES.search(site.class_name):
            words = f"a {site.class_name} that divides by the root of the sum of squares, not of their mean: its rows "
            words += f"leave with a median rms of {leaves:.3g}, sqrt(n) = {math.sqrt(n):.3g} times too short (n = {n})"
            cases.append(Case(site.path, "warning", words, n))
    return hit(cases, f"rows sqrt(n) times shorter than the name of the class says at {counted(len(cases), 'norm')}")


@Rule(
    id="B11",
    title="A gain is not applied, or is one too many",
    severity="error",
    threshold=(
        f"a gain where the norm {_MEANT} has none (a note while it is 1), or the reverse (error); a parameter of a "
        "norm that changes no output (error)"
    ),
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
    follows=("A11",),
)
def gain_presence(facts: Facts) -> Outcome:
    """A gain that is never applied, or one too many."""

    def judge(site: Site, meant: NormSpec, facts: Facts) -> Case:
        words = ("no gain acts on its output", "a gain acts on its output", "all of its entries are 1")
        return _presence(site, meant, facts, site.gain, meant.has_weight, words)

    found = compared(facts, fields_of("B11"), judge, "with or without a gain, against what is meant")
    return found if isinstance(found, Hit) else _held_and_unread(facts, are_biases=False) or found


@Rule(
    id="B12",
    title="A bias is dropped, or is one too many",
    severity="error",
    threshold=(
        f"a bias where the norm {_MEANT} has none (a note while it is 0), or the reverse (error); a bias that changes "
        "no output (error)"
    ),
    source="torch.nn.LayerNorm(bias=False); Ba et al. 2016, arXiv:1607.06450",
    why=(
        "The bias moves every row by the same vector, and a trained one may be longer than what varies. A port "
        "that drops it shifts the input of all that follows."
    ),
    remedy=("add the bias of the checkpoint in forward", "check that bias= of the norm is as in the config"),
    confirm="nk.identify(module, shape).readings['bias']; the output for a constant row",
    follows=("A11",),
)
def bias_presence(facts: Facts) -> Outcome:
    """A bias that was dropped, or one too many."""

    def judge(site: Site, meant: NormSpec, facts: Facts) -> Case:
        words = ("no bias is added", "a bias is added", "all of its entries are 0")
        return _presence(site, meant, facts, site.bias, meant.has_bias, words)

    found = compared(facts, fields_of("B12"), judge, "with or without a bias, against what is meant")
    return found if isinstance(found, Hit) else _held_and_unread(facts, are_biases=True) or found


def _held_and_unread(facts: Facts, *, are_biases: bool) -> Hit | None:
    """Parameters that a norm holds and that change no output: the biases, by name, or all others."""
    cases = []
    for path, names in facts.idle.items():
        named = [name for name in names if any(word in name.lower() for word in ("bias", "beta")) == are_biases]
        if named and not facts.is_stock(path):
            words = f"it holds {' and '.join(named)}, and other numbers there change no output"
            cases.append(Case(path, "error", words, 1.0))
    noun = "bias" if are_biases else "gain"
    return hit(cases, f"{counted(len(cases), 'norm')} with a {noun} that is never applied")


def _presence(
    site: Site, meant: NormSpec, facts: Facts, found: Spectrum | None, is_meant: bool, words: tuple[str, str, str]
) -> Case:
    """A parameter that is missing, one too many, or one too many that changes nothing, in these words."""
    missing, superfluous, neutral = words
    told = f"{missing if is_meant else superfluous}, {facts.source_at(site.path)} says {meant}"
    if not is_meant and found is not None and found.at_initialisation:
        return Case(site.path, "note", f"{told}; {neutral}")
    return Case(site.path, "error", told, 1.0)


@Rule(
    id="B13",
    title="The gain is on the other side of the division",
    severity="error",
    threshold=f"a gain in front of the division where that {_MEANT} is behind it, or the reverse",
    source="MuseSparkTextInputScaledRMSNorm of transformers; Zhang and Sennrich 2019, arXiv:1910.07467",
    why=(
        "In front of the division the gain changes the statistics too, and its length cancels: only its direction "
        "counts. Behind it, it multiplies the normalized row."
    ),
    remedy=("multiply by the gain where the checkpoint's own code does",),
    confirm=f"nk.identify(module, shape).spec.{fields_of('B13')[0]}; double the weight and compare the outputs",
    follows=("B11",),
)
def gain_placement(facts: Facts) -> Outcome:
    """A gain in front of the division, where one behind it is meant, or the reverse."""

    def judge(site: Site, meant: NormSpec, facts: Facts) -> Case | None:
        if not (site.spec.has_weight and meant.has_weight):
            return None
        # A gain of one number cancels in front of the division, and multiplies behind it.
        severity: Severity = "warning" if site.gain is not None and site.gain.at_initialisation else "error"
        words = f"the gain multiplies {site.spec.gain.placement} the row is normalized, "
        words += f"{facts.source_at(site.path)} says {meant.gain.placement}"
        return Case(site.path, severity, words, 1.0)

    return compared(facts, fields_of("B13"), judge, "whose gain is not where it is meant")


RULES = (other_centring, other_length, gain_presence, bias_presence, gain_placement)
"""The rules of this file."""
