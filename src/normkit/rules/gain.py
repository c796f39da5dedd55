"""Group B: the gain. The family's 1 is missing, there twice, or added in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normkit.conventions.gain import Gain
from normkit.measurement.facts import Site
from normkit.measurement.quantities import Spectrum
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import NO_INTENT, Case, Facts, Hit, Outcome, Rule, evidence_lines, hit
from normkit.text import counted, dtype_name, percent

# Half of the 1 that is looked for.
_GAP = 0.5
MOST_SITES = 0.8
"""Share of the norms at which a sign of one cause must show."""
_SCATTER_MEAN, _SCATTER_NEGATIVE = 0.3, 0.2
SCATTER_RMS = 0.3
"""A gain around 0 leaves rows shorter than this."""
_DOUBLED_SPREAD, _DOUBLED_LEAST = 0.3, 0.5
_NEAR_ONE = (0.5, 1.5)
# Gemma 3 270M: of its 109 trained gains 58 % have their 5 % quantile below 1, and 2 % have it with 1 added; none has
# over 6.2 % negative entries, and with 1 taken away 58 % have over 5 %. Of plain gains (SmolLM2, Qwen2.5-Coder, MPNet)
# 67 to 100 % have it below 1, with 1 added at most 2 %.
_REACHING, _CROSSED, _CROSSING, _FEWEST = 0.1, 0.05, 0.3, 6
# Beyond the rounding of float32: an offset that was added there changes no more.
_OFFSET = fields_of("B3")
_ROUNDING, _SMALLEST = 2.0**-20, 1e-30


@dataclass(frozen=True)
class _Gain:
    """A site with a gain, the offset that is meant and who says so, and what every entry starts as, offset included."""

    site: Site
    gain: Spectrum
    meant: Gain
    source: str
    initial: float

    @property
    def is_initial(self) -> bool:
        """Every entry is what it starts as."""
        return self.gain.quantiles[0] == self.gain.quantiles[-1] == self.initial

    @property
    def excess(self) -> float:
        """The offset that the code adds to the weight beyond the intended one."""
        return self.site.spec.gain.offset - self.meant.offset

    @property
    def seen(self) -> str:
        """Gain and output in words."""
        return f"the gain averages {self.gain.mean:.3g}, the median output has rms {self.site.output.rms_median:.3g}"


def _gains(facts: Facts) -> list[_Gain]:
    """The sites where the intended offset is known, and so is what the gain is made of."""
    return [
        _Gain(site, site.gain, intended.gain, facts.source_at(site.path), facts.initial_gain(site.path))
        for site in facts.sites
        if site.gain is not None
        and (intended := facts.intended(site)) is not None
        and intended.has_weight
        and not facts.is_gain_open(site)
    ]


def _offset_missed(facts: Facts) -> Outcome:
    """The code adds less than is meant, or the weights lack the 1 that it rightly does not add."""
    gains = _gains(facts)
    # A gain that acts as the one that is meant at its start shows that the weights were converted along with the code.
    missed = [gain for gain in gains if gain.excess < -_GAP and not gain.is_initial]
    if missed:
        near_one = [gain for gain in missed if _NEAR_ONE[0] <= gain.gain.quantiles[3] <= _NEAR_ONE[1]]
        lines = [
            f"{gain.site.path}: the gain is {gain.site.spec.gain.words}, {gain.source} says "
            f"{gain.meant.words}; {gain.seen}"
            for gain in missed
        ]
        measured = f"{counted(len(missed), 'norm')} without the offset that is meant"
        if len(near_one) >= MOST_SITES * len(missed):
            return _hit(missed, "warning", f"{measured}, which the weights may contain: they lie around 1", lines)
        return _hit(missed, "error", measured, lines)
    if not facts.is_intent_known:
        return NO_INTENT
    plain = [gain for gain in gains if gain.meant.offset == 0 and abs(gain.excess) < _GAP]
    scattered = [gain for gain in plain if _scatters_around_zero(gain)]
    if not scattered or len(scattered) < MOST_SITES * len(plain):
        below = [group for group in _offset_groups(gains) if _share(group, _is_below) >= _CROSSING]
        return _shifted(below, "1 + weight lies 1 too low", _is_below)
    lines = [
        f"{gain.site.path}: {percent(gain.gain.negative)} of the gain is negative; {gain.seen}" for gain in scattered
    ]
    measured = f"gains scatter around 0 at {len(scattered)} of {counted(len(plain), 'norm')}: they want a 1 added"
    return _hit(scattered, "error", measured, lines)


def _offset_doubled(facts: Facts) -> Outcome:
    """The code adds more than is meant, or the weights contain the 1 already."""
    gains = _gains(facts)
    extra = [gain for gain in gains if gain.excess > _GAP and not gain.is_initial]
    if extra:
        lines = [
            f"{gain.site.path}: the gain is {gain.site.spec.gain.words}, {gain.source} says "
            f"{gain.meant.words}; {gain.seen}"
            for gain in extra
        ]
        measured = f"{counted(len(extra), 'norm')} with a larger offset than is meant"
        return _hit(extra, "error", measured, lines)
    if not facts.is_intent_known:
        return NO_INTENT
    offset = [gain for gain in gains if gain.meant.offset == 1 and abs(gain.excess) < _GAP]
    doubled = [gain for gain in offset if _is_doubled(gain) and not gain.is_initial]
    if not doubled or len(doubled) < MOST_SITES * len(offset):
        above = [group for group in _offset_groups(gains) if 1.0 - _share(group, _is_above) <= _REACHING]
        return _shifted(above, "1 + weight lies 1 too high: the weights contain the 1", _is_above)
    lines = [
        f"{gain.site.path}: 1 + weight goes from {gain.gain.quantiles[0]:.3g} to {gain.gain.quantiles[-1]:.3g} and "
        f"averages {gain.gain.mean:.3g}"
        for gain in doubled
    ]
    measured = (
        f"1 + weight averages 1 more than it starts with at {len(doubled)} of {counted(len(offset), 'norm')}: the "
        "weights contain the 1"
    )
    return _hit(doubled, "error", measured, lines)


def _offset_groups(gains: list[_Gain]) -> list[list[_Gain]]:
    """The trained gains of a 1 + weight family that is computed as such: those of queries and keys, and the others."""
    # Some families start at 2: what their training leaves was not looked at.
    known = [gain for gain in gains if gain.meant.offset == gain.initial == 1 and abs(gain.excess) < _GAP]
    offset = [gain for gain in known if gain.gain.quantiles[0] < gain.gain.quantiles[-1]]
    groups = [[gain for gain in offset if (gain.site.role == "query-key") is wanted] for wanted in (True, False)]
    return [group for group in groups if len(group) >= _FEWEST]


def _is_below(gain: _Gain) -> bool:
    """More of it is negative than of a trained gain, which ends near 0 where a feature is of no use."""
    return gain.gain.negative > _CROSSED


def _is_above(gain: _Gain) -> bool:
    """Not even its small entries, those of features of little use, are below 1."""
    return gain.gain.quantiles[1] >= 1.0


def _share(group: list[_Gain], holds: Callable[[_Gain], bool]) -> float:
    return sum(map(holds, group)) / len(group)


def _shifted(groups: list[list[_Gain]], words: str, holds: Callable[[_Gain], bool]) -> Hit | None:
    """Groups of gains that no training leaves; queries and keys tell more surely than the others alone."""
    gains = [gain for group in groups for gain in group]
    if not gains:
        return None
    heads = [gain.site.role == "query-key" for gain in gains]
    which = "norms of queries and keys" if all(heads) else "norms"
    lines = [
        f"{gain.site.path}: 1 + weight goes from {gain.gain.quantiles[0]:.3g} to {gain.gain.quantiles[-1]:.3g}, 5 % "
        f"lie below {gain.gain.quantiles[1]:.3g}, {percent(gain.gain.negative)} are negative"
        for gain in sorted(gains, key=lambda gain: not holds(gain))
    ]
    measured = f"{words}, at {sum(map(holds, gains))} of {len(gains)} {which}"
    return _hit(gains, "error" if any(heads) else "warning", measured, lines)


def _hit(gains: list[_Gain], severity: Severity, measured: str, lines: list[str]) -> Hit:
    sites = tuple(gain.site.path for gain in gains)
    return Hit(severity=severity, sites=sites, measured=measured, evidence=evidence_lines(lines))


def _scatters_around_zero(gain: _Gain) -> bool:
    if abs(gain.initial) < _SCATTER_MEAN:
        # It starts there by design.
        return False
    if gain.gain.quantiles[0] == gain.gain.quantiles[-1] == 0:
        return True
    return scatters_around_zero(gain.site, gain.gain)


def scatters_around_zero(site: Site, gain: Spectrum) -> bool:
    """A gain of both signs, around 0, that leaves short rows."""
    small = abs(gain.mean) < _SCATTER_MEAN and site.output.rms_median < SCATTER_RMS
    return small and gain.negative > _SCATTER_NEGATIVE


def _is_doubled(gain: _Gain) -> bool:
    # Some families start at 2.
    more = gain.gain.mean - gain.initial
    return abs(more - 1) < _DOUBLED_SPREAD and gain.gain.quantiles[0] > _DOUBLED_LEAST


def _offset_in_16_bit(facts: Facts) -> Outcome:
    """The offset is added in the weight's own dtype; what that changes, from the weights as they are stored."""
    cases = []
    for site in facts.sites:
        passport, intended = facts.passports.get(site.path), facts.intended(site)
        if passport is None or not site.spec.gain.offset:
            continue
        if not site.spec.gain.is_added_narrow:
            cases += _added_wider(site, facts)
            continue
        meant = intended is not None and intended.gain.is_added_narrow
        if meant or is_open(site, facts, _OFFSET) or passport.weight is None:
            continue
        weight, offset = passport.weight.detach().cpu(), site.spec.gain.offset
        exact = weight.double() + offset
        error = ((weight + offset).double() - exact).abs() / exact.abs().clamp_min(_SMALLEST)
        rounded, largest = float((error > _ROUNDING).double().mean()), float(error.max())
        dtype = dtype_name(weight.dtype)
        line = f"{site.path}: {offset:g} is added in {dtype}"
        line += f", which changes {percent(rounded)} of the gains, by up to {percent(largest)}" if rounded else ""
        cases.append(Case(site.path, "warning" if rounded else "note", largest, line))
    if all(case.effect < 0 for case in cases):
        found = hit(cases, f"the offset is added in float32 at {counted(len(cases), 'norm')}")
    else:
        where = "" if any(case.severity == "warning" for case in cases) else "; in 16 bits it would round"
        found = hit(cases, f"the offset is added in the weight's dtype at {counted(len(cases), 'norm')}{where}")
    return found or undecided(facts, _OFFSET)


