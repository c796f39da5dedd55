import math

import pytest

from normkit.errors import InputError
from normkit.study.training_run import Point, Recipe, TrainingRun


def run(*losses):
    points = (
        Point(step=step, loss=loss, learning_rate=0.1, gradient_norm=1.0, observed={"odd": step} if step % 2 else {})
        for step, loss in enumerate(losses, start=1)
    )
    return TrainingRun(points=tuple(points))


def test_the_losses_and_what_was_observed():
    done = run(3.0, 2.0, 1.5)
    assert (done.losses, done.diverged, done.observed("odd")) == ([3.0, 2.0, 1.5], False, [1, 3])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_counts_as_one_that_did_not_move(loss):
    done = run(3.0, 2.0, loss)
    assert (done.losses, done.mean_of_last(2), done.diverged) == ([3.0, 2.0, None], 3.0, True)
    assert [done.capped(value) for value in (1.0, 5.0, loss)] == [1.0, 3.0, 3.0]


def test_the_last_losses_are_averaged_and_none_counts_more_than_the_first():
    assert run(9.0, 1.0, 2.0, 3.0).mean_of_last(2) == pytest.approx(2.5)
    assert run(2.0, 1.0).mean_of_last() == pytest.approx(1.5)
    assert run(4.0, 100.0, 2.0).mean_of_last(2) == pytest.approx(3.0)


def test_a_measurement_has_as_many_losses_as_the_recipe_has_steps():
    expected = {"losses": [3.0, None, None, None], "value": 1, "diverged": True, "findings": []}
    assert run(3.0, math.nan).measurement(4, value=1) == expected
    assert run(3.0, math.nan).measurement()["losses"] == [3.0, None]


def test_a_run_has_a_step():
    with pytest.raises(InputError, match="at least one step, got 0"):
        Recipe(steps=0, learning_rate=0.1)
