import math

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from normkit import NormSpec, specs
from normkit.errors import InputError, ShapeError
from normkit.plots import steps, theme
from normkit.plots.camera import upright
from normkit.plots.steps import three_steps

GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
SPEC = NormSpec(eps=1e-3)


@pytest.fixture(scope="module")
def x():
    return torch.randn(17, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.4


def drawn(ax):
    """Places of the points of a panel, in one order."""
    places = np.concatenate([artist.get_offsets().data for artist in ax.collections if artist.get_label() == "points"])
    return places[np.lexsort(places.round(9).T)]


def expected(rows):
    places = steps._CAMERA.paper((rows @ upright()).numpy())
    return places[np.lexsort(places.round(9).T)]


def test_each_panel_shows_what_torch_computes(x):
    panels = three_steps(x, SPEC, GAIN, BIAS).figure.axes
    centred = x - x.mean(-1, keepdim=True)
    rows = [x, centred, layer_norm(x, (3,), eps=1e-3), layer_norm(x, (3,), GAIN, BIAS, 1e-3)]
    assert len(panels) == 4
    for ax, values in zip(panels, rows, strict=True):
        assert drawn(ax) == pytest.approx(expected(values), abs=1e-12)


def curve(ax, *, dashed=False):
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) > 100 and line.is_dashed() is dashed]
    (line,) = lines
    return np.column_stack(line.get_data())


def test_at_eps_0_points_lie_on_the_circle_and_on_the_ellipse(x):
    panels = three_steps(x, NormSpec(eps=0.0), GAIN, BIAS).figure.axes
    for ax in panels[2:]:
        gaps = np.linalg.norm(drawn(ax)[:, None] - curve(ax), axis=-1).min(1)
        # Vertices of a polygon of 120 sides: half a side is 0.05 at the longest semi-axis.
        assert gaps.max() < 0.06


def test_the_circle_has_radius_root_three(x):
    ax = three_steps(x, SPEC, GAIN, BIAS).figure.axes[2]
    # Without perspective, the horizontal extent of a level circle is its diameter.
    assert np.ptp(curve(ax)[:, 0]) == pytest.approx(2 * math.sqrt(3), rel=1e-3)
    assert "√3" in [text.get_text() for text in ax.texts]


@pytest.mark.slow
def test_points_below_the_plane_are_lighter(x):
    ax = three_steps(x, SPEC, GAIN, BIAS).figure.axes[0]
    hidden, shown = (artist for artist in ax.collections if artist.get_label() == "points")
    assert len(hidden.get_offsets()) == int((x.mean(-1) < 0).sum()) > 0
    assert hidden.get_alpha() < shown.get_alpha()


def test_all_panels_have_one_window_so_that_lengths_compare(x):
    panels = three_steps(x, SPEC, GAIN, BIAS).figure.axes
    assert len({(*ax.get_xlim(), *ax.get_ylim()) for ax in panels}) == 1
    for ax in panels:
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        assert (drawn(ax) > (left, low)).all()
        assert (drawn(ax) < (right, high)).all()


def test_it_draws_into_given_axes(x):
    with theme.style():
        given = theme.panels(2, 2, 6.0)
    drawing = three_steps(x, SPEC, GAIN, BIAS, axes=given)
    assert drawing.figure is given[0].figure
    with pytest.raises(InputError, match="needs 4 axes, got 3"):
        three_steps(x, SPEC, GAIN, BIAS, axes=given[:3])


def test_other_points_and_norms_are_refused(x):
    with pytest.raises(ShapeError, match=r"shape \(N, 3\) are needed, got \(17, 2\)"):
        three_steps(x[:, :2], SPEC, GAIN[:2], BIAS[:2])
    with pytest.raises(InputError, match="a norm that centres; see rms_sphere"):
        three_steps(x, specs.LLAMA, GAIN, BIAS)
