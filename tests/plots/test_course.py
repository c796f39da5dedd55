import dataclasses
import math

import pytest

import imagined_runs
from normkit.measurement.training import Series
from normkit.plots import theme
from normkit.plots.course import draw, largest, step_axis, thinned, worst_update
from normkit.plots.depth import figure_of

INF, NAN = math.inf, math.nan


def drawn(values, **options):
    with theme.style():
        ax = theme.new_axes()
        draw(ax, (range(len(values)), values), **options)
        figure_of(ax).draw_without_rendering()
    return ax


def test_a_long_course_keeps_its_ends_its_peaks_and_where_numbers_are_missing():
    values = [1 + 0.01 * math.sin(step) for step in range(10_000)]
    values[7_003], values[7_100], values[8_500] = 40.0, -3.0, NAN
    steps, kept = thinned((range(10_000), values))
    assert len(steps) < 520
    assert (steps[0], steps[-1]) == (0, 9_999)
    assert {7_003: 40.0, 7_100: -3.0}.items() <= dict(zip(steps, kept, strict=True)).items()
    assert [step for step, value in zip(steps, kept, strict=True) if math.isnan(value)] == [8_500]
    assert list(steps) == sorted(steps)


def test_a_run_that_stays_nan_costs_a_cross_a_stretch():
    steps, _ = thinned((range(10_000), [NAN] * 10_000))
    assert len(steps) == 251


def test_a_short_course_is_kept_whole():
    course = ([0, 5], [1.0, 2.0])
    assert thinned(course) is course


def test_the_largest_of_several_series_at_each_step():
    one = Series(quantity="logit bound", path="a", steps=(0, 1, 2, 3), values=(1.0, 5.0, NAN, 1.0))
    other = Series(quantity="logit bound", path="b", steps=(1, 2, 3), values=(2.0, 2.0, INF))
    steps, values = largest([one, other])
    assert steps == [0, 1, 2, 3]
    assert values == pytest.approx([1.0, 5.0, NAN, INF], nan_ok=True)
    assert largest([]) == ([], [])


def test_the_worst_update_is_the_origins_or_the_highest_of_a_weight(healthy):
    calm, spike = imagined_runs.calm(healthy), imagined_runs.spike(healthy, began=400, noticed=401)
    assert worst_update(calm).path == "transformer.h.5.mlp.c_fc.weight"
    bias = imagined_runs.series("update ratio", "transformer.ln_f.bias", range(3), lambda _: 9.0)
    first = calm.of("update ratio")[0].path
    biased = dataclasses.replace(calm, series=(*calm.series, bias))
    assert worst_update(biased).path == "transformer.h.5.mlp.c_fc.weight"
    assert worst_update(dataclasses.replace(calm, series=(bias,))).path == bias.path
    moved = dataclasses.replace(spike, origin=dataclasses.replace(spike.origin, path=first))
    assert worst_update(moved).path == first
    assert worst_update(dataclasses.replace(calm, series=())) is None


def test_a_number_that_is_none_leaves_a_gap_and_a_cross():
    ax = drawn([1.0, 2.0, NAN, 3.0, INF])
    line, marks = ax.get_lines()
    assert line.get_ydata() == pytest.approx([1.0, 2.0, NAN, 3.0, NAN], nan_ok=True)
    assert list(marks.get_xdata()) == [2, 4]
    assert ax.get_yscale() == "log"


@pytest.mark.slow
def test_the_axis_is_logarithmic_where_asked_for_or_needed():
    assert drawn([2.0, 3.0], logarithmic=False).get_yscale() == "linear"
    assert drawn([2.0, 300.0], logarithmic=False).get_yscale() == "log"
    # A loss may be negative; a log axis cannot show it.
    assert drawn([-2.0, 300.0], logarithmic=False).get_yscale() == "linear"
    assert drawn([0.0, 0.0]).get_yscale() == "linear"


@pytest.mark.slow
def test_without_a_finite_number_there_is_no_scale():
    ax = drawn([NAN])
    assert list(ax.get_yticks()) == []
    assert list(ax.get_lines()[1].get_xdata()) == [0]


@pytest.mark.parametrize(("last", "expected"), [(0, ["0"]), (2, ["0", "1", "2"]), (40_000, ["0", "8,000"])])
def test_steps_are_whole_numbers(last, expected):
    with theme.style():
        ax = theme.new_axes()
        step_axis(ax, 0, last)
        figure_of(ax).draw_without_rendering()
    low, high = ax.get_xlim()
    shown = [t.get_text() for t in ax.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert shown[: len(expected)] == expected
    assert all(text.replace(",", "").isdigit() for text in shown)
    assert ax.get_xlabel() == "optimizer step"
