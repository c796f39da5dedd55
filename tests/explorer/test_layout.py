"""The page fits every window, and people with any eyes, hands or settings can use it."""

from __future__ import annotations

from pathlib import Path

import axe_playwright_python
import pytest
import torch

from drawing import set_state, settle
from normkit.explorer.exploration import explore

pytestmark = pytest.mark.browser

SCENES = ["three", "four", "model", "clusters", "gradient", "attention", "depth"]
SIZES = [(320, 640), (768, 1024), (1280, 800), (3840, 2160)]
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
# Elements that stick out to the right of the window, but for those inside something that scrolls by itself.
OUTSIDE = """() => [...document.querySelectorAll("body *")]
  .filter((part) => part.checkVisibility() && part.getBoundingClientRect().right > innerWidth + 1
    && !part.closest("#formula, .scroll, .skip, #scenes")).map((part) => part.id || part.className || part.nodeName)"""
# Targets are boxes of 24 pixels or more each way.
SMALL = """() => [...document.querySelectorAll("button, select, input, summary")]
  .filter((part) => part.checkVisibility() && part.id !== "stages").map((part) => [part, part.getBoundingClientRect()])
  .filter(([, { width, height }]) => Math.min(width, height) < 24).map(([part]) => part.outerHTML)"""


@pytest.fixture
def models():
    """Tokens of eight features, as of a model."""
    return {"models": explore(torch.randn(30, 8), labels=[f"token {i}" for i in range(30)]).data["models"]}


# A scheme changes colours alone.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "sizes"), [("light", SIZES), ("dark", SIZES[:1])], ids=["light", "dark"])
def test_nothing_sticks_out_at_any_width(explorer, models, scheme, sizes):
    page = explorer(models, color_scheme=scheme)
    page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        for scene in SCENES:
            set_state(page, scene=scene, stage=2)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (scene, width)
            assert page.evaluate(OUTSIDE) == [], (scene, width)
            assert page.evaluate(SMALL) == [], (scene, width)


def test_the_drawing_keeps_its_size_while_the_stages_pass(explorer, models):
    page = explorer(models, viewport={"width": 1280, "height": 800})
    sizes = page.evaluate(
        """async (scenes) => {
          const seen = [];
          for (const scene of scenes) {
            for (let stage = 0; stage <= 4; stage += 1) {
              normkitExplorer.store.set({ scene, stage });
              await new Promise(requestAnimationFrame);
              const { y, width, height } = document.getElementById("view").getBoundingClientRect();
              seen.push([y, width, height].join());
            }
          }
          return seen;
        }""",
        SCENES,
    )
    assert len(sizes) == 5 * len(SCENES)
    assert len(set(sizes)) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [(1280, 800), (1100, 1000), (1000, 500)])
def test_scrolled_anywhere_nothing_lies_over_the_numbers(lasting_page, size):
    page = lasting_page(viewport={"width": size[0], "height": size[1]})
    page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    edges = """(y) => {
      scrollTo(0, y);
      return [".stage", ".below"].map((name) => document.querySelector(name).getBoundingClientRect());
    }"""
    for scene in ("three", "clusters", "depth"):
        set_state(page, scene=scene, stage=2)
        for y in (0, 200, 500, 900, 99999):
            stage, below = page.evaluate(edges, y)
            assert stage["bottom"] <= below["top"] + 0.5, (scene, y)


def test_the_button_of_the_normal_does_not_lie_over_its_numbers(lasting_page):
    page = lasting_page(viewport={"width": 1280, "height": 800})
    page.evaluate("normkitExplorer.store.set({ mode: 'plane' })")
    page.wait_for_selector("#snap")
    snap, field = page.locator("#snap").bounding_box(), page.locator("#normal input").first.bounding_box()
    assert snap["y"] + snap["height"] <= field["y"]


def test_on_a_phone_the_drawing_stays_in_sight_while_a_control_is_used(lasting_page):
    page = lasting_page(viewport={"width": 390, "height": 844})
    page.locator("#gain input").first.scroll_into_view_if_needed()
    page.locator("#gain input").first.focus()
    view, control = page.locator("#view").bounding_box(), page.locator("#gain input").first.bounding_box()
    assert view["y"] == 0
    assert control["y"] >= view["height"]


