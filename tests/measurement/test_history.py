"""Robust z, jumps and who moved first."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from normkit.measurement.history import (
    FEWEST,
    GAIN_LIMIT,
    MEDIAN_LIMIT,
    WEIGHT_LIMIT,
    WINDOW,
    jumps,
    movers,
    robust_z,
    stands_out,
    too_large,
    update_sizes,
)
from watched_runs import Tiny, calm, parameter, raised, series, trained, training


def test_robust_z_is_the_distance_in_robust_deviations():
    past = [float(value) for value in range(21)]
    # Median 10, median absolute deviation 5.
    assert robust_z(past, 40.0, in_logarithms=False) == pytest.approx(30 / (1.4826 * 5))
    assert robust_z([math.exp(value) for value in past], math.exp(40.0), in_logarithms=True) == pytest.approx(
        30 / (1.4826 * 5)
    )


def test_a_wild_past_value_does_not_move_it():
    past = [float(value) for value in range(21)]
    calm_z, wild_z = (robust_z([*past, extra], 40.0, in_logarithms=False) for extra in (10.0, 1e9))
    assert wild_z == pytest.approx(calm_z, rel=0.15)


def test_of_the_past_only_the_newest_count():
    past = [1e6] * 50 + [1.0, 1.1] * (WINDOW // 2)
    assert robust_z(past, 2.0, in_logarithms=False) == robust_z(past[50:], 2.0, in_logarithms=False)


def test_without_a_past_or_a_number_nothing_is_said():
    short = [1.0] * (FEWEST - 1)
    assert math.isnan(robust_z(short, 9.0, in_logarithms=False))
    assert math.isnan(robust_z([*short, math.nan], 9.0, in_logarithms=False))
    assert not math.isnan(robust_z([*short, 1.0], 9.0, in_logarithms=False))
    for value in (math.nan, math.inf):
        assert math.isnan(robust_z([1.0] * FEWEST, value, in_logarithms=False))
    assert math.isnan(robust_z([1.0] * FEWEST, 0.0, in_logarithms=True))


def test_a_constant_past_has_a_spread_of_one_per_cent():
    assert robust_z([2.0] * FEWEST, 2.1, in_logarithms=False) == pytest.approx(5.0)


def test_a_jump_has_its_steps_and_sizes():
    found = jumps(raised(calm("gradient norm"), at_50=5.0, at_51=9.0))
    assert len(found) == 1
    jump = found[0]
    assert (jump.began, jump.step, jump.peak, jump.length, jump.value) == (50, 50, 51, 2, 9.0)
    assert jump.usual == pytest.approx(1.0, rel=0.05)
    assert jump.factor == pytest.approx(9.0, rel=0.05)
    assert jump.z > 6


def test_two_stretches_are_two_jumps():
    found = jumps(raised(calm("loss"), at_30=5.0, at_50=4.0, at_59=3.0))
    assert [jump.peak for jump in found] == [30, 50, 59]


def test_the_way_up_begins_before_the_limit():
    # Four robust deviations are on the way, not past the limit.
    wavering = calm("gradient norm")
    slope = {f"at_{step}": math.exp(0.055 * 4) for step in (48, 49)}
    (jump,) = jumps(raised(wavering, **slope, at_50=5.0))
    assert (jump.began, jump.step) == (48, 50)


@pytest.mark.parametrize(("quantity", "factor"), [("loss", 1.1), ("gradient norm", 2.5), ("update ratio", 3.5)])
def test_a_small_factor_is_no_jump_however_steady_the_series(quantity, factor):
    assert jumps(raised(calm(quantity), at_50=factor)) == ()
    assert len(jumps(raised(calm(quantity), at_50=2 * factor))) == 1


def test_what_may_rise_does_not_jump():
    assert jumps(raised(calm("kurtosis"), at_50=100.0)) == ()


def test_a_loss_below_zero_jumps_too():
    plain = series("loss", [-3.0 + 0.05 * math.sin(1.7 * step) for step in range(60)])
    assert [jump.peak for jump in jumps(raised(plain, at_50=2.0))] == [50]


def test_values_that_are_not_finite_are_passed_over():
    plain = raised(calm("loss"), at_20=math.nan, at_21=math.inf)
    assert [jump.peak for jump in jumps(raised(plain, at_50=5.0))] == [50]


def test_only_what_comes_later_is_looked_at():
    plain = raised(calm("loss"), at_30=5.0, at_50=5.0)
    assert [jump.peak for jump in jumps(plain, since=40)] == [50]


def test_jumps_are_those_that_stand_out_step_by_step():
    random.seed(0)
    values = [math.exp(random.gauss(0, 0.3) + (2.5 if random.random() < 0.03 else 0)) for _ in range(400)]
    slow = {
        step
        for step, value in enumerate(values)
        if stands_out("gradient norm", values[max(0, step - WINDOW) : step], value)
    }
    found = {
        step for jump in jumps(series("gradient norm", values)) for step in range(jump.step, jump.step + jump.length)
    }
    assert slow == found
    assert len(found) >= 3


def test_a_ramp_does_not_stand_out():
    ramp = [float(step) for step in range(1, 200)]
    assert jumps(series("update ratio", ramp)) == ()
    assert not stands_out("update ratio", ramp[:-1], ramp[-1])


def test_movers_come_in_the_order_of_time_and_then_of_a_step():
    run = training(
        raised(calm("loss"), at_50=5.0),
        raised(calm("gradient norm"), at_50=20.0),
        raised(calm("update ratio", "late.weight"), at_50=20.0),
        raised(calm("update ratio", "early.weight"), at_47=20.0),
        raised(calm("logit bound", "attention"), at_50=20.0),
        calm("stream rms", "block"),
        raised(calm("loss", "after"), at_55=5.0),
    )
    found = [(jump.began, jump.series.quantity, jump.series.path) for jump in movers(run, 50)]
    assert found == [
        (47, "update ratio", "early.weight"),
        (50, "logit bound", "attention"),
        (50, "loss", ""),
        (50, "gradient norm", ""),
        (50, "update ratio", "late.weight"),
    ]
    assert movers(run, 50, within=2)[0].began == 50


def test_usual_is_the_median_of_what_came_before():
    plain = calm("loss")
    (jump,) = jumps(raised(plain, at_50=5.0))
    assert jump.usual == median(plain.values[18:50])
    plain = calm("gradient norm")
    (jump,) = jumps(raised(plain, at_50=5.0))
    assert jump.usual == median(plain.values[:50])


def test_a_loss_that_falls_fast_is_held_against_its_newest_values():
    falling = series("loss", [3.5 * 0.95**step * (1 + 0.02 * math.sin(1.7 * step)) for step in range(60)])
    (jump,) = jumps(raised(falling, at_50=4.0))
    assert (jump.peak, jump.z > 6) == (50, True)
    assert robust_z(falling.values[:50], 4.0, in_logarithms=False) < 4
    assert jumps(falling) == ()


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
