import math

import pytest

from normkit.study.statistics import (
    block_means,
    difference,
    exponent,
    filled,
    interval,
    padded,
    slope,
    steps_to,
    value_of,
)


def test_three_values_span_their_range():
    assert interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_more_values_give_a_narrower_interval_than_their_range():
    values = [float(value) for value in range(25)]
    middle, low, high = interval(values)
    assert middle == 12.0
    assert 4 <= low < 12 < high <= 20


def test_infinity_is_a_value_and_nan_is_none():
    assert interval([1.0, math.inf, math.inf]) == (math.inf, 1.0, math.inf)
    assert all(math.isnan(value) for value in interval([1.0, math.nan]))
    assert all(math.isnan(value) for value in interval([]))


def test_the_middle_of_two_is_their_mean_and_infinity_if_one_is():
    assert interval([1.0, 2.0])[0] == 1.5
    assert interval([1.0, math.inf])[0] == math.inf


@pytest.mark.parametrize("power", [-0.5, 0.0, 2.0])
def test_a_power_law_has_its_slope(power):
    assert slope([2, 8, 32], [3 * value**power for value in (2, 8, 32)]) == pytest.approx(power, abs=1e-12)


def test_a_slope_of_what_is_not_positive_is_none():
    assert math.isnan(slope([1, 2], [0.0, 1.0]))
    assert math.isnan(slope([1, 2], [math.inf, 1.0]))


ARM = {"a": {"depths": [2, 12, 24, 48], "square": [900.0, 12.0, 48.0, 192.0], "lost": [1.0, 2.0, None, 4.0]}}


def test_a_power_law_of_the_deep_models_is_found_whatever_the_shallow_do():
    assert exponent("a", "square")(ARM) == pytest.approx(2.0)


def test_the_root_of_a_square_has_half_its_exponent():
    assert exponent("a", "square", 0.5)(ARM) == pytest.approx(1.0)


def test_a_value_that_was_not_finite_leaves_no_exponent():
    assert math.isnan(exponent("a", "lost")(ARM))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0] * 10, 10),
        ([2.0] * 9, None),
        ([2.0] * 10 + [1.0] * 10, 20),
        ([2.0] * 10 + [0.0] * 10, 15),
        ([2.0] * 20 + [0.0] + [2.0] * 20, None),
        ([1.0] * 9, None),
        ([None] + [0.0] * 10, 11),
        ([], None),
    ],
)
def test_the_first_ten_steps_whose_mean_is_low_enough_end_there(losses, expected):
    assert steps_to(losses, 1.0) == expected


def test_a_curve_is_the_means_of_blocks_of_steps():
    ends, means = block_means([4.0, 2.0, 1.0, 3.0], steps=4, blocks=2)
    assert ends == [2.0, 4.0]
    assert means == [3.0, 2.0]
    assert len(block_means([1.0] * 200, steps=200)[0]) == 50
    assert block_means([1.0, 2.0, 3.0], steps=3)[0] == [1.0, 2.0, 3.0]


def test_a_curve_is_capped_at_the_first_loss_and_infinite_where_the_run_had_ended():
    assert block_means([2.0, 1e9, None], steps=4, blocks=4)[1] == [2.0, 2.0, 2.0, math.inf]


def test_numbers_of_arms_and_their_differences():
    paired = {"a": {"loss": 3}, "b": {"loss": 1.5}}
    assert (value_of("a", "loss")(paired), difference("a", "b", "loss")(paired)) == (3.0, 1.5)


def test_values_that_are_missing_are_filled_and_a_run_that_ended_early_is_padded():
    assert filled([3.0, None]) == [3.0, math.inf]
    assert padded([3.0, None], 4) == [3.0, None, None, None]
