"""The state: what it accepts, and what a change of scene keeps."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.browser

MODES = ["layer", "rms", "batch", "length", "plane"]
CLOUDS = {
    name: {"n": n, "points": [[0.0] * n] * 5}
    for name, n in {"scatter": 3, "clusters": 3, "small": 3, "four": 4}.items()
}


@pytest.fixture(scope="module")
def start(modules):
    return modules("state.js", "DEFAULTS")


@pytest.fixture(scope="module")
def after(modules):
    """The state after some patches, one by one, from another state or the defaults."""

    def after(*patches, before=None, clouds=None):
        return modules.run(
            """async ([before, patches, clouds]) => {
              const { createStore, DEFAULTS } = await load("state.js");
              const store = createStore({ ...DEFAULTS, ...before }, { clouds });
              patches.forEach(store.set);
              return store.get();
            }""",
            [before, patches, clouds],
        )

    return after


def test_a_patch_with_an_unknown_name_is_a_mistake_of_the_program(after):
    with pytest.raises(Exception, match='The state has no "stages"'):
        after({"stages": 1})


@pytest.mark.parametrize(
    ("patch", "changed"),
    [
        ({"stage": 9}, {"stage": 4}),
        ({"stage": math.nan}, {}),
        ({"stage": "2"}, {}),
        ({"stage": None}, {}),
        ({"eps": 1e-13}, {"eps": 1e-12}),
        ({"eps": math.inf}, {}),
        ({"eps": -0.0}, {"eps": 0}),
        ({"zoom": 0}, {"zoom": 0.2}),
        ({"yaw": 4}, {"yaw": 3.1416}),
        ({"pitch": 2}, {"pitch": 1.5708}),
        ({"gain": [2, 3, 4]}, {"gain": [2, 3, 4, 0.8]}),
        ({"gain": [math.nan, 1, 1, 1]}, {}),
        ({"gain": []}, {}),
        ({"normal": [0, 0, 0]}, {}),
        ({"edits": {"1": [1, 2, 3]}}, {"edits": {"1": [1, 2, 3]}}),
        ({"edits": {"1": [1, math.inf, 3]}}, {}),
        ({"edits": None}, {}),
        ({"edits": "1:2"}, {}),
        ({"residual": 0}, {}),
        ({"residual": "no"}, {}),
        ({"cloud": 7}, {}),
        ({"scene": "__proto__"}, {}),
        ({"layer": 40, "depth": 12}, {"layer": 12, "depth": 12}),
        ({"scene": "gradient"}, {"scene": "gradient", "selected": 0}),
    ],
)
def test_a_value_is_clamped_or_left_as_it_was(after, start, patch, changed):
    assert after(patch) == start | changed


def test_a_change_of_scene_keeps_what_makes_sense(after):
    there = after({"mode": "batch", "eps": 0.1}, {"scene": "model"})
    assert (there["mode"], there["eps"]) == ("layer", 0.1)
    assert after({"mode": "plane"}, {"scene": "gradient"})["mode"] == "plane"
    assert after({"mode": "batch"}, {"scene": "depth"}, {"scene": "three"})["mode"] == "batch"


def test_the_points_fit_the_scene(after):
    there = after({"edits": {"2": [1, 2, 3]}, "selected": 2}, {"scene": "four"}, clouds=CLOUDS)
    assert (there["cloud"], there["edits"], there["selected"]) == ("four", {}, -1)
    back = after({"scene": "four", "cloud": "four"}, {"scene": "gradient"}, clouds=CLOUDS)
    assert (back["cloud"], back["selected"]) == ("scatter", 0)
    assert after({"cloud": "small"}, {"scene": "gradient"}, clouds=CLOUDS)["cloud"] == "small"
    mine = CLOUDS | {"given": {"n": 4, "points": [[1, 2, 3, 4]]}}
    assert (
        after({"scene": "four", "cloud": "given"}, {"scene": "three"}, {"scene": "four"}, clouds=mine)["cloud"]
        == "given"
    )
    assert after({"cloud": "nowhere"}, clouds=CLOUDS)["cloud"] == "scatter"
    assert after({"cloud": "constructor"}, clouds=CLOUDS)["cloud"] == "scatter"


def test_three_norms_have_their_own_points_which_no_other_scene_keeps(after):
    there = after({"scene": "clusters"}, clouds=CLOUDS)
    assert there["cloud"] == "clusters"
    assert after({"scene": "clusters"}, {"scene": "gradient"}, clouds=CLOUDS)["cloud"] == "scatter"
    assert after({"cloud": "small", "scene": "clusters"}, clouds=CLOUDS)["cloud"] == "small"
    assert after({"cloud": "clusters"}, clouds=CLOUDS)["cloud"] == "clusters"
    assert after({"scene": "clusters"}, {"scene": "depth"}, {"scene": "clusters"}, clouds=CLOUDS)["cloud"] == "clusters"
    given = CLOUDS | {"given": CLOUDS["small"]}
    assert after({"cloud": "given"}, {"scene": "clusters"}, clouds=given)["cloud"] == "given"


def test_what_lies_outside_the_cloud_goes(after):
    there = after({"edits": {"4": [1, 2, 3], "5": [1, 2, 3], "0": [1, 2, 3, 4]}, "selected": 99}, clouds=CLOUDS)
    assert (there["edits"], there["selected"]) == ({"4": [1, 2, 3]}, 4)


def test_points_moved_by_hand_belong_to_their_cloud(after):
    moved = {"edits": {"2": [1, 2, 3]}, "selected": 2}
    assert after(moved, {"mode": "rms"}, {"scene": "gradient"})["edits"] == {"2": [1, 2, 3]}
    there = after(moved, {"cloud": "small"})
    assert (there["edits"], there["selected"]) == ({}, -1)
    there = after({"cloud": "small"} | moved)
    assert (there["edits"], there["selected"]) == ({"2": [1, 2, 3]}, 2)


@pytest.mark.parametrize(
    ("scene", "modes"),
    [
        ("three", MODES),
        ("four", MODES),
        ("model", ["layer", "rms", "length"]),
        ("gradient", ["layer", "rms", "length", "plane"]),
        ("attention", ["layer", "rms", "length"]),
        ("clusters", []),
        ("depth", []),
    ],
)
def test_the_modes_of_a_scene(modules, scene, modes):
    assert modules("state.js", "modesOf", scene) == modes


def test_the_state_is_frozen_and_keeps_what_did_not_change(modules):
    assert modules.run(
        """async () => {
          const { createStore, DEFAULTS } = await load("state.js");
          const store = createStore(DEFAULTS);
          const before = store.get();
          store.set({ edits: { 1: [1, 2, 3] }, gain: [...before.gain] });
          const after = store.get();
          return [after.gain === before.gain, after.edits === before.edits,
            [after, after.gain, after.edits, after.edits[1]].every(Object.isFrozen)];
        }"""
    ) == [True, False, True]


def test_listeners_hear_changes_only(modules):
    assert modules.run(
        """async () => {
          const { createStore, DEFAULTS } = await load("state.js");
          const heard = [];
          const store = createStore(DEFAULTS);
          store.subscribe((now) => heard.push(["first", now.stage]));
          store.subscribe((now, before) => heard.push(["second", before.stage, now.stage]));
          store.set({ stage: 1 });
          store.set({ stage: 1 });
          store.set({ stage: NaN });
          return heard;
        }"""
    ) == [["first", 1], ["second", 0, 1]]