def _added_wider(site: Site, facts: Facts) -> list[Case]:
    """The offset is added in float32 where it is meant to be added in the weight's dtype: more exact, other bits."""
    intended = facts.intended(site)
    if intended is None or not intended.gain.is_added_narrow:
        return []
    if is_open(site, facts, _OFFSET):
        return []
    line = f"{site.path}: {site.spec.gain.offset:g} is added in float32, {facts.source_at(site.path)} says in the "
    return [Case(site.path, "note", -1.0, f"{line}weight's dtype: in 16 bits that gives other bits")]


RULES = (
    Rule(
        id="B1",
        title="The 1 of a 1 + weight gain is missing",
        severity="error",
        threshold=(
            "the code adds less to the weight than the config's class or the intent file; or a plain gain with |mean| "
            f"below {_SCATTER_MEAN:g}, over {percent(_SCATTER_NEGATIVE)} of it negative, output rms below "
            f"{SCATTER_RMS:g}, at {percent(MOST_SITES)} of the norms; or a trained 1 + weight with over "
            f"{percent(_CROSSED)} of it negative at {percent(_CROSSING)} of the norms (of queries and keys an error, "
            "of others alone a warning)"
        ),
        source="linkedin/Liger-Kernel#74, ggml-org/llama.cpp#5631",
        why=(
            "Some families store the gain less 1, so that weight decay pulls it towards 1. Read as the gain itself, "
            "it is near 0 and switches most features off or turns their sign."
        ),
        remedy=(
            "add 1 to the weight where the norm is computed, in float32",
            "or add 1 to the stored weights once, while converting, and nowhere else",
        ),
        confirm=f"nk.identify(module, shape).spec.{fields_of('B1')[0]}; the mean of the stored weights",
        check=_offset_missed,
    ),
    Rule(
        id="B2",
        title="The 1 of a 1 + weight gain is added twice",
        severity="error",
        threshold=(
            "the code adds more to the weight than the config's class or the intent file; or 1 + weight averages "
            f"1 ± {_DOUBLED_SPREAD:g} more than it starts with and stays above {_DOUBLED_LEAST:g}, at "
            f"{percent(MOST_SITES)} of the norms; or trained 1 + weights of which at most {percent(_REACHING)} have a "
            "5 % quantile below 1 (of queries and keys an error, of others alone a warning)"
        ),
        source="unslothai/unsloth#219, utensils/mold#1078",
        why=(
            "A converter that puts the 1 into the weights, and code that adds it again, together double every gain: "
            "every block then reads inputs about twice as long as it was trained on."
        ),
        remedy=(
            "subtract 1 from the stored weights, or use the family's plain form",
            "make the converter record that it has run, so that it cannot run twice",
        ),
        confirm=f"nk.identify(module, shape).spec.{fields_of('B1')[0]}; the mean of the stored weights",
        check=_offset_doubled,
    ),
    Rule(
        id="B3",
        title="The 1 of a 1 + weight gain is added in 16 bits",
        severity="warning",
        threshold=(
            "1 + weight in a 16-bit dtype, where it is meant to be added in float32 or nothing is known, and gains "
            "that it changes (warning); where no gain changes, or the weights are float32, a note"
        ),
        source="vllm-project/vllm#29810 (15.8125 + 1 rounds in bfloat16)",
        why=(
            "A weight near 0 has its digits far below those of 1: in bfloat16 the sum keeps 8 bits in all, and up to "
            "0.4 % of every gain is lost, differently for each feature. Storing the gain less 1 was meant to keep them."
        ),
        remedy=("add the 1 in float32: 1.0 + weight.float()",),
        confirm=f"nk.identify(module, shape).spec.{_OFFSET[0]}",
        check=_offset_in_16_bit,
    ),
)
"""The rules of this group, in order."""
