"""What explains a difference of rows: another convention or gain at a norm, another wiring, another scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normkit.comparison.effects import Formula, distances
from normkit.comparison.own_rounding import Limit
from normkit.comparison.recording import RecordedNorm
from normkit.comparison.row_places import Place
from normkit.conventions.eps import eps_in
from normkit.errors import InputError, SpecError
from normkit.identification.cast_program import in_words, programs_of
from normkit.identification.half_precision_calls import Run, rate
from normkit.identification.passport import CONVENTIONS, words_of
from normkit.identification.recorded_rows import identify_rows
from normkit.identification.row_bits import USUAL_EPS
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import shortened

_OFFSETS = (0.0, 1.0, -1.0, 2.0)
_ELSEWHERE = 0.05
"""What is further apart from every tensor of the reference than this is none of them, whatever rounding says."""
_SAME_SCALE = 1e-3
"""A factor nearer to 1 is none."""
_NEAR = 0.01
"""bfloat16 rounds the factor itself."""
_SAME_BITS, _OTHER_BITS = 0.99, 0.97
"""A norm's own cast program gives more of its bits than the first, a wrong one misses 4 % or more of them."""

_ROUNDED_NOWHERE = ("rows", "centring", "divisor", "eps", "gain", "bias")
"""The conventions that are no casts."""

Calls = Mapping[str, RecordedNorm]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One explanation, which the rows agree with."""

    kind: str
    """Its kind: "formula", "casts", "gain", "swapped gains", "not applied", "applied twice", "missing norm",
    "extra norm", "final norm", "scale", "softcap", "wiring", "first token" or "unknown"."""
    paths: tuple[str, ...]
    """The port's norms that it is about, or the reference's if they are missing."""
    words: str
    """One sentence; `together` writes the norms in place of "{}"."""


def applied(formula: Formula, x: Tensor) -> Tensor:
    """The formula on rows of shape (rows, n), in float64 without a rounding."""
    part = formula.weight if formula.weight is not None else formula.bias
    whole = x.double()
    if part is not None and part.dim() > x.dim() - 1:
        # A gain for each head; heads stand within tokens.
        whole = whole.reshape(-1, *part.shape[: part.dim() - x.dim() + 1], *x.shape[1:])
    elif formula.span is not None and x.dim() - 1 > max(formula.span, 1):
        whole = whole.flatten(1)
    spec = formula.spec.replace(eps=eps_in(x.dtype, formula.spec.eps))
    return replace(formula, spec=spec)(whole, torch.float64).reshape(x.shape)


def causes_at(place: Place, formulas: Mapping[str, Formula], places: Sequence[Place], limit: Limit) -> Iterator[Cause]:
    """What the port does at a norm that does not follow the reference's formula."""
    x, y = place.port_rows
    formula, path = formulas[place.reference], place.path

    def fits(candidate: Formula) -> bool:
        return limit.holds(distances(y, applied(candidate, x)))

    if limit.holds(distances(y, x)):
        yield Cause(kind="not applied", paths=(path,), words="{} is not applied: what leaves is what enters")
        return
    for changed in _variants(place, formula):
        if fits(changed):
            words = _difference(changed.spec, formula.spec)
            yield Cause(
                kind="formula",
                paths=(path,),
                words=f"the port's rows at {{}} follow the reference's formula with {words}",
            )
            return
    for other in places:
        gain = formulas.get(other.reference)
        if other is place or gain is None or not _has_other_gain(gain, formula):
            continue
        if fits(replace(formula, weight=gain.weight, bias=gain.bias)):
            there, own = other.port_rows, replace(gain, weight=formula.weight, bias=formula.bias)
            if limit.holds(distances(there[1], applied(own, there[0]))):
                both = tuple(sorted((path, other.path)))
                yield Cause(kind="swapped gains", paths=both, words=f"the gains of {both[0]} and {both[1]} are swapped")
            else:
                yield Cause(kind="gain", paths=(path, other.path), words=f"{path} has the gain of {other.path}")
            return
    if limit.holds(distances(y, applied(formula, applied(formula, x)))):
        yield Cause(kind="applied twice", paths=(path,), words=f"{path} is applied twice")
        return
    x0, y0 = place.reference_rows
    rows = ((y0, applied(formula, x0)), (y, applied(formula, x)))
    exact, apart = (float(distances(*each).median()) for each in rows)
    words = (
        f"the port's rows at {{}} do not follow the reference's formula, and no single change explains them: "
        f"{apart:.1e} from it, the reference's own {exact:.1e}"
    )
    yield Cause(kind="unknown", paths=(path,), words=words)


