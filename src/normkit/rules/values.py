"""Group B: the values of gains and biases: never loaded, others than an intent file says, or copied."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

from normkit.measurement.baseline import Values
from normkit.measurement.facts import Site
from normkit.measurement.quantities import Spectrum
from normkit.rules.rule import Case, Facts, Hit, NotChecked, Outcome, Rule, evidence_lines, hit
from normkit.rules.scale import HALF
from normkit.text import counted, percent

# Tolerances: for numbers rounded to 16 bits and once more, and for others.
_ROUNDED, _EXACT = 2.0**-7, 1e-5
# Two gains of fewer entries may agree by chance, as where nothing has trained them.
_TELLING_SIZE = 16
# Of 248 trained gains at most 6.2 % of the entries are negative, but for two first ones with 37 and 47 %.
_FLIPPED, _SELDOM, _FEWEST = 0.9, 0.1, 3
_LEVELS, _FEWER, _COARSE = 16, 4, 2.0**-6
# A later checkpoint moves nearly all gains; a damaged file some of them.
_MOST = 0.5


def _never_loaded(facts: Facts) -> Outcome:
    """Some norms are exactly as initialised while most are trained."""
    if _began_fresh(facts):
        return NotChecked("the run began with fresh weights: there was nothing to load")
    learnt = [site for site in facts.sites if site.gain is not None or site.bias is not None]
    untouched = [
        site for site in learnt if all(part is None or part.at_initialisation for part in (site.gain, site.bias))
    ]
    # Some classes start at another gain than 1.
    initial = [site for site in learnt if _is_as_it_starts(site, facts) and site not in untouched]
    trained = len(learnt) - len(untouched) - len(initial)
    if learnt and not trained and facts.training is None and facts.has_trained_matrices:
        norms = "the only norm is" if len(learnt) == 1 else f"all {len(learnt)} norms are"
        return Hit(
            severity="note",
            sites=tuple(site.path for site in learnt),
            measured=(
                f"{norms} exactly at initialisation in a model whose matrices are trained: never loaded, "
                "unless gains and biases were folded into the matrices"
            ),
            evidence=evidence_lines([_untouched(site) for site in untouched]),
        )
    if not untouched or trained < len(learnt) / 2:
        return None
    return Hit(
        severity="warning" if _stay_at_their_start(facts, learnt) else "error",
        sites=tuple(site.path for site in untouched),
        measured=f"{counted(len(untouched), 'norm')} exactly at initialisation, {trained} trained",
        evidence=evidence_lines([_untouched(site) for site in untouched]),
    )


def _stay_at_their_start(facts: Facts, learnt: list[Site]) -> bool:
    """In 16 bits small updates round away: then trained gains too have half of their entries where they started."""
    if facts.model.dtype not in HALF:
        return False
    gains = [(site.gain, facts.initial_gain(site.path)) for site in learnt if site.gain is not None]
    return any(
        gain.quantiles[0] != gain.quantiles[-1] and gain.quantiles[2] == gain.quantiles[4] == start
        for gain, start in gains
    )


def _is_as_it_starts(site: Site, facts: Facts) -> bool:
    gain, bias = site.gain, site.bias
    is_initial = gain is not None and gain.quantiles[0] == gain.quantiles[-1] == facts.initial_gain(site.path)
    return is_initial and (bias is None or bias.at_initialisation)


def _began_fresh(facts: Facts) -> bool:
    """A run in whose step 0 most gains were what they start as."""
    starts = [] if facts.training is None else facts.training.of("gain mean")
    seen = [(series.values[0], series.path) for series in starts if series.steps[:1] == (0,)]
    fresh = [path for mean, path in seen if mean == facts.initial_gain(path)]
    return bool(seen) and 2 * len(fresh) >= len(seen)


def _untouched(site: Site) -> str:
    parts = []
    if site.gain is not None:
        parts.append(f"all {site.gain.size} gains are exactly 1")
    if site.bias is not None:
        parts.append(f"all {site.bias.size} biases are exactly 0")
    return f"{site.path}: {' and '.join(parts)}"


def _other_values(facts: Facts) -> Outcome:
    """Gains that are not those that were declared; without a declaration, gains that two norms have in common."""
    if facts.training is not None:
        return NotChecked("gains and biases are to change in a training run")
    if facts.baseline is None or not any(norm.gain or norm.bias for norm in facts.baseline.norms.values()):
        name = "MODEL" if facts.model.name == facts.model.class_name else facts.model.name
        command = f"normkit identify {name} --against REFERENCE"
        return (
            _copies(facts)
            or _unlike_the_others(facts)
            or NotChecked(f"no reference for the values of gains: {command} compares them")
        )
    cases: list[Case] = []
    moved: list[Case] = []
    held = 0
    for name in ("gain", "bias"):
        now = {site.path: values for site in facts.sites if (values := Values.of(getattr(site, name))) is not None}
        meant = {path: getattr(norm, name) for path, norm in facts.baseline.norms.items() if getattr(norm, name)}
        for site in facts.sites:
            declared = facts.baseline.norms.get(site.path)
            if declared is None or not {site.path} <= now.keys() & meant.keys():
                continue
            # Other rules report factors of the output and offsets of the weight.
            if site.factor != declared.factor:
                continue
            if name == "gain" and site.spec.gain.offset != declared.spec.gain.offset:
                continue
            held += 1
            # Numbers that were rounded to 16 bits on one side agree to a rounding only.
            tolerance = _ROUNDED if site.dtype != declared.dtype and {site.dtype, declared.dtype} & HALF else _EXACT
            mine, wanted = now[site.path], meant[site.path]
            # Another number of features is another rule's.
            if mine.size != wanted.size:
                continue
            if mine.digest == wanted.digest or (tolerance == _ROUNDED and _agree(mine, wanted, tolerance)):
                continue
            told = _elsewhere(site.path, now, meant) or _pattern(mine, wanted, tolerance)
            line = f"{site.path}: its {name} {told or _in_numbers(mine, wanted)}"
            (cases if told else moved).append(Case(site.path, "error" if told else "warning", 1.0, line))
    if not cases and len(moved) >= _MOST * held:
        cases = [dataclasses.replace(case, severity="note") for case in moved]
        words = f"{len(cases)} of {counted(held, 'parameter')} of norms have moved, as in a later checkpoint"
        return hit(cases, words, "parameter")
    cases += moved
    words = f"{counted(len(cases), 'parameter')} of norms with other values than {facts.baseline.source or 'declared'}"
    return hit(cases, words, "parameter")


def _agree(now: Values, meant: Values, tolerance: float) -> bool:
    return _is_mapped(now, meant, tolerance, lambda value: value)


def _is_mapped(now: Values, meant: Values, tolerance: float, mapping: Callable[[float], float]) -> bool:
    """The smallest, the middle and the largest are those that are meant, mapped."""
    wanted = sorted(mapping(value) for value in (meant.minimum, meant.median, meant.maximum))
    scale = max(map(abs, wanted))
    pairs = zip((now.minimum, now.median, now.maximum), wanted, strict=True)
    return all(abs(value - other) <= tolerance * scale for value, other in pairs)


def _elsewhere(path: str, now: Mapping[str, Values], meant: Mapping[str, Values]) -> str | None:
    """The other norm that these numbers are declared for, in words; None if there is none."""
    if now[path].minimum == now[path].maximum:
        # Untrained values are alike everywhere.
        return None
    for other, values in meant.items():
        if other != path and values.digest == now[path].digest:
            swapped = other in now and now[other].digest == meant[path].digest
            return f"is the one of {other}" + (", which has this one's: the two are swapped" if swapped else "")
    return None


def _pattern(now: Values, meant: Values, tolerance: float) -> str | None:
    """The transformation of the numbers, in words; None if they are simply others."""
    if now.members == meant.members:
        if _agree(now, meant, tolerance) and now.negative == meant.negative:
            return "has its entries in another order"
        mirrored = _is_mapped(now, meant, tolerance, lambda value: -value)
        return "has the opposite sign" if mirrored else "has entries of another sign or in another order"
    if not meant.median or meant.minimum == meant.maximum:
        return None
    ratio, shift = now.median / meant.median, now.median - meant.median
    if _is_mapped(now, meant, tolerance, lambda value: value * ratio) and abs(ratio - 1) > tolerance:
        return f"is {ratio:.4g} times the one that is meant"
    if _is_mapped(now, meant, tolerance, lambda value: value + shift) and not _agree(now, meant, tolerance):
        return f"is the one that is meant {'plus' if shift > 0 else 'less'} {abs(shift):.4g}"
    return None


def _in_numbers(now: Values, meant: Values) -> str:
    was, wanted = (
        f"{each.minimum:.4g} to {each.maximum:.4g}, median {each.median:.4g}, {percent(each.negative)} negative"
        for each in (now, meant)
    )
    return f"is {was}; meant is {wanted}" + (" (some entries differ)" if was == wanted else "")


def _copies(facts: Facts) -> Outcome:
    """Trained gains that are the same numbers at two norms which share no parameter."""
    holders: Mapping[str, list[Site]] = defaultdict(list)
    for site in facts.sites:
        if site.gain is not None and site.gain.size >= _TELLING_SIZE and is_varied(site):
            holders[site.gain.digest].append(site)
    cases = [
        Case(site.path, "error", 0.0, f"{site.path}: its {site.gain.size} gains are a copy of those of {first.path}")
        for first, *others in holders.values()
        for site in others
        if site.gain is not None and not _are_one(first, site, facts)
    ]
    first = [Case(holder[0].path, "error", 0.0, "") for holder in holders.values() if len(holder) > 1]
    found = hit(cases, f"{counted(len(cases), 'norm')} with a copy of another norm's gain")
    if found is None:
        return None
    named = {*found.sites, *(case.path for case in first)}
    return dataclasses.replace(found, sites=tuple(site.path for site in facts.sites if site.path in named))


def _unlike_the_others(facts: Facts) -> Outcome:
    """A gain of the opposite sign, or of a few evenly spread numbers, among gains that have neither."""
    gains = [(site, site.gain) for site in facts.sites if is_varied(site) and site.gain is not None]
    cases = []
    for site, gain in gains:
        others = [other for each, other in gains if each is not site and each.role == site.role]
        others = others if len(others) >= _FEWEST else [other for each, other in gains if each is not site]
        if gain.size < _TELLING_SIZE or len(others) < _FEWEST:
            continue
        negative = statistics.median(other.negative for other in others)
        # A norm whose output is multiplied by a negative number has its own finding.
        if gain.negative > _FLIPPED and negative < _SELDOM and site.factor > 0:
            line = f"{site.path}: {percent(gain.negative)} of its gains are negative, of the median other norm's "
            cases.append(Case(site.path, "warning", gain.negative, f"{line}{percent(negative)}: its sign was flipped"))
        usual = statistics.median(other.distinct for other in others)
        if 1 < gain.distinct <= _LEVELS and usual > _FEWER * gain.distinct and _is_coarse(gain):
            line = f"{site.path}: its {gain.size} gains take {gain.distinct} distinct values, those of the others "
            cases.append(Case(site.path, "warning", 1.0, f"{line}{usual:.0f}: they were quantized"))
    return hit(cases, f"gains unlike all others at {counted(len(cases), 'norm')}")


def _is_coarse(gain: Spectrum) -> bool:
    """Its values lie further apart than the rounding of 16 bits leaves them."""
    step = (gain.quantiles[-1] - gain.quantiles[0]) / (gain.distinct - 1)
    return step > _COARSE * max(map(abs, gain.quantiles))


def is_varied(site: Site) -> bool:
    """It has a gain whose entries are not all alike, as where nothing trained them."""
    gain = site.gain
    return gain is not None and bool(gain.digest) and gain.quantiles[1] != gain.quantiles[5]


def _are_one(one: Site, other: Site, facts: Facts) -> bool:
    """They have one parameter, by design or not: that is another rule's."""
    shared = facts.shared.get(one.path)
    return facts.is_tied_in_stock(one.path, other.path) or (shared is not None and other.path in shared.twins)


