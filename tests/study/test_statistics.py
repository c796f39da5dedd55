import math

import pytest

from normkit.study.statistics import interval, slope


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
