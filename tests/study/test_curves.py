import math

import pytest

from normkit.study.curves import curve, mean_of_last, padded
from normkit.study.laboratory import Run
from normkit.study.loop import Point


def run(*losses):
    return Run(
        points=tuple(
            Point(step=step, loss=loss, learning_rate=1.0, gradient_norm=1.0) for step, loss in enumerate(losses, 1)
        )
    )


def test_a_run_that_ended_early_is_as_long_as_its_recipe():
    assert padded(run(3.0, 2.0), 2) == [3.0, 2.0]
    assert padded(run(3.0, math.nan), 4) == [3.0, None, None, None]


def test_what_was_not_finite_is_drawn_at_infinity():
    assert curve([3.0, None]) == [3.0, math.inf]


def test_the_last_losses_are_averaged():
    assert mean_of_last(run(9.0, 1.0, 2.0, 3.0), count=2) == pytest.approx(2.5)
    assert mean_of_last(run(2.0, 1.0), count=20) == pytest.approx(1.5)


def test_no_loss_counts_more_than_the_first():
    assert mean_of_last(run(4.0, 100.0, 2.0), count=2) == pytest.approx(3.0)
    assert mean_of_last(run(4.0, 1.0, math.inf), count=2) == 4.0
