"""How far a model moves in a step."""

from __future__ import annotations

import math

import pytest

from normkit.measurement.update_sizes import GAIN_LIMIT, MEDIAN_LIMIT, WEIGHT_LIMIT, too_large, update_sizes
from watched_runs import Tiny, parameter, series, trained, training

PARAMETERS = (
    parameter("a"),
    parameter("b"),
    parameter("c"),
    parameter("norm.weight", "gain"),
    parameter("bias", "bias"),
    parameter("table", "embedding"),
)


def moved(**ratios):
    names = {"norm": "norm.weight"}
    return training(
        *(series("update ratio", values, names.get(path, path), every=5) for path, values in ratios.items()),
        parameters=PARAMETERS,
    )


def test_the_median_weight_the_largest_and_the_largest_gain():
    first, second = update_sizes(moved(a=[0.01, 0.02], b=[0.03, 0.01], c=[0.02, 0.09], norm=[0.004, 0.001]))
    assert (first.step, first.median_weight, first.largest_weight) == (0, 0.02, ("b", 0.03))
    assert first.largest_gain == ("norm.weight", 0.004)
    assert (second.step, second.median_weight, second.largest_weight) == (5, 0.02, ("c", 0.09))


@pytest.mark.parametrize(
    ("ratios", "place"),
    [
        ({"a": MEDIAN_LIMIT, "b": MEDIAN_LIMIT, "c": MEDIAN_LIMIT}, "a"),
        ({"a": 0.01, "b": 0.01, "c": WEIGHT_LIMIT}, "c"),
        ({"a": 0.01, "norm": GAIN_LIMIT}, "norm.weight"),
    ],
)
def test_each_limit_counts(ratios, place):
    below, above = ({name: [factor * value] * 4 for name, value in ratios.items()} for factor in (0.99, 1.01))
    assert too_large(moved(**below)) == ()
    update, *_ = too_large(moved(**above))
    assert update.excess == pytest.approx(1.01)
    assert update.place == place
    assert f"{place} by" in str(update)


def test_a_few_steps_count_where_they_are_far_too_large():
    def limits(*excesses):
        return [update.step for update in too_large(moved(a=[MEDIAN_LIMIT * excess for excess in excesses]))]

    # Adam's first step is the learning rate times a sign, and several times as large as those that follow.
    assert limits(2.9, 0.9, 0.8) == limits(0.5, 2.9, 2.9, 2.9) == []
    assert limits(3.1, 0.9) == [0]
    assert limits(1.1, 1.1, 0.9, 1.1, 1.1) == [0, 5, 15, 20]


def test_biases_and_embeddings_do_not_count():
    assert update_sizes(moved(bias=[5.0], table=[5.0])) == ()


def test_what_starts_at_zero_does_not_count():
    assert [update.largest_weight[0] for update in update_sizes(moved(a=[math.inf, 1.0], b=[0.01, 0.01]))] == ["b", "b"]
    run = training(
        series("update ratio", [0.01] * 3, "a", every=5),
        series("update ratio", [0.9, 0.5], "b", first=5, every=5),
        parameters=PARAMETERS,
    )
    assert too_large(run) == ()


def test_a_run_without_updates_has_no_sizes():
    assert update_sizes(training()) == ()


@pytest.mark.slow
def test_a_real_run_and_one_at_thirty_times_its_rate():
    assert too_large(trained(Tiny())) == ()
    assert len(too_large(trained(Tiny(), learning_rate=9e-2))) > 10
