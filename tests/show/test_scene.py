import math

import numpy as np
import pytest

from normkit.show import theme
from normkit.show.axes import new_axes
from normkit.show.scene import Ball, Camera, Scene, ellipse

EXACT = 1e-14

TURNED = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]


@pytest.fixture
def ball():
    return Ball(centre=np.array([1.0, -2.0, 0.5]), semi_axes=np.array([0.5, 1.0, 2.0]), directions=TURNED)


@pytest.fixture
def scene():
    with theme.style():
        yield Scene(new_axes(), Camera(-50.0, 25.0))


def pulled_back(ball, points):
    return np.linalg.norm((points - ball.centre) @ ball.directions / ball.semi_axes, axis=-1)


def test_the_sections_of_a_ball_lie_on_it(ball):
    assert pulled_back(ball, ball.sections()) == pytest.approx(1.0)


def test_an_ellipse_closes_and_has_its_semi_axes():
    curve = ellipse(np.zeros(3), np.array([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    assert curve[0] == pytest.approx(curve[-1])
    assert np.abs(curve).max(0) == pytest.approx([3.0, 1.0, 0.0])


def test_the_outline_of_a_ball_just_holds_its_surface(scene, ball):
    scene.ball(ball)
    outline = scene.ax.patches[0].get_path().vertices
    sphere = np.random.default_rng(1).normal(size=(20_000, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    shown = scene.camera.paper(ball.centre + sphere * ball.semi_axes @ ball.directions.T)
    for angle in np.linspace(0, math.pi, 7):
        way = np.array([math.cos(angle), math.sin(angle)])
        # So many random points come within a few thousandths of the edge; a polygon of 120 sides within 0.04 %.
        assert (outline @ way).max() == pytest.approx((shown @ way).max(), rel=4e-3)


def test_the_far_side_of_a_ball_is_what_points_away_from_the_reader(scene, ball):
    poles = ball.centre + np.array([[1.0], [-1.0]]) * ball.semi_axes[2] * ball.directions[:, 2]
    towards = scene.camera.nearness(poles - ball.centre)
    assert ball.faces(scene.camera, poles).tolist() == (towards > 0).tolist()


def test_hidden_points_are_lighter_and_lie_under_the_sheet(scene):
    scene.sheet(np.array([[1.0, 1, 0], [1, -1, 0], [-1, -1, 0], [-1, 1, 0]]))
    scene.points(np.array([[0.0, 0, 1], [0, 0, -1], [0.1, 0, 2]]), [0, 1, 2], np.array([False, True, False]))
    hidden, shown = (artist for artist in scene.ax.collections if artist.get_label() == "points")
    assert (len(hidden.get_offsets()), len(shown.get_offsets())) == (1, 2)
    assert hidden.get_alpha() < shown.get_alpha()
    sheet = [patch.get_zorder() for patch in scene.ax.patches]
    assert hidden.get_zorder() < min(sheet) < max(sheet) < shown.get_zorder()


def test_nearer_points_are_drawn_last(scene):
    points = np.random.default_rng(2).normal(size=(9, 3))
    scene.points(points, [0] * 9)
    drawn = scene.ax.collections[0].get_offsets().data
    order = [int(np.abs(scene.camera.paper(points) - place).sum(1).argmin()) for place in drawn]
    assert np.diff(scene.camera.nearness(points[order])).min() > 0


def test_groups_have_colours_of_the_scheme():
    with theme.style("dark"):
        scene = Scene(new_axes(), Camera())
        scene.points(np.zeros((2, 3)), [0, 2])
    red, green, blue, _ = scene.ax.collections[0].get_facecolors()[1]
    assert f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}" == theme.DARK["third"]


@pytest.mark.parametrize(("azimuth", "elevation"), [(-60.0, 20.0), (0.0, 0.0), (35.0, 90.0), (200.0, -40.0)])
def test_the_paper_and_the_way_to_the_reader_are_one_orthonormal_frame(azimuth, elevation):
    camera = Camera(azimuth, elevation)
    frame = np.column_stack([camera.paper(np.eye(3)), camera.nearness(np.eye(3))])
    assert np.abs(frame.T @ frame - np.eye(3)).max() < EXACT
    # Right-handed: no mirror image.
    assert np.linalg.det(frame) == pytest.approx(1.0)


def test_the_third_coordinate_goes_up_and_a_look_from_above_shows_the_first_two():
    right, up = Camera(12.0, 30.0).paper(np.array([0.0, 0.0, 1.0]))
    assert right == pytest.approx(0.0, abs=EXACT)
    assert up == pytest.approx(math.cos(math.radians(30)))
    assert Camera(-90.0, 90.0).paper(np.array([2.0, 3.0, 9.0])) == pytest.approx([2.0, 3.0])
    assert Camera(12.0, 30.0).upwards @ np.array([0.0, 0.0, 1.0]) == pytest.approx(up)
