import dataclasses
import math

import numpy as np
import pytest
import torch

from normkit import NormSpec, specs
from normkit.errors import InputError
from normkit.plots import theme
from normkit.plots.ellipsoid import ellipsoid_depth, has_axes, interlacing
from normkit.plots.inspection import drawings


def with_axes(inspection, *axes):
    """The inspection with these semi-axes in turn at its sites."""
    sites = [
        dataclasses.replace(site, geometry=dataclasses.replace(site.geometry, semi_axes=axes[place % len(axes)]))
        for place, site in enumerate(inspection.sites)
    ]
    return dataclasses.replace(inspection, sites=tuple(sites))


def series(drawing):
    return {line.get_label(): line for line in drawing.figure.axes[0].get_lines()}


@pytest.mark.slow
def test_the_marks_are_the_semi_axes_of_each_site(healthy):
    lines = series(ellipsoid_depth(healthy))
    low, median, high = zip(*(site.geometry.semi_axes for site in healthy.sites), strict=True)
    for label, values in (("shortest semi-axis", low), ("median", median), ("longest", high)):
        assert lines[label].get_ydata() == pytest.approx(values)
    assert "ellipsoid-depth" in [drawing.name for drawing in drawings(healthy)]


def test_the_description_holds_the_largest_ratio(healthy):
    drawing = ellipsoid_depth(with_axes(healthy, (0.1, 1.0, 2.0), (0.5, 1.5, 4.0)))
    assert drawing.description == (
        "Median semi-axes run over 1.00 to 1.50; the longest axis of one norm over its shortest is at most 20.0."
    )


@pytest.mark.slow
def test_sites_without_axes_leave_a_gap(healthy):
    inspection = with_axes(healthy, (0.5, 1.0, 2.0), None, (math.nan, 1.0, 2.0), (0.0, 0.0, 0.0))
    places = series(ellipsoid_depth(inspection))["median"].get_xdata()
    assert list(places) == list(range(0, len(healthy.sites), 4))
    assert [has_axes(site) for site in inspection.sites[:4]] == [True, False, False, False]
    none = with_axes(healthy, None)
    assert "ellipsoid-depth" not in [drawing.name for drawing in drawings(none)]
    with pytest.raises(InputError, match="this inspection has none"):
        ellipsoid_depth(none)
    bare = dataclasses.replace(healthy, sites=tuple(dataclasses.replace(s, geometry=None) for s in healthy.sites))
    with pytest.raises(InputError, match="this inspection has none"):
        ellipsoid_depth(bare)


def test_the_dots_are_singular_values_and_lie_on_their_bars():
    gain = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    (ax,) = interlacing(gain, NormSpec()).figure.axes
    (dots,) = ax.get_lines()
    matrix = torch.diag(gain) @ (torch.eye(20, dtype=torch.float64) - 1 / 20)
    assert dots.get_ydata() == pytest.approx(torch.linalg.svdvals(matrix)[:-1].flip(0).numpy())
    bars = np.array([segment[:, 1] for segment in ax.collections[0].get_segments()])
    assert bars[:, 0] == pytest.approx(gain.sort().values[:-1].numpy())
    assert bars[:, 1] == pytest.approx(gain.sort().values[1:].numpy())
    assert (bars[:, 0] <= dots.get_ydata()).all()
    assert (dots.get_ydata() <= bars[:, 1]).all()


def test_the_gain_is_the_one_that_acts():
    stored = torch.linspace(-0.5, 0.5, 8, dtype=torch.float64)
    offset = interlacing(stored, specs.NEMOTRON).figure.axes[0].get_lines()[0].get_ydata()
    assert offset == pytest.approx(interlacing(stored + 1, NormSpec()).figure.axes[0].get_lines()[0].get_ydata())


def test_zero_gains_leave_axes_of_length_0():
    gain = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    (dots,) = interlacing(gain, NormSpec()).figure.axes[0].get_lines()
    assert len(dots.get_ydata()) == 5
    assert dots.get_ydata()[:2] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert dots.get_ydata()[2] > 0.1


def test_given_axes_names_and_norms_that_do_not_centre(healthy):
    with theme.style():
        ax, other = theme.panels(1, 2, 3.0)
    assert ellipsoid_depth(healthy, ax).figure is ax.figure
    drawing = interlacing(torch.ones(5).double(), NormSpec(), "a norm", other)
    assert drawing.figure is ax.figure
    assert drawing.caption.endswith("by size. Here: a norm.")
    with pytest.raises(InputError, match="give a norm that centres"):
        interlacing(torch.ones(5), specs.LLAMA)
