"""Statistics of a study: over seeds, of what its arms measured, and of the losses of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Measurement = Mapping[str, Any]
"""What one arm measured with one seed: names -> numbers or lists, ready for JSON; None is no finite number."""

Paired = Mapping[str, Measurement]
"""Name of an arm -> its measurement; all with one seed, so that differences between arms are paired."""

Statistic = Callable[[Paired], float]
"""From all arms of one seed to one number."""

_DRAWS = 4000
# The laws of depth hold for many layers.
_DEEP = 12
# Steps whose mean loss is compared with a level: the loss of one batch may be low by chance.
_STEPS = 10


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of a few values and its percentile bootstrap interval.

    The values are drawn with replacement 4,000 times, from one fixed seed; the interval holds the middle 95 % of the
    medians. For three values that is the range from the least to the greatest. A NaN makes all three results NaN;
    infinities are ordinary values.

    Returns:
        Median, lower end, upper end.

    Source:
        Efron & Tibshirani 1993, chapter 13.

    Example:
        >>> interval([1.0, 2.0, 4.0])
        (2.0, 1.0, 4.0)
    """
    if not len(values) or any(math.isnan(value) for value in values):
        return math.nan, math.nan, math.nan
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    drawn = np.random.default_rng(0).integers(len(ordered), size=(_DRAWS, len(ordered)))
    medians = np.sort(_median(np.sort(ordered[drawn], axis=1)))
    outside = (1 - 0.95) / 2
    low, high = medians[math.floor(outside * (_DRAWS - 1))], medians[math.ceil((1 - outside) * (_DRAWS - 1))]
    return float(_median(ordered[None])[0]), float(low), float(high)


def _median(ordered: np.ndarray) -> np.ndarray:
    """The median of each ascending row; infinities are ordinary values."""
    count = ordered.shape[1]
    below, above = ordered[:, (count - 1) // 2], ordered[:, count // 2]
    equal = below == above
    return np.where(equal, below, 0.5 * (np.where(equal, 0.0, below) + np.where(equal, 0.0, above)))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ~ x^p: the least-squares slope of log y over log x; NaN if a value is not positive.

    Example:
        >>> round(slope([1, 4, 16], [3.0, 1.5, 0.75]), 6)
        -0.5
    """
    if not all(0 < value < math.inf for value in (*x, *y)):
        return math.nan
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = log_x - log_x.mean()
    return float((centred * (log_y - log_y.mean())).sum() / (centred * centred).sum())


def value_of(arm: str, name: str) -> Statistic:
    """The statistic that is one number of one arm."""
    return lambda paired: float(paired[arm][name])


def largest(arm: str, name: str) -> Statistic:
    """The statistic that is the largest of several numbers of one arm."""
    return lambda paired: float(max(paired[arm][name]))


def difference(arm: str, other: str, name: str) -> Statistic:
    """The statistic that is a number of one arm minus the same number of another."""
    return lambda paired: float(paired[arm][name] - paired[other][name])


def ratio(arm: str, other: str, name: str) -> Statistic:
    """The statistic that is a number of one arm over the same number of another."""
    return lambda paired: float(paired[arm][name] / paired[other][name])


def excess(losses: Sequence[float]) -> float:
    """The mean of the losses of several learning rates above the least of them: the sensitivity to the rate.

    Source:
        Wortsman et al. 2023, arXiv:2309.14322.
    """
    return sum(losses) / len(losses) - float(min(losses))


def exponent(arm: str, quantity: str, power: float = 1.0) -> Statistic:
    """The statistic p of quantity^power ~ L^p, fitted on 12 layers and more.

    Args:
        arm: Its measurement holds "depths".
        quantity: A name in the measurement, one value per depth; None is no finite number.
        power: 0.5 for the root of a square.
    """

    def fitted(paired: Paired) -> float:
        measured = paired[arm]
        deep = [(x, y) for x, y in zip(measured["depths"], measured[quantity], strict=True) if x >= _DEEP]
        return power * slope([x for x, _ in deep], [math.inf if y is None else y for _, y in deep])

    return fitted


def filled(values: Sequence[float | None], missing: float = math.inf) -> list[float]:
    """The values, with `missing` in place of None."""
    return [missing if value is None else value for value in values]


def padded(values: Sequence[float | None], length: int) -> list[float | None]:
    """The values of a run that may have diverged early, followed by None up to a length."""
    return [*values, *[None] * (length - len(values))]


def steps_to(losses: Sequence[float | None], level: float) -> float | None:
    """The first step after which the mean loss of the last ten steps is at most `level`; None if there is none.

    Args:
        losses: One per step; None if it was not finite.
        level: The loss to reach.

    Example:
        >>> steps_to([2.0] * 10 + [1.0] * 10, 1.5)
        15
    """
    values = filled(losses)
    ends = range(_STEPS, len(values) + 1)
    return next((end for end in ends if math.fsum(values[end - _STEPS : end]) <= _STEPS * level), None)


def block_means(losses: Sequence[float | None], steps: int, blocks: int = 50) -> tuple[list[float], list[float]]:
    """The losses of a run as a curve: the last steps of blocks of equal length, and the mean loss of each block.

    A loss counts at most as much as the first one. The mean of a block that the run did not reach is infinite.

    Args:
        losses: One per step; None if it was not finite.
        steps: Steps of the recipe.
        blocks: Blocks at most.

    Example:
        >>> block_means([3.0, 1.0, 2.0, None], steps=6, blocks=3)
        ([2.0, 4.0, 6.0], [2.0, 2.5, inf])
    """
    length = -(-steps // blocks)
    ends = list(range(length, steps + 1, length))
    values = filled(losses)
    capped = [min(loss, values[0]) for loss in values]
    means = [math.fsum(capped[end - length : end]) / length if end <= len(capped) else math.inf for end in ends]
    return [float(end) for end in ends], means
