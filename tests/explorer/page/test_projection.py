"""From a frame to commands: order of depth, places, picking, labels, and frames with nothing to show."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest

pytestmark = pytest.mark.browser

CAMERA = {"yaw": 0.5, "pitch": 0.3, "zoom": 1}
SIZE = {"width": 800, "height": 600}
BALL = {"quadric": {"centre": [0, 0, 0], "matrix": [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}}
SURFACE = {"kind": "surface", **BALL, "colour": "accent", "alpha": 0.2}


def frame(*items, radius=2.0):
    return {"radius": radius, "panels": [{"kind": "space", "title": "one", "items": list(items)}]}


def points(at, **options):
    return {"kind": "points", "at": at, "colours": "ink", "markers": 0, **options}


def drawn(modules, *items, camera=CAMERA, size=SIZE):
    return modules("projection.js", "commands", frame(*items), camera, size)


def towards(camera=CAMERA):
    cos = math.cos(camera["pitch"])
    return np.array([cos * math.cos(camera["yaw"]), cos * math.sin(camera["yaw"]), math.sin(camera["pitch"])])


def test_commands_run_from_far_to_near(modules):
    at = np.random.default_rng(1).normal(size=(200, 3))
    curve = {"kind": "curve", "at": at[:30].tolist(), "colour": "line"}
    commands = drawn(modules, SURFACE, points(at.tolist()), curve)
    depths = [command["depth"] for command in commands]
    # Sorted in steps of a 2^26th of the radius.
    assert all(later > earlier - 1e-7 for earlier, later in pairwise(depths))
    assert {command["type"] for command in commands} == {"polygon", "marker", "line"}


def test_a_point_lies_behind_between_or_before_the_halves_of_a_ball(modules):
    inside, behind, before = ((share * towards()).tolist() for share in (0.2, -1.4, 1.4))
    for place, expected in ((behind, (False, False)), (inside, (True, False)), (before, (True, True))):
        commands = drawn(modules, SURFACE, points([place]))
        at = next(k for k, command in enumerate(commands) if command["type"] == "marker")
        caps = [k for k, command in enumerate(commands) if command["type"] == "polygon" and len(command["at"]) > 20]
        # The cap of the far half is painted first, that of the near half last.
        assert (caps[0] < at, caps[1] < at) == expected


@pytest.mark.parametrize("share", [1, -1])
def test_a_point_on_a_ball_is_painted_after_the_face_it_lies_on(modules, share):
    commands = drawn(modules, SURFACE, points([(share * towards()).tolist()]))
    at = next(k for k, command in enumerate(commands) if command["type"] == "marker")
    caps = [k for k, command in enumerate(commands) if command["type"] == "polygon" and len(command["at"]) > 20]
    assert caps[share > 0] < at
    assert (caps[1] < at) == (share > 0)


def test_layers_come_before_depth(modules):
    ends = [[-1, 0, 0], [1, 0, 0]]
    curves = [{"kind": "curve", "at": ends, "colour": name, "layer": name} for name in ("front", "normal", "behind")]
    colours = [command["colour"] for command in drawn(modules, *curves)]
    assert colours[0] == "behind"
    assert colours[-1] == "front"
    assert set(colours[1:-1]) == {"normal"}


def test_nearer_points_are_larger_and_more_opaque(modules):
    far, near = drawn(modules, points([(1.5 * towards()).tolist(), (-1.5 * towards()).tolist()]))
    assert near["size"] > 1.3 * far["size"]
    assert near["alpha"] > 1.3 * far["alpha"]


def test_each_point_has_its_colour_and_marker(modules):
    item = points([[0, 0, 0], [0, 1, 0]], colours=["group-1", "group-2"], markers=[3, 5], selected=1)
    commands = drawn(modules, item)
    assert {(command["colour"], command["marker"]) for command in commands} == {
        ("group-1", 3), ("group-2", 5), ("ink", 5)
    }  # fmt: skip


def test_places_that_are_not_numbers_are_left_out(modules):
    nan = [math.nan, 0, 0]
    items = [
        points([nan, [0, 0, 0], [math.inf, 0, 0]]),
        {"kind": "curve", "at": [nan, nan], "colour": "ink"},
        {"kind": "segments", "pairs": [[nan, [1, 0, 0]]], "colours": "ink"},
        {"kind": "arrow", "from": [0, 0, 0], "to": nan, "colour": "ink"},
        {"kind": "label", "at": nan, "text": "x"},
        {**SURFACE, "quadric": {"centre": nan, "matrix": BALL["quadric"]["matrix"]}, "edge": "ink"},
    ]
    commands = drawn(modules, *items)
    assert [command["type"] for command in commands] == ["marker"]
    assert "$" not in json.dumps(commands)


def test_a_curve_goes_on_after_a_hole(modules):
    at = [[math.nan] * 3 if k == 30 else [math.cos(k / 10), math.sin(k / 10), 0] for k in range(60)]
    commands = drawn(modules, {"kind": "curve", "at": at, "colour": "ink"})
    assert len(commands) > 15
    assert all(math.isfinite(value) for command in commands for value in command["at"])


def test_dashes_go_on_from_piece_to_piece(modules):
    item = {"kind": "curve", "at": [[0, -2, 0], [0, 2, 0]], "colour": "ink", "dash": [6, 4]}
    pieces = sorted(drawn(modules, item), key=lambda command: command["offset"])
    assert len(pieces) > 3
    for one, other in pairwise(pieces):
        length = sum(math.dist(one["at"][k : k + 2], one["at"][k + 2 : k + 4]) for k in range(0, len(one["at"]) - 2, 2))
        # Each end is stretched by 0.15 pixels.
        assert other["offset"] - one["offset"] == pytest.approx(length - 0.3, abs=1e-6)


def test_an_arrow_ends_at_its_tip(modules):
    tip = [0.4, 1.2, 0.5]
    commands = drawn(modules, {"kind": "arrow", "from": [0, 0, 0], "to": tip, "colour": "third"})
    where = modules("projection.js", "screen", tip, CAMERA, {"x": 0, "y": 0, **SIZE}, 2.0)
    head = [command for command in commands if command["type"] == "polygon"][-1]
    assert head["at"][-2:] == pytest.approx([where["x"], where["y"]])
    assert all(command["depth"] <= head["depth"] for command in commands)
    assert drawn(modules, {"kind": "arrow", "from": tip, "to": tip, "colour": "third"}) == []


def test_outline_and_lines_only_where_an_edge_is_asked_for(modules):
    assert {command["type"] for command in drawn(modules, SURFACE)} == {"polygon"}
    lines = [c for c in drawn(modules, {**SURFACE, "edge": "accent", "edgeAlpha": 0.3}) if c["type"] == "line"]
    assert max(line["alpha"] for line in lines) > 2.5 * min(line["alpha"] for line in lines)


def test_screen_and_what_moves_a_place_there_are_inverse(modules):
    box, place = {"x": 100, "y": 50, "width": 300, "height": 200}, [0.7, -0.2, 1.1]
    before = modules("projection.js", "screen", place, CAMERA, box, 2.0)
    step = modules("camera.js", "unseen", modules("camera.js", "lens", CAMERA, box, 2.0), 13, 21, place)
    after = modules("projection.js", "screen", [a + b for a, b in zip(place, step, strict=True)], CAMERA, box, 2.0)
    assert after["x"] - before["x"] == pytest.approx(13)
    assert after["y"] - before["y"] == pytest.approx(21)
    assert math.hypot(*step) * before["scale"] == pytest.approx(math.hypot(13, 21))


def test_picks_the_nearest_point_and_of_two_the_one_in_front(modules):
    along = towards()
    item = points([(-along).tolist(), along.tolist(), [0, 1, 0]], pick=True)
    pick = [frame(item), CAMERA, SIZE]
    centre = modules("projection.js", "screen", [0, 0, 0], CAMERA, {"x": 0, "y": 0, **SIZE}, 2.0)
    side = modules("projection.js", "screen", [0, 1, 0], CAMERA, {"x": 0, "y": 0, **SIZE}, 2.0)
    assert modules("projection.js", "pick", *pick, centre["x"], centre["y"]) == {"panel": 0, "index": 1}
    assert modules("projection.js", "pick", *pick, side["x"] + 9, side["y"] - 9) == {"panel": 0, "index": 2}
    assert modules("projection.js", "pick", *pick, side["x"] + 12, side["y"] - 12) is None
    assert modules("projection.js", "pick", frame({**item, "pick": False}), CAMERA, SIZE, side["x"], side["y"]) is None


def test_picks_in_the_panel_under_the_pointer(modules):
    several = frame(points([[0, 0, 0], [math.nan, 0, 0]], pick=True))
    several["panels"] *= 3
    for panel, box in enumerate(modules("projection.js", "layout", several["panels"], SIZE)):
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        assert modules("projection.js", "pick", several, CAMERA, SIZE, x + 3, y) == {"panel": panel, "index": 0}


@pytest.mark.parametrize(
    ("kind", "count", "size", "grid"),
    [
        ("space", 1, (800, 600), (1, 1)),
        ("space", 3, (1200, 800), (3, 1)),
        ("space", 3, (320, 900), (1, 3)),
        ("chart", 4, (1200, 800), (2, 2)),
        ("chart", 4, (320, 1200), (1, 4)),
    ],
)
def test_layout_keeps_panels_large_and_apart(modules, kind, count, size, grid):
    # A function cannot be handed to the browser as JSON; that it is there is what counts.
    panels = [{"kind": kind, "title": "", **({"draw": True} if kind == "chart" else {})}] * count
    boxes = modules("projection.js", "layout", panels, {"width": size[0], "height": size[1]})
    assert (len({box["x"] for box in boxes}), len({box["y"] for box in boxes})) == grid
    for box in boxes:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0] + 1e-9
        assert box["y"] + box["height"] <= size[1] + 1e-9


def test_several_panels_are_titled_and_clipped(modules):
    several = frame(points([[0, 0, 0]]))
    several["panels"] *= 2
    commands = modules("projection.js", "commands", several, CAMERA, SIZE)
    assert [command["type"] for command in commands] == ["clip", "text", "clip", "marker"] * 2


def test_a_chart_gets_its_box_and_its_commands_are_painted_in_their_order(modules):
    script = """async (size) => {
      const { commands, layout } = await load("projection.js");
      const draw = (box) => [{ type: "text", x: box.x, y: box.y, text: "b" }, { type: "line", at: [0, 0, 1, 1] }];
      const panels = [{ kind: "chart", title: "c", draw }];
      return [commands({ panels, radius: 1 }, { yaw: 0, pitch: 0, zoom: 1 }, size), layout(panels, size)];
    }"""
    commands, boxes = modules.run(script, SIZE)
    assert [command["type"] for command in commands] == ["text", "line"]
    assert (commands[0]["x"], commands[0]["y"]) == (boxes[0]["x"], boxes[0]["y"])


def test_labels_do_not_lie_on_each_other_and_stay_inside(modules):
    labels = [{"kind": "label", "at": [0, 0, 0.01 * k], "text": f"label {k}"} for k in range(4)]
    edge = {"kind": "label", "at": [0, 2.8, 0], "text": "at the edge"}
    commands = drawn(modules, *labels, edge, camera={"yaw": 0, "pitch": 0, "zoom": 1})
    assert [command["type"] for command in commands] == ["text"] * 5
    rows = sorted((command["anchor"], command["y"]) for command in commands[:4])
    assert all(a[0] != b[0] or b[1] - a[1] > 12 for a, b in pairwise(rows))
    assert commands[4]["anchor"] == "end"


def test_a_long_label_is_pushed_into_the_box_and_a_small_box_leaves_out_what_finds_no_room(modules):
    camera = {"yaw": 0, "pitch": 0, "zoom": 1}
    long = {
        "kind": "label",
        "at": [0, 2, 0],
        "text": "a label that is wider than the half of the box that it stands in",
    }
    (text,) = drawn(modules, long, camera=camera, size={"width": 600, "height": 600})
    width = 0.56 * 12.5 * len(long["text"])
    left = text["x"] - (width if text["anchor"] == "end" else 0)
    assert left >= 0
    assert left + width <= 600
    crowd = [{"kind": "label", "at": [0, 0, 0], "text": "fourteen signs"}] * 40
    assert len(drawn(modules, *crowd, camera=camera, size={"width": 200, "height": 120})) < 30
    assert len(drawn(modules, *crowd, camera=camera, size={"width": 900, "height": 600})) == 40
    assert drawn(modules, long, camera=camera, size={"width": 200, "height": 200}) == []


def test_on_a_large_screen_letters_markers_and_lines_are_larger(modules):
    items = [points([[0, 1, 0]]), {"kind": "label", "at": [0, 0, 1], "text": "word"}]
    camera = {"yaw": 0, "pitch": 0, "zoom": 1}
    usual, large = (
        drawn(modules, *items, camera=camera, size={"width": 1.5 * height, "height": height}) for height in (900, 1800)
    )
    for small, big in zip(usual, large, strict=True):
        assert [big["x"], big["y"], big["size"]] == pytest.approx([2 * small["x"], 2 * small["y"], 2 * small["size"]])


def test_labels_are_painted_last(modules):
    label = {"kind": "label", "at": (-towards()).tolist(), "text": "behind"}
    assert drawn(modules, label, SURFACE)[-1]["text"] == "behind"


@pytest.mark.parametrize("size", [(0, 600), (800, 0), (0, 0), (0.4, 0.4), (math.nan, 5)])
def test_without_room_nothing_is_drawn(modules, size):
    size = {"width": size[0], "height": size[1]}
    assert drawn(modules, SURFACE, points([[0, 0, 0]]), size=size) == []
    assert modules("projection.js", "pick", frame(points([[0, 0, 0]])), CAMERA, size, 0, 0) is None


def test_frames_without_anything(modules):
    assert modules("projection.js", "commands", {"panels": [], "radius": 1}, CAMERA, SIZE) == []
    assert modules("projection.js", "layout", [], SIZE) == []
    empty = [points([]), {"kind": "curve", "at": [], "colour": "ink", "closed": True}]
    assert drawn(modules, *empty, {"kind": "segments", "pairs": [], "colours": []}, {"kind": "unheard of"}) == []


def test_equal_frames_give_equal_commands(modules):
    items = [SURFACE, points(np.random.default_rng(2).normal(size=(50, 3)).round(3).tolist())]
    assert drawn(modules, *items) == drawn(modules, *items)
