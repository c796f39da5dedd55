"""Four dimensions from inside the hyperplane: its points, sphere, ellipsoid and needles."""

import math

import numpy as np
import pytest

pytestmark = pytest.mark.browser

# Distances from the drawn sets, whose size is about 2; the root of a 3 x 3 matrix by Jacobi is among the operations.
CLOSE = 1e-12
GAIN = [1.5, -0.6, 1.1, 0.8]
BIAS = [0.5, -0.3, 0.4, 0.2]
FOUR = {"scene": "four", "cloud": "four", "eps": 0}
AFTER_SCALING = [2, 2.4, 3, 3.7, 4]
HELMERT = np.array([[1, -1, 0, 0], [1, 1, -2, 0], [1, 1, 1, -3]]) / np.sqrt([[2], [6], [12]])
ONES = np.full(4, 0.5)


def items(picture, kind, **fields):
    return [
        item
        for item in picture["panels"][0]["items"]
        if item["kind"] == kind and all(item.get(name) == value for name, value in fields.items())
    ]


def quadric(picture, colour="accent"):
    (surface,) = items(picture, "surface", colour=colour)
    return np.array(surface["quadric"]["centre"]), np.array(surface["quadric"]["matrix"])


def at(picture):
    return np.array(items(picture, "points", pick=True)[0]["at"])


def gain_at(stage):
    return 1 + min(1, max(0, stage - 2)) * (np.array(GAIN) - 1)


def test_the_world_is_the_helmert_coordinates_of_the_hyperplane(pictures):
    for picture in pictures(*(FOUR | {"stage": stage, "gain": GAIN, "bias": BIAS} for stage in (0, 0.5, 1, 2.2, 4))):
        shown = np.array(picture["computed"]["shown"])
        assert at(picture) == pytest.approx(shown @ HELMERT.T, abs=CLOSE)
    assert np.abs(HELMERT @ HELMERT.T - np.eye(3)).max() < CLOSE


@pytest.mark.parametrize("mode", ["layer", "plane"])
def test_the_points_lie_on_a_true_sphere_and_then_on_its_ellipsoid(pictures, mode):
    states = [FOUR | {"mode": mode, "stage": stage, "gain": GAIN, "bias": BIAS} for stage in AFTER_SCALING]
    drawn = pictures(*states)
    for picture in drawn:
        centre, matrix = quadric(picture)
        lengths = np.linalg.norm(np.linalg.solve(matrix, (at(picture) - centre).T), axis=0)
        assert np.abs(lengths - 1).max() < CLOSE
    assert quadric(drawn[0])[1] == pytest.approx(2 * np.eye(3), abs=CLOSE)


@pytest.mark.parametrize(("mode", "size"), [("rms", 2), ("length", 1)])
def test_the_shadow_of_the_whole_sphere_reaches_as_far_as_it_does(pictures, mode, size):
    directions = np.random.default_rng(0).normal(size=(50, 3))
    for picture, stage in zip(
        pictures(*(FOUR | {"mode": mode, "stage": stage, "gain": GAIN, "bias": BIAS} for stage in AFTER_SCALING)),
        AFTER_SCALING,
        strict=True,
    ):
        centre, matrix = quadric(picture)
        lengths = np.linalg.norm(np.linalg.solve(matrix, (at(picture) - centre).T), axis=0)
        assert lengths.max() < 1 + CLOSE
        reach = size * np.linalg.norm(gain_at(stage) * (directions @ HELMERT), axis=1)
        assert np.linalg.norm(directions @ matrix, axis=1) == pytest.approx(reach, rel=CLOSE)


def test_the_shell_of_the_selected_point_passes_through_it(pictures):
    for picture in pictures(
        *(FOUR | {"stage": stage, "eps": 0.3, "selected": 5, "bias": BIAS} for stage in (2, 2.5, 4))
    ):
        centre, matrix = quadric(picture, "error")
        assert np.linalg.norm(np.linalg.solve(matrix, at(picture)[5] - centre)) == pytest.approx(1, abs=CLOSE)


