import math
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from normkit import NormSpec, reference, specs
from normkit.errors import InputError, ShapeError
from normkit.geometry import space_figures
from normkit.geometry.centring import helmert
from normkit.geometry.space_figures import (
    array,
    centred_clusters,
    hyperplane_steps,
    nearest_basis,
    rms_sphere,
    three_steps,
    upright,
)
from normkit.show import theme
from normkit.show.axes import panels

EXACT = 1e-14
GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
GAIN4, BIAS4 = torch.tensor([0.9, 1.5, 0.6, 1.0]).double(), torch.tensor([0.5, 0.0, 0.0, 0.2]).double()
SPEC, LAYER, RMS = NormSpec(eps=1e-3), NormSpec(eps=0.0), specs.LLAMA.replace(eps=0.0)
STEPS, SPHERE = space_figures._STEPS_CAMERA, space_figures._SPHERE_CAMERA


def rows(n):
    return torch.randn(17, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.4


X, X4 = rows(3), rows(4)


def in_order(places):
    return places[np.lexsort(places.round(9).T)]


def drawn(ax):
    """Places of the points of a panel, in one order."""
    parts = [artist.get_offsets().data for artist in ax.collections if artist.get_label() == "points"]
    return in_order(np.concatenate(parts))


def expected(camera, coordinates):
    return pytest.approx(in_order(camera.paper(coordinates.numpy())), abs=1e-12)


def written(ax):
    """The numbers of two decimals in a panel."""
    return sorted(float(text.get_text()) for text in ax.texts if re.fullmatch(r"\d\.\d\d", text.get_text()))


def test_upright_turns_all_ones_into_up_and_a_tensor_with_a_gradient_becomes_an_array():
    assert (torch.ones(3).double() @ upright()).tolist() == pytest.approx([0.0, 0.0, math.sqrt(3)], abs=EXACT)
    assert (upright().mT @ upright() - torch.eye(3)).abs().max() < EXACT
    assert array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]


def test_the_nearest_basis_spans_the_same_plane_and_is_no_further_than_any_other():
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(4, 3, generator=generator, dtype=torch.float64)).Q
    nearest = nearest_basis(plane, helmert(4))
    assert (plane @ plane.mT - nearest @ nearest.mT).abs().max() < EXACT * 10
    distance = (nearest - helmert(4)).norm()
    for _ in range(50):
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
        assert distance <= (plane @ turn - helmert(4)).norm()
    assert (nearest_basis(helmert(4), helmert(4)) - helmert(4)).abs().max() < EXACT * 10


@pytest.mark.slow
def test_the_panels_of_three_steps_show_what_torch_computes_in_one_window():
    axes = three_steps(X, SPEC, GAIN, BIAS).figure.axes
    values = [
        X,
        X - X.mean(-1, keepdim=True),
        layer_norm(X, (3,), eps=1e-3),
        layer_norm(X, (3,), GAIN, BIAS, 1e-3),
    ]
    assert len({(*ax.get_xlim(), *ax.get_ylim()) for ax in axes}) == 1
    for ax, shown in zip(axes, values, strict=True):
        assert drawn(ax) == expected(STEPS, shown @ upright())
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        assert ((drawn(ax) > (left, low)) & (drawn(ax) < (right, high))).all()
    hidden, shown = (artist for artist in axes[0].collections if artist.get_label() == "points")
    assert len(hidden.get_offsets()) == int((X.mean(-1) < 0).sum()) > 0
    assert hidden.get_alpha() < shown.get_alpha()


@pytest.mark.slow
def test_at_eps_0_points_lie_on_the_circle_of_radius_root_three_and_on_the_ellipse():
    axes = three_steps(X, LAYER, GAIN, BIAS).figure.axes
    for ax in axes[2:]:
        (line,) = [line for line in ax.get_lines() if len(line.get_xdata()) > 100 and not line.is_dashed()]
        curve = np.column_stack(line.get_data())
        # Vertices of a polygon of 120 sides: half a side is 0.05 at the longest semi-axis.
        assert np.linalg.norm(drawn(ax)[:, None] - curve, axis=-1).min(1).max() < 0.06
        if ax is axes[2]:
            # Without perspective, the horizontal extent of a level circle is its diameter.
            assert np.ptp(curve[:, 0]) == pytest.approx(2 * math.sqrt(3), rel=1e-3)
    assert "√3" in [text.get_text() for text in axes[2].texts]


@pytest.mark.slow
def test_inside_the_hyperplane_points_are_where_their_helmert_coordinates_say():
    centred, scaled, tilted = hyperplane_steps(X4, LAYER, GAIN4, BIAS4).figure.axes
    assert drawn(centred) == expected(SPHERE, X4 @ helmert(4))
    unit = layer_norm(X4, (4,), eps=0.0) @ helmert(4)
    assert unit.norm(dim=-1).tolist() == pytest.approx([2.0] * len(X4))
    assert drawn(scaled) == expected(SPHERE, unit)
    matrix = torch.diag(GAIN4) @ (torch.eye(4, dtype=torch.float64) - 0.25)
    sizes = 2 * torch.linalg.svdvals(matrix)[:3]
    assert written(tilted) == pytest.approx(sorted(round(float(size), 2) for size in sizes))


