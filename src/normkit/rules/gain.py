"""Group B: the gain. The 1 of a 1 + weight gain is missing, added twice, or added in 16 bits."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from normkit.conventions.gain import Gain
from normkit.measurement.facts import BatchNorm, Site, Spectrum
from normkit.rules.facts import Facts, is_constant
from normkit.rules.finding import Severity
from normkit.rules.meant import fields_of, is_open, undecided
from normkit.rules.rule import NO_INTENT, Case, Hit, Outcome, Rule, first_values, hit
from normkit.text import counted, dtype_name, percent

# Half of the 1 that is looked for.
_GAP = 0.5
MOST_SITES = 0.8
"""Share of the norms at which a sign of one cause must show."""
_SCATTER_MEAN, _SCATTER_NEGATIVE = 0.3, 0.2
# At most one in eight norms of four trained models has as many negative gains.
_BOTH_SIGNS, _NEARER = 0.03, 0.5
SCATTER_RMS = 0.3
"""A gain around 0 gives rows shorter than this."""
_DOUBLED_SPREAD, _DOUBLED_LEAST = 0.3, 0.5
_NEAR_ONE = (0.5, 1.5)
# Gemma 3 270M: of its 109 trained gains 58 % have their 5 % quantile below 1, and 2 % have it with 1 added; none has
# over 6.2 % negative entries, and with 1 taken away 58 % have over 5 %. Of plain gains (SmolLM2, Qwen2.5-Coder, MPNet)
# 67 to 100 % have it below 1, with 1 added at most 2 %.
_REACHING, _CROSSED, _CROSSING, _FEWEST = 0.1, 0.05, 0.3, 6
_FEWEST_OF_TOWER = 4
# Beyond the rounding of float32: an offset that was added there changes no more.
_ROUNDING, _SMALLEST = 2.0**-20, 1e-30
_OFFSET, _OFFSET_DTYPE = fields_of("B1"), fields_of("B3")


@dataclass(frozen=True)
class _Gain:
    """A site with a gain whose intended offset is known."""

    site: Site
    gain: Spectrum
    meant: Gain
    source: str
    """The source of the intended offset."""
    initial: float
    """Initial value of every entry, offset included."""
    began_right: bool
    """A watched run began it near its initial value, untrained: what changed it since is no offset."""

    @property
    def is_initial(self) -> bool:
        """Every entry is its initial value."""
        return is_constant(self.gain) and self.gain.quantiles[0] == self.initial

    @property
    def excess(self) -> float:
        """The offset that the code adds to the weight beyond the intended one."""
        return self.site.spec.gain.offset - self.meant.offset

    @property
    def seen(self) -> str:
        """Gain and output in words."""
        return f"the gain averages {self.gain.mean:.3g}, the median output has rms {self.site.output.rms_median:.3g}"


def _gains(facts: Facts) -> list[_Gain]:
    """The sites where the intended offset is known, and the gain's dependence on the weight."""
    training = facts.training
    first = {} if training is None or training.began_trained else first_values(training, "gain mean")
    return [
        _Gain(
            *(site, site.gain, intended.gain, facts.source_at(site.path)),
            initial=(initial := facts.initial_gain(site.path)),
            began_right=abs(first.get(site.path, math.inf) - initial) < _GAP,
        )
        for site in facts.sites
        if site.gain is not None
        and (intended := facts.intended(site)) is not None
        and intended.has_weight
        and not facts.is_gain_open(site)
    ]


def _found(gains: list[_Gain], severity: Severity, measured: str, words: Callable[[_Gain], str]) -> Hit | None:
    """The gains as one hit, with these words for each."""
    return hit([Case(gain.site.path, severity, words(gain)) for gain in gains], measured)


def _against_meant(gain: _Gain) -> str:
    return f"the gain is {gain.site.spec.gain.words}, {gain.source} says {gain.meant.words}; {gain.seen}"


