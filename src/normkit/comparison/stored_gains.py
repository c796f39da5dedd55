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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from normkit.comparison.parameter_pairs import kind_of
from normkit.comparison.parameters import norm_tensors
from normkit.comparison.runtimes import convention
from normkit.comparison.weights import Weights

FEW, MANY = 0.003, 0.10
"""The largest share of gains below -0.1, and the least share below 0.9, of a decided kind."""

AT_START = 0.25
"""The largest share of gains within 0.1 of zero of a decided kind."""

LEAST_NORMS, LEAST_NUMBERS = 4, 256
"""The least norms and numbers of a kind that is decided: single norms of trained models look like anything."""

Reading = Literal["one-centred", "zero-centred", "1 too much", "never trained", "mixed", "undecided"]

_READINGS: Mapping[float, Reading] = {0.0: "one-centred", 1.0: "zero-centred", -1.0: "1 too much"}


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
        return {
            "kind": self.kind,
            "norms": self.norms,
            "reading": self.reading,
            "adds": self.adds,
            "adds_in_runtime": self.adds_in_runtime,
            "is_right": self.is_right,
            "below": [*self.below],
            "smallest": self.smallest,
            "largest": self.largest,
        }


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
        """What all decided kinds are; "mixed" if they differ."""
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
        return {
            "name": self.name,
            "runtime": self.runtime,
            "architecture": self.architecture,
            "eps": {**self.eps},
            "reading": self.reading,
            "is_right": self.is_right,
            "kinds": [each.to_json() for each in self.kinds],
            "biases": self.biases,
            "not_finite": [*self.not_finite],
            "untrained": {**self.untrained},
            "notes": [*self.notes],
        }


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