def rounds_elsewhere(place: Place, formula: Formula) -> float | None:
    """The share of the port's outputs with the bits of the reference's program; None where that is as large as its own.

    None also where nothing is in 16 bits, or the formula does not give the reference's own bits.
    """
    if not {each.dtype for each in (*place.port_rows, *place.reference_rows)} <= {*HALF}:
        return None
    if place.port_rows[0].dim() > 2 or _share(formula, place.reference_rows) < _SAME_BITS:
        return None
    share = _share(formula, place.port_rows)
    return None if share >= _OTHER_BITS else share


def _share(formula: Formula, rows: tuple[Tensor, Tensor]) -> float:
    """The share of outputs that the formula's cast program gives bit for bit."""
    x, y = rows
    shares = (rate([Run(x=x, y=y, weight=weight, bias=bias)], formula.spec).share for weight, bias in _stored(formula))
    return max(shares)


def cause_of_bits(place: Place, formula: Formula, share: float) -> Cause:
    """Where the port rounds, at a norm whose reference gives its own bits and not the port's.

    Args:
        place: The norm.
        formula: The reference's formula.
        share: The share of the port's outputs that it gives bit for bit.
    """
    x, y = place.port_rows
    candidates = [
        *programs_of(formula.spec, formula.spec.output_dtype),
        *(each.spec for each in _variants(place, formula)),
    ]
    rated = [
        (rate([Run(x=x, y=y, weight=weight, bias=bias)], each).share, each)
        for weight, bias in _stored(formula)
        for each in candidates
        if (each.has_weight, each.has_bias) == (weight is not None, bias is not None)
    ]
    best, found = max(rated, key=lambda each: each[0])
    words = _difference(found, formula.spec)
    if best < _SAME_BITS or not words:
        words = f"{share:.0%} of the bits are those of the reference's program ({in_words(formula.spec)})"
        return Cause(kind="casts", paths=(place.path,), words=f"at {{}} the port rounds in another place: {words}")
    kind = "formula" if _difference(found, formula.spec, _ROUNDED_NOWHERE) else "casts"
    return Cause(kind=kind, paths=(place.path,), words=f"the port's bits at {{}} are the reference's with {words}")


def _stored(formula: Formula) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Gain and bias as they are stored, and in float32, in which a port may store them."""
    parts = tuple(None if part is None else part.flatten() for part in (formula.weight, formula.bias))
    yield parts[0], parts[1]
    if any(part is not None and part.dtype in HALF for part in parts):
        wide = tuple(None if part is None else part.float() for part in parts)
        yield wide[0], wide[1]


def together(causes: Iterable[Cause]) -> Iterator[Cause]:
    """The causes in order, each once; those that say the same of several norms are one."""
    alike: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        alike.setdefault((cause.kind, cause.words), []).append(cause)
    for (kind, words), found in alike.items():
        paths = tuple(dict.fromkeys(path for cause in found for path in cause.paths))
        norms = paths[0] if len(paths) == 1 else f"{len(paths)} norms ({shortened(paths)})" if paths else ""
        yield Cause(kind=kind, paths=paths, words=words.replace("{}", norms))


def causes_before(
    place: Place, calls: Calls, others: Calls, limit: Limit, starts: Tensor, *, may_be_attention: bool
) -> Iterator[Cause]:
    """What arrives at a norm of the port in place of the reference's rows.

    Args:
        place: The norm.
        calls: The port's norms.
        others: The reference's norms.
        limit: What rounding explains there.
        starts: True for the rows of each text's first token; of no row if that is not known.
        may_be_attention: Attention may lie before the norm.
    """
    x, x0 = place.port_rows[0], place.reference_rows[0]
    beginning = f"what enters {place.path} in the port is"
    ratio = _ratio(x, x0, limit)
    if ratio is not None:
        known = _root_of_features(ratio, x0[0].numel())
        words = f"{beginning} {ratio:.4g} times what enters it in the reference{known}"
        yield Cause(kind="scale", paths=(place.path,), words=words)
        return
    others = {path: norm for path, norm in others.items() if path != place.reference}
    for owner, norms in (("the reference", others), ("the port", calls)):
        if (found := _one_of(x, norms, limit, skip=place.path)) is not None:
            yield Cause(kind="wiring", paths=(place.path,), words=f"{beginning} what {found} in {owner}")
            return
    if (found := _other_sum(x.double() - x0.double(), others)) is not None:
        yield Cause(kind="wiring", paths=(place.path,), words=f"{beginning} the reference's sum {found}")
        return
    apart = distances(x, x0)
    is_first = bool(starts.any()) and not bool(starts.all()) and float(apart[starts].max()) <= limit.worst
    if may_be_attention and is_first:
        words = (
            f"the first token of each text agrees at {place.path}, later ones do not: queries, keys, positions, the "
            "softmax's scale or the mask, for a token alone attends to itself whatever these are"
        )
        yield Cause(kind="first token", paths=(place.path,), words=words)


def cause_of_head(head: Tensor, calls: Calls, others: Calls, limit: Limit) -> Iterator[Cause]:
    """What the port's head takes, where it is not what leaves the last norm."""
    if not others:
        return
    last = [*others][-1]
    for owner, norms in (("reference", others), ("port", calls)):
        found = _one_of(head, norms, limit)
        if found == f"enters {last}" or (owner == "port" and found == f"enters {[*calls][-1]}"):
            words = f"the final norm is not applied: the head takes what {found} in the {owner}"
            yield Cause(kind="final norm", paths=(last,), words=words)
            return
        if found is not None and found not in (f"leaves {last}", f"leaves {[*calls][-1]}"):
            yield Cause(kind="wiring", paths=(), words=f"the port's head takes what {found} in the {owner}")
            return


