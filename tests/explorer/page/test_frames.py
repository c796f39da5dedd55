"""Every scene at every stage, for whatever points there are."""

import json
import math

import pytest
import torch

import normkit as nk

pytestmark = pytest.mark.browser

STAGES = [0, 0.5, 1.5, 2, 3.5, 4]
MODES = {"three": 5, "four": 5, "gradient": 5}
SCENES = ["three", "four", "clusters", "gradient", "attention", "depth"]
ALL_MODES = ["layer", "rms", "batch", "length", "plane"]


def numbers(found):
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for part in found for number in numbers(part)]
    return [found] if isinstance(found, int | float) else []


def assert_drawable(picture):
    for panel in picture["panels"]:
        # The numbers of a chart are pixels; a line that leaves its panel does so by a few heights of it.
        assert all(math.isfinite(number) for number in numbers(panel))
        for item in panel.get("items", []):
            if item["kind"] == "points":
                count = len(item["at"])
                assert all(len(at) == 3 for at in item["at"])
                assert isinstance(item["colours"], str) or len(item["colours"]) == count
                assert isinstance(item["markers"], int) or len(item["markers"]) == count
    assert math.isfinite(picture["radius"])
    assert picture["radius"] > 0
    for handle in picture["handles"]:
        assert handle["label"]
        assert len(handle["at"]) == 3
        assert all(map(math.isfinite, handle["at"]))


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_every_scene_can_be_drawn_at_every_stage(pictures, scene, eps):
    modes = ALL_MODES[: MODES.get(scene, 1)]
    cloud = scene if scene in ("four", "clusters") else "small"
    modes = [mode for mode in modes if scene != "gradient" or mode != "batch"]
    states = [
        {"scene": scene, "mode": mode, "stage": stage, "eps": eps, "cloud": cloud, "selected": 0, "depth": 6}
        for mode in modes
        for stage in STAGES
    ]
    for picture in pictures(*states):
        assert picture["panels"]
        assert_drawable(picture)


@pytest.mark.parametrize("scene", SCENES)
def test_an_empty_cloud_can_be_drawn(pictures, scene):
    n = 4 if scene == "four" else 3
    data = {"clouds": {"none": {"label": "none", "n": n, "points": [], "groups": []}}}
    modes = ALL_MODES if scene in ("three", "four") else ["layer"]
    for picture in pictures(
        *({"scene": scene, "mode": m, "cloud": "none", "stage": 2, "depth": 2} for m in modes), data=data
    ):
        assert_drawable(picture)


@pytest.mark.parametrize("scene", ["three", "four", "gradient", "clusters"])
def test_rows_that_are_not_numbers_can_be_drawn(pictures, scene):
    n = 4 if scene == "four" else 3
    points = [[1.0, 2.0, 4.0, 3.0][:n], [math.nan] * n, [math.inf, 1.0, 0.0, 0.0][:n], [1e300] * (n - 1) + [-1e300]]
    data = {"clouds": {"strange": {"label": "strange", "n": n, "points": points, "groups": [0, 1, 2, 3]}}}
    states = [{"scene": scene, "cloud": "strange", "stage": stage, "selected": k} for stage in STAGES for k in range(4)]
    for picture in pictures(*states, data=data):
        for panel in picture["panels"]:
            (cloud,) = [item for item in panel["items"] if item.get("pick")]
            assert len(cloud["at"]) == 4
            assert all(math.isfinite(number) for number in numbers(cloud["at"]))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_points_of_few_or_many_features_can_be_drawn(pictures, n):
    data = json.loads(json.dumps(dict(nk.explore(torch.randn(6, n)).data)))
    states = [dict(data["start"]) | {"stage": stage, "selected": 0} for stage in STAGES]
    for picture in pictures(*states, data=data):
        assert_drawable(picture)


def test_two_thousand_points_can_be_drawn(pictures):
    points = torch.randn(2000, 3).double().round(decimals=3).tolist()
    cloud = {"label": "many", "n": 3, "points": points, "groups": [0] * 2000}
    (picture,) = pictures({"cloud": "many", "stage": 1.5}, data={"clouds": {"many": cloud}})
    assert_drawable(picture)
