"""The page as a whole: it opens, draws one frame for what changed, and follows the window and the scheme."""

from __future__ import annotations

import re

import pytest

from normkit.explorer.document import document

pytestmark = pytest.mark.browser

PICTURE = "() => document.getElementById('canvas').toDataURL()"
QUIET = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def set_state(page, **patch):
    page.evaluate("(patch) => normkitExplorer.store.set(patch)", patch)
    page.evaluate(QUIET)


def test_a_policy_forbids_the_network_before_anything_could_ask_for_it(chromium, page_data, tmp_path):
    text = document(page_data)
    assert text.index("Content-Security-Policy") < min(text.index("<style"), text.index("<script"))
    path = tmp_path / "explorer.html"
    path.write_text(text)
    page = chromium.new_page()
    page.goto(path.as_uri())
    policy = page.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    assert policy == (
        "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
        "media-src blob:; form-action 'none'; base-uri 'none'"
    )
    assert page.evaluate("fetch('data:text/plain,x').then(() => 'answered', () => 'refused')") == "refused"
    page.close()


def test_every_scene_draws_its_own_picture_and_many_changes_make_one_frame(explorer):
    page = explorer()
    pictures = []
    for scene in ("three", "four", "clusters", "gradient", "depth"):
        set_state(page, scene=scene, stage=2)
        pictures.append(page.evaluate(PICTURE))
    assert len(set(pictures)) == 5
    requests = page.evaluate(
        """async () => {
          let count = 0;
          const request = requestAnimationFrame;
          globalThis.requestAnimationFrame = (tick) => { count += 1; return request(tick); };
          for (let i = 1; i <= 20; i += 1) normkitExplorer.store.set({ stage: i / 100, yaw: i / 100 });
          return count;
        }"""
    )
    assert requests == 1


def test_turning_the_drawing_touches_nothing_else(explorer):
    page = explorer()
    page.wait_for_timeout(400)
    before = page.evaluate(PICTURE)
    page.evaluate(
        """() => {
          globalThis.touched = [];
          const watch = new MutationObserver((changes) => touched.push(...changes.map((c) => c.target.id)));
          for (const part of document.querySelectorAll("aside, .timeline, .reading, .below")) {
            watch.observe(part, { subtree: true, childList: true, attributes: true, characterData: true });
          }
        }"""
    )
    set_state(page, yaw=1.0, zoom=1.2)
    assert page.evaluate(PICTURE) != before
    assert page.evaluate("touched") == []
    set_state(page, eps=0.5)
    assert page.evaluate("touched") != []


def test_the_drawing_has_the_pixels_of_the_screen(explorer):
    page = explorer(device_scale_factor=2)
    sizes = """() => {
      const canvas = document.getElementById("canvas");
      const { width, height } = canvas.parentElement.getBoundingClientRect();
      return [canvas.width, canvas.height, Math.round(2 * width), Math.round(2 * height)];
    }"""
    width, height, box_width, box_height = page.evaluate(sizes)
    assert (width, height) == (box_width, box_height)
    page.set_viewport_size({"width": 700, "height": 900})
    page.evaluate(QUIET)
    assert page.evaluate(sizes)[0] == page.evaluate(sizes)[2] != width


def test_a_change_of_the_colour_scheme_is_drawn(explorer):
    page = explorer(color_scheme="light")
    light = page.evaluate(PICTURE)
    page.emulate_media(color_scheme="dark")
    page.evaluate(QUIET)
    dark = page.evaluate(PICTURE)
    page.emulate_media(color_scheme="light")
    page.evaluate(QUIET)
    assert page.evaluate(PICTURE) == light != dark


def test_the_scene_is_told_in_words_once_it_rests(explorer):
    page = explorer()
    page.evaluate(
        """() => {
          globalThis.told = [];
          const summary = document.getElementById("summary");
          new MutationObserver(() => told.push(summary.textContent)).observe(summary, { childList: true });
        }"""
    )
    for eps in (0.1, 0.2, 0.3):
        set_state(page, eps=eps, stage=2)
    page.wait_for_timeout(500)
    told = page.evaluate("told")
    assert len(told) == 1
    assert "points" in told[0]
    assert page.locator("#view").get_attribute("aria-describedby") == "summary"


def test_notes_and_title_are_text_whatever_they_hold(explorer):
    nasty = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    page = explorer({"notes": [nasty], "title": nasty})
    assert page.locator("#notes li").inner_text() == nasty
    assert page.locator("h1").inner_text() == nasty
    assert page.locator("img, .still svg").count() == 0


def test_a_bad_link_is_told_and_a_good_one_opens_what_it_says(explorer):
    page = explorer(hash="#v=7&scene=nowhere&eps=NaN")
    assert "nowhere" in page.locator("#message").inner_text()
    assert page.evaluate("normkitExplorer.store.get().scene") == "three"
    page.evaluate("() => { location.hash = '#v=1&scene=four&stage=2&eps=0.01'; }")
    page.wait_for_selector("[data-scene='four'][aria-pressed='true']")
    assert page.evaluate("(({ scene, stage, eps }) => [scene, stage, eps])(normkitExplorer.store.get())") == [
        *("four", 2, 0.01)
    ]


def test_points_that_were_given_are_shown(explorer):
    given = {"points": [[1, 2, 3], [2, 1, 0]], "groups": [0, 1], "labels": ["a", "b"], "n": 3}
    page = explorer({"given": given, "start": {"cloud": "given"}})
    assert len(page.evaluate("normkitExplorer.frame().panels[0].items.find(({ pick }) => pick).at")) == 2
    assert page.locator("#cloud option:checked").inner_text() == "your points"


def test_without_scripts_the_page_says_so_and_shows_a_figure(chromium, page_data, tmp_path):
    path = tmp_path / "explorer.html"
    path.write_text(document(page_data))
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.get_by_text(re.compile("JavaScript, which is off")).is_visible()
    assert page.locator(".still svg").is_visible()
    assert not page.locator("main").is_visible()
    context.close()
