"""Causes of a difference of rows: another wiring, another scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.comparison.effects import distances
from normkit.comparison.own_rounding import Limit
from normkit.comparison.recording import RecordedNorm
from normkit.comparison.row_places import Place, is_of_heads
from normkit.text import shortened

_ELSEWHERE = 0.05
"""A tensor that is further than this from every tensor of the reference is none of them, whatever rounding says."""
_SAME_SCALE = 1e-3
"""A factor nearer to 1 is none."""
_NEARLY_ALL = 0.99
"""Share of a squared difference: what is left of the difference is less than a tenth."""
_SAME_LENGTH = 0.02
"""Lengths that differ by less than this share of the distance of the rows are the same; those of unrelated rows of 64
features differ by some 9 % of it."""
_NEAR = 0.01
"""bfloat16 rounds the factor itself."""

Calls = Mapping[str, RecordedNorm]


@dataclass(frozen=True, kw_only=True)
class RowCause:
    """One explanation, which the rows agree with."""

    kind: str
    """Its kind: "formula", "divisor", "casts", "gain", "swapped gains", "not applied", "applied twice", "missing norm",
    "extra norm", "final norm", "scale", "softcap", "wiring", "first token",
    "order", "rotation" or "unknown"."""
    paths: tuple[str, ...]
    """The port's norms that it is about, or the reference's if they are missing."""
    words: str
    """One sentence; `together` writes the norms in place of "{}"."""


def together(causes: Iterable[RowCause]) -> Iterator[RowCause]:
    """The causes in order, each once; those that say the same of several norms are one."""
    alike: dict[tuple[str, str], list[RowCause]] = {}
    for cause in causes:
        alike.setdefault((cause.kind, cause.words), []).append(cause)
    for (kind, words), found in alike.items():
        paths = tuple(dict.fromkeys(path for cause in found for path in cause.paths))
        norms = paths[0] if len(paths) == 1 else f"{len(paths)} norms ({shortened(paths)})" if paths else ""
        yield RowCause(kind=kind, paths=paths, words=words.replace("{}", norms))


def causes_before(
    place: Place, calls: Calls, others: Calls, limit: Limit, starts: Tensor, *, may_be_attention: bool
) -> Iterator[RowCause]:
    """The rows that arrive at a norm of the port in place of the reference's.

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
        yield RowCause(kind="scale", paths=(place.path,), words=words)
        return
    others = {path: norm for path, norm in others.items() if path != place.reference}
    for owner, norms in (("the reference", others), ("the port", calls)):
        if (found := _one_of(x, norms, limit, skip=place.path)) is not None:
            yield RowCause(kind="wiring", paths=(place.path,), words=f"{beginning} what {found} in {owner}")
            return
    if (found := _other_sum(x.double() - x0.double(), others)) is not None:
        yield RowCause(kind="wiring", paths=(place.path,), words=found.format(f"what enters {place.path}"))
        return
    apart = distances(x, x0)
    is_first = bool(starts.any()) and not bool(starts.all()) and float(apart[starts].max()) <= limit.worst
    if may_be_attention and is_first:
        words = (
            f"the first token of each text agrees at {place.path}, later ones do not: queries, keys, positions, the "
            "softmax's scale or the mask, for a token alone attends to itself whatever these are"
        )
        yield RowCause(kind="first token", paths=(place.path,), words=words)


def order_of(place: Place, limit: Limit, tokens: int) -> RowCause | None:
    """Whether rows at a norm have the reference's numbers in another order: of the features, or of a token's heads."""
    x, x0 = (rows.flatten(1).double() for rows in (place.port_rows[0], place.reference_rows[0]))
    beginning = f"what enters {place.path} is the reference's with"
    if limit.holds(distances(x.sort(-1).values, x0.sort(-1).values)):
        return RowCause(kind="order", paths=(place.path,), words=f"{beginning} its features in another order")
    if tokens and len(x) % tokens == 0 and len(x) > tokens:
        # As heads in another order keep the sum over the heads and that of squares.
        heads, heads_there = (rows.reshape(tokens, -1, rows.shape[-1]) for rows in (x, x0))
        sums = [(one.sum(1), two.sum(1)) for one, two in ((heads, heads_there), (heads**2, heads_there**2))]
        if all(limit.holds(distances(*each)) for each in sums):
            return RowCause(kind="order", paths=(place.path,), words=f"{beginning} its heads in another order")
    return None


def rotation_of(place: Place, limit: Limit) -> RowCause | None:
    """Whether rows at a norm of queries or keys have the reference's lengths, and other directions.

    A rotary embedding turns pairs of features: those half of the features apart, or neighbours.
    """
    if not is_of_heads(place.path) and not is_of_heads(place.reference):
        return None
    x, x0 = (rows.flatten(1).double() for rows in (place.port_rows[0], place.reference_rows[0]))
    apart = float(distances(x, x0).median())

    def have_one_length(shape: Sequence[int], axis: int) -> bool:
        off = distances(*(rows.reshape(len(rows), *shape).norm(dim=axis).flatten(1) for rows in (x, x0)))
        return limit.holds(off) and float(off.median()) < _SAME_LENGTH * apart

    if not have_one_length((-1, 1), 1):
        return None
    pairs = ""
    if x.shape[1] % 2 == 0 and have_one_length((2, -1), 1):
        pairs = ", as a whole and in each pair of features half a row apart"
    elif x.shape[1] % 2 == 0 and have_one_length((-1, 2), 2):
        pairs = ", as a whole and in each pair of neighbouring features"
    words = (
        f"each row that enters {place.path} has the reference's length{pairs}, and another direction: the rotary "
        "embedding stands before this norm in one of the two and behind it in the other, or turns by other angles"
    )
    return RowCause(kind="rotation", paths=(place.path,), words=words)


