import dataclasses
import math

import pytest

import imagined_runs
from normkit.errors import InputError
from normkit.inspection.figures import drawings
from normkit.inspection.run_figures import (
    depth_profiles,
    draw_course,
    norm_drift,
    run_drawings,
    run_timeline,
    thinned,
)
from normkit.show import theme
from normkit.show.axes import figure_of, new_axes

INF, NAN = math.inf, math.nan


def watched(inspection, kind, **options):
    return dataclasses.replace(inspection, training=kind(inspection, **options))


def labels(drawing):
    return [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]


@pytest.mark.slow
def test_a_run_brings_its_figures_first(healthy):
    names = [drawing.name for drawing in drawings(watched(healthy, imagined_runs.spike))]
    assert names[:4] == ["run-timeline", "run-depth", "run-drift", "input-scale"]
    assert run_drawings(healthy) == ()
    assert run_drawings(watched(healthy, imagined_runs.bare)) == ()
    assert "run-timeline" not in [drawing.name for drawing in drawings(healthy)]


def test_the_timeline_draws_what_was_measured_and_marks_both_steps(healthy):
    inspection = watched(healthy, imagined_runs.spike)
    drawing = run_timeline(inspection)
    whole, near = drawing.figure.axes[0], drawing.figure.axes[1]
    (loss,) = inspection.training.of("loss")
    line = whole.get_lines()[0]
    assert line.get_ydata() == pytest.approx(loss.values)
    assert list(near.get_lines()[0].get_xdata()) == list(range(385, 437))
    assert [ax.get_ylabel() for ax in drawing.figure.axes[::2]] == [
        "loss", "gradient norm", "update ratio,\nworst parameter", "logit bound,\nlargest",
    ]  # fmt: skip
    assert drawing.figure.axes[2].get_yscale() == "log"
    assert labels(drawing) == ["began: step 409", "noticed: step 412"]
    marks = {line.get_label(): line.get_xdata()[0] for line in near.get_lines() if line.get_label()[:1] != "_"}
    assert marks == {"began: step 409": 409, "noticed: step 412": 412}
    assert "It began at step 409 and was noticed at step 412." in drawing.description
    assert "The update ratio of transformer.h.5.mlp.c_fc.weight goes from 0.0120 at step 0 to 0.132" in (
        drawing.description
    )


@pytest.mark.slow
def test_panels_columns_and_marks_are_those_of_the_run(healthy):
    calm = run_timeline(watched(healthy, imagined_runs.calm))
    assert (labels(calm), len(calm.figure.axes)) == ([], 4)
    at_once = run_timeline(watched(healthy, imagined_runs.spike, began=100, noticed=100))
    assert labels(at_once) == ["began and noticed: step 100"]
    assert len({ax.get_position().x0 for ax in at_once.figure.axes}) == 2
    short = run_timeline(watched(healthy, imagined_runs.spike, began=20, noticed=21))
    assert len(short.figure.axes) == 4
    training = imagined_runs.calm(healthy)
    only = tuple(each for each in training.series if each.quantity == "loss")
    loss = run_timeline(dataclasses.replace(healthy, training=dataclasses.replace(training, series=only)))
    assert [ax.get_ylabel() for ax in loss.figure.axes] == ["loss"]


def test_the_z_score_stands_under_the_loss(healthy):
    training = imagined_runs.spike(healthy)
    scores = imagined_runs.series("loss z", "", range(16, 437), lambda step: 8.0 if step == 412 else 0.5)
    training = dataclasses.replace(training, series=(*training.series, scores))
    drawing = run_timeline(dataclasses.replace(healthy, training=training))
    assert [ax.get_ylabel() for ax in drawing.figure.axes[:4:2]] == ["loss", "z of the loss"]
    assert list(drawing.figure.axes[3].get_lines()[0].get_ydata()).count(8.0) == 1
    assert "Its z-score goes from 0.500 at step 16 to 0.500 at step 436, with a peak of 8.00 at step 412." in (
        drawing.description
    )