def test_on_a_phone_the_walk_the_picture_the_timeline_and_the_formula_are_visible_together(lasting_page):
    page = lasting_page(viewport={"width": 400, "height": 800}, reduced_motion="reduce")
    shown = ["#walk .turns button:last-child", "#view", "#play", "#stages", "#formula"]

    def boxes():
        settle(page)
        return page.evaluate(
            "(parts) => parts.map((part) => document.querySelector(part).getBoundingClientRect())", shown
        )

    def fit(found):
        return all(box["height"] > 0 and box["y"] >= 0 and box["y"] + box["height"] <= 800 for box in found)

    assert fit(boxes())
    for _ in range(7):
        page.locator(shown[0]).click()
        found = boxes()
        assert fit(found)
        # One below the other: nothing hides behind the drawing.
        assert found[0]["y"] + found[0]["height"] <= found[1]["y"]
        assert found[1]["y"] + found[1]["height"] <= found[2]["y"] < found[4]["y"]
        page.locator(shown[0]).click()
        page.wait_for_function("() => document.querySelector('#walk .turns').textContent !== 'PreviousShow'")


CONTRAST = """(part) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((value) => {
      const share = value / 255;
      return share > 0.04045 ? ((share + 0.055) / 1.055) ** 2.4 : share / 12.92;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let below = part;
  while (/^(transparent|rgba\\(.*, 0\\))$/.test(getComputedStyle(below).backgroundColor)) below = below.parentElement;
  const [one, other] = [getComputedStyle(part).color, getComputedStyle(below).backgroundColor].map(light);
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_buttons_have_a_contrast_of_4_5_in_every_state(lasting_page, scheme):
    page = lasting_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    page.locator("#walk .turns button").last.click()
    page.wait_for_selector("[data-handle=guess]")
    faint = []
    for part in (
        "#scenes button",
        "#walk li button",
        "#walk .turns button:last-child",
        "#play",
        "#pace",
        "#stages button",
    ):
        for index in (0, -1):
            button = page.locator(part).nth(index)
            for state, act in (
                ("rest", lambda: page.mouse.move(1, 1)),
                ("hover", button.hover),
                ("focus", button.focus),
            ):
                act()
                if button.evaluate(CONTRAST) < 4.5:
                    faint.append((part, index, state))
    back = page.locator("#back")
    assert back.is_disabled()
    assert back.evaluate(CONTRAST) >= 4.5
    assert faint == []


FOUND_BY_AXE = """async (rules) => {
  const { passes, violations } = await axe.run({ resultTypes: ["violations"], ...rules });
  const contrast = passes.some(({ id }) => id === "color-contrast") ? [] : ["no colours were looked at"];
  return [...contrast, ...violations.map(({ id, nodes }) => [id, nodes[0].html])];
}"""


# Every rule in one scheme; in the others those that look at colours.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"color_scheme": "light"}, {}),
        ({"color_scheme": "dark"}, {"runOnly": "cat.color"}),
        ({"color_scheme": "dark", "forced_colors": "active"}, {"runOnly": "cat.color"}),
    ],
    ids=["light", "dark", "forced colours"],
)
def test_axe_finds_nothing_in_any_scene(explorer, models, scene, settings, rules):
    page = explorer(models, **settings)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    # Rows of the table are alike; a few of them are enough.
    page.add_style_tag(content="#table tr:nth-child(n + 5) { display: none; }")
    page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    set_state(page, scene=scene, stage=2)
    assert page.evaluate(FOUND_BY_AXE, rules) == []


def test_axe_finds_nothing_on_a_phone_in_a_step_of_the_walk_and_beside_a_formula_that_scrolls(explorer):
    page = explorer(hash="#v=1&walk=1", viewport={"width": 400, "height": 800})
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert page.locator("#walk h3").inner_text() == "Why a plane"
    assert page.evaluate(FOUND_BY_AXE, {}) == []
    set_state(page, walk=0, scene="gradient", stage=4, gain=[1.15, 0.95, 1.05], bias=[-0.35, 0.65, 0.45])
    assert page.locator("#formula").evaluate("formula => formula.scrollWidth > formula.clientWidth")
    assert page.evaluate(FOUND_BY_AXE, {}) == []


def test_the_whole_tour_by_keyboard(explorer):
    page = explorer()
    names = []
    for _ in range(80):
        page.keyboard.press("Tab")
        name = page.evaluate(
            """() => {
              const part = document.activeElement;
              const style = getComputedStyle(part);
              if (part === document.body) return "";
              const seen = style.outlineStyle !== "none" || part.matches(".handle") || part.matches(".skip");
              return (seen ? "" : "no outline: ") + (part.id || part.textContent || part.ariaLabel).trim();
            }"""
        )
        if not name:
            break
        names.append(name)
    assert not [name for name in names if name.startswith("no outline")]
    expected = [
        "Skip to the walk",
        "Skip to the drawing",
        "Four dimensions",
        "Why a plane",
        "Start",
        "view",
        "play",
        "step",
        "pace",
        "stage",
        "formula",
        "eps",
    ]
    assert [name for name in names if name in expected] == expected
    assert page.evaluate("document.documentElement.matches(':focus-within')") is False, "focus is not trapped"
