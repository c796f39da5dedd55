"""The size of a model's optimizer steps relative to its parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from normkit.measurement.training import Training
from normkit.text import percent

TYPICAL_LIMIT, FASTEST_LIMIT, GAIN_LIMIT = 0.045, 0.12, 0.025
"""Update ratios past which a step is too large: of the median weight, of the fastest weight, of the fastest gain.

Measured on the demo models with their own recipe (AdamW, 6e-3): at most 0.025, 0.059 and 0.003; at three times its
learning rate, which still trains well, 0.044, 0.092 and 0.021; at thirty times, 0.05 to 0.1, 0.2 and 0.19 to 0.28.
"""

FROM_NOTHING = 1e3
"""Beside a parameter that starts at 0, as gains do that are stored without their 1, every step is large: its first
ratio is missing, or past this."""

FAR_TOO_FAST, OPENING, FAR_AT_FIRST, LASTING = 3.0, 10, 10.0, 4
"""The factor over its limit at which a step is far too large; the steps that open a run, and that factor for each of
these alone; and the number of large steps that is too many.

Adam's first step is the learning rate times the sign of each gradient, over four times as large as those that follow
once its moments have settled (0.23 for a momentum of 0.9 and gradients of both signs), in ten steps or so.
"""

_SHRUNK = 0.1


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The change of the parameters in one step: rms of the change over their own rms."""

    step: int
    typical: float
    """Ratio of the median weight matrix; NaN without one."""
    fastest: tuple[str, float]
    """Path and ratio of the fastest weight matrix."""
    gain: tuple[str, float]
    """Path and ratio of the fastest gain."""

    @property
    def ratios(self) -> tuple[tuple[str, float, float], ...]:
        """Place, ratio and limit of each of the three that was measured; the median weight's first."""
        three = (
            ("the median weight", self.typical, TYPICAL_LIMIT),
            (*self.fastest, FASTEST_LIMIT),
            (*self.gain, GAIN_LIMIT),
        )
        return tuple(each for each in three if not math.isnan(each[1]))

    @property
    def excess(self) -> float:
        """The largest of the three ratios over their limits; at most 1 if the step is not too large."""
        return max((ratio / limit for _, ratio, limit in self.ratios), default=0.0)

    @property
    def place(self) -> str:
        """The parameter that is furthest past its limit."""
        return max(
            (self.fastest[1] / FASTEST_LIMIT, self.fastest[0]),
            (self.gain[1] / GAIN_LIMIT, self.gain[0]),
            key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0],
        )[1]

    def __str__(self) -> str:
        """The ratios in words: the median weight's, the fastest weight's, and a gain's that is past its limit."""
        parts = [f"the median weight by {percent(self.typical)}"] if not math.isnan(self.typical) else []
        parts += [
            f"{path} by {percent(ratio)}"
            for (path, ratio), least in ((self.fastest, 0.0), (self.gain, GAIN_LIMIT))
            if ratio > least
        ]
        return ", ".join(parts)


def paces(training: Training) -> tuple[Pace, ...]:
    """The pace of every step in which updates were measured; biases and parameters that start at 0 do not count."""
    kinds = {parameter.path: parameter.kind for parameter in training.parameters}
    weights: dict[int, dict[str, float]] = defaultdict(dict)
    scales: dict[int, dict[str, float]] = defaultdict(dict)
    typical: dict[int, float] = {}
    # Beside a parameter that was set to 0 in the run every step is large too.
    shrunk = {change.path: change.step for change in training.changes if change.factor < _SHRUNK}
    ratios = [series for series in training.of("update ratio") if series.values]
    first = min((series.steps[0] for series in ratios), default=0)
    for series in ratios:
        pairs = [pair for pair in zip(series.steps, series.values, strict=True) if math.isfinite(pair[1])]
        if not series.path:
            typical |= dict(pairs)
            continue
        if series.steps[0] > first or not series.values[0] < FROM_NOTHING:
            continue
        for step, value in pairs:
            if step >= shrunk.get(series.path, math.inf):
                break
            if kinds.get(series.path) in ("weight", "output"):
                weights[step][series.path] = value
            elif kinds.get(series.path) == "gain":
                scales[step][series.path] = value
    return tuple(
        Pace(
            step=step,
            typical=typical[step] if step in typical else median(weights[step].values() or [math.nan]),
            fastest=_largest(weights[step]),
            gain=_largest(scales[step]),
        )
        for step in sorted({*weights, *scales, *typical})
    )


def too_fast(training: Training) -> tuple[Pace, ...]:
    """The measured steps that were too large, in order: none where they are few and none of them is far too large."""
    fast = tuple(pace for pace in paces(training) if pace.excess > 1)
    return fast if len(fast) >= LASTING or any(pace.excess > FAR_TOO_FAST for pace in fast) else ()


def _largest(ratios: dict[str, float]) -> tuple[str, float]:
    return max(ratios.items(), key=lambda pair: pair[1], default=("", math.nan))
