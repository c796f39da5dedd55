import dataclasses
import math

import pytest

import imagined_runs
from normkit.errors import InputError
from normkit.plots.inspection import drawings
from normkit.plots.training import run_drawings, run_timeline


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


def test_a_healthy_run_has_no_marks_and_one_column(healthy):
    drawing = run_timeline(watched(healthy, imagined_runs.calm))
    assert labels(drawing) == []
    assert len(drawing.figure.axes) == 4


@pytest.mark.slow
def test_a_short_run_needs_no_second_look_and_one_mark_where_both_fall_together(healthy):
    drawing = run_timeline(watched(healthy, imagined_runs.spike, began=100, noticed=100))
    assert labels(drawing) == ["began and noticed: step 100"]
    assert len({ax.get_position().x0 for ax in drawing.figure.axes}) == 2
    few = run_timeline(watched(healthy, imagined_runs.spike, began=20, noticed=21))
    assert len(few.figure.axes) == 4


def test_what_was_not_measured_has_no_panel(healthy):
    training = imagined_runs.calm(healthy)
    only = tuple(each for each in training.series if each.quantity == "loss")
    drawing = run_timeline(dataclasses.replace(healthy, training=dataclasses.replace(training, series=only)))
    assert [ax.get_ylabel() for ax in drawing.figure.axes] == ["loss"]


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
