"""Activations of a model: the shadow that is drawn contains the points, and is no larger than it must be."""

import math

import numpy as np
import pytest

pytestmark = pytest.mark.browser

# Roots of a 3 x 3 matrix by Jacobi.
CLOSE = 1e-12
# The page holds the coordinates in float32, of size up to 4.
STORED = 1e-6
TURN = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]])


def drawn(picture):
    (surface,) = [item for item in picture["panels"][0]["items"] if item["kind"] == "surface"]
    (points,) = [item for item in picture["panels"][0]["items"] if item.get("pick")]
    return np.array(surface["quadric"]["centre"]), np.array(surface["quadric"]["matrix"]), np.array(points["at"])


def outside(centre, matrix, at):
    """How far the points reach beyond the ellipsoid, over 200 directions; it may be flat."""
    directions = np.random.default_rng(1).normal(size=(200, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return ((at - centre) @ directions.T - np.linalg.norm(directions @ matrix, axis=1)).max()


def random_site(n):
    generator = np.random.default_rng(n)
    basis, _ = np.linalg.qr(np.concatenate([np.ones((n, 1)), generator.normal(size=(n, 2))], 1))
    basis = basis.T * [[math.copysign(1, basis[0, 0])], [1], [1]]
    gain = generator.normal(1, 0.5, n)
    full = basis @ np.diag(gain**2) @ basis.T
    square = [full[i, j] for i in range(3) for j in range(i, 3)]
    return basis, gain, {"n": n, "gain": list(basis @ gain), "square": square}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [3, 4, 16])
def test_the_shadow_after_gain_is_the_image_of_the_whole_sphere(modules, n):
    basis, gain, site = random_site(n)
    centring = np.eye(n) - np.ones((n, n)) / n
    for mode, of_sphere in (("layer", n * centring), ("rms", n * np.eye(n)), ("length", np.eye(n))):
        for share, factors in ((0, np.ones(n)), (1, gain)):
            image = basis @ np.diag(factors)
            expected = TURN @ image @ of_sphere @ image.T @ TURN.T
            assert modules("activations.js", "square", site, mode, share) == pytest.approx(expected, abs=CLOSE * n)


@pytest.mark.parametrize("mode", ["layer", "rms", "length"])
@pytest.mark.parametrize("eps", [0, 1e-5, 0.3])
def test_the_points_are_inside_at_every_moment_after_scaling(pictures, model_data, mode, eps):
    _, data = model_data
    stages = [2, 2.25, 2.5, 3, 3.5, 4]
    for picture in pictures(
        *({"scene": "model", "mode": mode, "eps": eps, "stage": stage} for stage in stages), data=data
    ):
        assert outside(*drawn(picture)) < STORED
        assert np.linalg.norm(drawn(picture)[2], axis=1).max() <= picture["radius"] * (1 + STORED)


def test_before_gain_it_is_the_disc_or_ball_of_the_true_radius(pictures, model_data):
    _, data = model_data
    layer, rms = pictures(
        *({"scene": "model", "mode": mode, "stage": 2, "eps": 0} for mode in ("layer", "rms")), data=data
    )
    assert drawn(layer)[1] == pytest.approx(np.diag([4, 4, 0]), abs=CLOSE)
    assert drawn(rms)[1] == pytest.approx(4 * np.eye(3), abs=CLOSE)
    words = [item["text"] for item in rms["panels"][0]["items"] if item["kind"] == "label"]
    assert "ball of radius √16 = 4" in words
    assert "points inside: the rest lies in 13 more directions" in words


def test_what_lies_far_beyond_the_others_is_drawn_at_the_rim(modules):
    rows = np.random.default_rng(0).normal(size=(40, 3))
    rows[7] = [600, -800, 0]
    found = modules("activations.js", "atRim", rows.tolist())
    drawn, lengths = np.array(found["rows"]), np.linalg.norm(rows, axis=1)
    assert found["moved"] == [i == 7 for i in range(40)]
    assert drawn[7] / np.linalg.norm(drawn[7]) == pytest.approx([0.6, -0.8, 0])
    assert np.linalg.norm(drawn[7]) == pytest.approx(1.2 * np.delete(lengths, 7).max())
    assert (np.delete(drawn, 7, 0) == np.delete(rows, 7, 0)).all()
    # Nothing is moved where no row is alone, and where all are 0.
    for plain in (rows[8:], np.zeros((3, 3))):
        assert modules("activations.js", "atRim", plain.tolist())["rows"] == plain.tolist()


def test_a_row_far_beyond_the_others_leaves_the_world_its_size_at_and_between_all_stages(modules, model_data):
    _, data = model_data
    radii = modules.run(
        """async ({ stages, data }) => {
          const [{ compute }, { activations }, { startFrom }] =
            await Promise.all(["computation.js", "activations.js", "state.js"].map(load));
          return stages.map((stage) => {
            const state = startFrom({ scene: "model", stage });
            const found = compute(state, data);
            const far = found.stages.map(([row, ...rows]) => [row.map((value) => 1000 * value), ...rows]);
            return [found, { ...found, stages: far }].map((of) => activations(state, of).radius);
          });
        }""",
        {"stages": [0, 0.5, 1, 1.5, 2, 3.5, 4], "data": data},
    )
    assert all(far < 2 * radius for radius, far in radii), radii


def test_all_ones_is_up(pictures, model_data):
    x, data = model_data
    (picture,) = pictures({"scene": "model", "stage": 0}, data=data)
    (points,) = [item for item in picture["panels"][0]["items"] if item.get("pick")]
    assert np.array(points["at"])[:, 2] == pytest.approx(x.sum(1).numpy() / 4, abs=STORED)
    assert picture["panels"][0]["title"] == data["models"][0]["sites"][0]["path"]


def test_without_a_model_the_scene_says_so(pictures):
    (picture,) = pictures({"scene": "model", "stage": 2})
    assert picture["panels"] == [{"kind": "space", "title": "No activations", "items": []}]
    assert picture["radius"] == 1
