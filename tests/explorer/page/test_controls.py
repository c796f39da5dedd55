"""Every control changes the state and the picture, says what it does in words, and shows only where it matters."""

from __future__ import annotations

import math

import pytest

from drawing import as_opened, set_state, settle

pytestmark = pytest.mark.browser

NORM = ["eps", "place"]
VECTORS = ["gain", "bias"]
# The controls that each scene shows, with two models and the page's own points.
SHOWN = {
    "three": ["modes", "cloud", *NORM, *VECTORS],
    "four": ["modes", *NORM, *VECTORS],
    "model": ["model", "site", "modes", "colour", *NORM],
    "clusters": [*NORM, *VECTORS],
    "gradient": ["modes", "cloud", *NORM, *VECTORS, "upstream"],
    "attention": ["modes", *NORM, "query", "size"],
    "depth": ["depth", "spread", "layer", "seed", "residual"],
}
NASTY = "<img src=x onerror=alert(1)>"
STATE = "(key) => normkitExplorer.store.get()[key]"
PICTURE = "() => document.getElementById('canvas').toDataURL()"


def state(page, key):
    settle(page)
    return page.evaluate(STATE, key)


@pytest.fixture(scope="module")
def opened(lasting_explorer, made_up_model):
    """A page with two models of two sites each, of which the second have groups, other norms and a hostile name."""
    (small,) = made_up_model[1]["models"]
    (site,) = small["sites"]
    grouped = {**site, "path": "block.1.norm", "groups": [0] * site["count"]}
    others = [
        {**site, "mode": "rms", "path": NASTY},
        {**site, "mode": "length", "eps": 0.25, "place": "outside", "path": "block.1.norm"},
    ]
    models = [{**small, "sites": [site, grouped]}, {**small, "name": NASTY, "sites": others}]
    return lasting_explorer({"models": models})


@pytest.fixture
def page(opened):
    """This page in its first state."""
    return as_opened(opened)


def visible(page):
    return page.evaluate(
        """() => [...document.querySelectorAll("#controls select, #controls input, #controls fieldset")]
          .filter((part) => part.id && part.checkVisibility()).map(({ id }) => id)"""
    )


def start_over(page, **patch):
    """The state as the page opened it, but for a patch."""
    page.evaluate("() => { globalThis.opened ??= normkitExplorer.store.get(); }")
    page.evaluate("({ scene, ...patch }) => normkitExplorer.store.set({ ...opened, scene })", patch)
    set_state(page, **patch)


@pytest.mark.exhaustive
def test_a_scene_shows_the_controls_that_matter_there_and_each_has_a_name(page):
    nameless = """() => [...document.querySelectorAll("input, select, button")]
      .filter((part) => !(part.labels?.length || part.ariaLabel || part.textContent.trim())).map(({ id }) => id)"""
    for scene, expected in SHOWN.items():
        page.locator(f"[data-scene={scene}]").click()
        assert state(page, "scene") == scene
        assert page.locator("#scenes [aria-pressed=true]").get_attribute("data-scene") == scene
        assert sorted(visible(page)) == sorted(expected), scene
        assert page.evaluate(nameless) == []
    for scene in ("three", "four", "gradient"):
        set_state(page, scene=scene, mode="plane")
        assert sorted(visible(page)) == sorted([*SHOWN[scene], "normal"])


def test_a_reset_stays_in_the_scene_with_its_own_points(lasting_page):
    page = lasting_page()
    for scene, cloud in [("clusters", "clusters"), ("four", "four"), ("gradient", "scatter")]:
        set_state(page, scene=scene)
        start = page.evaluate("() => normkitExplorer.store.get()")
        set_state(page, edits={"3": [1, 2, 3, 4][: 4 if scene == "four" else 3]}, eps=0, gain=[2, 2, 2, 2], stage=3)
        page.evaluate("() => { document.getElementById('message').textContent = 'It stays 3.'; }")
        page.locator("#reset").click()
        settle(page)
        assert page.text_content("#message") == ""
        assert page.evaluate("() => normkitExplorer.store.get()") == start
        assert (start["scene"], start["cloud"]) == (scene, cloud)


