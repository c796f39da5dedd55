"""Medians and bootstrap intervals over seeds, and the slope of a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DRAWS = 4000


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The median of a few values and the percentile bootstrap interval of it.

    The values are drawn anew, with replacement, 4,000 times from one fixed seed; the interval holds the middle
    `confidence` of the medians. With three values that is the range from the least to the greatest. A NaN makes all
    three NaN; infinities are values like others.

    Args:
        values: One a seed.
        confidence: Share of the draws inside.

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
    # The greatest of an even number's two middle values could be infinite and the other not: no mean of the two.
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    drawn = np.random.default_rng(0).integers(len(ordered), size=(_DRAWS, len(ordered)))
    medians = np.sort(_median(np.sort(ordered[drawn], axis=1)))
    outside = (1 - confidence) / 2
    low, high = medians[math.floor(outside * (_DRAWS - 1))], medians[math.ceil((1 - outside) * (_DRAWS - 1))]
    return float(_median(ordered[None])[0]), float(low), float(high)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ~ x^p: the least-squares slope of log y over log x; NaN where one is not positive.

    Example:
        >>> round(slope([1, 4, 16], [3.0, 1.5, 0.75]), 6)
        -0.5
    """
    if not all(0 < value < math.inf for value in (*x, *y)):
        return math.nan
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = log_x - log_x.mean()
    return float((centred * (log_y - log_y.mean())).sum() / (centred * centred).sum())


def _median(ordered: np.ndarray) -> np.ndarray:
    """Of each row, ascending."""
    count = ordered.shape[1]
    below, above = ordered[:, (count - 1) // 2], ordered[:, count // 2]
    equal = below == above
    return np.where(equal, below, 0.5 * (np.where(equal, 0.0, below) + np.where(equal, 0.0, above)))