def cause_of_extra(path: str, calls: Calls) -> Cause:
    """A norm of the port that the reference has not: one that is called twice, or another one."""
    norm = calls[path]
    others = {other: each for other, each in calls.items() if other != path}
    found = _one_of(norm.normalized, others, Limit(median=0.0, worst=0.0), verbs=("leaves",))
    base = path.partition("#")[0]
    if found == f"leaves {base}":
        return Cause(kind="applied twice", paths=(base,), words="{} is applied twice: what leaves it enters it again")
    where = "" if found is None else f", which takes what {found}"
    return Cause(kind="extra norm", paths=(path,), words=f"the reference has no norm for the port's {{}}{where}")


def _one_of(
    x: Tensor, norms: Calls, limit: Limit, *, skip: str = "", verbs: Sequence[str] = ("enters", "leaves")
) -> str | None:
    """Which of the rows of some norms these are, in words; None if they are none of them."""
    best: tuple[float, str] | None = None
    for path, norm in norms.items():
        for verb in verbs:
            rows = norm.normalized if verb == "enters" else norm.output
            if (path == skip and verb == "enters") or rows.shape[1:] != x.shape[1:]:
                continue
            count = min(len(rows), len(x))
            apart = float(distances(x[:count], rows[:count]).median())
            if apart <= limit.median and apart < _ELSEWHERE and (best is None or apart < best[0]):
                best = apart, f"{verb} {path}"
    return None if best is None else best[1]


def _other_sum(change: Tensor, others: Calls) -> str | None:
    """What a sum has more or less than the reference's, in words: what entered or left one of the norms before it."""
    best: tuple[float, str] | None = None
    for other, norm in others.items():
        if norm.input.shape != change.shape:
            continue
        x, y = norm.normalized.double(), norm.output.double()
        for part, words in (
            (y - x, f"with what leaves {other} in place of what enters it"),
            (x - y, f"with what enters {other} in place of what leaves it"),
            (-x, f"without what enters {other}"),
            (x, f"with what enters {other} once more"),
            (-y, f"without what leaves {other}"),
            (y, f"with what leaves {other} once more"),
        ):
            apart = float(distances(change, part).median())
            if apart < _ELSEWHERE and (best is None or apart < best[0]):
                best = apart, words
    return None if best is None else best[1]


def causes_of_outputs(given: Tensor, expected: Tensor, limit: Limit) -> Iterator[Cause]:
    """What the port's outputs are a function of the reference's by: a factor, or a softcap."""
    if given.shape[1] != expected.shape[1]:
        return
    count = min(len(given), len(expected))
    given, expected = given[:count].double(), expected[:count].double()
    if (ratio := _ratio(given, expected, limit)) is not None:
        yield Cause(kind="scale", paths=(), words=f"the port's outputs are {ratio:.4g} times the reference's")
        return
    for here, there, beginning in (
        (given, expected, "the port's outputs are the reference's with"),
        (expected, given, "the port's outputs lack"),
    ):
        if (cap := _softcap(here, there, limit)) is not None:
            words = f"{beginning} a softcap, {cap:.4g} * tanh(x / {cap:.4g})"
            yield Cause(kind="softcap", paths=(), words=words)
            return


