"""Group B: the gain. The family's 1 is missing or there twice, or the trained gains were never loaded."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.inspection.result import Severity, Site, Spectrum
from normkit.inspection.rules.rule import NO_INTENT, Facts, Hit, Outcome, Rule, counted, percent, shortened

# Half of the 1 that is looked for.
_GAP = 0.5
_MOST_SITES = 0.8
_SCATTER_MEAN, _SCATTER_NEGATIVE, _SCATTER_RMS = 0.3, 0.2, 0.3
_DOUBLED_MEAN, _DOUBLED_SPREAD, _DOUBLED_LEAST = 2.0, 0.3, 0.5
_NEAR_ONE = (0.5, 1.5)


@dataclass(frozen=True)
class _Gain:
    """A site with a gain, the offset that was intended, and what the config's class fills the gain with."""

    site: Site
    gain: Spectrum
    intended: float
    initial: float | None

    @property
    def is_initial(self) -> bool:
        """Every entry is what the config's class starts with."""
        return self.gain.quantiles[0] == self.gain.quantiles[-1] == self.initial

    @property
    def excess(self) -> float:
        """What the code adds to the weight beyond the intended."""
        return self.site.spec.weight_offset - self.intended

    @property
    def seen(self) -> str:
        """Gain and output in words."""
        return f"the gain averages {self.gain.mean:.3g}, the median output has rms {self.site.output.rms_median:.3g}"


def _gains(facts: Facts) -> list[_Gain]:
    """The sites where the intended offset is known."""
    initial = facts.intent.initial_gains if facts.intent is not None else {}
    return [
        _Gain(site, site.gain, intended.weight_offset, initial.get(site.path))
        for site in facts.sites
        if site.gain is not None and (intended := facts.intended(site)) is not None and intended.has_weight
    ]


def _offset_missed(facts: Facts) -> Outcome:
    """The code adds less than the config's class, or the weights lack the 1 that neither of them adds."""
    if facts.intent is None:
        return NO_INTENT
    gains = _gains(facts)
    # A gain that acts as the stock one at its start shows that the weights were converted along with the code.
    missed = [gain for gain in gains if gain.excess < -_GAP and not gain.is_initial]
    if missed:
        near_one = [gain for gain in missed if _NEAR_ONE[0] <= _median(gain.gain) <= _NEAR_ONE[1]]
        lines = [
            f"{gain.site.path}: the gain is the weight, that of {facts.intent.source} is {gain.intended:g} + weight; "
            f"{gain.seen}"
            for gain in missed
        ]
        measured = f"{counted(len(missed), 'norm')} without the offset of {facts.intent.source}"
        if len(near_one) >= _MOST_SITES * len(missed):
            return _hit(missed, "warning", f"{measured}, which the weights may contain: they lie around 1", lines)
        return _hit(missed, "error", measured, lines)
    plain = [gain for gain in gains if gain.intended == 0 and abs(gain.excess) < _GAP]
    scattered = [gain for gain in plain if _scatters_around_zero(gain)]
    if not scattered or len(scattered) < _MOST_SITES * len(plain):
        return None
    lines = [
        f"{gain.site.path}: {percent(gain.gain.negative)} of the gain is negative; {gain.seen}" for gain in scattered
    ]
    measured = f"gains scatter around 0 at {len(scattered)} of {counted(len(plain), 'norm')}: they want a 1 added"
    return _hit(scattered, "error", measured, lines)


def _offset_doubled(facts: Facts) -> Outcome:
    """The code adds more than the config's class, or the weights contain the 1 already."""
    if facts.intent is None:
        return NO_INTENT
    gains = _gains(facts)
    extra = [gain for gain in gains if gain.excess > _GAP and not gain.is_initial]
    if extra:
        lines = [
            f"{gain.site.path}: {gain.site.spec.weight_offset:g} is added to the weight, {facts.intent.source} adds "
            f"{gain.intended:g}; {gain.seen}"
            for gain in extra
        ]
        measured = f"{counted(len(extra), 'norm')} with a larger offset than that of {facts.intent.source}"
        return _hit(extra, "error", measured, lines)
    offset = [gain for gain in gains if gain.intended == 1 and abs(gain.excess) < _GAP]
    doubled = [gain for gain in offset if _is_near_two(gain.gain) and not gain.is_initial]
    if not doubled or len(doubled) < _MOST_SITES * len(offset):
        return None
    lines = [
        f"{gain.site.path}: 1 + weight goes from {gain.gain.quantiles[0]:.3g} to {gain.gain.quantiles[-1]:.3g} and "
        f"averages {gain.gain.mean:.3g}"
        for gain in doubled
    ]
    measured = (
        f"1 + weight averages near 2 at {len(doubled)} of {counted(len(offset), 'norm')}: the weights contain the 1"
    )
    return _hit(doubled, "error", measured, lines)


