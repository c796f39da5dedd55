"""A series held against its own past: how far a value stands out, where it jumped, where the way up began.

What multiplies is looked at in logarithms: gradients and updates are spread over decades, and a healthy one that
doubles is nothing. The loss is taken as it is. The middle and the spread of the past are a median and a median
deviation, which a few wild values do not move.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from normkit.measurement.training import Parameter, Quantity, Series, Training
from normkit.text import percent

WINDOW = 128
"""Number of past values that count."""

FEWEST = 16
"""With fewer nothing is said."""

LIMIT = 6.0
"""Robust standard deviations above its past that are a jump."""

STAYS = 8
"""A spike of the loss that is still there after so many steps is no spike."""

LEAST_FACTORS: dict[Quantity, float] = {
    "logit bound": 4.0,
    "stream rms": 4.0,
    "loss": 1.2,
    "activation gradient": 4.0,
    "gradient norm": 3.0,
    "parameter gradient": 4.0,
    "update ratio": 4.0,
}
"""The quantities that can jump, in the order of a step, and the least factor over the usual value.

In steady series the spread alone says little: in healthy runs of the demo models logit bounds and updates reach z = 12
at less than 4 times their median, and the gradient norm z = 4.7 at 3.3 times.
"""

# While a loss falls fast, values of 128 steps ago say nothing: the last 32 count too, but as they waver more (z up to
# 5.5 in healthy runs of the demo models), only beyond z = 8.
_SHORT, _SHORT_WEIGHT = 32, 6.0 / 8.0
# The median absolute deviation of Gaussian numbers is the standard deviation over this.
_TO_DEVIATION = 1.4826
# Smallest spread that counts, over the median or in logarithms: rounding alone makes a nearly constant series jump.
_LEAST_SPREAD = 0.01
# A jump that ended this many steps before had no consequence.
_OVER = 8
# From here on a value belongs to the rise of a jump.
_ON_ITS_WAY = 3.0


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A stretch of values far above their past."""

    series: Series
    """The series that moved."""
    began: int
    """First step of the unbroken way up to it."""
    step: int
    """First step past the limit."""
    peak: int
    """Step of its largest value."""
    last: int
    """Last step past the limit."""
    length: int
    """Values in the stretch."""
    value: float
    """The largest value."""
    usual: float
    """Median of the last 128 values, of a loss the last 32, before the way up."""
    z: float
    """Distance of the largest value from its past, in robust standard deviations."""

    @property
    def factor(self) -> float:
        """The largest value over the usual one."""
        return self.value / self.usual if self.usual else math.inf

    @property
    def weight(self) -> float:
        """Weight among other jumps: the logarithm of its factor times the number of values that it lasts."""
        return math.log(max(self.factor, 1.0)) * self.length


def robust_z(past: Sequence[float], value: float, *, in_logarithms: bool) -> float:
    """Distance of a value from its past in robust standard deviations: z = (v - median) / (1.4826 MAD).

    Args:
        past: The values before it; of the finite ones the last 128 count.
        value: The value.
        in_logarithms: Compare logarithms of positive values, for quantities that grow by factors.

    Returns:
        z, or NaN with fewer than 16 values before it or where the value itself is not finite (or not positive). A
        spread below 1 % of the median counts as 1 %.

    Example:
        >>> robust_z([1.0, 1.1] * 8, 2.0, in_logarithms=False)
        12.815...
    """
    known = [each for each in past if math.isfinite(each) and (each > 0 or not in_logarithms)][-WINDOW:]
    if len(known) < FEWEST or not math.isfinite(value) or (in_logarithms and value <= 0):
        return math.nan
    if in_logarithms:
        known, value = [math.log(each) for each in known], math.log(value)
    middle = median(known)
    spread = _TO_DEVIATION * median(abs(each - middle) for each in known)
    least = _LEAST_SPREAD if in_logarithms else _LEAST_SPREAD * abs(middle)
    return (value - middle) / max(spread, least, 1e-300)


def height(quantity: Quantity, past: Sequence[float], value: float) -> float:
    """Height of a value of a quantity above its past; above `LIMIT` it is a jump if its factor is large enough.

    The robust z over the last 128 values, in logarithms unless it is the loss; of a loss 3/4 of that over the last 32,
    where that is more.
    """
    whole = robust_z(past, value, in_logarithms=quantity != "loss")
    if quantity != "loss" or math.isnan(whole):
        return whole
    known = [each for each in past if math.isfinite(each)]
    return max(whole, _SHORT_WEIGHT * robust_z(known[-_SHORT:], value, in_logarithms=False))


def stands_out(quantity: Quantity, past: Sequence[float], value: float) -> bool:
    """The value is a jump: its height is above `LIMIT`, and its factor is at least the quantity's least one.

    Example:
        >>> stands_out("loss", [2.0, 2.1] * 8, 5.0), stands_out("loss", [2.0, 2.1] * 8, 2.3)
        (True, False)
    """
    known = [each for each in past if math.isfinite(each)]
    if quantity not in LEAST_FACTORS or len(known) < FEWEST or not math.isfinite(value):
        return False
    return _is_high(quantity, median(known[-_span(quantity) :]), value) and height(quantity, known, value) > LIMIT


def _span(quantity: Quantity) -> int:
    """Over how many values the usual one is the median."""
    return _SHORT if quantity == "loss" else WINDOW


def _is_high(quantity: Quantity, usual: float, value: float) -> bool:
    return value > usual and value - usual >= (LEAST_FACTORS[quantity] - 1) * abs(usual)