def _softcap(capped: Tensor, plain: Tensor, limit: Limit) -> float | None:
    """c where capped = c * tanh(plain / c); None if there is none."""
    low, high = float(capped.abs().max()) * (1 + 1e-6), float(plain.abs().max()) * 100
    if not 0 < low < high or limit.holds(distances(plain, capped)):
        return None
    caps = torch.logspace(math.log10(low), math.log10(high), 400, dtype=torch.float64)

    def apart(cap: float) -> Tensor:
        return distances(cap * torch.tanh(plain / cap), capped)

    best = min(range(len(caps)), key=lambda place: float(apart(float(caps[place])).median()))
    low, high = float(caps[max(best - 1, 0)]), float(caps[min(best + 1, len(caps) - 1)])
    for _ in range(40):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if float(apart(first).median()) < float(apart(second).median()):
            high = second
        else:
            low = first
    cap = (low + high) / 2
    without = float(distances(plain, capped).median())
    is_one = limit.holds(apart(cap)) or float(apart(cap).median()) < 1e-2 * without
    return cap if is_one else None


def _ratio(x: Tensor, expected: Tensor, limit: Limit) -> float | None:
    """How many times the expected rows these are; None if they are no multiple, or the same."""
    ratio = float((x.double() * expected).sum() / expected.double().square().sum().clamp_min(1e-300))
    if ratio == 0 or abs(ratio - 1) < _SAME_SCALE or not limit.holds(distances(x, ratio * expected.double())):
        return None
    return ratio


def _root_of_features(ratio: float, features: int) -> str:
    """Whether a factor is the root of the number of features, by which some models scale their embedding."""
    for power, words in ((0.5, "is applied once more"), (-0.5, "is missing")):
        if abs(ratio / features**power - 1) < _NEAR:
            return f": a factor sqrt({features}) {words}"
    return ""


def _variants(place: Place, formula: Formula) -> Iterator[Formula]:
    """The reference's formula with what the port's rows show, and with one field changed."""
    x, y = place.port_rows
    spec = formula.spec
    try:
        found = identify_rows(
            x,
            y,
            None if formula.weight is None else formula.weight.flatten(),
            None if formula.bias is None else formula.bias.flatten(),
        )
    except InputError:
        found = None
    changes: list[dict[str, Any]] = []
    if found is not None and found.spec is not None:
        for reading in ("eps", "gain", "centring", "divisor"):
            if reading not in found.undecidable:
                changes.append({name: getattr(found.spec, name) for name in CONVENTIONS[reading]})
    changes += [{"eps": eps} for eps in USUAL_EPS]
    changes += [{"weight_offset": offset} for offset in _OFFSETS if spec.has_weight]
    changes += [{"has_weight": False, "weight_offset": 0.0}, {"has_bias": False}, {"correction": 1 - spec.correction}]
    changes += [{"centre_numerator": centred, "centre_statistics": centred} for centred in (False, True)]
    for change in changes:
        try:
            each = spec.replace(**change)
        except SpecError:
            continue
        if each != spec:
            weight, bias = (formula.weight if each.has_weight else None), (formula.bias if each.has_bias else None)
            yield Formula(spec=each, weight=weight, bias=bias)


def _difference(given: NormSpec, expected: NormSpec, readings: Sequence[str] = tuple(CONVENTIONS)) -> str:
    """The conventions in which two specs differ, in words."""
    parts = []
    for reading in readings:
        mine, theirs = words_of(given, reading), words_of(expected, reading)
        if reading == "eps" and mine != theirs and expected.eps == 0:
            parts.append(f"eps {given.eps:g}, where the reference's rows show none")
        elif mine != theirs:
            common = {*mine} & {*theirs} if len(mine) == len(theirs) else set()
            told = [", ".join(part for part in words if part not in common) for words in (mine, theirs)]
            label = {"gain": "", "casts": "", "offset dtype": "offset "}.get(reading, f"{reading} ")
            parts.append(f"{label}{told[0]} instead of {told[1]}")
    return "; ".join(parts)


def _has_other_gain(formula: Formula, other: Formula) -> bool:
    if formula.weight is None or other.weight is None or formula.weight.shape != other.weight.shape:
        return False
    return not torch.equal(formula.weight, other.weight)
