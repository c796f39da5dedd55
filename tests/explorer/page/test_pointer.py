"""Mouse, touch, wheel and keys on the drawing, as a reader uses them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from drawing import Drawing, Fingers, as_opened

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SIZE = {"width": 1100, "height": 800}


@pytest.fixture
def drawing(lasting_page) -> Drawing:
    return Drawing(lasting_page(viewport=SIZE))


def test_a_drag_turns_the_drawing(drawing):
    before = drawing.state()
    drawing.drag(drawing.corner(), (100, -40))
    after = drawing.state()
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"yaw", "pitch"}
    assert after["yaw"] == pytest.approx(before["yaw"] - 0.8, abs=2e-4)
    assert after["pitch"] == pytest.approx(before["pitch"] - 0.32, abs=2e-4)


def test_only_the_first_button_drags(drawing):
    before = drawing.state()
    x, y = drawing.corner()
    drawing.page.mouse.move(x, y)
    drawing.page.mouse.down(button="middle")
    drawing.page.mouse.move(x + 90, y - 90)
    drawing.page.mouse.up(button="middle")
    drawing.settle()
    assert drawing.state() == before


def test_a_drag_is_one_patch_a_frame(drawing):
    counts = drawing.page.evaluate(
        """async () => {
          const canvas = document.getElementById("canvas");
          const { left, top } = canvas.getBoundingClientRect();
          const send = (type, x) => canvas.dispatchEvent(new PointerEvent(type,
            { bubbles: true, pointerId: 1, clientX: left + x, clientY: top + 5, buttons: 1, pointerType: "mouse" }));
          let changes = 0;
          normkitExplorer.store.subscribe(() => { changes += 1; });
          const view = document.getElementById("view");
          view.setPointerCapture = () => {};
          send("pointerdown", 5);
          const counts = [];
          for (let frame = 0; frame < 3; frame++) {
            for (let step = 1; step <= 20; step++) send("pointermove", 20 + 40 * frame + step);
            counts.push(changes);
            await new Promise((done) => requestAnimationFrame(done));
            counts.push(changes);
          }
          send("pointerup", 100);
          delete view.setPointerCapture;
          return counts;
        }"""
    )
    assert counts == [0, 1, 1, 2, 2, 3]


def test_a_point_follows_the_pointer(drawing):
    index = drawing.lonely()
    start = drawing.markers()[index]
    drawing.drag(start, (37, -52))
    state = drawing.state()
    assert state["selected"] == index
    assert list(state["edits"]) == [str(index)]
    assert math.dist(drawing.markers()[index], (start[0] + 37, start[1] - 52)) < 12
    numbers = [
        len(f"{value:.15g}".replace("-", "").replace(".", "").strip("0")) for value in state["edits"][str(index)]
    ]
    assert max(numbers) <= 5


def test_a_click_selects_and_escape_lets_go(drawing):
    index = drawing.lonely()
    before = drawing.state()
    drawing.page.mouse.click(*drawing.markers()[index])
    drawing.settle()
    assert drawing.state() == before | {"selected": index}
    drawing.page.mouse.click(*drawing.corner())
    assert drawing.state()["selected"] == index
    drawing.page.keyboard.press("Escape")
    drawing.settle()
    assert drawing.state() == before


def test_hover_shows_the_point_as_text(drawing):
    hover = drawing.page.locator("#hover")
    assert hover.is_hidden()
    index = drawing.lonely()
    drawing.page.mouse.move(*drawing.markers()[index])
    assert hover.is_visible()
    assert hover.text_content().startswith(f"{index + 1}: (")
    drawing.page.mouse.move(*drawing.corner())
    assert hover.is_hidden()


def test_a_token_that_is_markup_hovers_as_text(explorer, model_data):
    drawing = Drawing(explorer(model_data[1], hash="#scene=model", viewport=SIZE))
    hover = drawing.page.locator("#hover")
    seen = set()
    for place in drawing.markers():
        drawing.page.mouse.move(*place)
        seen.add(hover.text_content())
    assert "<script>alert(1)</script>" in seen
    assert hover.locator("*").count() == 0


def test_the_hovering_text_stays_inside_the_drawing(drawing):
    for x, y in drawing.markers():
        drawing.page.mouse.move(x, y)
        box = drawing.page.locator("#hover").bounding_box()
        if box is not None:
            assert box["x"] >= drawing.box["x"] - 1
            assert box["y"] >= drawing.box["y"] - 1
            assert box["x"] + box["width"] <= drawing.box["x"] + drawing.box["width"] + 1


def test_the_wheel_zooms_and_does_not_scroll(drawing):
    before = drawing.state()["zoom"]
    page = drawing.page
    page.mouse.move(*drawing.corner())
    page.mouse.wheel(0, -100)
    page.wait_for_function("zoom => normkitExplorer.store.get().zoom > zoom", arg=before)
    assert drawing.state()["zoom"] == pytest.approx(1.0015**100, abs=1e-4)
    page.mouse.wheel(0, 100)
    page.wait_for_function("zoom => normkitExplorer.store.get().zoom === zoom", arg=before)
    assert page.evaluate("scrollY") == 0
    page.mouse.move(900, 400)
    page.mouse.wheel(0, 100)
    page.wait_for_function("() => scrollY > 0")
    assert drawing.state()["zoom"] == before


@pytest.mark.parametrize("key", ["+", "=", "-", "_"])
def test_keys_zoom(drawing, key):
    drawing.page.focus("#view")
    drawing.page.keyboard.press(key)
    drawing.settle()
    assert drawing.state()["zoom"] == pytest.approx(1.15 if key in "+=" else 1 / 1.15, abs=1e-4)


def test_keys_turn_and_home_comes_back(drawing):
    before = drawing.state()
    drawing.page.focus("#view")
    seen = []
    for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Shift+ArrowLeft"):
        drawing.set(yaw=0, pitch=0)
        drawing.page.keyboard.press(key)
        drawing.settle()
        state = drawing.state()
        seen.append((state["yaw"], state["pitch"]))
    assert seen == [(0.064, 0), (-0.064, 0), (0, -0.064), (0, 0.064), (0.32, 0)]
    drawing.page.keyboard.press("+")
    drawing.page.keyboard.press("Home")
    drawing.settle()
    assert drawing.state() == before


def test_keys_go_from_point_to_point(drawing):
    drawing.page.focus("#view")
    count = len(drawing.markers())
    seen = []
    for key in ("PageDown", "]", "]", "[", "PageUp", "PageUp", "PageDown"):
        drawing.page.keyboard.press(key)
        drawing.settle()
        seen.append(drawing.state()["selected"])
    assert seen == [0, 1, 2, 1, 0, count - 1, 0]
    drawing.set(selected=-1)
    drawing.page.keyboard.press("[")
    drawing.settle()
    assert drawing.state()["selected"] == count - 1


def test_in_depth_the_keys_go_from_layer_to_layer(drawing):
    drawing.set(scene="depth")
    drawing.page.focus("#view")
    for _ in range(3):
        drawing.page.keyboard.press("]")
    drawing.settle()
    assert drawing.state()["layer"] == 2
    drawing.page.keyboard.press("Escape")
    drawing.settle()
    assert drawing.state()["layer"] == -1


def test_keys_of_the_browser_are_left_alone(drawing):
    before = drawing.state()
    prevented = drawing.page.evaluate(
        """() => [["+", { ctrlKey: true }], ["ArrowLeft", { altKey: true }], ["Tab", {}], ["a", {}], ["+", {}]].map(
          ([key, keys]) => !document.getElementById("view").dispatchEvent(
            new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...keys })))"""
    )
    assert prevented == [False, False, False, False, True]
    drawing.settle()
    assert drawing.state() == before | {"zoom": 1.15}


def test_handles_stand_where_they_are_drawn_and_say_where(drawing):
    drawing.set(mode="plane", selected=3, stage=0)
    handles = drawing.page.locator("#handles button")
    assert handles.evaluate_all("all => all.map((each) => each.dataset.handle)") == ["normal", "point"]
    x, y = drawing.markers()[3]
    box = handles.nth(1).bounding_box()
    assert (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) == pytest.approx((x, y), abs=1)
    assert min(box["width"], box["height"]) >= 24
    name = handles.nth(1).get_attribute("aria-label")
    raw = drawing.page.evaluate("normkitExplorer.frame().handles[1].at")
    assert name.startswith("Point 4, at ")
    assert float(name.split("at ")[1].split(",")[0].replace("\u2212", "-")) == pytest.approx(raw[0], rel=1e-2)


def test_a_handle_is_dragged(drawing):
    drawing.set(mode="plane")
    before = drawing.state()
    box = drawing.page.locator("[data-handle=normal]").bounding_box()
    drawing.drag((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2), (-60, 40))
    after = drawing.state()
    assert {key for key in before if before[key] != after[key]} == {"normal"}
    assert max(len(str(value).replace("-", "").replace(".", "").lstrip("0")) for value in after["normal"]) <= 5
    moved = drawing.page.locator("[data-handle=normal]").bounding_box()
    assert (moved["x"] - box["x"], moved["y"] - box["y"]) == pytest.approx((-60, 40), abs=6)


@pytest.mark.parametrize("handle", ["normal", "point"])
def test_a_handle_is_moved_by_keys(drawing, handle):
    drawing.set(mode="plane", selected=5)
    button = drawing.page.locator(f"[data-handle={handle}]")
    names, places = [button.get_attribute("aria-label")], [button.bounding_box()]
    button.focus()
    for key in ("ArrowRight", "Shift+ArrowRight"):
        drawing.page.keyboard.press(key)
        drawing.settle()
        names.append(button.get_attribute("aria-label"))
        places.append(button.bounding_box())
    assert len(set(names)) == 3
    steps = [after["x"] - before["x"] for before, after in pairwise(places)]
    assert 1 < steps[0] < 12
    assert steps[1] > 2.9 * steps[0]
    assert drawing.state()["yaw"] == drawing.page.evaluate("normkitExplorer['state.js'].DEFAULTS.yaw")
    assert button.evaluate("button => button === document.activeElement")


def test_a_handle_that_goes_leaves_the_focus_on_the_drawing(drawing):
    drawing.set(selected=5)
    drawing.page.locator("[data-handle=point]").focus()
    drawing.page.keyboard.press("Escape")
    drawing.settle()
    assert drawing.page.locator("#handles button").count() == 0
    assert drawing.page.evaluate("document.activeElement.id") == "view"


def test_the_upstream_gradient_is_dragged(drawing):
    drawing.set(scene="gradient", selected=4)
    before = drawing.state()
    box = drawing.page.locator("[data-handle=upstream]").bounding_box()
    drawing.drag((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2), (30, 30))
    after = drawing.state()
    assert {key for key in before if before[key] != after[key]} == {"upstream"}


@pytest.fixture(scope="module")
def telephone(lasting_explorer) -> Page:
    return lasting_explorer(viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True)


@pytest.fixture
def touched(telephone) -> tuple[Drawing, Fingers]:
    return Drawing(as_opened(telephone)), Fingers(telephone)


def test_a_finger_turns_the_drawing_and_the_page_stays(touched):
    drawing, fingers = touched
    before = drawing.state()
    x, y = drawing.corner()
    fingers.send("Start", (x, y))
    for step in range(1, 11):
        fingers.send("Move", (x + 6 * step, y - 10 * step))
    fingers.send("End")
    drawing.settle()
    after = drawing.state()
    assert {key for key in before if before[key] != after[key]} == {"yaw", "pitch"}
    assert drawing.page.evaluate("scrollY") == 0


def test_two_fingers_zoom(touched):
    drawing, fingers = touched
    middle = drawing.box["x"] + drawing.box["width"] / 2, drawing.box["y"] + drawing.box["height"] / 2
    before = drawing.state()

    def apart(distance):
        return [(middle[0] - distance, middle[1]), (middle[0] + distance, middle[1])]

    fingers.send("Start", *apart(30))
    for distance in (35, 45, 60):
        fingers.send("Move", *apart(distance))
    drawing.settle()
    assert drawing.state()["zoom"] == pytest.approx(2, rel=0.02)
    for distance in (45, 30):
        fingers.send("Move", *apart(distance))
    fingers.send("End")
    drawing.settle()
    after = drawing.state()
    assert after["zoom"] == pytest.approx(1, rel=0.02)
    assert {key for key in before if before[key] != after[key]} <= {"zoom"}


def test_a_tap_selects_and_tells(touched):
    drawing, fingers = touched
    index = drawing.lonely()
    fingers.send("Start", drawing.markers()[index])
    fingers.send("End")
    drawing.settle()
    assert drawing.state()["selected"] == index
    assert drawing.page.locator("#hover").text_content().startswith(f"{index + 1}: (")
    assert drawing.page.locator("#hover").is_visible()


def test_a_finger_moves_a_point(touched):
    drawing, fingers = touched
    index = drawing.lonely()
    x, y = drawing.markers()[index]
    fingers.send("Start", (x, y))
    for step in range(1, 6):
        fingers.send("Move", (x - 5 * step, y + 5 * step))
    fingers.send("End")
    drawing.settle()
    assert list(drawing.state()["edits"]) == [str(index)]
    assert drawing.state()["yaw"] == drawing.page.evaluate("normkitExplorer['state.js'].DEFAULTS.yaw")


def test_elsewhere_the_page_scrolls_by_touch(touched):
    drawing, fingers = touched
    still = drawing.page.locator("body *").evaluate_all(
        "all => all.filter((each) => getComputedStyle(each).touchAction === 'none').map((each) => each.id)"
    )
    assert "view" in still
    assert set(still) <= {"view", "canvas", "handles", ""}
    drawing.page.evaluate("document.getElementById('controls').scrollIntoView()")
    top = drawing.page.evaluate("scrollY")
    fingers.send("Start", (15, 600))
    for step in range(1, 11):
        fingers.send("Move", (15, 600 + 15 * step))
        drawing.settle()
    fingers.send("End")
    assert drawing.page.evaluate("scrollY") < top - 100
