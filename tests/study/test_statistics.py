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


def test_an_interval_holds_the_middle_medians():
    assert interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    values = [float(value) for value in range(25)]
    middle, low, high = interval(values)
    assert middle == 12.0
    assert 4 <= low < 12 < high <= 20
    assert interval([1.0, math.inf, math.inf]) == (math.inf, 1.0, math.inf)
    assert all(math.isnan(value) for value in interval([1.0, math.nan]))
    assert all(math.isnan(value) for value in interval([]))
    assert interval([1.0, 2.0])[0] == 1.5
    assert interval([1.0, math.inf])[0] == math.inf


@pytest.mark.parametrize("power", [-0.5, 0.0, 2.0])
def test_a_power_law_has_its_slope(power):
    assert slope([2, 8, 32], [3 * value**power for value in (2, 8, 32)]) == pytest.approx(power, abs=1e-12)


ARM = {"a": {"depths": [2, 12, 24, 48], "square": [900.0, 12.0, 48.0, 192.0], "lost": [1.0, 2.0, None, 4.0]}}


def test_the_exponent_of_deep_models():
    assert exponent("a", "square")(ARM) == pytest.approx(2.0)
    assert exponent("a", "square", 0.5)(ARM) == pytest.approx(1.0)
    assert math.isnan(exponent("a", "lost")(ARM))
    assert math.isnan(slope([1, 2], [0.0, 1.0]))
    assert math.isnan(slope([1, 2], [math.inf, 1.0]))


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


def test_a_curve_is_the_means_of_blocks_of_steps_capped_at_the_first_loss():
    ends, means = block_means([4.0, 2.0, 1.0, 3.0], steps=4, blocks=2)
    assert ends == [2.0, 4.0]
    assert means == [3.0, 2.0]
    assert len(block_means([1.0] * 200, steps=200)[0]) == 50
    assert block_means([1.0, 2.0, 3.0], steps=3)[0] == [1.0, 2.0, 3.0]
    assert block_means([2.0, 1e9, None], steps=4, blocks=4)[1] == [2.0, 2.0, 2.0, math.inf]


def test_numbers_of_arms_and_values_that_are_missing():
    paired = {"a": {"loss": 3}, "b": {"loss": 1.5}}
    assert (value_of("a", "loss")(paired), difference("a", "b", "loss")(paired)) == (3.0, 1.5)
    assert filled([3.0, None]) == [3.0, math.inf]
    assert padded([3.0, None], 4) == [3.0, None, None, None]