def _hit(gains: list[_Gain], severity: Severity, measured: str, lines: list[str]) -> Hit:
    sites = tuple(gain.site.path for gain in gains)
    return Hit(severity=severity, sites=sites, measured=measured, evidence=shortened(lines))


def _median(gain: Spectrum) -> float:
    return gain.quantiles[3]


def _scatters_around_zero(gain: _Gain) -> bool:
    if gain.gain.quantiles[0] == gain.gain.quantiles[-1] == 0:
        return not gain.is_initial
    small = abs(gain.gain.mean) < _SCATTER_MEAN and gain.site.output.rms_median < _SCATTER_RMS
    return small and gain.gain.negative > _SCATTER_NEGATIVE


def _is_near_two(gain: Spectrum) -> bool:
    return abs(gain.mean - _DOUBLED_MEAN) < _DOUBLED_SPREAD and gain.quantiles[0] > _DOUBLED_LEAST


def _never_loaded(facts: Facts) -> Outcome:
    """Some norms are exactly as initialised while most are trained."""
    learnt = [site for site in facts.sites if site.gain is not None or site.bias is not None]
    untouched = [
        site for site in learnt if all(part is None or part.at_initialisation for part in (site.gain, site.bias))
    ]
    trained = len(learnt) - len(untouched)
    if not untouched or trained < len(learnt) / 2:
        return None
    return Hit(
        # A gain kept in 16 bits can stay at 1 through training: small updates round away.
        severity="warning" if facts.model.dtype in ("float16", "bfloat16") else "error",
        sites=tuple(site.path for site in untouched),
        measured=f"{counted(len(untouched), 'norm')} exactly at initialisation, {trained} trained",
        evidence=shortened([_untouched(site) for site in untouched]),
    )


def _untouched(site: Site) -> str:
    parts = []
    if site.gain is not None:
        parts.append(f"all {site.gain.size} gains are exactly 1")
    if site.bias is not None:
        parts.append(f"all {site.bias.size} biases are exactly 0")
    return f"{site.path}: {' and '.join(parts)}"


RULES = (
    Rule(
        id="B1",
        title="The 1 of a 1 + weight gain is missing",
        severity="error",
        threshold=(
            "the code adds less to the weight than the config's class; or a plain gain with |mean| below "
            f"{_SCATTER_MEAN:g}, over {percent(_SCATTER_NEGATIVE)} of it negative, output rms below "
            f"{_SCATTER_RMS:g}, at {percent(_MOST_SITES)} of the norms"
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
        confirm="nk.identify(module, shape).spec.weight_offset; the mean of the stored weights",
        check=_offset_missed,
    ),
    Rule(
        id="B2",
        title="The 1 of a 1 + weight gain is added twice",
        severity="error",
        threshold=(
            "the code adds more to the weight than the config's class; or 1 + weight averages "
            f"{_DOUBLED_MEAN:g} ± {_DOUBLED_SPREAD:g} and stays above {_DOUBLED_LEAST:g}, at {percent(_MOST_SITES)} of "
            "the norms"
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
        confirm="nk.identify(module, shape).spec.weight_offset; the mean of the stored weights",
        check=_offset_doubled,
    ),
    Rule(
        id="B6",
        title="Trained gains were never loaded",
        severity="error",
        threshold="gain exactly 1 and bias exactly 0 at some norms while at least half of the norms are trained",
        source="huggingface/transformers#29554 and #35615",
        why=(
            "Training never leaves a whole gain at exactly 1. Some norms kept their initial values because the "
            "checkpoint's names did not match the model's, and nothing failed."
        ),
        remedy=(
            "read the loading report: look for missing and unexpected keys that name these norms",
            "map the checkpoint's names to the model's and load again, with strict=True",
        ),
        confirm="compare the parameter in the model with the tensor in the checkpoint's file",
        check=_never_loaded,
    ),
)
"""The rules of this group, in order."""