@Rule(
    id="B1",
    title="The 1 of a 1 + weight gain is missing",
    severity="error",
    threshold=(
        "the code adds less to the weight than the config's class or the intent file; or a plain gain with |mean| "
        f"below {_SCATTER_MEAN:g}, over {percent(_SCATTER_NEGATIVE)} of it negative, output rms below "
        f"{SCATTER_RMS:g}, or |mean| below {_NEARER:g} and over {percent(_BOTH_SIGNS)} negative, at "
        f"{percent(MOST_SITES)} of the norms of the model or of one tower; or a trained 1 + weight with over "
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
    confirm=f"nk.identify(module, shape).spec.{_OFFSET[0]}; the mean of the stored weights",
)
def missing_offset(facts: Facts) -> Outcome:
    """The code adds less than is meant, or the weights lack the 1 that it rightly does not add."""
    gains = _gains(facts)
    # A gain that acts as the one that is meant at its start shows that the weights were converted along with the code.
    missed = [gain for gain in gains if gain.excess < -_GAP and not (gain.is_initial or gain.began_right)]
    if missed:
        near_one = [gain for gain in missed if _NEAR_ONE[0] <= gain.gain.quantiles[3] <= _NEAR_ONE[1]]
        measured = f"{counted(len(missed), 'norm')} without the offset that is meant"
        if len(near_one) >= MOST_SITES * len(missed):
            measured += ", which the weights may contain: they are around 1"
            return _found(missed, "warning", measured, _against_meant)
        return _found(missed, "error", measured, _against_meant)
    if not facts.is_intent_known:
        return NO_INTENT
    plain = [gain for gain in gains if gain.meant.offset == 0 and abs(gain.excess) < _GAP]
    towers: dict[str, list[_Gain]] = defaultdict(list)
    for gain in plain:
        # A tower, which may have a checkpoint and a converter of its own, is the module around a list of blocks.
        towers[re.split(r"\.\d", gain.site.path)[0].rpartition(".")[0]].append(gain)
    for group in (plain, *(tower for tower in towers.values() if _FEWEST_OF_TOWER <= len(tower) < len(plain))):
        # Some families start around 0 by design.
        scattered = [
            gain
            for gain in group
            if not gain.began_right
            and abs(gain.initial) >= _SCATTER_MEAN
            and _is_around_zero(gain)
            and not is_exchanged(gain.site)
        ]
        if not scattered or len(scattered) < MOST_SITES * len(group):
            continue
        measured = f"gains scatter around 0 at {len(scattered)} of {counted(len(group), 'norm')}: they need a 1 added"
        return _found(
            *(scattered, "error", measured),
            lambda gain: f"{percent(gain.gain.negative)} of the gain is negative; {gain.seen}",
        )

    def is_below(gain: _Gain) -> bool:
        # A trained gain ends near 0 where a feature is of no use: few of its entries are negative.
        return gain.gain.negative > _CROSSED

    below = [group for group in _offset_groups(gains) if sum(map(is_below, group)) >= _CROSSING * len(group)]
    return _shifted(below, "1 + weight is 1 too low", is_below)


@Rule(
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
        "If a converter adds the 1 to the weights, and the code adds it again, every gain is doubled: every block "
        "then reads inputs about twice as long as it was trained on."
    ),
    remedy=(
        "subtract 1 from the stored weights, or use the family's plain form",
        "make the converter record that it has run, so that it cannot run twice",
    ),
    confirm=f"nk.identify(module, shape).spec.{_OFFSET[0]}; the mean of the stored weights",
)
def doubled_offset(facts: Facts) -> Outcome:
    """The code adds more than is meant, or the weights contain the 1 already."""
    gains = _gains(facts)
    extra = [gain for gain in gains if gain.excess > _GAP and not (gain.is_initial or gain.began_right)]
    if extra:
        measured = f"{counted(len(extra), 'norm')} with a larger offset than is meant"
        return _found(extra, "error", measured, _against_meant)
    if not facts.is_intent_known:
        return NO_INTENT
    offset = [gain for gain in gains if gain.meant.offset == 1 and abs(gain.excess) < _GAP]
    doubled = [
        gain
        for gain in offset
        # Some families start at 2.
        if abs(gain.gain.mean - gain.initial - 1) < _DOUBLED_SPREAD
        and gain.gain.quantiles[0] > _DOUBLED_LEAST
        and not (gain.is_initial or gain.began_right)
    ]
    if doubled and len(doubled) >= MOST_SITES * len(offset):
        measured = f"1 + weight averages 1 more than it starts with at {len(doubled)} of "
        measured += f"{counted(len(offset), 'norm')}: the weights contain the 1"
        return _found(doubled, "error", measured, lambda gain: f"{_span(gain.gain)} and averages {gain.gain.mean:.3g}")

    def is_above(gain: _Gain) -> bool:
        # Not even its small entries, those of features of little use, are below 1.
        return gain.gain.quantiles[1] >= 1.0

    above = [
        group for group in _offset_groups(gains) if sum(not is_above(gain) for gain in group) <= _REACHING * len(group)
    ]
    return _shifted(above, "1 + weight is 1 too high: the weights contain the 1", is_above)


def _span(gain: Spectrum) -> str:
    return f"1 + weight goes from {gain.quantiles[0]:.3g} to {gain.quantiles[-1]:.3g}"


def _offset_groups(gains: list[_Gain]) -> list[list[_Gain]]:
    """The trained gains of a 1 + weight family that is computed as such: those of queries and keys, and the others."""
    # Some families start at 2: their trained gains were not studied.
    known = [gain for gain in gains if gain.meant.offset == gain.initial == 1 and abs(gain.excess) < _GAP]
    offset = [gain for gain in known if not (gain.began_right or is_constant(gain.gain))]
    groups = [[gain for gain in offset if (gain.site.role == "query-key") is wanted] for wanted in (True, False)]
    return [group for group in groups if len(group) >= _FEWEST]


