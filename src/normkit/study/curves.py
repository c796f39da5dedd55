"""The losses of a run as numbers that are compared and drawn: a run that diverged is as long as any other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.study.laboratory import Run


def padded(run: Run, steps: int) -> list[float | None]:
    """The loss of each step, ready for JSON; None where it was not finite, and after that.

    Args:
        run: What a training run gave.
        steps: Of its recipe.
    """
    losses = run.losses
    return losses + [None] * (steps - len(losses))


def curve(losses: Sequence[float | None]) -> list[float]:
    """Losses to draw, from those of a measurement: infinity in place of None."""
    return [math.inf if loss is None else loss for loss in losses]


def mean_of_last(run: Run, count: int = 20) -> float:
    """The mean loss of the last steps, each at most the loss of the first step; that itself if the run diverged.

    Args:
        run: What a training run gave.
        count: Steps, or all where there are fewer.

    Source:
        Wortsman et al. 2023, arXiv:2309.14322, cap the loss of diverged runs in the same way.
    """
    if run.diverged:
        return run.points[0].loss
    last = run.points[-count:]
    return sum(run.capped(point.loss) for point in last) / len(last)
