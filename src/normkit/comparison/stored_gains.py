"""How gains are stored, from one file alone: as they multiply, without the 1 that a loader adds, or with 1 too much.

Trained gains are hardly ever negative, and some of them always shrink below the 1 that they begin at. So a number that
a loader adds is right if almost none of the sums lies below -0.1 while many lie below 0.9. Gains that have hardly left
their start show neither: gains of about 0 may be trained ones of 0 or untrained ones without their 1.

The limits come from eight trained models (SmolLM2 135M, Qwen2.5-Coder 0.5B, Gemma 3 270M, all-mpnet-base-v2,
all-MiniLM-L6-v2, Whisper base and the two that ship with normkit). In the 23 kinds of norms there, at most 3.4 % of the
gains are below -0.1 and at least 1.2 % below 0.9. A kind is decided only if at most 0.3 % are below -0.1 and at least
10 % below 0.9. Stored in each of the three ways, 51 of 69 are decided, none of them wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import kind_of
from normkit.comparison.parameters import norm_tensors
from normkit.comparison.runtimes import convention
from normkit.comparison.weights import Weights
from normkit.show.parts import Fact, Section, Tone, Verdict, printable
from normkit.text import counted, shortened, significant

FEW, MANY = 0.003, 0.10
"""The largest share of gains below -0.1, and the least share below 0.9, of a decided kind."""

AT_START = 0.25
"""The largest share of gains within 0.1 of zero of a decided kind."""

LEAST_NORMS, LEAST_NUMBERS = 4, 256
"""The least norms and numbers of a kind that is decided: single norms of trained models look like anything."""

Reading = Literal["one-centred", "zero-centred", "1 too much", "never trained", "mixed", "undecided"]

_READINGS: Mapping[float, Reading] = {0.0: "one-centred", 1.0: "zero-centred", -1.0: "1 too much"}


_NEEDS = {
    "one-centred": "gains as they multiply: a loader must add nothing",
    "zero-centred": "gains without their 1: a loader must add 1",
    "1 too much": "gains with 1 too much: they are right for no loader that is known",
}


@dataclass(frozen=True, kw_only=True)
class KindOfGains:
    """The gains of the norms that stand at one place in every layer."""

    kind: str
    """Path of the norms, with a star for each number."""
    norms: int
    """How many norms."""
    reading: Reading
    """How the gains are stored; "never trained": all of them are one number."""
    adds: float | None
    """The number that a loader must add; None if undecided."""
    adds_in_runtime: float | None
    """The number that the runtime adds; None if that is not known."""
    below: tuple[float, float, float]
    """The shares of gains below -1.1, -0.1 and 0.9."""
    smallest: float
    largest: float

    @property
    def is_right(self) -> bool | None:
        """Whether the runtime adds what is needed; None if one of the two is not known."""
        if self.adds is None or self.adds_in_runtime is None:
            return None
        return self.adds == self.adds_in_runtime

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "is_right": self.is_right, "below": [*self.below]}


@dataclass(frozen=True, kw_only=True)
class StoredGains:
    """The gains of one file."""

    name: str
    runtime: str
    """Who reads the file; "" if that is not known."""
    architecture: str
    eps: Mapping[str, float]
    """As in `Weights`."""
    kinds: tuple[KindOfGains, ...]
    """In the order of the file."""
    biases: int
    """How many norms have a bias."""
    not_finite: tuple[str, ...]
    """Names of gains with NaN or infinities; they are in no kind."""
    untrained: Mapping[str, float]
    """Path of a norm whose gains are all the number that they begin at -> that number; empty where all norms are so."""
    notes: tuple[str, ...]

    @property
    def reading(self) -> Reading:
        """The kind of all that are decided; "mixed" if they differ."""
        found = {each.reading for each in self.kinds} - {"undecided"}
        trained = found - {"never trained"}
        if len(trained) > 1:
            return "mixed"
        return next(iter(trained or found), "undecided")

    @property
    def is_right(self) -> bool | None:
        """Whether the runtime adds to each kind what is needed; None if no kind is wrong and none decided."""
        judged = {each.is_right for each in self.kinds}
        return False if False in judged or self.not_finite else True if True in judged else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        lists = {"not_finite": [*self.not_finite], "notes": [*self.notes]}
        kinds = [each.to_json() for each in self.kinds]
        return {**asdict(self), **lists, "kinds": kinds, "reading": self.reading, "is_right": self.is_right}


def stored_gains(weights: Weights) -> StoredGains:
    """Find how the gains of a file are stored, from their values alone; nothing else is read and nothing is run.

    Raises:
        ModelError: If the file cannot be read to its end.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> found = {f"h.{layer}.ln_1.weight": torch.rand(256) - 0.9 for layer in range(12)}
        >>> stored_gains(weights_of(found)).reading
        'zero-centred'
    """
    norms = norm_tensors(weights.source.tensors).norms
    kinds: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    bad = []
    for norm in norms:
        if norm.weight is None:
            continue
        rows = weights.source.rows(norm.weight, 0, weights.source.tensors[norm.weight].matrix[0])
        values = rows.reshape(-1).to(torch.float32)
        if not bool(values.isfinite().all()):
            bad.append(norm.weight)
            continue
        kinds[kind_of(norm.path)].append((norm.path, values))
    found = tuple(_kind(weights, kind, members) for kind, members in kinds.items())
    return StoredGains(
        name=weights.name,
        runtime=weights.runtime,
        architecture=weights.architecture,
        eps=weights.eps,
        kinds=found,
        biases=sum(norm.bias is not None for norm in norms),
        not_finite=tuple(bad),
        untrained=_untrained(found, kinds),
        notes=weights.notes,
    )


def _untrained(found: Sequence[KindOfGains], kinds: Mapping[str, Sequence[tuple[str, Tensor]]]) -> dict[str, float]:
    """The norms whose gains are all at their start, where others are not.

    Gains begin at 1 less what a loader adds; where that is not decided, at what it is for the file's other kinds.
    """
    decided = {each.adds for each in found if each.adds is not None}
    at_start = {}
    for kind in found:
        starts = {1 - adds for adds in ({kind.adds} if kind.adds is not None else decided) if adds is not None}
        for path, values in kinds[kind.kind]:
            first = float(values[0])
            if first in (starts or {0.0, 1.0}) and bool((values == first).all()):
                at_start[path] = first
    return at_start if len(at_start) < sum(map(len, kinds.values())) else {}


def _kind(weights: Weights, kind: str, members: Sequence[tuple[str, Tensor]]) -> KindOfGains:
    values = torch.cat([vector for _, vector in members])
    below = [float((values < limit).double().mean()) for limit in (-1.1, -0.1, 0.9, 1.9)]
    at_start = [float((values + c).abs().lt(0.1).double().mean()) for c in (1.0, 0.0, -1.0)]
    smallest, largest = float(values.min()), float(values.max())
    adds: float | None = None
    reading: Reading = "undecided"
    if smallest == largest:
        reading = "never trained"
    elif len(members) >= LEAST_NORMS and len(values) >= LEAST_NUMBERS:
        # To add c moves both limits down by c.
        fitting = [
            c
            for place, c in enumerate((1.0, 0.0, -1.0))
            if below[place] <= FEW and below[place + 1] >= MANY and at_start[place] <= AT_START
        ]
        if len(fitting) == 1:
            adds, reading = fitting[0], _READINGS[fitting[0]]
    known = convention(weights, members[0][0])
    return KindOfGains(
        kind=kind,
        norms=len(members),
        reading=reading,
        adds=adds,
        adds_in_runtime=None if known is None else known.adds,
        below=(below[0], below[1], below[2]),
        smallest=smallest,
        largest=largest,
    )


def describe_gains(found: StoredGains) -> Section:
    """How the gains of a file are stored, safe to print."""
    groups: dict[tuple[object, ...], list[KindOfGains]] = defaultdict(list)
    for each in found.kinds:
        groups[(each.reading, each.adds_in_runtime, each.smallest if each.reading == "never trained" else 0)].append(
            each
        )
    facts = [_fact(members, found.runtime) for members in groups.values()]
    verdict = _verdict(found)
    # A sentence for each number at which norms stand at their start among trained ones.
    others = sum(each.norms for each in found.kinds) - len(found.untrained)
    trained = f"{counted(others, 'other norm')} {'is' if others == 1 else 'are'} trained"
    fresh = [
        f"{shortened([path for path, at in found.untrained.items() if at == number])}: all {number:g}, as initialised, "
        f"where {trained}"
        for number in dict.fromkeys(found.untrained.values())
    ]
    if fresh and verdict.tone != "error":
        verdict = replace(verdict, tone="warning", detail=f"{verdict.detail} {fresh.pop(0)}.")
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
