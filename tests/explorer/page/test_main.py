"""The page as a whole: it opens, draws one frame for what changed, and follows the window and the scheme."""

from __future__ import annotations

import pytest

from drawing import set_state, settle
from normkit.explorer.document import document

pytestmark = pytest.mark.browser

PICTURE = "() => document.getElementById('canvas').toDataURL()"


def test_a_policy_forbids_the_network_before_anything_could_ask_for_it(window, page_data, tmp_path):
    text = document(page_data)
    assert text.index("Content-Security-Policy") < min(text.index("<style"), text.index("<script"))
    path = tmp_path / "explorer.html"
    path.write_text(text)
    page = window()
    page.goto(path.as_uri())
    policy = page.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    assert policy == (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "media-src blob:; form-action 'none'; base-uri 'none'"
    )
    assert page.evaluate("fetch('data:text/plain,x').then(() => 'answered', () => 'refused')") == "refused"


def test_every_scene_draws_its_own_picture_and_many_changes_make_one_frame(lasting_page):
    page = lasting_page()
    pictures = []
    for scene in ("three", "four", "clusters", "gradient", "attention", "depth"):
        set_state(page, scene=scene, stage=2)
        pictures.append(page.evaluate(PICTURE))
    assert len(set(pictures)) == 6
    requests = page.evaluate(
        """async () => {
          let count = 0;
          const request = requestAnimationFrame;
          globalThis.requestAnimationFrame = (tick) => { count += 1; return request(tick); };
          for (let i = 1; i <= 20; i += 1) normkitExplorer.store.set({ stage: i / 100, yaw: i / 100 });
          globalThis.requestAnimationFrame = request;
          return count;
        }"""
    )
    assert requests == 1


def test_the_drawing_has_the_pixels_of_the_screen(lasting_explorer):
    page = lasting_explorer(device_scale_factor=2)
    sizes = """() => {
      const canvas = document.getElementById("canvas");
      const { width, height } = canvas.parentElement.getBoundingClientRect();
      return [canvas.width, canvas.height, Math.round(2 * width), Math.round(2 * height)];
    }"""
    width, height, box_width, box_height = page.evaluate(sizes)
    assert (width, height) == (box_width, box_height)
    page.set_viewport_size({"width": 700, "height": 900})
    settle(page)
    assert page.evaluate(sizes)[0] == page.evaluate(sizes)[2] != width


def test_a_change_of_the_colour_scheme_is_drawn(lasting_page):
    page = lasting_page(color_scheme="light")
    light = page.evaluate(PICTURE)
    page.emulate_media(color_scheme="dark")
    settle(page)
    dark = page.evaluate(PICTURE)
    page.emulate_media(color_scheme="light")
    settle(page)
    assert page.evaluate(PICTURE) == light != dark


def test_the_scene_is_told_in_words_once_it_rests_and_turning_it_touches_nothing_else(explorer):
    page = explorer()
    page.wait_for_function("() => document.getElementById('summary').textContent")
    page.evaluate(
        """() => {
          globalThis.told = [];
          const summary = document.getElementById("summary");
          new MutationObserver(() => told.push(summary.textContent)).observe(summary, { childList: true });
          // The only clock is this list: what waits in it waits until it is called.
          globalThis.waiting = new Map();
          globalThis.setTimeout = (call, milliseconds) => {
            waiting.set(waiting.size + 1, [call, milliseconds]);
            return waiting.size;
          };
          globalThis.clearTimeout = (number) => waiting.has(number) && waiting.set(number, null);
        }"""
    )
    for eps in (0.1, 0.2, 0.3):
        set_state(page, eps=eps, stage=2)
    assert page.evaluate("told") == []
    waits = page.evaluate(
        """() => {
          const left = [...waiting.values()].filter(Boolean);
          for (const [call] of left) call();
          return left.map(([, milliseconds]) => milliseconds);
        }"""
    )
    told = page.evaluate("told")
    assert waits == [300]
    assert len(told) == 1
    assert "points" in told[0]
    assert page.locator("#view").get_attribute("aria-describedby") == "summary"
    before = page.evaluate(PICTURE)
    page.evaluate(
        """() => {
          globalThis.touched = [];
          const watch = new MutationObserver((changes) => touched.push(...changes.map((c) => c.target.id)));
          for (const part of document.querySelectorAll("#walk, #controls, .timeline, .reading, .below")) {
            watch.observe(part, { subtree: true, childList: true, attributes: true, characterData: true });
          }
        }"""
    )
    set_state(page, yaw=1.0, zoom=1.2)
    assert page.evaluate(PICTURE) != before
    assert page.evaluate("touched") == []
    set_state(page, eps=0.7)
    assert page.evaluate("touched") != []


def test_points_that_were_given_are_shown(explorer):
    given = {"points": [[1, 2, 3], [2, 1, 0]], "groups": [0, 1], "labels": ["a", "b"], "n": 3}
    page = explorer({"given": given, "start": {"cloud": "given"}})
    assert len(page.evaluate("normkitExplorer.frame().panels[0].items.find(({ pick }) => pick).at")) == 2
    assert page.locator("#cloud option:checked").inner_text() == "your points"
