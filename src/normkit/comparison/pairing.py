"""Pairs the norms of two models, and finds the conventions in which two norms differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normkit.identification.book import Entry, PassportBook
from normkit.identification.passport import Passport
from normkit.identification.spec_readings import CONVENTIONS, said, same_eps, value_of
from normkit.spec import NormSpec

MatchedBy = Literal["path", "order"]

_SAME_GAIN = 0.999
"""Correlation of two gains: rounding to eight bits leaves 0.9999."""
_FEWEST_TELLING = 16
"""Fewer gains than this may be alike by chance."""
_SAME_EPS = 1e-6
"""eps is measured to about 1e-7; five digits are 1e-5 to 1e-4 apart."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A norm and the one that it stands for."""

    entry: Entry
    """The entry of the model."""
    reference: Entry
    """The entry of the reference."""
    matched_by: MatchedBy
    """Both have this "path"; or "order": of what no path matched, they come in turn and have equally many features."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A convention in which a norm differs from its reference."""

    reading: str
    """A key of `CONVENTIONS`, "kind", "features", or another reading of a passport, as in "training"."""
    given: Any
    """The norm's value: for a convention, the fields of `NormSpec` that it decides."""
    expected: Any
    """The reference's value."""


def match(model: PassportBook, reference: PassportBook) -> tuple[Match, ...]:
    """Pair the norms of a model with those of its reference, in the model's forward order.

    Norms with the same path are paired first. The others are paired in forward order: as many norms of one size as
    possible, preferably those whose parameters are the same, to the bit or but for rounding and an offset. If all
    parameters exist in another order, they were exchanged between norms, and the norms are paired in turn.
    """
    there = {entry.path: entry for entry in reference.entries}
    matches = {
        entry.path: Match(entry=entry, reference=there[entry.path], matched_by="path")
        for entry in model.entries
        if entry.path in there
    }
    rest = [entry for entry in model.entries if entry.path not in matches]
    rest_there = [entry for entry in reference.entries if entry.path not in matches]
    aligned = zip(rest, rest_there, strict=True) if _is_permuted(rest, rest_there) else _aligned(rest, rest_there)
    for entry, other in aligned:
        matches[entry.path] = Match(entry=entry, reference=other, matched_by="order")
    return tuple(matches[entry.path] for entry in model.entries if entry.path in matches)


def changes(entry: Entry, reference: Entry) -> tuple[Change, ...]:
    """The changes of a norm against its reference; a convention that is undecidable in either is not compared."""
    found = []
    if entry.features != reference.features:
        found.append(Change(reading="features", given=entry.features, expected=reference.features))
    given, expected = entry.passport, reference.passport
    if given.spec is None or expected.spec is None:
        if given.verdict != expected.verdict:
            found.append(Change(reading="kind", given=given.verdict, expected=expected.verdict))
        return tuple(found)
    for reading in CONVENTIONS:
        if reading in undecided(given, expected):
            continue
        values, others = value_of(given.spec, reading), value_of(expected.spec, reading)
        if values != others and not _is_alike(reading, given.spec, expected.spec):
            found.append(Change(reading=reading, given=values, expected=others))
    for reading, here in given.readings.items():
        there = expected.readings.get(reading)
        if reading in (*CONVENTIONS, "kind") or there is None or here.undecidable or there.undecidable:
            continue
        values, others = said(here.value), said(there.value)
        if isinstance(values, dict) and isinstance(others, dict):
            # A dtype that only one of them was tried on is no difference: the other may run in float32 alone.
            values, others = (
                {key: each[key] for key in each if key in other} for each, other in ((values, others), (others, values))
            )
        if values != others:
            found.append(Change(reading=reading, given=values, expected=others))
    return tuple(found)


def undecided(given: Passport, expected: Passport) -> dict[str, str]:
    """The conventions that could not be compared, each with the reason."""
    open_readings = {**expected.undecidable, **given.undecidable}
    return {reading: reason for reading, reason in open_readings.items() if reading in CONVENTIONS}


def digests(entry: Entry) -> list[str | None]:
    """Digests of a norm's weight and bias."""
    return [(entry.passport.parameters[role] or {}).get("sha256") for role in ("weight", "bias")]


def _is_alike(reading: str, given: NormSpec, expected: NormSpec) -> bool:
    """Two specs with different values for a reading mean the same by it."""
    if reading == "eps":
        return same_eps(given, expected, _SAME_EPS)
    # Where one has no offset, the gain has said so.
    return reading == "offset dtype" and not (given.gain.offset and expected.gain.offset)


def _likeness(entry: Entry, other: Entry) -> int:
    """0 for norms of different sizes, 1 for one size, 3 where the parameters are the same too."""
    if entry.features != other.features:
        return 0
    return 3 if _hold_the_same(entry, other) else 1


def _hold_the_same(entry: Entry, other: Entry) -> bool:
    """The parameters are the same to the bit, or the weights but for rounding, a constant and a factor."""
    if digests(entry) == digests(other):
        return True
    weights = [each.passport.weight for each in (entry, other)]
    if any(weight is None or weight.is_meta or weight.numel() < _FEWEST_TELLING for weight in weights):
        return False
    given, expected = (weight.detach().cpu().double().flatten() for weight in weights if weight is not None)
    if given.shape != expected.shape:
        return False
    spreads = (given - given.mean(), expected - expected.mean())
    along = spreads[0] @ spreads[1]
    return bool(along > _SAME_GAIN * spreads[0].norm() * spreads[1].norm())


def _is_permuted(model: Sequence[Entry], reference: Sequence[Entry]) -> bool:
    """The norms have the same sizes in turn, and all parameters of the ones are those of the others."""
    if [entry.features for entry in model] != [entry.features for entry in reference]:
        return False
    held, held_there = (Counter(each for entry in entries for each in digests(entry)) for entries in (model, reference))
    if held == held_there:
        return True
    left = list(reference)
    for entry in model:
        same = next((other for other in left if _hold_the_same(entry, other)), None)
        if same is None:
            return False
        left.remove(same)
    return True


def _aligned(model: Sequence[Entry], reference: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """The pairs, in forward order on both sides, whose likenesses have the largest sum."""
    best = [[0] * (len(reference) + 1) for _ in range(len(model) + 1)]
    for here in reversed(range(len(model))):
        for there in reversed(range(len(reference))):
            paired = _likeness(model[here], reference[there]) + best[here + 1][there + 1]
            best[here][there] = max(paired, best[here + 1][there], best[here][there + 1])
    here = there = 0
    while here < len(model) and there < len(reference):
        like = _likeness(model[here], reference[there])
        if like and best[here][there] == like + best[here + 1][there + 1]:
            yield model[here], reference[there]
            here, there = here + 1, there + 1
        elif best[here][there] == best[here + 1][there]:
            here += 1
        else:
            there += 1
