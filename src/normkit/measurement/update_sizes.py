"""The size of a model's updates relative to its parameters, step by step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from normkit.measurement.training import Training
from normkit.text import percent

MEDIAN_LIMIT, WEIGHT_LIMIT, GAIN_LIMIT = 0.045, 0.12, 0.025
"""Update ratios past which a step is too large: of the median weight, of any weight, of any gain.

Measured on the demo models with their own recipe (AdamW, 6e-3): at most 0.025, 0.059 and 0.003; at three times its
learning rate, which still trains well, 0.044, 0.092 and 0.021; at thirty times, 0.05 to 0.1, 0.2 and 0.19 to 0.28.
"""

FROM_NOTHING = 1e3
"""Limit of the first ratio of a parameter that starts at 0, as gains that are stored less 1: relative to it every step
is large. The first ratio is missing, or past this."""

FAR_TOO_LARGE, FIRST_STEPS, FAR_IN_FIRST_STEPS, MANY_STEPS = 3.0, 10, 10.0, 4
"""The factor over its limit at which a step is far too large; the number of first steps of a run, and the factor for
each of these alone; and the number of large steps that is too many.

Adam's first step is the learning rate times the sign of each gradient, over four times as large as those that follow
once its moments have settled (0.23 for a momentum of 0.9 and gradients of both signs), in ten steps or so.
"""

_SHRUNK = 0.1


@dataclass(frozen=True, kw_only=True)
class UpdateSize:
    """The change of the parameters in one step: rms of the change over their own rms."""

    step: int
    median_weight: float
    """Ratio of the median weight matrix; NaN without one."""
    largest_weight: tuple[str, float]
    """Path and ratio of the weight matrix with the largest ratio."""
    largest_gain: tuple[str, float]
    """Path and ratio of the gain with the largest ratio."""

    @property
    def ratios(self) -> tuple[tuple[str, float, float], ...]:
        """Place, ratio and limit of each of the three that was measured; the median weight's first."""
        three = (
            ("the median weight", self.median_weight, MEDIAN_LIMIT),
            (*self.largest_weight, WEIGHT_LIMIT),
            (*self.largest_gain, GAIN_LIMIT),
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
            (self.largest_weight[1] / WEIGHT_LIMIT, self.largest_weight[0]),
            (self.largest_gain[1] / GAIN_LIMIT, self.largest_gain[0]),
            key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0],
        )[1]

    def __str__(self) -> str:
        """The ratios in words: of the median weight, of the largest, and of a gain if it is past its limit."""
        parts = [f"the median weight by {percent(self.median_weight)}"] if not math.isnan(self.median_weight) else []
        parts += [
            f"{path} by {percent(ratio)}"
            for (path, ratio), least in ((self.largest_weight, 0.0), (self.largest_gain, GAIN_LIMIT))
            if ratio > least
        ]
        return ", ".join(parts)


def update_sizes(training: Training) -> tuple[UpdateSize, ...]:
    """The sizes of every step in which updates were measured; biases and parameters that start at 0 do not count."""
    kinds = {parameter.path: parameter.kind for parameter in training.parameters}
    weights: dict[int, dict[str, float]] = defaultdict(dict)
    scales: dict[int, dict[str, float]] = defaultdict(dict)
    medians: dict[int, float] = {}
    # Relative to a parameter that was set to 0 in the run every step is large too.
    shrunk = {change.path: change.step for change in training.changes if change.factor < _SHRUNK}
    ratios = [series for series in training.of("update ratio") if series.values]
    first = min((series.steps[0] for series in ratios), default=0)
    for series in ratios:
        pairs = [pair for pair in zip(series.steps, series.values, strict=True) if math.isfinite(pair[1])]
        if not series.path:
            medians |= dict(pairs)
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
        UpdateSize(
            step=step,
            median_weight=medians[step] if step in medians else median(weights[step].values() or [math.nan]),
            largest_weight=_largest(weights[step]),
            largest_gain=_largest(scales[step]),
        )
        for step in sorted({*weights, *scales, *medians})
    )


def too_large(training: Training) -> tuple[UpdateSize, ...]:
    """The measured steps that were too large, in order: none where they are few and none of them is far too large."""
    large = tuple(update for update in update_sizes(training) if update.excess > 1)
    return large if len(large) >= MANY_STEPS or any(update.excess > FAR_TOO_LARGE for update in large) else ()


def _largest(ratios: dict[str, float]) -> tuple[str, float]:
    return max(ratios.items(), key=lambda pair: pair[1], default=("", math.nan))