RULES = (
    Rule(
        id="B6",
        title="Trained gains were never loaded",
        severity="error",
        threshold=(
            "gain exactly 1 and bias exactly 0 at some norms while at least half of the norms are trained (error; in "
            "16 bits a warning where trained gains too have half of their entries at 1); all norms so in a model whose "
            "matrices are trained (note)"
        ),
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
    Rule(
        id="B14",
        title="Gains are not the ones that are meant",
        severity="error",
        threshold=(
            "other numbers than in the intent file: those of another norm, in another order, of another sign, a "
            "multiple, or shifted (error); others at less than half of the norms (warning), at more of them (note); "
            "without a file the same numbers, bit for bit, at two norms that share no parameter "
            f"(error), one gain over {percent(_FLIPPED)} negative among others whose median has under "
            f"{percent(_SELDOM)}, or of at most "
            f"{_LEVELS} evenly spread values among others of {_FEWER} times as many (warning)"
        ),
        source="huggingface/transformers#35615; unslothai/unsloth#219 (gains changed by a conversion)",
        why=(
            "A converter that swaps two names, permutes the heads or scales a tensor leaves shapes, formula and "
            "loading intact. Only the numbers tell, and only beside those of a copy that is known to be right."
        ),
        remedy=(
            "load or convert the named tensors anew, and compare them with the source's",
            "if the weights are those of a later checkpoint, have the intent file written anew",
        ),
        confirm="compare the parameter in the model with the tensor in the checkpoint's file",
        check=_other_values,
        follows=("B6", "B10", "D5"),
    ),
)
"""The rules of this group, in order."""