def jumps(series: Series, since: int = 0) -> tuple[Jump, ...]:
    """The jumps of one series from a step on, in order; none of a quantity that is not in `LEAST_FACTORS`."""
    if series.quantity not in LEAST_FACTORS:
        return ()
    found: list[Jump] = []
    first = last = None
    for index in (*_high(series, since), None):
        if last is not None and index != last + 1:
            assert first is not None
            found.append(_jump(series, first, last))
            first = last = None
        if index is not None and _height(series, index) > LIMIT:
            first, last = index if first is None else first, index
    return tuple(found)


def _height(series: Series, index: int) -> float:
    return _known_height(series.quantity, series.values[max(0, index - 2 * WINDOW) : index], series.values[index])


# Each report judges the whole run anew, and several rules ask for the same jumps: nine of ten heights are known.
_known_height = lru_cache(maxsize=4096)(height)


def movers(training: Training, step: int, within: int = WINDOW // 4) -> tuple[Jump, ...]:
    """Jumps before a step or in it, the earliest first; in one step, the forward pass before the backward one.

    Those that began later than the step, or more than `within` steps before it, do not count.
    """
    found = [
        (jump.began, list(LEAST_FACTORS).index(series.quantity), -jump.z, place, jump)
        for place, series in enumerate(training.series)
        for jump in jumps(series, since=step - within)
        if step - within <= jump.began <= step and jump.last >= step - max(_OVER, _spacing(series, step))
    ]
    return tuple(entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1]))


def _spacing(series: Series, step: int) -> int:
    """Steps between the last two values up to a step."""
    place = bisect_left(series.steps, step)
    near = series.steps[max(0, place - 2) : place]
    return near[-1] - near[0] if len(near) > 1 else 0


def _high(series: Series, since: int) -> Iterator[int]:
    """Indices of values far above the median before them; the caller judges them against the spread."""
    span = _span(series.quantity)
    window: deque[float] = deque()
    ordered: list[float] = []
    start = bisect_left(series.steps, since)
    for index in range(max(0, start - WINDOW), len(series.values)):
        value = series.values[index]
        if not math.isfinite(value):
            continue
        if index >= start and len(ordered) >= FEWEST:
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            if _is_high(series.quantity, middle, value):
                yield index
        window.append(value)
        insort(ordered, value)
        if len(window) > span:
            del ordered[bisect_left(ordered, window.popleft())]


def _jump(series: Series, first: int, last: int) -> Jump:
    began = first
    while began and _height(series, began - 1) > _ON_ITS_WAY:
        began -= 1
    peak = max(range(first, last + 1), key=lambda index: series.values[index])
    past = [value for value in series.values[max(0, began - _span(series.quantity)) : began] if math.isfinite(value)]
    return Jump(
        series=series,
        began=series.steps[began],
        step=series.steps[first],
        peak=series.steps[peak],
        last=series.steps[last],
        length=last - first + 1,
        value=series.values[peak],
        usual=median(past),
        z=_height(series, peak),
    )


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
_FALLEN = 0.95
"""A loss that has fallen so far below its start has borne the first steps."""


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
    weights: dict[int, dict[str, float]] = defaultdict(dict)
    scales: dict[int, dict[str, float]] = defaultdict(dict)
    medians = {
        step: value
        for series in training.of("update ratio")
        if not series.path
        for step, value in series.pairs()
        if math.isfinite(value)
    }
    for parameter, step, value in judged_ratios(training):
        (scales if parameter.kind == "gain" else weights)[step][parameter.path] = value
    return tuple(
        UpdateSize(
            step=step,
            median_weight=medians[step] if step in medians else median(weights[step].values() or [math.nan]),
            largest_weight=_largest(weights[step]),
            largest_gain=_largest(scales[step]),
        )
        for step in sorted({*weights, *scales, *medians})
    )


def judged_ratios(training: Training) -> Iterator[tuple[Parameter, int, float]]:
    """Parameter, step and update ratio of the weights and gains that count: none that starts at 0 or was set to it."""
    parameters = {each.path: each for each in training.parameters if each.kind in ("weight", "output", "gain")}
    # Relative to a parameter that was set to 0 in the run every step is large too.
    shrunk = {change.path: change.step for change in training.changes if change.factor < _SHRUNK}
    ratios = [series for series in training.of("update ratio") if series.values]
    first = min((series.steps[0] for series in ratios), default=0)
    for series in ratios:
        if series.path not in parameters or series.steps[0] > first or not series.values[0] < FROM_NOTHING:
            continue
        for step, value in series.pairs():
            if step >= shrunk.get(series.path, math.inf):
                break
            if math.isfinite(value):
                yield parameters[series.path], step, value


def too_large(training: Training) -> tuple[UpdateSize, ...]:
    """The measured steps that were too large, in order: none where they are few and none of them is far too large.

    Adam's first steps do not count among the many where the loss has fallen.
    """
    large = tuple(update for update in update_sizes(training) if update.excess > 1)
    spared = FIRST_STEPS if _bears_its_start(training) else 0
    is_often = sum(update.step >= spared for update in large) >= MANY_STEPS
    return large if is_often or any(update.excess > FAR_TOO_LARGE for update in large) else ()


def _bears_its_start(training: Training) -> bool:
    """Adam and its like made the steps, and the loss has fallen."""
    is_adam = [("Adam" in line.partition(":")[0]) for line in training.optimizers]
    losses = [value for series in training.of("loss") for value in series.values]
    has_fallen = len(losses) >= MANY_STEPS and median(losses[-MANY_STEPS:]) < _FALLEN * losses[0]
    return bool(is_adam) and all(is_adam) and has_fallen


def _largest(ratios: dict[str, float]) -> tuple[str, float]:
    return max(ratios.items(), key=lambda pair: pair[1], default=("", math.nan))