def _shifted(groups: list[list[_Gain]], words: str, holds: Callable[[_Gain], bool]) -> Hit | None:
    """Groups of gains that no training gives; queries and keys are a surer sign than the others alone."""
    gains = [gain for group in groups for gain in group]
    if not gains:
        return None
    heads = [gain.site.role == "query-key" for gain in gains]
    which = "norms of queries and keys" if all(heads) else "norms"
    found = [
        Case(
            gain.site.path,
            "error" if any(heads) else "warning",
            f"{_span(gain.gain)}, 5 % of it is below {gain.gain.quantiles[1]:.3g}, {percent(gain.gain.negative)} is "
            "negative",
            effect=float(holds(gain)),
        )
        for gain in gains
    ]
    return hit(found, f"{words}, at {sum(map(holds, gains))} of {len(gains)} {which}")


def _is_around_zero(gain: _Gain) -> bool:
    """All gains are 0; or they have both signs and give short rows, or a mean that is nearer to 0 than to 1."""
    is_zero = gain.gain.quantiles[0] == gain.gain.quantiles[-1] == 0
    has_both_signs = gain.gain.negative > _BOTH_SIGNS and abs(gain.gain.mean) < _NEARER
    return is_zero or has_both_signs or scatters_around_zero(gain.site, gain.gain)


def scatters_around_zero(site: Site, gain: Spectrum) -> bool:
    """A gain of both signs, around 0, that gives short rows."""
    small = abs(gain.mean) < _SCATTER_MEAN and site.output.rms_median < SCATTER_RMS
    return small and gain.negative > _SCATTER_NEGATIVE


def is_exchanged(site: Site | BatchNorm) -> bool:
    """Its gain has both signs and is around 0, and its bias is around a positive number, as trained gains are."""
    gain, bias = site.gain, site.bias
    if gain is None or bias is None or gain.negative <= _BOTH_SIGNS or abs(gain.mean) >= _NEARER:
        return False
    return bias.quantiles[1] > 0 and bias.mean > max(_SCATTER_MEAN, abs(gain.mean))


@Rule(
    id="B3",
    title="The 1 of a 1 + weight gain is added in 16 bits",
    severity="warning",
    threshold=(
        "1 + weight in a 16-bit dtype, where it is meant to be added in float32 or nothing is known, and gains "
        "that it changes (warning); where no gain changes, or the weights are float32, a note"
    ),
    source="vllm-project/vllm#29810 (15.8125 + 1 rounds in bfloat16)",
    why=(
        "The digits of a weight near 0 are far below those of 1: in bfloat16 the sum keeps 8 bits in all, and up to "
        "0.4 % of every gain is lost, differently for each feature. Storing the gain less 1 was meant to keep them."
    ),
    remedy=("add the 1 in float32: 1.0 + weight.float()",),
    confirm=f"nk.identify(module, shape).spec.{_OFFSET_DTYPE[0]}",
)
def offset_in_16_bits(facts: Facts) -> Outcome:
    """The offset is added in the weight's own dtype; the change that makes, from the weights as they are stored."""
    cases: list[Case] = []
    for site in facts.sites:
        passport, intended = facts.passports.get(site.path), facts.intended(site)
        offset, is_meant = site.spec.gain.offset, intended is not None and intended.gain.is_added_narrow
        if passport is None or not offset or is_meant == site.spec.gain.is_added_narrow:
            continue
        if is_open(site, facts, _OFFSET_DTYPE):
            continue
        if is_meant:
            # More exact than is meant, and other bits.
            words = f"{offset:g} is added in float32, {facts.source_at(site.path)} says in the weight's dtype: in 16 "
            cases.append(Case(site.path, "note", f"{words}bits that gives other bits", -1.0))
        elif passport.weight is not None:
            weight = passport.weight.detach().cpu()
            exact = weight.double() + offset
            error = ((weight + offset).double() - exact).abs() / exact.abs().clamp_min(_SMALLEST)
            rounded, largest = float((error > _ROUNDING).double().mean()), float(error.max())
            words = f"{offset:g} is added in {dtype_name(weight.dtype)}"
            if rounded:
                words += f", which changes {percent(rounded)} of the gains, by up to {percent(largest)}"
            else:
                words += ", the weight's own dtype: it changes no gain here, and would in 16 bits"
            cases.append(Case(site.path, "warning" if rounded else "note", words, largest))
    where = "" if any(case.severity == "warning" for case in cases) else "; in 16 bits it would round"
    if all(case.effect < 0 for case in cases):
        found = hit(cases, f"the offset is added in float32 at {counted(len(cases), 'norm')}")
    else:
        found = hit(cases, f"the offset is added in the weight's dtype at {counted(len(cases), 'norm')}{where}")
    return found or undecided(facts, _OFFSET_DTYPE)


RULES = (missing_offset, doubled_offset, offset_in_16_bits)
"""The rules of this file."""
