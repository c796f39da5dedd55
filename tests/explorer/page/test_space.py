"""Three dimensions: what is drawn contains the points that were computed."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.browser

# Distances from the drawn sets, whose size is about 1; the root of a 3 x 3 matrix by Jacobi is among the operations.
CLOSE = 1e-12
GAIN = [1.5, -0.6, 1.1, 1.0]
BIAS = [0.5, -0.3, 0.4, 0.0]
ROW_MODES = ["layer", "plane", "rms", "length"]
AFTER_SCALING = [2, 2.4, 3, 3.7, 4]
ONES = np.ones(3) / math.sqrt(3)


def items(picture, kind, panel=0, **fields):
    return [
        item
        for item in picture["panels"][panel]["items"]
        if item["kind"] == kind and all(item.get(name) == value for name, value in fields.items())
    ]


def texts(picture, panel=0):
    return {item["text"]: np.array(item["at"]) for item in items(picture, "label", panel)}


def unit_places(item, points):
    """The points in the coordinates in which the drawn ellipse or ellipsoid is the unit circle or sphere."""
    if "quadric" in item:
        matrix, centre = np.array(item["quadric"]["matrix"]), np.array(item["quadric"]["centre"])
        return np.linalg.solve(matrix, (points - centre).T).T
    places = np.array(item["at"])
    centre = places.mean(0)
    axes = np.stack([places[0] - centre, places[len(places) // 4] - centre], 1)
    found, *_ = np.linalg.lstsq(axes, (points - centre).T, rcond=None)
    assert np.abs(axes @ found - (points - centre).T).max() < CLOSE
    return found.T


def image(picture, panel=0, colour="accent"):
    """The drawn image of the sphere; the curve from the centre to it, which shows its radius, is not it."""
    found = items(picture, "surface", panel, colour=colour)
    return (found or [curve for curve in items(picture, "curve", panel, colour=colour) if curve.get("closed")])[0]


def along(one, other):
    return np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)


@pytest.mark.parametrize("mode", ROW_MODES)
def test_the_points_lie_on_the_drawn_image_at_every_moment_after_scaling(pictures, mode):
    states = [{"mode": mode, "stage": stage, "eps": 0, "gain": GAIN, "bias": BIAS} for stage in AFTER_SCALING]
    for picture in pictures(*states):
        shown = np.array(picture["computed"]["shown"])
        lengths = np.linalg.norm(unit_places(image(picture), shown), axis=1)
        assert np.abs(lengths - 1).max() < CLOSE
        assert ("quadric" in image(picture)) == (mode in ("rms", "length"))


@pytest.mark.parametrize("mode", ROW_MODES)
def test_epsilon_holds_the_points_inside_and_the_selected_one_on_its_own_shell(pictures, mode):
    for picture in pictures(*({"mode": mode, "stage": stage, "eps": 0.3, "selected": 7} for stage in (2, 2.6, 4))):
        shown = np.array(picture["computed"]["shown"])
        assert np.linalg.norm(unit_places(image(picture), shown), axis=1).max() < 1
        shell = np.linalg.norm(unit_places(image(picture, colour="error"), shown[7:8]), axis=1)
        assert shell == pytest.approx(1, abs=CLOSE)
        assert any(text.startswith("ε: 0.") for text in texts(picture))


def test_without_a_selected_point_and_without_epsilon_there_is_no_shell(pictures):
    for picture in pictures({"stage": 2, "eps": 0.3}, {"stage": 2, "eps": 0, "selected": 7}):
        assert not items(picture, "curve", colour="error")


@pytest.mark.parametrize("mode", ["layer", "plane"])
def test_the_plane_contains_the_points_from_centring_on(pictures, mode):
    for picture in pictures(
        *({"mode": mode, "stage": stage, "gain": GAIN, "bias": BIAS} for stage in (1, 1.5, *AFTER_SCALING))
    ):
        (plane,) = items(picture, "surface", colour="third")
        corners = np.array(plane["outline"])
        normal = np.cross(corners[1] - corners[0], corners[2] - corners[0])
        shown = np.array(picture["computed"]["shown"])
        assert np.abs((shown - corners[0]) @ normal).max() / np.linalg.norm(normal) < CLOSE


def test_points_drop_onto_the_plane_along_all_ones(pictures):
    (picture,) = pictures({"stage": 1})
    (trails,) = items(picture, "segments", width=1, alpha=0.4)
    steps = np.array([np.subtract(end, start) for start, end in trails["pairs"]])
    assert np.abs(np.cross(steps, ONES)).max() < CLOSE
    (axis,) = items(picture, "curve", colour="contrast")
    assert along(np.subtract(axis["at"][1], axis["at"][0]), ONES) == pytest.approx(1, abs=CLOSE)
    assert along(texts(picture)["all-ones"], ONES) == pytest.approx(1, abs=CLOSE)


@pytest.mark.parametrize("mode", ["layer", "plane"])
def test_the_normal_after_gain_is_the_old_one_divided_by_the_gain(pictures, mode):
    normal = [0.2, 0.1, 1, 0]
    (picture,) = pictures({"mode": mode, "stage": 4, "gain": GAIN, "bias": BIAS, "normal": normal})
    (arrow,) = items(picture, "arrow", colour="third")
    expected = (ONES if mode == "layer" else np.array(normal[:3])) / GAIN[:3]
    assert abs(along(np.subtract(arrow["to"], arrow["from"]), expected)) == pytest.approx(1, abs=CLOSE)
    assert arrow["from"] == pytest.approx(BIAS[:3])
    assert ("normal 1/g" if mode == "layer" else "normal u/g") in texts(picture)


def test_a_gain_of_zero_flattens_the_image_onto_its_own_plane(modules, pictures):
    assert modules("space.js", "imageNormal", list(ONES), [2, 0, 3]) == pytest.approx([0, 1, 0])
    (picture,) = pictures({"stage": 3, "gain": [2, 0, 3, 1]})
    assert np.abs(np.array(image(picture)["at"])[:, 1]).max() == 0
    (picture,) = pictures({"stage": 3, "gain": [0, 0, 0, 0], "bias": [0, 0, 0, 0]})
    assert np.abs(np.array(image(picture)["at"])).max() == 0


def test_bias_moves_the_image_by_an_arrow(pictures):
    half, whole = pictures(*({"stage": stage, "bias": BIAS} for stage in (3.5, 4)))
    for picture, share in ((half, 0.5), (whole, 1)):
        (arrow,) = items(picture, "arrow", colour="ink")
        assert np.array(arrow["to"]) == pytest.approx(share * np.array(BIAS[:3]))
        assert np.array(image(picture)["at"]).mean(0) == pytest.approx(share * np.array(BIAS[:3]), abs=CLOSE)
    (none,) = pictures({"stage": 4, "bias": [0, 0, 0, 0]})
    assert not items(none, "arrow", colour="ink")


def test_the_sphere_appears_while_the_points_are_scaled(pictures):
    raw, half, done = pictures({"stage": 1}, {"stage": 1.5}, {"stage": 2})
    assert [image(picture)["alpha"] for picture in (raw, half, done)] == [0, 0.5, 1]
    assert "radius √3" in texts(done)
    assert "radius √3" not in texts(raw)
    assert "mean = 0" in texts(raw)


def test_the_sets_travel_straight_between_two_stages(pictures):
    stages = (2, 2.25, 3, 3.25, 4)
    curves = [
        np.array(image(picture)["at"])
        for picture in pictures(*({"stage": s, "gain": GAIN, "bias": BIAS} for s in stages))
    ]
    for start, between, end in (curves[:3], curves[2:]):
        assert np.abs(0.75 * start + 0.25 * end - between).max() < CLOSE


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("stage", [0, 0.4, 1, 1.5, 2, 2.5, 3, 3.5, 4])
def test_the_box_of_batchnorm_is_one_deviation_to_either_side_of_the_centroid(pictures, stage, place):
    gain = [*GAIN[:1], 0.6, *GAIN[2:]]
    (picture,) = pictures({"mode": "batch", "stage": stage, "eps": 0.1, "place": place, "gain": gain, "bias": BIAS})
    shown = np.array(picture["computed"]["shown"])
    corners = np.array(items(picture, "segments", colours="accent")[0]["pairs"]).reshape(-1, 3)
    assert len(corners) == 24
    assert corners.min(0) == pytest.approx(shown.mean(0) - shown.std(0), abs=CLOSE)
    assert corners.max(0) == pytest.approx(shown.mean(0) + shown.std(0), abs=CLOSE)
    (centroid,) = items(picture, "points", colours="ink")
    assert centroid["at"][0] == pytest.approx(shown.mean(0), abs=CLOSE)
    assert not items(picture, "surface")


@pytest.mark.parametrize("stage", [1.5, 2, 3.5, 4])
def test_zero_over_zero_is_a_cross_at_the_centre(pictures, stage):
    (picture,) = pictures({"cloud": "small", "eps": 0, "stage": stage, "bias": BIAS})
    (points,) = items(picture, "points", pick=True)
    lost = picture["computed"]["undefinedRows"]
    assert lost == [40, 41]
    assert [i for i, marker in enumerate(points["markers"]) if marker == 4] == lost
    assert {points["colours"][i] for i in lost} == {"error"}
    centre = max(0, stage - 3) * np.array(BIAS[:3])
    assert np.array([points["at"][i] for i in lost]) == pytest.approx(np.stack([centre, centre]))
    assert texts(picture)["0/0"] == pytest.approx(centre)


def test_a_constant_column_of_batchnorm_is_lost_and_the_others_stay(pictures):
    cloud = {"label": "flat", "n": 3, "points": [[1, 5, 0], [2, 5, 3], [4, 5, -1]], "groups": [0, 0, 0]}
    (picture,) = pictures({"cloud": "flat", "mode": "batch", "eps": 0, "stage": 2}, data={"clouds": {"flat": cloud}})
    (points,) = items(picture, "points", pick=True)
    assert points["markers"] == [4, 4, 4]
    columns = np.array(cloud["points"], dtype=float)[:, [0, 2]]
    at = np.array(points["at"])
    assert at[:, [0, 2]] == pytest.approx((columns - columns.mean(0)) / columns.std(0))
    assert at[:, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize("eps", [0, 0.2])
def test_the_gradient_is_torchs_and_its_parts_add_up(pictures, mode, eps):
    normal = [0.2, 0.1, 1.0, 0.0]
    upstream = [0.9, -0.6, 1.7, 0.0]
    state = {
        "scene": "gradient",
        "mode": mode,
        "eps": eps,
        "selected": 5,
        "gain": GAIN,
        "bias": BIAS,
        "upstream": upstream,
        "normal": normal,
    }
    (picture,) = pictures(state)
    raw = torch.tensor(picture["computed"]["raw"][5], dtype=torch.float64, requires_grad=True)
    gain, bias = torch.tensor(GAIN[:3], dtype=torch.float64), torch.tensor(BIAS[:3], dtype=torch.float64)
    direction = torch.tensor(ONES if mode == "layer" else normal[:3], dtype=torch.float64)
    direction = direction / direction.norm()
    x = raw - direction * (raw @ direction) if mode in ("layer", "plane") else raw
    row = x / (x.square().sum().div(1 if mode == "length" else 3) + eps).sqrt()
    output = gain * row + bias
    output.backward(torch.tensor(upstream[:3], dtype=torch.float64))
    arrows = {
        label["text"]: (np.array(arrow["from"]), np.array(arrow["to"]))
        for arrow, label in itertools.product(items(picture, "arrow"), items(picture, "label"))
        if arrow["to"] == label["at"]
    }
    start, end = arrows["gradient at x"]
    assert start == pytest.approx(raw.detach().numpy(), abs=CLOSE)
    assert end - start == pytest.approx(raw.grad.numpy(), abs=CLOSE)
    start, end = arrows["gradient that arrives"]
    assert start == pytest.approx(output.detach().numpy(), abs=CLOSE)
    assert end - start == pytest.approx(upstream[:3], abs=CLOSE)
    start, end = arrows["what is left"]
    assert start == pytest.approx(row.detach().numpy(), abs=CLOSE)
    assert (end - start) @ row.detach().numpy() == pytest.approx(0, abs=CLOSE)
    if mode in ("layer", "plane"):
        assert (end - start) @ direction.numpy() == pytest.approx(0, abs=CLOSE)
    pieces = [np.array(curve["at"]) for curve in items(picture, "curve", dash=[5, 4], colour="contrast")]
    assert pieces[0][0] == pytest.approx(end, abs=CLOSE)
    assert pieces[-1][1] == pytest.approx(arrows["times gain"][1], abs=CLOSE)
    assert arrows["times gain"][1] - start == pytest.approx((gain.numpy() * upstream[:3]), abs=CLOSE)
    handle = next(handle for handle in picture["handles"] if handle["id"] == "upstream")
    assert handle["at"] == pytest.approx(arrows["gradient that arrives"][1])


def test_a_gradient_that_is_not_defined_is_not_drawn(pictures):
    (picture,) = pictures({"scene": "gradient", "cloud": "small", "eps": 0, "selected": 40})
    assert not items(picture, "arrow")
    assert "0/0: no gradient" in texts(picture)


def test_dragging_the_selected_point_moves_its_features(pictures):
    (picture,) = pictures({"stage": 2, "selected": 3, "edits": {1: [1, 2, 3]}, "drag": [["point", [0.25, -0.5, 1]]]})
    (handle,) = picture["handles"]
    assert handle["id"] == "point"
    assert handle["at"] == pytest.approx(picture["computed"]["shown"][3])
    (patch,) = picture["drag"]
    assert patch["edits"]["1"] == [1, 2, 3]
    assert patch["edits"]["3"] == pytest.approx(np.add(picture["computed"]["raw"][3], [0.25, -0.5, 1]), abs=1e-3)


def test_dragging_the_normal_turns_it_and_near_all_ones_it_snaps(pictures):
    state = {"mode": "plane", "normal": [0.2, 0.1, 1, 0.7]}
    (picture,) = pictures(state)
    (handle,) = picture["handles"]
    tip = np.array(handle["at"])
    assert along(tip, state["normal"][:3]) == pytest.approx(1)
    targets = [np.array([1.0, -0.5, 0.3]), np.add(2 * ONES, [0.1, 0, 0]), -2 * ONES, np.add(2 * ONES, [0.3, 0, 0])]
    (picture,) = pictures(state | {"drag": [["normal", list(target - tip)] for target in targets]})
    turned = [np.array(patch["normal"]) for patch in picture["drag"]]
    assert turned[0][:3] == pytest.approx(targets[0] / np.linalg.norm(targets[0]))
    assert turned[1][:3] == pytest.approx(ONES, abs=1e-15)
    assert turned[2][:3] == pytest.approx(-ONES, abs=1e-15)
    assert along(turned[3][:3], ONES) < math.cos(math.radians(4))
    assert all(normal[3] == 0.7 for normal in turned)


def test_dragging_the_upstream_gradient(pictures):
    (picture,) = pictures(
        {"scene": "gradient", "selected": 0, "upstream": [1, 2, 3, 9], "drag": [["upstream", [0.5, 0, -1]]]}
    )
    assert picture["drag"] == [{"upstream": [1.5, 2, 2, 9]}]


def test_torch_puts_the_drawn_points_where_the_page_does(pictures):
    (picture,) = pictures({"stage": 4, "gain": GAIN, "bias": BIAS})
    raw, gain, bias = (torch.tensor(v, dtype=torch.float64) for v in (picture["computed"]["raw"], GAIN[:3], BIAS[:3]))
    (points,) = items(picture, "points", pick=True)
    assert np.array(points["at"]) == pytest.approx(F.layer_norm(raw, (3,), gain, bias).numpy(), abs=CLOSE)