def test_groups_of_one_s_own_leave_no_colour_to_choose(page):
    set_state(page, scene="model", site=0)
    assert "colour" in visible(page)
    set_state(page, site=1)
    assert "colour" not in visible(page)


def test_a_site_is_shown_by_the_norm_that_it_has(page):
    norm = "() => (({ mode, eps, place }) => [mode, eps, place])(normkitExplorer.store.get())"
    set_state(page, mode="plane", eps=0, place="outside")
    page.locator("[data-scene=model]").click()
    assert page.evaluate(norm) == ["layer", 1e-5, "inside"]
    page.select_option("#model", "1")
    assert page.evaluate(norm) == ["rms", 1e-5, "inside"]
    page.select_option("#site", "1")
    assert page.evaluate(norm) == ["length", 0.25, "outside"]
    page.locator("#reset").click()
    assert page.evaluate(norm) == ["layer", 1e-5, "inside"]
    assert (state(page, "scene"), state(page, "model"), state(page, "site")) == ("model", 0, 0)


def test_a_key_changes_the_state_and_the_picture(lasting_page):
    page = lasting_page()
    for scene, control, key, press in [
        ("three", "#eps", "eps", "End"),
        ("three", "#gain [type=range] >> nth=0", "gain", "End"),
        ("four", "#bias [type=range] >> nth=3", "bias", "Home"),
        ("gradient", "#upstream [type=range] >> nth=1", "upstream", "End"),
        ("depth", "#depth", "depth", "Home"),
        ("depth", "#spread", "spread", "End"),
        ("depth", "#layer", "layer", "End"),
        ("depth", "#residual", "residual", "Space"),
        ("depth", "#seed", "seed", "ArrowUp"),
    ]:
        start_over(page, scene=scene, stage=4)
        before = (state(page, key), page.evaluate(PICTURE))
        page.locator(control).focus()
        page.keyboard.press(press)
        after = (state(page, key), page.evaluate(PICTURE))
        assert after[0] != before[0], control
        assert after[1] != before[1], control


def test_a_choice_changes_the_state_and_the_picture(page):
    for scene, select, value, key in [
        *[("three", "#modes", mode, "mode") for mode in ("rms", "batch", "length", "plane")],
        ("three", "#cloud", "small", "cloud"),
        ("three", "#place", "outside", "place"),
        ("model", "#modes", "rms", "mode"),
        ("model", "#colour", "position", "colour"),
    ]:
        start_over(page, scene=scene, stage=2, eps=0.5)
        before = page.evaluate(PICTURE)
        page.locator(select).select_option(value)
        assert state(page, key) == value
        assert page.evaluate(PICTURE) != before, (select, value)
    page.locator("#site").select_option("1")
    assert state(page, "site") == 1
    page.locator("#model").select_option("1")
    assert (state(page, "model"), state(page, "site")) == (1, 0), "another model starts at its first site"


def test_what_the_scene_cannot_show_says_why_and_names_of_models_and_sites_are_text(page):
    set_state(page, scene="model")
    disabled = page.locator("#modes option:disabled")
    assert disabled.all_inner_texts() == ["BatchNorm (needs whole vectors)", "Any hyperplane (needs whole vectors)"]
    assert disabled.first.get_attribute("title") == "needs whole vectors"
    assert page.locator("#colour option:disabled").inner_text() == "layer (one layer)"
    page.select_option("#model", "1")
    settle(page)
    assert page.locator("#model option").nth(1).inner_text() == NASTY
    assert page.locator("#site option").first.inner_text() == NASTY
    assert page.locator("img").count() == 0


def test_epsilon_is_told_in_words_and_ends_at_exactly_0(lasting_page):
    page = lasting_page()
    slider = page.locator("#eps")
    assert slider.get_attribute("aria-valuetext") == "epsilon 1e-5"
    slider.focus()
    for press, eps, text in [
        ("Home", 0, "exactly 0"),
        ("ArrowRight", 1e-12, "1e-12"),
        ("End", 10, "10"),
        ("ArrowLeft", 7.94, "7.94"),
    ]:
        page.keyboard.press(press)
        assert state(page, "eps") == eps
        assert slider.get_attribute("aria-valuetext") == f"epsilon {text}"
        assert page.locator("label[for=eps] + .value").inner_text() == text


