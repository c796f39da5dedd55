import math

import numpy as np
import pytest

from normkit.study.statistics import (
    block_means,
    decision,
    difference,
    estimate,
    exponent,
    filled,
    gap,
    holm,
    over_rates,
    padded,
    range_of,
    sensitivity,
    share_of_effect,
    slope,
    steps_to,
    value_of,
)


def covered(draw, centre, times, count=10):
    """Share of the intervals of `count` draws that hold the centre, and of the tests that decide against it."""
    samples = draw((times, count))
    intervals = [estimate(values)[1:] for values in samples]
    wrong = [decision(values, centre, math.inf)[1] <= 0.05 for values in samples]
    return sum(low <= centre <= high for low, high in intervals) / times, sum(wrong) / times


# Of t at ten values: exact for normal ones; the skewed have less, as Student's t is known to (Efron & Tibshirani).
# Four standard deviations of the share at each number of draws are the tolerance.
@pytest.mark.parametrize("times", [400, pytest.param(20_000, marks=[pytest.mark.exhaustive, pytest.mark.slow])])
@pytest.mark.parametrize(("law", "centre", "expected"), [("normal", 0.0, 0.95), ("exponential", 1.0, 0.90)])
def test_95_of_100_intervals_hold_the_mean(law, centre, expected, times):
    rng = np.random.default_rng(1)
    draw = {"normal": lambda shape: rng.normal(size=shape), "exponential": lambda shape: rng.exponential(size=shape)}
    share, wrong = covered(draw[law], centre, times)
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / times))
    assert wrong == pytest.approx(1 - share, abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_equivalence_is_claimed_of_different_arms_in_one_of_forty_cases_and_holm_keeps_a_page_below_one_in_twenty():
    rng = np.random.default_rng(2)
    at_the_bound = [decision(values, -1.0, 1.0) for values in rng.normal(1.0, 0.5, size=(20_000, 10))]
    assert sum(within and p <= 0.05 for within, p in at_the_bound) / 20_000 == pytest.approx(0.025, abs=0.0045)
    pages = rng.normal(size=(4_000, 12, 10))
    wrong = sum(min(holm([decision(values, 0.0, math.inf)[1] for values in page])) <= 0.05 for page in pages)
    assert wrong / 4_000 == pytest.approx(0.05, abs=0.014)


def test_an_interval_is_that_of_student_and_of_order_statistics_where_a_run_diverged():
    middle, low, high = estimate([1.0, 2.0, 3.0])
    # t(0.975, 2) = 4.302653 (tables), s = 1.
    assert (middle, high - middle, middle - low) == pytest.approx((2.0, *2 * [4.302653 / math.sqrt(3)]), rel=1e-6)
    assert estimate([2.0, 2.0]) == (2.0, 2.0, 2.0)
    assert estimate([2.0]) == (2.0, -math.inf, math.inf)
    assert estimate([*map(float, range(1, 10)), math.inf]) == (5.5, 2.0, 9.0)
    assert estimate([1.0, math.inf, math.inf]) == (math.inf, -math.inf, math.inf)
    assert all(math.isnan(value) for value in (*estimate([1.0, math.nan]), *estimate([])))


def test_a_decision_has_its_direction_and_p_value():
    # t = 0.9 / (0.1 / sqrt(3)) = 15.588 with 2 degrees of freedom: p = 0.004090.
    assert decision([0.8, 0.9, 1.0], 0.0, math.inf) == (True, pytest.approx(0.0040900, rel=1e-3))
    assert decision([0.8, 0.9, 1.0], -math.inf, 0.0) == (False, pytest.approx(0.0040900, rel=1e-3))
    assert decision([0.0, 0.1, -0.1], -1.0, 1.0)[0]
    assert decision([2.0, 2.1, 1.9], -1.0, 1.0) == (False, pytest.approx(2 * 0.00165, rel=0.01))
    assert decision([1.0, 1.0], 1.0, math.inf) == (True, 0.0)
    assert decision([1.0, 1.0], 1.5, math.inf) == (False, 0.0)
    assert decision([math.inf] * 3, 1000.0, math.inf) == (True, 0.0)
    assert decision([math.inf, *[5.0] * 9], 1.0, math.inf) == (True, 2 * 0.5**10)
    assert decision([1.0], 0.0, math.inf) == decision([1.0, math.nan], 0.0, math.inf) == (False, 1.0)
    assert holm([0.01, 0.04, 0.02, 0.9]) == pytest.approx([0.04, 0.08, 0.06, 0.9])
    assert range_of([3.0, 1.0, math.inf]) == (3.0, 1.0, math.inf)
    assert math.isnan(range_of([1.0, math.nan])[0])


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
    assert share_of_effect("b", "a", "c", "loss")({**paired, "c": {"loss": 9.0}}) == -0.25
    assert filled([3.0, None]) == [3.0, math.inf]
    assert padded([3.0, None], 4) == [3.0, None, None, None]


def test_numbers_over_the_learning_rates_of_a_model_are_those_of_its_arms():
    last = {"a, rate 0.1": 3.0, "a, rate 1": 2.0, "a, tangent, rate 1": 9.0, "a": 9.0, "b, rate 1": 5.0}
    paired = {name: {"last": loss, "cut": loss + 0.5} for name, loss in last.items()}
    assert [measured["last"] for measured in over_rates(paired, "a")] == [3.0, 2.0]
    assert (sensitivity(paired, "a"), sensitivity(paired, "b")) == (0.5, 0.0)
    assert gap("b, rate 1", "cut", "last")(paired) == 0.5
