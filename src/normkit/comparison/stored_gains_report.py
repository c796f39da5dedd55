"""How the gains of one file are stored, in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from normkit.comparison.stored_gains import KindOfGains, StoredGains, stored_gains
from normkit.comparison.weights import Weights
from normkit.show.parts import Fact, Section, Tone, Verdict, printable
from normkit.text import counted, shortened, significant

_NEEDS = {
    "one-centred": "gains as they multiply: a loader must add nothing",
    "zero-centred": "gains without their 1: a loader must add 1",
    "1 too much": "gains with 1 too much: they are right for no loader that is known",
}


def describe_weights(weights: Weights) -> Section:
    """What one file says of its norms by itself, from the values of its gains; nothing is run.

    Raises:
        ModelError: If the file cannot be read to its end.
    """
    return describe_gains(stored_gains(weights))


def describe_gains(found: StoredGains) -> Section:
    """How the gains of a file are stored, safe to print."""
    groups: dict[tuple[object, ...], list[KindOfGains]] = defaultdict(list)
    for each in found.kinds:
        groups[(each.reading, each.adds_in_runtime, each.smallest if each.reading == "never trained" else 0)].append(
            each
        )
    facts = [_fact(members, found.runtime) for members in groups.values()]
    verdict, fresh = _verdict(found), _untrained(found)
    if fresh and verdict.tone != "error":
        verdict = replace(verdict, tone="warning", detail=f"{verdict.detail} {fresh[0]}.")
        del fresh[0]
    facts[:0] = [Fact("untrained", words, "warning") for words in fresh]
    if found.not_finite:
        facts.insert(0, Fact("not finite", f"NaN or infinity in {shortened(found.not_finite)}", "error"))
    if found.biases:
        facts.append(Fact("biases", f"at {counted(found.biases, 'norm')}"))
    eps = {f"{value:.7g}" for value in found.eps.values()}
    facts.append(Fact("eps", shortened(sorted(eps)) if eps else "not stated"))
    form = " ".join(filter(None, (found.runtime, found.architecture)))
    facts.append(Fact("form", form or "not stated"))
    return printable(
        Section(
            id="gains",
            title=f"Gains of {found.name}",
            source="read from the stored values; nothing was run",
            verdict=verdict,
            facts=tuple(facts),
            remarks=found.notes,
        )
    )


def _untrained(found: StoredGains) -> list[str]:
    """The norms at their start among trained ones, a sentence for each number at which they are."""
    others = sum(each.norms for each in found.kinds) - len(found.untrained)
    trained = f"{counted(others, 'other norm')} {'is' if others == 1 else 'are'} trained"
    by_number: dict[float, list[str]] = defaultdict(list)
    for path, number in found.untrained.items():
        by_number[number].append(path)
    return [
        f"{shortened(paths)}: all {number:g}, as initialised, where {trained}" for number, paths in by_number.items()
    ]


def _verdict(found: StoredGains) -> Verdict:
    if not found.kinds and not found.not_finite:
        return Verdict(tone="neutral", headline="no gains", detail="the file holds no gain of a norm.")
    if found.is_right is False:
        detail = "a gain is not a number" if found.not_finite else f"{found.runtime} computes other gains from them"
        return Verdict(tone="error", headline=found.reading, detail=f"{detail}.")
    if found.reading == "mixed":
        return Verdict(tone="warning", headline="mixed", detail="the norms of the file are stored in different ways.")
    if found.reading == "undecided":
        detail = "by their values alone it cannot be said; compare the file with the model it was made from."
        return Verdict(tone="note", headline="undecided", detail=detail)
    if found.reading == "never trained":
        return Verdict(tone="note", headline="never trained", detail="the gains of each norm are all one number.")
    as_read = f", as {found.runtime} stores them" if found.is_right else ""
    tone: Tone = "warning" if found.reading == "1 too much" else "good"
    return Verdict(tone=tone, headline=found.reading, detail=f"{_NEEDS[found.reading]}{as_read}.")


def _fact(members: list[KindOfGains], runtime: str) -> Fact:
    first, count = members[0], sum(each.norms for each in members)
    label = counted(count, "norm") if len(members) > 1 else first.kind
    words = {"never trained": f"all {significant(first.smallest)}: never trained", "undecided": "undecided"}.get(
        first.reading
    )
    words = words or f"{first.reading}, {significant(min(each.smallest for each in members))} to " + significant(
        max(each.largest for each in members)
    )
    if first.is_right is False:
        words += f"; {runtime} adds {first.adds_in_runtime:g} to them, they need {first.adds:+g}"
    if len(members) > 1:
        words += f" ({shortened([each.kind.rpartition('.')[2] for each in members], 2)})"
    tone: Tone = "error" if first.is_right is False else "note" if first.adds is None else "good"
    return Fact(label, words, tone)
