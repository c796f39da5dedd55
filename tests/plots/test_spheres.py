import math
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm

from normkit import NormSpec, reference, specs
from normkit.errors import InputError, ShapeError
from normkit.plots import spheres, theme
from normkit.plots.camera import helmert, upright
from normkit.plots.spheres import hyperplane_steps, rms_sphere

GAIN4, BIAS4 = torch.tensor([0.9, 1.5, 0.6, 1.0]).double(), torch.tensor([0.5, 0.0, 0.0, 0.2]).double()
GAIN3 = torch.tensor([0.65, 1.35, 1.0]).double()
LAYER, RMS = NormSpec(eps=0.0), specs.LLAMA.replace(eps=0.0)


def rows(n):
    return torch.randn(15, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn(ax):
    places = np.concatenate([artist.get_offsets().data for artist in ax.collections if artist.get_label() == "points"])
    return places[np.lexsort(places.round(9).T)]


def expected(coordinates):
    places = spheres._CAMERA.paper(coordinates.numpy())
    return places[np.lexsort(places.round(9).T)]


def test_inside_the_hyperplane_points_are_where_their_helmert_coordinates_say():
    x = rows(4)
    centred, scaled, _ = hyperplane_steps(x, LAYER, GAIN4, BIAS4).figure.axes
    assert drawn(centred) == pytest.approx(expected(x @ helmert(4)), abs=1e-12)
    unit = torch.nn.functional.layer_norm(x, (4,), eps=0.0) @ helmert(4)
    assert unit.norm(dim=-1).tolist() == pytest.approx([2.0] * 15)
    assert drawn(scaled) == pytest.approx(expected(unit), abs=1e-12)


def test_the_ellipsoid_keeps_true_lengths():
    x = rows(4)
    y = reference.forward(x, LAYER, GAIN4, BIAS4) - BIAS4
    normal = (1 / GAIN4) / (1 / GAIN4).norm()
    assert (y @ normal).abs().max() < 1e-12
    ax = hyperplane_steps(x, LAYER, GAIN4, BIAS4).figure.axes[2]
    # In some orthonormal basis of the tilted hyperplane: what the paper shows is a projection of the true cloud.
    left, _, _ = torch.linalg.svd(normal[:, None])
    inside = y @ left[:, 1:]
    best = np.linalg.lstsq(inside.numpy()[_order(inside, ax)], drawn(ax), rcond=None)[0]
    assert best.T @ best == pytest.approx(np.eye(2), abs=1e-9)


def _order(inside, ax):
    """Which row each drawn place is of."""
    shown, order = drawn(ax), []
    directions = spheres.nearest_basis(spheres.image_of(LAYER, 4, GAIN4, BIAS4).surface.axes()[1], helmert(4))
    places = spheres._CAMERA.paper(((reference.forward(rows(4), LAYER, GAIN4, BIAS4) - BIAS4) @ directions).numpy())
    for place in shown:
        order.append(int(np.abs(places - place).sum(1).argmin()))
    assert sorted(order) == list(range(len(inside)))
    return order


def test_the_semi_axes_on_paper_are_the_singular_values():
    ax = hyperplane_steps(rows(4), LAYER, GAIN4, BIAS4).figure.axes[2]
    written = sorted(float(text.get_text()) for text in ax.texts if re.fullmatch(r"\d\.\d\d", text.get_text()))
    matrix = torch.diag(GAIN4) @ (torch.eye(4, dtype=torch.float64) - 0.25)
    sizes = 2 * torch.linalg.svdvals(matrix)[:3]
    assert written == pytest.approx(sorted(round(float(size), 2) for size in sizes))


def test_rms_norm_keeps_the_direction_of_every_point():
    x = rows(3)
    raw, scaled, final = rms_sphere(x, RMS, GAIN3).figure.axes
    for ax, values in ((raw, x), (scaled, rms_norm(x, (3,), eps=0.0)), (final, rms_norm(x, (3,), GAIN3, eps=0.0))):
        assert drawn(ax) == pytest.approx(expected(values @ upright()), abs=1e-12)
    written = sorted(float(text.get_text()) for text in final.texts if re.fullmatch(r"\d\.\d\d", text.get_text()))
    assert written == pytest.approx([round(math.sqrt(3) * g, 2) for g in sorted(GAIN3.tolist())])


@pytest.mark.parametrize("n", [3, 4])
def test_far_points_are_lighter(n):
    x = rows(n)
    drawing = rms_sphere(x, RMS, GAIN3) if n == 3 else hyperplane_steps(x, LAYER, GAIN4, BIAS4)
    ax = drawing.figure.axes[1]
    far = [artist for artist in ax.collections if artist.get_label() == "points" and artist.get_alpha() < 1]
    behind = spheres._CAMERA.nearness((x @ (upright() if n == 3 else helmert(4))).numpy()) < 0
    # 15 points: the far and the near ones cannot be equally many.
    assert sum(len(artist.get_offsets()) for artist in far) == behind.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_they_draw_into_given_axes_in_both_schemes(scheme):
    with theme.style(scheme):
        given = theme.panels(1, 3, 3.0)
        assert hyperplane_steps(rows(4), LAYER, GAIN4, BIAS4, axes=given).figure is given[0].figure
        other = theme.panels(1, 3, 3.0)
        assert rms_sphere(rows(3), RMS, GAIN3, axes=other).scheme == scheme


def test_wrong_points_and_norms_are_refused():
    with pytest.raises(ShapeError, match=r"shape \(N, 4\) are needed"):
        hyperplane_steps(rows(3), LAYER, GAIN4, BIAS4)
    with pytest.raises(ShapeError, match=r"shape \(N, 3\) are needed"):
        rms_sphere(rows(4), RMS, GAIN3)
    with pytest.raises(InputError, match="a norm that centres"):
        hyperplane_steps(rows(4), RMS, GAIN4, BIAS4)
    with pytest.raises(InputError, match="does not centre"):
        rms_sphere(rows(3), LAYER, GAIN3)
