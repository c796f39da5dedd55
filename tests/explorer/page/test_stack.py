"""Depth: five stacks on one logarithmic axis, and what leaves it."""

import itertools
import math

import pytest

pytestmark = pytest.mark.browser

DEPTH = {"scene": "depth", "depth": 12}
AXIS = {"low": -2, "high": 2}
NAMES = ["none", "post", "pre", "rms", "batch"]
COLOURS = {"rms": "accent", "mean": "contrast", "gradient": "third"}


def commands(picture, panel, kind, **fields):
    return [
        command
        for command in picture["panels"][panel]["commands"]
        if command["type"] == kind and all(command.get(name) == value for name, value in fields.items())
    ]


def words(picture, panel):
    return [command["text"] for command in commands(picture, panel, "text")]


def test_the_axis_is_whole_decades_around_rms_and_gradient(modules):
    def stacks(*values):
        return {"none": {"rms": list(values), "gradient": [1.0]}, "post": {"rms": [1.0], "gradient": [0.5]}}

    cases = [stacks(1.0), stacks(3.0, 4000.0), stacks(2e-5), stacks(1e300, math.inf, math.nan), stacks(0.0, 1e-300)]
    assert modules.each("stack.js", "decades", [[case] for case in cases]) == [
        {"low": -1, "high": 1},
        {"low": -1, "high": 4},
        {"low": -5, "high": 1},
        {"low": -1, "high": 12},
        {"low": -9, "high": 1},
    ]


def test_heights_are_logarithms_of_the_absolute_value(modules):
    values = [0.01, 1, -10, 100, 0, math.inf, math.nan]
    heights = modules.each("stack.js", "height", [[value, AXIS] for value in values])
    assert heights[:4] == pytest.approx([0, 0.5, 0.75, 1])
    assert heights[4] < -1
    assert heights[5] > 2
    assert math.isnan(heights[6])


def test_a_path_runs_to_between_two_layers_and_ends_where_the_numbers_end(modules):
    values = [1, 10, 100, math.nan]
    assert modules("stack.js", "path", values, AXIS, 0, 1.5) == [[0, 0.5], [1, 0.75], [1.5, 0.875]]
    assert modules("stack.js", "path", values, AXIS, 0.5, 3) == [[0.5, 0.625], [1, 0.75], [2, 1]]
    assert modules("stack.js", "path", values, AXIS, 1, 1) == [[1, 0.75]]


def test_what_leaves_the_panel_is_told(modules):
    cases = [
        ([1, 2], -1, "2"),
        ([1, -2], -1, "2"),
        ([1, 2e6], -1, "↑ 2e+6"),
        ([1, 2e-6], -1, "↓ 2e-6"),
        ([1, 0], -1, "↓ 0"),
        ([1, 2, math.inf, math.nan], -1, "↑ ∞ from 2"),
        ([1, math.nan], -1, "not a number from 1"),
        ([1, 3, math.inf], 1, "3"),
        ([1, 3, math.inf], 2, "↑ ∞"),
    ]
    readings = modules.each("stack.js", "reading", [[values, AXIS, layer] for values, layer, _ in cases])
    assert readings == [text for *_, text in cases]


def test_the_lines_are_the_computed_numbers_on_one_axis(pictures):
    (picture,) = pictures(DEPTH | {"stage": 4})
    stacks = picture["computed"]["stack"]
    assert [panel["title"] for panel in picture["panels"]] == [
        "no norm",
        "Post-LN",
        "Pre-LN",
        "Pre-RMSNorm",
        "BatchNorm",
    ]
    ticks = [{c["text"]: c["y"] for c in commands(picture, k, "text", anchor="end")} for k in range(5)]
    assert ticks[0] == ticks[1] == ticks[2] == ticks[3]
    decade = ticks[0]["1"] - ticks[0]["10¹"] if "10¹" in ticks[0] else (ticks[0]["1"] - ticks[0]["10²"]) / 2
    for k, name in enumerate(NAMES):
        for series in ("rms", "gradient"):
            (line,) = commands(picture, k, "line", colour=COLOURS[series], width=2.6)
            heights = [(ticks[0]["1"] - y) / decade for y in line["at"][1::2]]
            assert heights == pytest.approx([math.log10(value) for value in stacks[name][series]], abs=1e-9)
            steps = {round(b - a, 6) for a, b in zip(line["at"][::2], line["at"][2::2], strict=False)}
            assert len(steps) == 1