@pytest.mark.slow
def test_numbers_that_are_none_are_crosses_and_nothing_else_is_no_figure(healthy):
    short = run_timeline(watched(healthy, imagined_runs.short))
    assert "The gradient norm goes from 2.50 at step 0 to inf at step 2, with a peak" not in short.description
    assert "to inf at step 2" in short.description
    assert "nan" not in short.svg().lower()
    broken, three = watched(healthy, imagined_runs.broken), imagined_runs.short(healthy)
    lost = tuple(dataclasses.replace(each, values=(math.nan,) * 3) for each in three.series)
    never = dataclasses.replace(healthy, training=dataclasses.replace(three, series=lost, parameters=()))
    for inspection in (broken, never, healthy):
        assert run_drawings(inspection) == ()
        with pytest.raises(InputError, match="this inspection has none"):
            run_timeline(inspection)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes_and_a_long_one_no_heavier_figure(healthy):
    inspection = watched(healthy, imagined_runs.calm, steps=20_000, every=25)
    figure = run_timeline(inspection).svg()
    assert len(figure.encode()) < 60_000
    assert figure == run_timeline(inspection).svg()


@pytest.mark.slow
def test_a_hostile_name_is_not_set_as_a_formula(healthy):
    inspection = watched(healthy, imagined_runs.spike)
    training = imagined_runs.hostile(healthy, r"$\frac{1}{0$ \x")
    for drawing in run_drawings(dataclasses.replace(inspection, training=training)):
        assert drawing.svg()


def drawn(values, **options):
    with theme.style():
        ax = new_axes()
        draw_course(ax, (range(len(values)), values), **options)
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
    # A run that stays NaN costs one cross per stretch.
    assert len(thinned((range(10_000), [NAN] * 10_000))[0]) == 251
    short = ([0, 5], [1.0, 2.0])
    assert thinned(short) is short


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
    # Without a finite number there is no scale.
    ax = drawn([NAN])
    assert list(ax.get_yticks()) == []
    assert list(ax.get_lines()[1].get_xdata()) == [0]


def lines(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


def test_each_block_at_the_first_report_and_the_last(healthy):
    inspection = watched(healthy, imagined_runs.spike)
    drawing = depth_profiles(inspection)
    gradient, stream, updates = drawing.figure.axes
    assert [ax.get_ylabel() for ax in drawing.figure.axes] == [
        "rms of the gradient", "rms of the stream", "largest update ratio",
    ]  # fmt: skip
    streams = inspection.training.of("stream rms")
    assert lines(stream)["step 0"] == pytest.approx([each.values[0] for each in streams])
    assert lines(stream)["step 425"] == pytest.approx([each.last for each in streams])
    assert lines(updates)["step 425"] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.132])
    assert gradient.get_xlabel() == "block"
    assert drawing.description.endswith("largest update ratio: 0.0120 at first, 0.00200 to 0.132 at last.")


def test_the_largest_update_of_a_block_is_shown_and_one_report_is_one_line(healthy):
    training = imagined_runs.calm(healthy)
    small = imagined_runs.parameter("another", block=5, update_ratio=1e-6)
    bias = imagined_runs.parameter("a bias", kind="bias", block=5, update_ratio=0.9)
    more = dataclasses.replace(training, parameters=(*training.parameters, small, bias))
    updates = depth_profiles(dataclasses.replace(healthy, training=more)).figure.axes[2]
    assert lines(updates)["step 425"][5] == pytest.approx(0.012)
    once = watched(healthy, imagined_runs.calm, steps=1)
    assert list(lines(depth_profiles(once).figure.axes[0])) == ["step 0"]


@pytest.mark.slow
def test_what_is_not_finite_at_last_is_a_cross(healthy):
    training = imagined_runs.calm(healthy)
    struck = tuple(
        dataclasses.replace(each, values=(*each.values[:-1], math.inf)) if each.quantity == "stream rms" else each
        for each in training.series
    )
    drawing = depth_profiles(dataclasses.replace(healthy, training=dataclasses.replace(training, series=struck)))
    crosses = drawing.figure.axes[1].get_lines()[-1]
    assert (list(crosses.get_xdata()), crosses.get_marker()) == ([0, 1, 2, 3, 4, 5], "x")
    assert "nan" not in drawing.svg().lower()


