"""What a model was fed, step by step, as series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from normkit.inspection.training import Quantity

# Of fewer elements it is no wonder that they are alike.
_FEWEST = 16


def batch_series(pulse: Mapping[str, float]) -> Iterator[tuple[Quantity, float]]:
    """The series that a pulse adds to; none of a step whose batch was not seen.

    Args:
        pulse: By the names of `normkit.watching.gauging.PULSE`.
    """
    calls, sampled = pulse["calls"], pulse["sampled"]
    if calls:
        yield "batch digest", pulse["digest"]
        yield "batch largest", max(abs(pulse["low"]), abs(pulse["high"]), key=_height)
        if sampled >= _FEWEST:
            yield "batch distinct", pulse["distinct"]
            if not pulse["ids"]:
                yield "batch rms", math.sqrt(pulse["energy"] / sampled)
    if pulse["labels"]:
        yield "labels", pulse["labels"]
        yield "label spread", pulse["highest"] - pulse["lowest"]
        shares: tuple[tuple[Quantity, str, str], ...] = (
            ("labels copied", "copied", "labels"),
            ("labels next", "next", "nexts"),
            ("labels back", "back", "backs"),
            ("labels then", "then", "thens"),
        )
        for quantity, part, whole in shares:
            # What is fed with no ids has no input at a label's place.
            if pulse[whole] and pulse["nexts"]:
                yield quantity, pulse[part] / pulse[whole]


def _height(value: float) -> float:
    return math.inf if math.isnan(value) else value