def test_the_signal_runs_forward_and_then_the_gradient_back(pictures):
    def reach(picture, colour):
        (faint,) = commands(picture, 0, "line", colour=colour, alpha=0.4)
        (strong,) = commands(picture, 0, "line", colour=colour, width=2.6)
        whole = faint["at"][-2] - faint["at"][0]
        return [(x - faint["at"][0]) / whole for x in (strong["at"][0], strong["at"][-2])]

    drawn = pictures(*(DEPTH | {"stage": stage} for stage in (0, 1, 2, 3, 4)))
    assert [reach(picture, "accent")[1] for picture in drawn] == pytest.approx([0, 0.5, 1, 1, 1])
    assert [reach(picture, "third")[0] for picture in drawn] == pytest.approx([1, 1, 1, 0.5, 0])
    assert ["signal →" in words(picture, 0) for picture in drawn] == [False, True, False, False, False]
    assert ["← gradient" in words(picture, 0) for picture in drawn] == [False, False, True, True, False]


def test_every_line_is_named_with_its_value(pictures):
    (picture,) = pictures(DEPTH | {"stage": 0})
    for panel in range(5):
        names = list(commands(picture, panel, "text", bold=True))
        assert sorted(name["text"].split()[0] for name in names) == ["gradient", "rms", "|mean|"]
        right = sorted(name["y"] for name in names if not name["text"].startswith("gradient"))
        assert right[1] - right[0] >= 14
        assert {name["colour"] for name in names} == set(COLOURS.values())


def test_a_layer_is_read_out(pictures):
    (picture,) = pictures(DEPTH | {"stage": 4, "layer": 5})
    assert len(commands(picture, 0, "marker")) == 3
    rms = picture["computed"]["stack"]["none"]["rms"][5]
    (text,) = [word for word in words(picture, 0) if word.startswith("rms")]
    assert float(text.split()[1]) == pytest.approx(rms, rel=1e-3)
    ys = sorted(command["y"] for command in commands(picture, 0, "text", bold=True))
    assert all(b - a >= 14 for a, b in itertools.pairwise(ys))


def test_what_explodes_leaves_the_panel_at_its_top_and_nothing_is_drawn_outside(pictures):
    (picture,) = pictures({"scene": "depth", "depth": 48, "spread": 4, "stage": 4})
    (line,) = commands(picture, 0, "line", colour="accent", width=2.6)
    clips = commands(picture, 0, "clip")
    assert min(line["at"][1::2]) < clips[0]["y"]
    order = [command["type"] for command in picture["panels"][0]["commands"]]
    first, last = order.index("clip"), len(order) - 1 - order[::-1].index("clip")
    lines = picture["panels"][0]["commands"]
    assert all(first < k < last for k, command in enumerate(lines) if command.get("width") == 2.6)
    assert clips[-1]["width"] == 500
    assert any(word.startswith("rms ↑") for word in words(picture, 0))


@pytest.mark.parametrize("size", [(195, 155), (160, 122)])
def test_in_a_narrow_panel_every_word_is_inside(modules, size):
    script = """async ([width, height]) => {
      const [{ compute }, { frame }, { startFrom }] =
        await Promise.all(["computation.js", "frames.js", "state.js"].map(load));
      const state = startFrom({ scene: "depth", stage: 2 });
      const { panels } = frame(state, compute(state, { models: [], clouds: {} }));
      return panels.flatMap(({ draw }) => draw({ x: 0, y: 0, width, height })).filter(({ type }) => type === "text");
    }"""
    words = modules.run(script, size)
    assert len(words) > 20
    for word in words:
        assert 5 <= word["y"] <= size[1] - 5, word["text"]
        if word.get("anchor", "start") == "start":
            assert word["x"] + 0.5 * word["size"] * len(word["text"]) <= size[0], word["text"]