def test_without_blocks_there_is_nothing_to_draw(healthy, empty):
    for inspection in (healthy, watched(healthy, imagined_runs.bare), watched(empty, imagined_runs.calm)):
        assert "run-depth" not in [drawing.name for drawing in run_drawings(inspection)]
        with pytest.raises(InputError, match="this inspection has none"):
            depth_profiles(inspection)


def line(ax, label):
    return next(line for line in ax.get_lines() if line.get_label() == label)


def test_the_norm_that_moved_most_stands_out_of_the_band_of_all(healthy):
    inspection = watched(healthy, imagined_runs.calm)
    drawing = norm_drift(inspection)
    assert [ax.get_ylabel() for ax in drawing.figure.axes] == [
        "mean of the gain", "input rms", "rows that eps cuts, %", "kurtosis of the input",
    ]  # fmt: skip
    gains = inspection.training.of("gain mean")
    gain = drawing.figure.axes[0]
    assert list(line(gain, "moved most").get_ydata()) == pytest.approx(gains[-1].values)
    assert list(line(gain, "their median").get_ydata()) == pytest.approx(gains[6].values)
    assert "mean of the gain at transformer.ln_f, 1.00 to 1.06" in drawing.description
    assert "rows that eps cuts at transformer.h.0.ln_1, 37.0 % to 0 %" in drawing.description


def test_the_way_is_counted_in_octaves_where_the_axis_is_logarithmic(healthy):
    ways = {"input rms": (0.1, 0.3), "gain mean": (0.5, 1.2)}
    found = tuple(
        imagined_runs.series(quantity, path, (0, 1), lambda step, first=first, last=last: last if step else first)
        for quantity, (first, last) in ways.items()
        for path, (first, last) in (("small", (first, last)), ("large", (2.0, 2.9)))
    )
    training = dataclasses.replace(imagined_runs.calm(healthy), series=found)
    description = norm_drift(dataclasses.replace(healthy, training=training)).description
    assert "input rms at small, 0.100 to 0.300" in description
    assert "mean of the gain at large, 2.00 to 2.90" in description


@pytest.mark.slow
def test_a_norm_that_ends_in_no_number_moved_most(healthy):
    training = imagined_runs.calm(healthy)
    victim = healthy.sites[4].path
    struck = tuple(
        dataclasses.replace(each, values=(*each.values[:-1], math.inf)) if each.path == victim else each
        for each in training.series
    )
    drawing = norm_drift(dataclasses.replace(healthy, training=dataclasses.replace(training, series=struck)))
    assert f"mean of the gain at {victim}, 1.00 to inf" in drawing.description
    assert drawing.figure.axes[0].get_lines()[-1].get_marker() == "x"
    assert "nan" not in drawing.svg().lower()


def test_the_headroom_has_a_panel(healthy):
    paths = [site.path for site in healthy.sites]
    found = tuple(
        imagined_runs.series("headroom", path, (0, 5), lambda step, place=place: 15.0 - place * step)
        for place, path in enumerate(paths)
    )
    training = dataclasses.replace(imagined_runs.calm(healthy), series=found)
    drawing = norm_drift(dataclasses.replace(healthy, training=training))
    (ax,) = drawing.figure.axes
    assert ax.get_ylabel() == "headroom, bits"
    assert list(line(ax, "moved most").get_ydata()) == [15.0, 15.0 - 5 * (len(paths) - 1)]
    assert f"headroom at {paths[-1]}, 15.0 to " in drawing.description


def test_one_report_or_none_shows_no_drift(healthy):
    one = watched(healthy, imagined_runs.calm, steps=1)
    assert "run-drift" not in [drawing.name for drawing in run_drawings(one)]
    for inspection in (one, healthy):
        with pytest.raises(InputError, match="this inspection has none"):
            norm_drift(inspection)


def test_one_norm_has_no_band(healthy):
    training = imagined_runs.calm(healthy)
    only = tuple(each for each in training.series if each.path == "transformer.ln_f" and each.quantity == "gain mean")
    drawing = norm_drift(dataclasses.replace(healthy, training=dataclasses.replace(training, series=only)))
    (ax,) = drawing.figure.axes
    assert [line.get_label() for line in ax.get_lines()] == ["moved most"]
    assert len(ax.collections) == 0