@pytest.mark.slow
def test_the_ellipsoid_in_the_hyperplane_keeps_true_lengths():
    y = reference.forward(X4, LAYER, GAIN4, BIAS4) - BIAS4
    normal = (1 / GAIN4) / (1 / GAIN4).norm()
    assert (y @ normal).abs().max() < 1e-12
    shown = drawn(hyperplane_steps(X4, LAYER, GAIN4, BIAS4).figure.axes[2])
    directions = nearest_basis(space_figures.image_of(LAYER, 4, GAIN4, BIAS4).surface.axes()[1], helmert(4))
    places = SPHERE.paper((y @ directions).numpy())
    order = [int(np.abs(places - place).sum(1).argmin()) for place in shown]
    assert sorted(order) == list(range(len(y)))
    # In some orthonormal basis of the tilted hyperplane: what the paper shows is a projection of the true cloud.
    left, _, _ = torch.linalg.svd(normal[:, None])
    best = np.linalg.lstsq((y @ left[:, 1:]).numpy()[order], shown, rcond=None)[0]
    assert best.T @ best == pytest.approx(np.eye(2), abs=1e-9)


@pytest.mark.slow
def test_rms_norm_keeps_the_direction_of_every_point():
    axes = rms_sphere(X, RMS, GAIN).figure.axes
    for ax, values in zip(axes, (X, rms_norm(X, (3,), eps=0.0), rms_norm(X, (3,), GAIN, eps=0.0)), strict=True):
        assert drawn(ax) == expected(SPHERE, values @ upright())
    assert written(axes[2]) == pytest.approx([round(math.sqrt(3) * g, 2) for g in sorted(GAIN.tolist())])


@pytest.mark.parametrize("n", [3, 4])
def test_points_on_the_far_side_of_a_sphere_are_lighter(n):
    drawing = rms_sphere(X, RMS, GAIN) if n == 3 else hyperplane_steps(X4, LAYER, GAIN4, BIAS4)
    ax = drawing.figure.axes[1]
    far = [artist for artist in ax.collections if artist.get_label() == "points" and artist.get_alpha() < 1]
    behind = SPHERE.nearness((X @ upright() if n == 3 else X4 @ helmert(4)).numpy()) < 0
    # 17 points: the far and the near ones cannot be equally many.
    assert sum(len(artist.get_offsets()) for artist in far) == behind.sum() > 0


@pytest.mark.slow
def test_nine_views_show_a_cloud_and_its_two_centrings():
    axes = centred_clusters(X).figure.axes
    kinds = [X, X - X.mean(0), X - X.mean(1, keepdim=True)]
    for place, ax in enumerate(axes):
        assert drawn(ax) == expected(space_figures._CLOUD_CAMERAS[place // 3], kinds[place % 3] @ upright())
    # Along the plane only LayerNorm's points are on one line.
    heights = [np.abs(drawn(ax)[:, 1]).max() for ax in axes[3:6]]
    assert heights[2] < 1e-12 < 0.5 < min(heights[:2])
    # The cross is the mean of each cloud, and only BatchNorm moves it to the origin.
    crosses = [np.ravel(line.get_data()) for ax in axes[6:] for line in ax.get_lines() if line.get_marker() == "x"]
    level = ((X.mean(0) - X.mean()) @ upright())[:2].numpy()
    for cross, place in zip(crosses, (level, [0.0, 0.0], level), strict=True):
        assert cross == pytest.approx(place, abs=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_they_draw_into_given_axes_in_both_schemes(scheme):
    with theme.style(scheme):
        given = panels(3, 3, 6.0)
        for drawing in (
            three_steps(X, SPEC, GAIN, BIAS, axes=given[:4]),
            hyperplane_steps(X4, LAYER, GAIN4, BIAS4, axes=given[:3]),
            rms_sphere(X, RMS, GAIN, axes=given[:3]),
            centred_clusters(X, axes=given),
        ):
            assert (drawing.figure, drawing.scheme) == (given[0].figure, scheme)
    with pytest.raises(InputError, match="needs 4 axes, got 3"):
        three_steps(X, SPEC, GAIN, BIAS, axes=given[:3])


def test_wrong_points_and_norms_are_refused():
    for draw, error, message in (
        (lambda: three_steps(X[:, :2], SPEC, GAIN[:2], BIAS[:2]), ShapeError, r"\(N, 3\) are needed, got \(17, 2\)"),
        (lambda: three_steps(X, RMS, GAIN, BIAS), InputError, "a norm that centres; see rms_sphere"),
        (lambda: hyperplane_steps(X, LAYER, GAIN4, BIAS4), ShapeError, r"shape \(N, 4\) are needed"),
        (lambda: hyperplane_steps(X4, RMS, GAIN4, BIAS4), InputError, "a norm that centres"),
        (lambda: rms_sphere(X4, RMS, GAIN), ShapeError, r"shape \(N, 3\) are needed"),
        (lambda: rms_sphere(X, LAYER, GAIN), InputError, "does not centre"),
        (lambda: centred_clusters(X[:, :2]), ShapeError, r"shape \(N, 3\) are needed, got \(17, 2\)"),
    ):
        with pytest.raises(error, match=message):
            draw()