def cause_of_head(head: Tensor, calls: Calls, others: Calls, limit: Limit) -> Iterator[RowCause]:
    """The input of the port's head, where it is not the output of the last norm."""
    if not others:
        return
    last = [*others][-1]
    for owner, norms in (("reference", others), ("port", calls)):
        found = _one_of(head, norms, limit)
        if found == f"enters {last}" or (owner == "port" and found == f"enters {[*calls][-1]}"):
            words = f"the final norm is not applied: the head takes what {found} in the {owner}"
            yield RowCause(kind="final norm", paths=(last,), words=words)
            return
        if found is not None and found not in (f"leaves {last}", f"leaves {[*calls][-1]}"):
            yield RowCause(kind="wiring", paths=(), words=f"the port's head takes what {found} in the {owner}")
            return


def causes_of_heads(
    heads: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    calls: Calls,
    calls_there: Calls,
    names: Mapping[str, str],
    limit: Limit,
) -> Iterator[RowCause]:
    """The heads, of several, that take another place of the stream than the reference's.

    Args:
        heads: What the port's heads take.
        others: What the reference's heads take, of as many heads.
        calls: The port's norms.
        calls_there: The reference's norms.
        names: The port's norm -> the reference's.
        limit: What rounding explains at the outputs.
    """
    for (path, x), (other, x0) in zip(heads.items(), others.items(), strict=True):
        found, found_there = _one_of(x, calls, limit), _one_of(x0, calls_there, limit)
        if found is None or found_there is None:
            continue
        verb, _, norm = found.partition(" ")
        if f"{verb} {names.get(norm, norm)}" != found_there:
            words = f"the head {path} takes what {found}, where the reference's {other} takes what {found_there}"
            yield RowCause(kind="wiring", paths=(norm,), words=words)


def cause_of_extra(path: str, calls: Calls) -> RowCause:
    """A norm of the port that the reference has not: one that is called twice, or another one."""
    norm = calls[path]
    others = {other: each for other, each in calls.items() if other != path}
    found = _one_of(norm.normalized, others, Limit(median=0.0, worst=0.0), verbs=("leaves",))
    base = path.partition("#")[0]
    if found == f"leaves {base}":
        return RowCause(
            kind="applied twice", paths=(base,), words="{} is applied twice: what leaves it enters it again"
        )
    where = "" if found is None else f", which takes what {found}"
    return RowCause(kind="extra norm", paths=(path,), words=f"the reference has no norm for the port's {{}}{where}")


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
    """The term that a sum has more or less than the reference's, in words: rows before or after an earlier norm."""
    best: tuple[float, str] | None = None
    for other, norm in others.items():
        if norm.input.shape != change.shape:
            continue
        x, y = norm.normalized.double(), norm.output.double()
        for part, words in (
            (
                y - x,
                f"the residual connection around {other} adds what the norm gives, not what enters it, as {{}} shows",
            ),
            (x - y, f"the residual connection around {other} adds what enters it, not what it gives, as {{}} shows"),
            (-x, f"{{}} lacks what enters {other}, which the reference's sum has: a residual connection is missing"),
            (x, f"{{}} is the reference's sum with what enters {other} once more"),
            (-y, f"{{}} is the reference's sum without what leaves {other}"),
            (y, f"{{}} is the reference's sum with what leaves {other} once more"),
        ):
            apart = float(distances(change, part).median())
            if apart < _ELSEWHERE and (best is None or apart < best[0]):
                best = apart, words
    return None if best is None else best[1]


def causes_of_outputs(given: Tensor, expected: Tensor, limit: Limit) -> Iterator[RowCause]:
    """The function between the reference's outputs and the port's: a factor, or a softcap."""
    if given.shape[1] != expected.shape[1]:
        return
    count = min(len(given), len(expected))
    given, expected = given[:count].double(), expected[:count].double()
    if (ratio := _ratio(given, expected, limit)) is not None:
        yield RowCause(kind="scale", paths=(), words=f"the port's outputs are {ratio:.4g} times the reference's")
        return
    for here, there, beginning in (
        (given, expected, "the port's outputs are the reference's with"),
        (expected, given, "the port's outputs lack"),
    ):
        if (cap := _softcap(here, there, limit)) is not None:
            words = f"{beginning} a softcap, {cap:.4g} * tanh(x / {cap:.4g})"
            yield RowCause(kind="softcap", paths=(), words=words)
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
    given, wanted = x.double(), expected.double()
    ratio = float((given * wanted).sum() / wanted.square().sum().clamp_min(1e-300))
    if ratio == 0 or abs(ratio - 1) < _SAME_SCALE:
        return None
    # The factor explains this share of the squared difference; the rest is at right angles to the expected rows.
    share = (ratio - 1) ** 2 * float(wanted.square().sum()) / float((given - wanted).square().sum())
    is_explained = share > _NEARLY_ALL or (share > 0.5 and limit.holds(distances(given, ratio * wanted)))
    return ratio if is_explained else None


def _root_of_features(ratio: float, features: int) -> str:
    """Whether a factor is the root of the number of features, by which some models scale their embedding."""
    for power, words in ((0.5, "is applied once more"), (-0.5, "is missing")):
        if abs(ratio / features**power - 1) < _NEAR:
            return f": a factor sqrt({features}) {words}"
    return ""