def test_what_leaves_the_hyperplane_stands_as_a_needle_and_collapses_while_centring(pictures):
    stages = (0, 0.5, 1, 2, 3, 4)
    for picture, stage in zip(
        pictures(*(FOUR | {"stage": stage, "gain": GAIN, "bias": BIAS} for stage in stages)), stages, strict=True
    ):
        shown = np.array(picture["computed"]["shown"])
        pairs = np.array(items(picture, "segments", colours="contrast")[0]["pairs"])
        if stage in (1, 2):
            assert len(pairs) == 0
            continue
        assert pairs[:, 0] == pytest.approx(at(picture), abs=CLOSE)
        assert (pairs[:, 1] - pairs[:, 0])[:, :2] == pytest.approx(0)
        assert (pairs[:, 1] - pairs[:, 0])[:, 2] == pytest.approx(shown @ ONES, abs=CLOSE)


def test_the_box_of_batchnorm_is_a_tesseract(pictures):
    (picture,) = pictures(FOUR | {"mode": "batch", "stage": 0})
    shown = np.array(picture["computed"]["shown"])
    pairs = np.array(items(picture, "segments", colours="accent")[0]["pairs"])
    assert pairs.shape == (32, 2, 3)
    signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    corners = (shown.mean(0) + signs * shown.std(0)) @ HELMERT.T
    distances = np.linalg.norm(pairs.reshape(-1, 1, 3) - corners, axis=2)
    assert distances.min(1).max() < CLOSE
    assert set(distances.argmin(1)) == set(range(16))


def test_dragging_a_point_moves_it_within_its_hyperplane(pictures):
    delta = np.array([0.3, -0.2, 0.5])
    (picture,) = pictures(FOUR | {"stage": 0, "selected": 8, "drag": [["point", list(delta)]]})
    before = np.array(picture["computed"]["raw"][8])
    after = np.array(picture["drag"][0]["edits"]["8"])
    moved = HELMERT @ (after - before)
    assert moved == pytest.approx(delta, abs=3e-3)
    assert after.sum() == pytest.approx(before.sum(), abs=3e-3)


def test_the_normal_is_turned_by_its_tilt(modules, pictures):
    state = FOUR | {"mode": "plane", "normal": [0.2, 0.1, 1, 0.3]}
    u = np.array(state["normal"]) / np.linalg.norm(state["normal"])
    (picture,) = pictures(state | {"drag": [["normal", [0.1, 0.2, -0.3]], ["normal", list(-2 * HELMERT @ u)]]})
    (handle,) = picture["handles"]
    assert handle["at"] == pytest.approx(2 * HELMERT @ u)
    turned, upright = (np.array(patch["normal"]) for patch in picture["drag"])
    assert np.linalg.norm(turned) == pytest.approx(1)
    tilt = HELMERT @ turned
    assert tilt == pytest.approx(np.add(HELMERT @ u, [0.05, 0.1, -0.15]))
    assert upright == pytest.approx(ONES, abs=1e-15)
    far = np.array(modules("hyperplane.js", "tilted", list(-u), [5, 0, 0]))
    assert np.linalg.norm(far) == pytest.approx(1)
    assert abs(far.sum()) < 1e-12


def test_a_row_of_nothing_but_zero_stands_at_the_centre(pictures):
    points = [[1, 2, 3, 4], [2, 2, 2, 2], [0, 0, 0, 0]]
    cloud = {"label": "constant", "n": 4, "points": points, "groups": [0, 1, 2]}
    (picture,) = pictures(FOUR | {"cloud": "constant", "stage": 4, "bias": BIAS}, data={"clouds": {"constant": cloud}})
    assert at(picture)[1:] == pytest.approx(np.stack([HELMERT @ BIAS] * 2))
    assert picture["radius"] > 2
    assert math.isfinite(picture["radius"])
