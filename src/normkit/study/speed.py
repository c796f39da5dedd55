"""How a training run comes down: its loss as a curve, and how soon it reaches a level."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STEPS = 10
"""Steps whose mean counts: the loss of one batch may be low by chance."""


def steps_to(losses: Sequence[float | None], level: float) -> float | None:
    """Steps after which the mean loss of the latest ten steps is at most `level`, for the first time; None if never.

    Args:
        losses: One a step; None where it was not finite.
        level: What is to be reached.

    Example:
        >>> steps_to([2.0] * 10 + [1.0] * 10, 1.5)
        15
    """
    values = [math.inf if loss is None else loss for loss in losses]
    ends = range(_STEPS, len(values) + 1)
    return next((end for end in ends if math.fsum(values[end - _STEPS : end]) <= _STEPS * level), None)


def descent(losses: Sequence[float | None], steps: int, places: int = 50) -> tuple[list[float], list[float]]:
    """The losses of a run as a curve: last steps of blocks of equal length, and the mean loss of each block.

    A loss counts for at most the first one; a block that the run did not reach is infinite.

    Args:
        losses: One a step; None where it was not finite.
        steps: That were to be taken.
        places: Blocks at most.

    Example:
        >>> descent([3.0, 1.0, 2.0, None], steps=6, places=3)
        ([2.0, 4.0, 6.0], [2.0, 2.5, inf])
    """
    length = -(-steps // places)
    ends = list(range(length, steps + 1, length))
    values = [math.inf if loss is None else loss for loss in losses]
    capped = [min(loss, values[0]) for loss in values]
    means = [math.fsum(capped[end - length : end]) / length if end <= len(capped) else math.inf for end in ends]
    return [float(end) for end in ends], means
