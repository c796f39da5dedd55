import dataclasses
import math

import pytest

import imagined_runs
from normkit.errors import InputError
from normkit.plots.drift import has_drift, norm_drift


def watched(inspection, kind, **options):
    return dataclasses.replace(inspection, training=kind(inspection, **options))


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
    assert not has_drift(one.training)
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
