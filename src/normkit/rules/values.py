"""Group B: the values of gains and biases: never loaded, others than an intent file says, or copied."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from normkit.measurement.baseline import DeclaredBatchNorm, DeclaredNorm, Values
from normkit.measurement.facts import BatchNorm, Site, Spectrum
from normkit.rules.facts import Facts, is_constant
from normkit.rules.gain import MOST_SITES, is_exchanged
from normkit.rules.rule import Case, Hit, NotChecked, Outcome, Rule, first_values, hit
from normkit.rules.scale import HALF
from normkit.text import counted, percent

# Tolerances: for numbers rounded to 16 bits and once more, and for others.
_ROUNDED, _EXACT = 2.0**-7, 1e-5
# Two gains of fewer entries may agree by chance, as where nothing has trained them.
_TELLING_SIZE = 16
# Of 248 trained gains at most 6.2 % of the entries are negative, except in two first norms, with 37 and 47 %.
_FLIPPED, _SELDOM, _FEWEST = 0.9, 0.1, 3
_LEVELS, _FEWER, _COARSE = 16, 4, 2.0**-6
# A later checkpoint moves nearly all gains; a damaged file some of them.
_MOST = 0.5
# Gains are around 1 and biases around 0. The largest median gain of four trained models is at most 4.4
# times the next, that of a final norm; of a role at most 1.3 times.
_APART, _MULTIPLE = 0.5, 8.0
# Statistics that are the data's are off by what sampling leaves, those of another norm by a part of the deviation.
_MISFIT, _TIMES = 0.1, 4.0


@Rule(
    id="B6",
    title="Trained gains were never loaded",
    severity="error",
    threshold=(
        "gain exactly 1 and bias exactly 0 at some norms while at least half of the norms are trained (error; in "
        "16 bits a warning where trained gains too have half of their entries at 1), or the bias alone, and of a "
        "batch norm the gain alone (warning); all norms so in a model whose matrices are trained (note)"
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
)
def never_loaded(facts: Facts) -> Outcome:
    """Some norms are exactly as initialised while most are trained."""
    starts = {} if facts.training is None else first_values(facts.training, "gain mean")
    if starts and 2 * sum(mean == facts.initial_gain(path) for path, mean in starts.items()) >= len(starts):
        return NotChecked("the run began with fresh weights: there was nothing to load")
    learnt: list[Site | BatchNorm] = [site for site in facts.sites if site.gain is not None or site.bias is not None]
    # Gains of 0, with which a residual branch begins, tell neither.
    learnt += [
        norm
        for norm in facts.batch_norms
        if facts.training is None and norm.is_gathered and (norm.gain or norm.bias) and norm.zero_gains < norm.channels
    ]
    untouched = [
        site for site in learnt if all(part is None or part.at_initialisation for part in (site.gain, site.bias))
    ]
    # Some classes start at another gain than 1.
    initial = [
        site
        for site in learnt
        if site not in untouched and facts.is_gain_initial(site) and (site.bias is None or site.bias.at_initialisation)
    ]
    trained = len(learnt) - len(untouched) - len(initial)
    cases = []
    for site in untouched:
        parts = [f"all {site.gain.size} gains are exactly 1"] if site.gain is not None else []
        parts += [f"all {site.bias.size} biases are exactly 0"] if site.bias is not None else []
        cases.append(Case(site.path, "error", " and ".join(parts)))
    if learnt and not trained and facts.training is None and facts.has_trained_matrices:
        norms = "the only norm is" if len(learnt) == 1 else f"all {len(learnt)} norms are"
        measured = (
            f"{norms} exactly at initialisation in a model whose matrices are trained: never loaded, "
            "unless gains and biases were folded into the matrices"
        )
        found = hit(cases, measured)
        return Hit(
            severity="note",
            sites=tuple(site.path for site in learnt),
            measured=measured,
            evidence=() if found is None else found.evidence,
        )
    if trained < len(learnt) / 2:
        return None
    cases += _half_loaded([norm for norm in learnt if norm not in untouched])
    found = hit(
        cases,
        f"{counted(len(cases), 'norm')} exactly at initialisation, {trained - len(cases) + len(untouched)} trained",
    )
    # In 16 bits small updates round away: then trained gains too have half of their entries at their initial value.
    is_rounded = facts.model.dtype in HALF and any(
        isinstance(site, Site)
        and not is_constant(site.gain)
        and site.gain.quantiles[2] == site.gain.quantiles[4] == facts.initial_gain(site.path)
        for site in learnt
        if site.gain is not None
    )
    return replace(found, severity="warning") if found is not None and is_rounded else found


def _half_loaded(norms: Sequence[Site | BatchNorm]) -> list[Case]:
    """Norms one of whose parameters is at initialisation, where that of most others is trained.

    Gains of other norms than batch norms are 1 after folding, and where 16 bits have rounded their updates away.
    """
    cases = []
    for name, words in (("gain", "gains are exactly 1"), ("bias", "biases are exactly 0")):
        parts = [
            (norm.path, part)
            for norm in norms
            if (part := getattr(norm, name)) is not None and (name == "bias" or isinstance(norm, BatchNorm))
        ]
        still = [(path, part) for path, part in parts if part.at_initialisation]
        if 2 * len(still) < len(parts):
            cases += [
                Case(path, "warning", f"all {part.size} {words}, not those of {len(parts) - len(still)} others")
                for path, part in still
            ]
    return cases


@Rule(
    id="B14",
    title="Gains are not the ones that are meant",
    severity="error",
    threshold=(
        "other numbers than in the intent file: those of another norm, in another order, of another sign, a "
        "multiple, or shifted (error); others at less than half of the norms (warning), at more of them (note); "
        "without a file the same numbers, bit for bit, at two norms that share no parameter "
        f"(error), one gain over {percent(_FLIPPED)} negative among others whose median has under "
        f"{percent(_SELDOM)}, or of at most "
        f"{_LEVELS} evenly spread values among others of {_FEWER} times as many (warning), or at "
        f"{percent(MOST_SITES)} of the norms gains of both signs around 0 and biases around a positive number (error)"
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
    follows=("B6", "B10", "D5"),
)
def other_values(facts: Facts) -> Outcome:
    """Gains and biases against the declared ones; without a declaration, against each other."""
    if facts.training is not None:
        return NotChecked("gains and biases are expected to change in a training run")
    meant_norms: dict[str, DeclaredNorm | DeclaredBatchNorm] = {}
    if facts.baseline is not None:
        meant_norms = {**facts.baseline.norms, **facts.baseline.batch_norms}
    if facts.baseline is None or not any(norm.gain or norm.bias for norm in meant_norms.values()):
        name = "MODEL" if facts.model.name == facts.model.class_name else facts.model.name
        command = f"normkit compare {name} REFERENCE"
        unknown = NotChecked(f"no reference for the values of gains: {command} compares them")
        return _exchanged(facts) or _copies(facts) or _unlike_the_others(facts) or unknown
    explained: list[Case] = []
    moved: list[Case] = []
    held = 0
    for name, noun in (("gain", "gain"), ("bias", "bias"), ("mean", "running mean"), ("variance", "running variance")):
        of_sites: list[Site | BatchNorm] = [*facts.sites] if name in ("gain", "bias") else []
        norms = {norm.path: norm for norm in (*of_sites, *facts.batch_norms)}
        now = {path: values for path, norm in norms.items() if (values := Values.of(getattr(norm, name))) is not None}
        meant = {path: part for path, norm in meant_norms.items() if (part := getattr(norm, name, None))}
        for path in now:
            if path not in meant or not _is_comparable(norms[path], meant_norms[path], name):
                continue
            held += 1
            tolerance = _tolerance(norms[path], meant_norms[path])
            mine, wanted = now[path], meant[path]
            # Other rules report another number of features.
            if mine.size != wanted.size:
                continue
            if mine.digest == wanted.digest or (tolerance == _ROUNDED and _is_mapped(mine, wanted, tolerance)):
                continue
            if (told := _elsewhere(path, now, meant) or _pattern(mine, wanted, tolerance)) is not None:
                explained.append(Case(path, "error", f"its {noun} {told}", 1.0))
            else:
                is_now, was_meant = (
                    f"{each.minimum:.4g} to {each.maximum:.4g}, median {each.median:.4g}, "
                    f"{percent(each.negative)} negative"
                    for each in (mine, wanted)
                )
                some = " (some entries differ)" if is_now == was_meant else ""
                moved.append(Case(path, "warning", f"its {noun} is {is_now}; meant is {was_meant}{some}", 1.0))
    if not explained and len(moved) >= _MOST * held:
        words = f"{len(moved)} of {counted(held, 'parameter')} of norms have moved, as in a later checkpoint"
        return hit([replace(case, severity="note") for case in moved], words, "parameter")
    cases = explained + moved
    source = facts.baseline.source or "declared"
    return hit(cases, f"{counted(len(cases), 'parameter')} of norms with other values than {source}", "parameter")


def _is_comparable(norm: Site | BatchNorm, declared: DeclaredNorm | DeclaredBatchNorm, name: str) -> bool:
    """Other rules report factors of the output and offsets of the weight."""
    if isinstance(norm, BatchNorm) or isinstance(declared, DeclaredBatchNorm):
        return isinstance(norm, BatchNorm) and isinstance(declared, DeclaredBatchNorm)
    is_offset = name == "gain" and norm.spec.gain.offset != declared.spec.gain.offset
    return norm.factor == declared.factor and not is_offset


def _tolerance(norm: Site | BatchNorm, declared: DeclaredNorm | DeclaredBatchNorm) -> float:
    """Numbers that were rounded to 16 bits on one side agree to a rounding only."""
    if isinstance(norm, BatchNorm) or isinstance(declared, DeclaredBatchNorm):
        return _EXACT
    return _ROUNDED if norm.dtype != declared.dtype and {norm.dtype, declared.dtype} & HALF else _EXACT


def _is_mapped(
    now: Values, meant: Values, tolerance: float, mapping: Callable[[float], float] = lambda value: value
) -> bool:
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
        if _is_mapped(now, meant, tolerance) and now.negative == meant.negative:
            return "has its entries in another order"
        mirrored = _is_mapped(now, meant, tolerance, lambda value: -value)
        return "has the opposite sign" if mirrored else "has entries of another sign or in another order"
    if not meant.median or meant.minimum == meant.maximum:
        return None
    ratio, shift = now.median / meant.median, now.median - meant.median
    if _is_mapped(now, meant, tolerance, lambda value: value * ratio) and abs(ratio - 1) > tolerance:
        return f"is {ratio + 0.0:.4g} times the one that is meant"
    if _is_mapped(now, meant, tolerance, lambda value: value + shift) and not _is_mapped(now, meant, tolerance):
        return f"is the one that is meant {'plus' if shift > 0 else 'less'} {abs(shift):.4g}"
    return None


def _exchanged(facts: Facts) -> Hit | None:
    """Gains around 0 and biases around a positive number at nearly all norms: no norm is left to hold them against."""
    both = [site for site in facts.sites if site.gain is not None and site.bias is not None]
    cases = [
        Case(
            site.path,
            "error",
            f"its gains have a median of {site.gain.quantiles[3]:.3g}, {percent(site.gain.negative)} of them negative, "
            f"and its biases of {site.bias.quantiles[3]:.3g}: they are exchanged",
            2.0,
        )
        for site in both
        if is_exchanged(site) and site.gain is not None and site.bias is not None
    ]
    if len(cases) < max(_FEWEST, MOST_SITES * len(both)):
        return None
    words = f"gains scatter around 0 and biases around a positive number at {len(cases)} of "
    return hit(cases, f"{words}{counted(len(both), 'norm')}: weight and bias are exchanged")


def _copies(facts: Facts) -> Hit | None:
    """Trained gains that are the same numbers at two norms which share no parameter."""
    holders: Mapping[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for path, noun, part in _parts(facts):
        if part.size >= _TELLING_SIZE and is_varied(part):
            holders[noun, part.digest].append((path, part.size))

    def are_one(one: str, other: str) -> bool:
        # They have one parameter, by design or not: D4 reports that.
        shared = facts.shared.get(one)
        return facts.is_tied_in_stock(one, other) or (shared is not None and other in shared.twins)

    # The owner of statistics is the batch norm whose data has them; of others the first is taken for it.
    misfits = {
        norm.path: math.sqrt(max(0.0, norm.change**2 - norm.sampling**2))
        for norm in facts.batch_norms
        if not math.isnan(norm.change + norm.sampling)
    }
    cases: list[Case] = []
    perhaps = set()
    for (noun, _), held in holders.items():
        best, *others = sorted((misfits.get(path, 0.0), order) for order, (path, _) in enumerate(held))
        is_told = bool(others) and others[0][0] > max(_MISFIT, _TIMES * best[0])
        first = held[best[1] if is_told else 0][0]
        copies = [(path, size) for path, size in held if path != first and not are_one(first, path)]
        cases += [Case(path, "error", f"its {size} {noun} are a copy of those of {first}") for path, size in copies]
        perhaps |= {first} if copies and not is_told else set()
    noun = "gain" if any(" gains are" in case.words for case in cases) else "statistics"
    number = len({case.path for case in cases})
    found = hit(cases, f"{counted(number, 'norm')} with a copy of another norm's {noun}")
    if found is None:
        return None
    named = {*found.sites, *perhaps}
    return replace(found, sites=tuple(dict.fromkeys(path for path, *_ in _parts(facts) if path in named)))


def _parts(facts: Facts) -> list[tuple[str, str, Spectrum]]:
    """Path, name and numbers of all that norms hold: in forward order, batch norms last."""
    found = [
        *((site.path, "gains", site.gain) for site in facts.sites),
        *((norm.path, "gains", norm.gain) for norm in facts.batch_norms),
        *((norm.path, "running means", norm.mean) for norm in facts.batch_norms),
        *((norm.path, "running variances", norm.variance) for norm in facts.batch_norms),
    ]
    return [(path, noun, part) for path, noun, part in found if part is not None]


def _unlike_the_others(facts: Facts) -> Hit | None:
    """A gain of the opposite sign, or of a few evenly spread numbers, among gains that have neither."""
    kinds = {site.path: (site.role, site.factor) for site in facts.sites}
    gains = [(path, part) for path, noun, part in _parts(facts) if noun == "gains" and is_varied(part)]
    norms: list[Site | BatchNorm] = [*facts.sites, *facts.batch_norms]
    biases = {norm.path: norm.bias for norm in norms if norm.bias is not None}
    cases = []
    for path, gain in gains:
        role, factor = kinds.get(path, ("batch norm", 1.0))
        alike = [other for each, other in gains if each != path and kinds.get(each, ("batch norm", 1.0))[0] == role]
        others = alike if len(alike) >= _FEWEST else [other for each, other in gains if each != path]
        if gain.size < _TELLING_SIZE or len(others) < _FEWEST:
            continue
        negative = statistics.median(other.negative for other in others)
        # A norm whose output is multiplied by a negative number has its own finding.
        if gain.negative > _FLIPPED and negative < _SELDOM and factor > 0:
            words = f"{percent(gain.negative)} of its gains are negative, {percent(negative)} of the median other "
            cases.append(Case(path, "warning", f"{words}norm's: its sign was flipped", gain.negative))
        if (bias := biases.get(path)) is not None and len(biases) > _FEWEST:
            gain_of, bias_of = (
                statistics.median(part.quantiles[3] for other, part in parts.items() if other != path)
                for parts in (dict(gains), biases)
            )
            mine, its = gain.quantiles[3], bias.quantiles[3]
            is_other = abs(mine - bias_of) < abs(mine - gain_of) and abs(its - gain_of) < abs(its - bias_of)
            if is_other and abs(gain_of - bias_of) > _APART:
                words = f"its gains have a median of {mine:.3g} and its biases of {its:.3g}, those of the others "
                cases.append(Case(path, "error", f"{words}{gain_of:.3g} and {bias_of:.3g}: they are exchanged", 2.0))
        top = max((abs(part.quantiles[3]) for part in alike), default=0.0)
        if len(alike) >= _FEWEST and abs(gain.quantiles[3]) > _MULTIPLE * top > 0:
            words = f"its gains have a median of {gain.quantiles[3]:.3g}, {abs(gain.quantiles[3]) / top:.3g} times the "
            cases.append(
                Case(path, "warning", f"{words}largest median of {counted(len(alike), 'other norm')} of its role", 1.5)
            )
        usual = statistics.median(other.distinct for other in others)
        if 1 < gain.distinct <= _LEVELS and min(usual, gain.size) >= _FEWER * gain.distinct:
            # Only values further apart than the rounding of 16 bits leaves them were quantized.
            step = (gain.quantiles[-1] - gain.quantiles[0]) / (gain.distinct - 1)
            if step > _COARSE * max(map(abs, gain.quantiles)):
                words = f"its {gain.size} gains take {gain.distinct} distinct values, those of the others {usual:.0f}: "
                cases.append(Case(path, "warning", f"{words}they were quantized", 1.0))
    return hit(cases, f"gains unlike all others at {counted(len(cases), 'norm')}")


def is_varied(part: Spectrum | None) -> bool:
    """Its entries are not all alike, as where nothing trained them."""
    return part is not None and bool(part.digest) and part.quantiles[1] != part.quantiles[5]


RULES = (never_loaded, other_values)
"""The rules of this file."""