def test_every_position_of_epsilon_is_a_round_number_and_is_found_again(modules):
    values = modules.each("controls.js", "epsilonAt", [[position] for position in range(132)])
    assert [values[position] for position in (0, 1, 71, 131)] == [0, 1e-12, 1e-5, 10]
    assert modules.each("controls.js", "epsilonPosition", [[value] for value in values]) == list(range(132))
    assert all(
        math.isclose(value, 10 ** ((position - 121) / 10), rel_tol=5e-3)
        for position, value in enumerate(values)
        if value
    )


@pytest.mark.parametrize(
    ("eps", "text"), [(0, "exactly 0"), (1e-5, "1e-5"), (1.26e-12, "1.26e-12"), (0.1, "0.1"), (10, "10")]
)
def test_epsilon_as_text(modules, eps, text):
    assert modules("controls.js", "epsilonText", eps) == text


def test_a_typed_number_counts_and_a_half_typed_one_stays(explorer):
    page = explorer({"start": {"eps": 0.01}})
    field = page.get_by_label("gain, axis 2, typed")
    for typed, value in [("2.375", 2.375), ("", 2.375), ("-0.5", -0.5)]:
        field.fill(typed)
        assert state(page, "gain")[1] == value
    slider = page.get_by_label("gain, axis 2", exact=True)
    assert slider.get_attribute("aria-valuetext") == "gain -0.5"
    assert page.locator("#gain [type=range]:visible").count() == 3
    set_state(page, scene="four", eps=5, stage=3)
    assert page.locator("#gain [type=range]:visible").count() == 4
    page.get_by_role("button", name="Reset").click()
    assert (state(page, "scene"), state(page, "eps"), state(page, "stage")) == ("four", 0.01, 0)
    assert state(page, "gain")[1] != -0.5
    set_state(page, mode="plane")
    page.get_by_role("button", name="Snap to all-ones").click()
    assert state(page, "normal") == [1, 1, 1, 1]


@pytest.mark.parametrize(("scene", "count", "n"), [("three", 40, 3), ("four", 40, 4), ("clusters", 48, 3)])
def test_new_points_are_drawn_about_the_middle_of_each_group(page, scene, count, n):
    set_state(page, scene=scene)
    first = page.evaluate(PICTURE)
    draws = []
    for _ in range(2):
        page.click("#draw")
        draws.append(state(page, "edits"))
        assert list(map(int, draws[-1])) == list(range(count))
        assert {len(row) for row in draws[-1].values()} == {n}
        assert max(abs(value) for row in draws[-1].values() for value in row) < 8
    assert draws[0] != draws[1]
    # The world is fitted to them, as it is to the points that were there: none lies beyond the drawing.
    longest = max(math.hypot(*row) for row in draws[1].values())
    assert scene == "clusters" or page.evaluate("() => normkitExplorer.frame().radius") >= longest
    assert page.evaluate(PICTURE) != first
    page.click("#reset")
    assert state(page, "edits") == {}


@pytest.mark.parametrize("patch", [{"scene": "three", "cloud": "shifted"}, {"scene": "depth"}, {"scene": "attention"}])
def test_clouds_that_mean_more_are_not_drawn_anew(page, patch):
    set_state(page, **patch)
    settle(page)
    assert not page.is_visible("#draw")
    assert page.is_visible("#reset")


def test_groups_keep_their_middle_and_spread_when_they_are_redrawn(modules):
    groups = [k % 2 for k in range(400)]
    points = [[10.0 * group, 0.0, (-1.0) ** (k // 2)] for k, group in enumerate(groups)]
    drawn = modules("controls.js", "redrawn", {"points": points, "groups": groups, "n": 3}, 5)
    rows = [drawn[str(k)] for k in range(400)]
    assert modules("controls.js", "redrawn", {"points": points, "groups": groups, "n": 3}, 5) == drawn
    assert [row[0] for row in rows] == [10 * group for group in groups]
    heights = [row[2] for row in rows]
    # 400 draws of deviation 1: the mean is off by 0.05, the deviation by 0.035.
    assert abs(sum(heights)) / 400 < 0.2
    assert 0.85 < math.sqrt(sum(height**2 for height in heights) / 400) < 1.15
