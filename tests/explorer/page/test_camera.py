"""The camera against a model of it in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytestmark = pytest.mark.browser

BOX = {"x": 40, "y": 30, "width": 600, "height": 400}
CAMERAS = [
    {"yaw": yaw, "pitch": pitch, "zoom": zoom}
    for yaw, pitch, zoom in [(0, 0, 1), (0.7, -0.4, 1), (-2.5, 1.2, 3), (3.1, math.pi / 2, 0.3)]
]
RADIUS = 2.5


def model(camera, places):
    """Turned about the third axis, tilted, and seen from six radii away."""
    cy, sy = math.cos(camera["yaw"]), math.sin(camera["yaw"])
    cp, sp = math.cos(camera["pitch"]), math.sin(camera["pitch"])
    turned = np.asarray(places) @ np.array([[cy, sy, 0], [-sy, cy, 0], [0, 0, 1]]).T
    toward, right, up = (turned @ np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]]).T).T
    magnification = 6 * RADIUS / (6 * RADIUS - toward)
    pixels = 0.88 * camera["zoom"] * min(BOX["width"], BOX["height"]) / (2 * RADIUS)
    x = BOX["x"] + BOX["width"] / 2 + pixels * magnification * right
    y = BOX["y"] + BOX["height"] / 2 - pixels * magnification * up
    return np.stack([x, y, toward, magnification], axis=1)


@pytest.mark.parametrize("camera", CAMERAS)
def test_places_are_seen_as_numpy_sees_them(modules, camera):
    places = np.random.default_rng(0).normal(size=(20, 3)).tolist()
    lens = modules("camera.js", "lens", camera, BOX, RADIUS)
    seen = np.reshape(modules("camera.js", "seen", lens, places), (-1, 4))
    # A few roundings of numbers up to a thousand.
    np.testing.assert_allclose(seen, model(camera, places), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("camera", CAMERAS)
def test_axes_of_the_camera_are_a_right_handed_basis(modules, camera):
    lens = modules("camera.js", "lens", camera, BOX, RADIUS)
    basis = np.array([lens["right"], lens["up"], lens["toward"]])
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-15)
    assert np.linalg.det(basis) == pytest.approx(1)


@pytest.mark.parametrize("camera", CAMERAS)
def test_a_step_of_pixels_becomes_the_step_in_the_world_that_is_seen_as_it(modules, camera):
    lens = modules("camera.js", "lens", camera, BOX, RADIUS)
    place = np.array([0.3, -1.1, 0.8])
    step = modules("camera.js", "unseen", lens, 17, -5, place.tolist())
    before, after = np.reshape(modules("camera.js", "seen", lens, [place.tolist(), (place + step).tolist()]), (2, 4))
    np.testing.assert_allclose(after - before, [17, -5, 0, 0], atol=1e-10)


def test_what_cannot_be_seen_has_no_magnification_and_without_room_a_step_is_nothing(modules):
    lens = modules("camera.js", "lens", CAMERAS[0], BOX, RADIUS)
    far = 6 * RADIUS
    places = [[math.nan, 0, 0], [0, math.inf, 0], [0, 0, -math.inf], [far, 0, 0], [2 * far, 0, 0], [-2 * far, 0, 0]]
    seen = np.reshape(modules("camera.js", "seen", lens, places), (-1, 4))
    assert (seen[:, 3] > 0).tolist() == [False] * 5 + [True]
    lens = modules("camera.js", "lens", CAMERAS[0], {"x": 0, "y": 0, "width": 0, "height": 9}, RADIUS)
    assert [abs(value) for value in modules("camera.js", "unseen", lens, 3, 4, [0, 0, 0])] == [0, 0, 0]


def test_what_is_in_front_follows_the_pointer(modules):
    camera = {"yaw": 0.4, "pitch": 0.2, "zoom": 1}
    lens = modules("camera.js", "lens", camera, BOX, RADIUS)
    front = [RADIUS * value for value in lens["toward"]]
    turned = {**camera, **modules("camera.js", "orbit", camera, 10, 6)}
    moved = modules("camera.js", "seen", modules("camera.js", "lens", turned, BOX, RADIUS), [front])
    still = modules("camera.js", "seen", lens, [front])
    assert moved[0] > still[0] + 5
    assert moved[1] > still[1] + 5


@pytest.mark.parametrize(("dy", "pitch"), [(1e6, math.pi / 2), (-1e6, -math.pi / 2)])
def test_the_camera_does_not_turn_over(modules, dy, pitch):
    assert modules("camera.js", "orbit", CAMERAS[1], 0, dy)["pitch"] == pitch
