import dataclasses
import math

import pytest

import imagined_runs
from normkit.errors import InputError
from normkit.plots.profiles import depth_profiles, has_profiles


def watched(inspection, kind):
    return dataclasses.replace(inspection, training=kind(inspection))


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


def test_the_largest_update_of_a_block_is_shown(healthy):
    training = imagined_runs.calm(healthy)
    small = imagined_runs.parameter("another", block=5, update_ratio=1e-6)
    bias = imagined_runs.parameter("a bias", kind="bias", block=5, update_ratio=0.9)
    more = dataclasses.replace(training, parameters=(*training.parameters, small, bias))
    updates = depth_profiles(dataclasses.replace(healthy, training=more)).figure.axes[2]
    assert lines(updates)["step 425"][5] == pytest.approx(0.012)


def test_one_report_is_one_line(healthy):
    inspection = watched(healthy, lambda base: imagined_runs.calm(base, steps=1))
    assert list(lines(depth_profiles(inspection).figure.axes[0])) == ["step 0"]


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
        assert not has_profiles(inspection)
        with pytest.raises(InputError, match="this inspection has none"):
            depth_profiles(inspection)
