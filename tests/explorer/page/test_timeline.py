"""The timeline plays, steps and scrubs through the stages, and says in words where it stands."""

from __future__ import annotations

import pytest

from drawing import set_state, settle

pytestmark = pytest.mark.browser

STAGE = "() => normkitExplorer.store.get().stage"
# Every stage that the state passes through, in order.
WATCH = "() => { globalThis.seen = []; normkitExplorer.store.subscribe(({ stage }) => seen.push(stage)); }"


def wait_for(page, script, expected):
    page.wait_for_function(f"(expected) => ({script})() === expected", arg=expected)


def names(page):
    return page.locator("#stages button").all_inner_texts()


@pytest.mark.exhaustive
def test_playing_goes_through_every_stage_pauses_there_and_ends(explorer):
    page = explorer()
    page.evaluate(WATCH)
    page.evaluate(
        """() => {
          // A clock four times as fast: what is waited for here is the order of things, not the time.
          const request = requestAnimationFrame;
          globalThis.requestAnimationFrame = (tick) => request((now) => tick(4 * now));
        }"""
    )
    page.get_by_role("button", name="Play").click()
    assert page.get_by_role("button", name="Pause").is_visible()
    page.get_by_role("button", name="Play").wait_for()
    seen = page.evaluate("seen")
    assert seen == sorted(seen)
    assert {1, 2, 3, 4} <= set(seen)
    assert seen[-1] == 4
    assert len(seen) > 12, "it travels, it does not jump"
    page.get_by_role("button", name="Play").click()
    wait_for(page, "() => seen.at(-1) > 0 && seen.at(-1) < 2 && seen.includes(0)", True)
    page.get_by_role("button", name="Pause").click()
    stopped = page.evaluate(STAGE)
    settle(page)
    assert page.evaluate(STAGE) == stopped


def test_a_stage_is_stepped_to_jumped_to_and_scrubbed(explorer):
    page = explorer(reduced_motion="reduce")
    page.evaluate(WATCH)
    back, step, track = page.locator("#back"), page.locator("#step"), page.locator("#stage")
    assert back.is_disabled()
    step.click()
    wait_for(page, STAGE, 1)
    step.click()
    wait_for(page, STAGE, 2)
    back.click()
    wait_for(page, STAGE, 1)
    page.get_by_role("button", name="gain", exact=True).click()
    wait_for(page, STAGE, 3)
    assert page.evaluate("seen") == [1, 2, 1, 3], "without motion it jumps"
    page.locator("#stages [aria-current=step]", has_text="gain").wait_for()
    track.focus()
    page.keyboard.press("End")
    wait_for(page, STAGE, 4)
    page.locator("#step:disabled").wait_for()
    page.keyboard.press("ArrowLeft")
    wait_for(page, STAGE, 3.99)
    page.locator("#stage[aria-valuetext='99 % from gain to bias']").wait_for()
    set_state(page, stage=2.5)
    page.evaluate("() => { seen.length = 0; }")
    page.get_by_role("button", name="Play").click()
    wait_for(page, STAGE, 4)
    assert page.evaluate("seen") == [3, 4], "it plays by jumps, too"


def test_a_step_at_the_end_hands_the_focus_to_play(lasting_page):
    page = lasting_page(reduced_motion="reduce")
    for button, stage, end in [("#step", 3, 4), ("#back", 1, 0)]:
        set_state(page, stage=stage)
        page.focus(button)
        page.keyboard.press("Enter")
        wait_for(page, STAGE, end)
        wait_for(page, "() => document.activeElement.id", "play")


def test_nothing_plays_by_itself_and_a_change_from_elsewhere_ends_the_run(lasting_page):
    page = lasting_page()
    assert page.evaluate(STAGE) == 0
    page.get_by_role("button", name="Play").click()
    wait_for(page, f"() => ({STAGE})() > 0.01", True)
    set_state(page, stage=3.2)
    assert page.evaluate(STAGE) == 3.2
    assert page.get_by_role("button", name="Play").is_visible()


def test_each_stage_has_its_formula_and_what_holds(lasting_page):
    page = lasting_page()
    formulas, invariants = [], []
    for stage in range(5):
        set_state(page, stage=stage)
        wait_for(page, "() => document.getElementById('stage').valueAsNumber", stage)
        formulas.append(page.locator("#formula math").inner_html())
        invariants.append(page.locator("#invariant").inner_text())
    assert len(set(formulas)) == len(set(invariants)) == 5
    set_state(page, stage=2)
    page.evaluate("() => { document.querySelector('#formula msqrt').className = 'kept'; }")
    set_state(page, eps=0.1)
    kept = page.locator("#formula .kept")
    assert kept.locator(":scope > mn").text_content() == "0.1", "what is the same is not laid out again"
    set_state(page, stage=3)
    assert kept.count() == 0


def test_the_formula_is_that_of_the_state_whatever_stood_there_before(lasting_page):
    page = lasting_page()
    made = "() => normkitExplorer['formulas.js'].formula(normkitExplorer.store.get()).outerHTML"
    for scene in ("clusters", "attention", "three", "depth", "gradient"):
        for patch in ({"stage": 0}, {"stage": 4}, {"eps": 0.1}, {"place": "outside"}, {"gain": [2, 1, 1]}):
            set_state(page, scene=scene, **patch)
            assert page.locator("#formula").inner_html() == page.evaluate(made), (scene, patch)


def test_a_change_from_elsewhere_ends_the_run_in_its_pauses_too(lasting_page):
    page = lasting_page(reduced_motion="reduce")
    page.get_by_role("button", name="Play").click()
    wait_for(page, STAGE, 1)
    set_state(page, stage=0.5)
    page.get_by_role("button", name="Play").wait_for()
    assert page.evaluate(STAGE) == 0.5


def test_the_stages_of_the_modes_and_scenes(lasting_page):
    page = lasting_page()
    assert names(page) == ["raw", "centre", "scale", "gain", "bias"]
    for patch, expected in [
        ({"mode": "rms"}, "as it is"),
        ({"mode": "plane"}, "project"),
        ({"scene": "clusters"}, "centre"),
    ]:
        set_state(page, **patch)
        wait_for(page, "() => document.querySelectorAll('#stages button')[1].textContent", expected)
    set_state(page, scene="depth", stage=0)
    wait_for(page, "() => document.querySelectorAll('#stages button').length", 3)
    assert names(page) == ["input", "output", "back"]


def test_a_stage_in_words(modules):
    cases = {
        ("three", 0): "raw",
        ("three", 2): "scale",
        ("three", 1.4): "40 % from centre to scale",
        ("depth", 1): "50 % from input to output",
        ("depth", 4): "back",
    }
    states = [[{"scene": scene, "mode": "layer", "stage": stage}] for scene, stage in cases]
    assert modules.each("timeline.js", "stageText", states) == list(cases.values())
