"""What the scenes in space share."""

import math

import numpy as np
import pytest

pytestmark = pytest.mark.browser

CLOSE = 1e-12


def picked(picture):
    (points,) = [item for item in picture["panels"][0]["items"] if item.get("pick")]
    return points


def segments(picture):
    return [i for i in picture["panels"][0]["items"] if i["kind"] == "segments" and isinstance(i["colours"], list)]


def test_blending_is_exact_at_both_ends_and_what_is_not_a_number_stands_at_the_centre(modules):
    cases = [[1e-3, 1e9, 0], [1e-3, 1e9, 1], [-2.0, 4.0, 0.25]]
    assert modules.each("marks.js", "blend", cases) == [1e-3, 1e9, -0.5]
    axes = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert modules("marks.js", "see", axes, [1, math.nan, 3], [7, 8, 9]) == [8, 3, 1]
    assert modules("marks.js", "see", axes, [math.inf, 2, -math.inf]) == [2, 0, 0]


def test_the_root_of_a_matrix_squares_to_it(modules):
    generator = np.random.default_rng(0)
    for rank in (3, 2, 1, 0):
        half = generator.normal(size=(3, rank))
        square = half @ half.T
        root = np.array(modules("marks.js", "root", square.tolist()))
        assert root @ root == pytest.approx(square, abs=CLOSE)
        # A root of what rounding left of an eigenvalue 0 is that much larger.
        assert np.linalg.eigvalsh(root).min() > -1e-7


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_farthest_place_of_an_ellipsoid(modules, count):
    generator = np.random.default_rng(count)
    arms, direction = generator.normal(size=(count, 3)), generator.normal(size=3)
    place = np.array(modules("marks.js", "farthest", arms.tolist(), direction.tolist()))
    coordinates = generator.normal(size=(5000, count))
    coordinates /= np.linalg.norm(coordinates, axis=1, keepdims=True)
    reached = (coordinates @ arms @ direction).max()
    assert reached <= place @ direction + CLOSE
    assert place @ direction == pytest.approx(np.linalg.norm(arms @ direction))


def test_groups_have_a_colour_and_a_marker_each(pictures):
    cloud = {"label": "many", "n": 3, "points": [[i, 0, 1] for i in range(10)], "groups": list(range(10))}
    (picture,) = pictures({"cloud": "many", "selected": 4}, data={"clouds": {"many": cloud}})
    points = picked(picture)
    assert points["colours"] == [f"group-{i % 8}" for i in range(10)]
    assert points["markers"] == [i % 4 for i in range(10)]
    assert points["selected"] == 4
    assert points["at"] == cloud["points"]


def test_trails_run_from_the_stage_before_and_fade_during_the_next(pictures):
    fresh, half, done, next_one, gone = pictures(*({"stage": stage} for stage in (0, 0.5, 1, 1.5, 2)))
    assert not segments(fresh)
    (trail,) = segments(half)
    assert [pair[0] for pair in trail["pairs"]] == half["computed"]["stages"][0]
    assert [pair[1] for pair in trail["pairs"]] == half["computed"]["shown"]
    old, new = segments(next_one)
    assert old["alpha"] == pytest.approx(segments(done)[0]["alpha"] / 2)
    assert [pair[1] for pair in old["pairs"]] == next_one["computed"]["stages"][1]
    assert [pair[1] for pair in new["pairs"]] == next_one["computed"]["shown"]
    (last,) = segments(gone)
    assert [pair[0] for pair in last["pairs"]] == gone["computed"]["stages"][1]


def test_many_points_leave_no_trails_and_are_small(pictures):
    places = np.random.default_rng(0).normal(size=(2000, 3)).round(3)
    cloud = {"label": "many", "n": 3, "points": places.tolist(), "groups": [0] * 2000}
    (picture,) = pictures({"cloud": "many", "stage": 1.5}, data={"clouds": {"many": cloud}})
    assert len(picked(picture)["at"]) == 2000
    assert picked(picture)["radius"] < 3
    assert not segments(picture)


def test_the_world_holds_every_point_and_its_radius_travels_without_a_jump(pictures):
    stages = [i / 20 for i in range(81)]
    cloud = {"label": "far", "n": 3, "points": [[900, 2, 1], [3, 4, -800], [1, 0, 0]], "groups": [0, 1, 2]}
    data = {"clouds": {"far": cloud}}
    drawn = pictures(*({"cloud": "far", "stage": stage, "eps": 0} for stage in stages), data=data)
    radii = [picture["radius"] for picture in drawn]
    for picture, radius in zip(drawn, radii, strict=True):
        assert np.linalg.norm(picked(picture)["at"], axis=1).max() <= radius * (1 + CLOSE)
    steps = np.diff(radii)
    assert np.abs(np.diff(steps[:20])).max() < 1e-9
    assert np.abs(np.diff(steps[20:40])).max() < 1e-9
    assert radii[0] == pytest.approx(np.linalg.norm([900, 2, 1]))


def test_a_point_moved_by_hand_counts_half(pictures):
    before, after = pictures({}, {"edits": {0: [10, 0, 0]}})
    assert before["radius"] < after["radius"] == 5
