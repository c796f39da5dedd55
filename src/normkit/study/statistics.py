"""Statistics of a study: over seeds, of what its arms measured, and of the losses of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Measurement = Mapping[str, Any]
"""The measurements of one arm with one seed: names -> numbers or lists, ready for JSON; None is no finite number."""

Paired = Mapping[str, Measurement]
"""Name of an arm -> its measurement; all with one seed, so that differences between arms are paired."""

Statistic = Callable[[Paired], float]
"""From all arms of one seed to one number."""

# The laws of depth hold for many layers.
_DEEP = 12
# Steps whose mean loss is compared with a level: the loss of one batch may be low by chance.
_STEPS = 10


def estimate(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a statistic over the seeds and its 95 % interval; paired if the statistic is a difference of arms.

    mean +- t(0.975, n - 1) * s / sqrt(n), s the standard deviation with n - 1. The coverage is 95 % if the values are
    normal; `tests/study/test_statistics.py` measures it for these and for skewed ones. Where a value is infinite, as of
    a run that diverged, the result is the median, between order statistics: at least 95 % for any distribution, and
    infinite for less than six seeds. Equal values are a number without chance. One value has no interval, and a NaN
    makes all three results NaN.

    Returns:
        Mean (or median), lower end, upper end.

    Source:
        Student 1908; Conover 1999, section 3.2, for the median.

    Example:
        >>> [round(value, 2) for value in estimate([1.0, 2.0, 3.0])]
        [2.0, -0.48, 4.48]
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data) or np.isnan(data).any():
        return math.nan, math.nan, math.nan
    if (data == data[0]).all():
        middle = float(data[0])
        return (middle, middle, middle) if len(data) > 1 else (middle, -math.inf, math.inf)
    if np.isinf(data).any():
        from scipy.stats import quantile_test

        low, high = quantile_test(data, p=0.5).confidence_interval(0.95)
        ends = (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
        return median(data.tolist()), *map(float, ends)
    from scipy.special import stdtrit

    half = float(stdtrit(len(data) - 1, 0.975)) * float(data.std(ddof=1)) / math.sqrt(len(data))
    return float(data.mean()), float(data.mean()) - half, float(data.mean()) + half


def decision(values: Sequence[float], low: float, high: float) -> tuple[bool, float]:
    """Whether the mean over the seeds lies within two bounds rather than outside, and the p-value of that.

    With one bound it is the two-sided t-test of the mean against it. With two, "within" is the test of equivalence
    (two one-sided t-tests), and "outside" the test against the nearer bound. The p-value is at most 0.05 exactly where
    the interval of `estimate` lies on one side of the bounds. Infinite values are tested by their signs.

    Returns:
        The direction, and the p-value; 1 if nothing can be said.

    Source:
        Schuirmann 1987 for the two one-sided tests.

    Example:
        >>> decision([1.0, 1.1, 1.2], 0.5, math.inf)[0]
        True
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2 or np.isnan(data).any():
        return False, 1.0
    signs = [(bound, sign) for bound, sign in ((low, 1.0), (high, -1.0)) if math.isfinite(bound)]
    within = max(_one_sided(sign * (data - bound)) for bound, sign in signs)
    outside = min(_one_sided(sign * (bound - data)) for bound, sign in signs)
    return within <= outside, min(1.0, 2 * min(within, outside))


def _one_sided(over: np.ndarray) -> float:
    """The p-value of "the values lie above 0"."""
    if (over == over[0]).all():
        return 0.0 if over[0] >= 0 else 1.0
    if np.isinf(over).any():
        from scipy.stats import binomtest

        return float(binomtest(int((over > 0).sum()), len(over), alternative="greater").pvalue)
    from scipy.special import stdtr

    error = over.std(ddof=1) / math.sqrt(len(over))
    return float(stdtr(len(over) - 1, -over.mean() / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, raised so that at 0.05 the chance of any wrong decision is at most 5 %.

    Source:
        Holm 1979.

    Example:
        >>> holm([0.01, 0.04, 0.02])
        [0.03, 0.04, 0.04]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def range_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest of the seeds, as charts show them; NaN if there is one among them."""
    ordered = sorted(values)
    if not ordered or any(math.isnan(value) for value in ordered):
        return math.nan, math.nan, math.nan
    return median(ordered), ordered[0], ordered[-1]


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


def gap(arm: str, name: str, other: str) -> Statistic:
    """The statistic that is one number of an arm minus another number of the same arm."""
    return lambda paired: float(paired[arm][name] - paired[arm][other])


def share_of_effect(arm: str, other: str, without: str, name: str) -> Statistic:
    """The statistic (arm - other) / (without - other): a difference over what having a norm at all changes.

    Args:
        arm: The arm that may be as good.
        other: The arm that it is compared with.
        without: The arm without a norm; a positive control sees to it that it differs from `other`.
        name: Of a loss.
    """
    return lambda paired: difference(arm, other, name)(paired) / difference(without, other, name)(paired)


def ratio(arm: str, other: str, name: str) -> Statistic:
    """The statistic that is a number of one arm over the same number of another."""
    return lambda paired: float(paired[arm][name] / paired[other][name])


def excess(losses: Sequence[float]) -> float:
    """The mean of the losses of several learning rates above the least of them: the sensitivity to the rate.

    Source:
        Wortsman et al. 2023, arXiv:2309.14322.
    """
    return sum(losses) / len(losses) - float(min(losses))


def over_rates(paired: Paired, model: str) -> list[Measurement]:
    """The measurements of a model at its learning rates, in the order of the arms, "MODEL, rate RATE" by name."""
    return [measured for name, measured in paired.items() if name.startswith(f"{model}, rate ")]


def sensitivity(paired: Paired, model: str) -> float:
    """`excess` of a model's losses at the end, "last", over its learning rates; a diverged run has its first loss."""
    return excess([float(run["last"]) for run in over_rates(paired, model)])


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
