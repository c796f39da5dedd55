"""The walk: each step asks before it shows, its words are true of its points, and a touched control ends it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from drawing import set_state, settle
from normkit.explorer import document

pytestmark = pytest.mark.browser

_STEPS = """async (data) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { WALK } = await load("steps.js");
  return WALK.map(({ title, question, answer, to, state: patch }) => {
    const state = startFrom(patch);
    const { stages, rows, raw, arms, shown } = compute(state, data);
    const images = arms && Object.fromEntries(Object.entries(arms).map(([name, arm]) => [name, arm.shown]));
    return { title, question, answer, to, patch, state, stages, rows, raw, shown, arms: images };
  });
}"""


@pytest.fixture(scope="module")
def steps(modules: Any) -> Any:
    """The seven steps with what the page computes for each."""
    clouds = json.loads((Path(document.__file__).parent / "page" / "clouds.json").read_text(encoding="utf-8"))
    return modules.run(_STEPS, {"clouds": clouds, "models": []})


def _tensors(step: Any) -> list[torch.Tensor]:
    return [torch.tensor(stage, dtype=torch.float64) for stage in step["stages"]]


def test_there_are_seven_short_steps_that_ask_and_each_is_a_state_that_holds(steps: Any) -> None:
    titles = [step["title"] for step in steps]
    assert titles == [
        "Why a plane",
        "Why this plane and no other",
        "Why a sphere",
        "What epsilon does to small vectors",
        "What gain and bias do",
        "Why RMSNorm drops the plane",
        "Why BatchNorm is another thing",
    ]
    words = sum(len(f"{step['title']} {step['question']} {step['answer']}".split()) for step in steps)
    # Three minutes: at 200 words a minute, 10 seconds are left for dragging and looking at each step.
    assert words / 200 + 7 * 10 / 60 <= 3
    for step in steps:
        assert step["answer"].count(". ") <= 1
        assert step["answer"].endswith(".")
        assert step["question"].count(". ") <= 2
        assert step["question"].endswith(("?", "there.", "spot."))
        assert all(step["state"][key] == value for key, value in step["patch"].items())


def test_centring_moves_along_all_ones_into_one_plane(steps: Any) -> None:
    raw, centred, *_ = _tensors(steps[0])
    assert (steps[0]["state"]["stage"], steps[0]["to"]) == (0, 1)
    moved = raw - centred
    assert (moved - moved[:, :1]).abs().max() < 1e-15
    assert centred.sum(1).abs().max() < 1e-14
    # Only the height is lost: with it the point is back, and it is sqrt(n) times the mean.
    height = raw @ torch.ones(3, dtype=torch.float64) / math.sqrt(3)
    assert torch.allclose(height, raw.mean(1) * math.sqrt(3), atol=1e-14)
    assert torch.linalg.matrix_rank(centred) == 2


def test_dividing_by_the_deviation_gives_the_length_2_and_a_sphere(steps: Any) -> None:
    _, centred, scaled, *_ = _tensors(steps[2])
    assert (steps[2]["state"]["stage"], steps[2]["to"]) == (1, 2)
    assert scaled.square().mean(1).sub(1).abs().max() < 1e-14
    assert scaled.norm(dim=1).sub(2).abs().max() < 1e-14
    # A surface of dimension 2 in the hyperplane of dimension 3: n - 2 of n - 1.
    assert torch.linalg.matrix_rank(scaled) == 3
    assert functional.cosine_similarity(centred, scaled).sub(1).abs().max() < 1e-14


def test_epsilon_keeps_what_the_sentence_says(steps: Any) -> None:
    step = steps[3]
    raw, _, scaled, *_ = _tensors(step)
    eps, deviation = step["state"]["eps"], raw.std(1, correction=0)
    assert eps == 0.01
    assert "0.01" in step["question"]
    kept = scaled.norm(dim=1) / math.sqrt(3)
    assert torch.allclose(kept, deviation / (deviation.square() + eps).sqrt(), atol=1e-14)
    # Half is lost at sqrt(eps / 3), 0.058; the cloud has rows on both sides of it, and long ones that hardly notice.
    half = math.sqrt(eps / 3)
    assert f"{half:.3f}" in step["answer"]
    assert half / math.sqrt(half**2 + eps) == pytest.approx(0.5, abs=1e-15)
    assert kept[step["state"]["selected"]] < 0.55
    assert kept.max() > 0.99
    assert (scaled[deviation == 0] == 0).all()
    assert (deviation == 0).sum() == 2
    # The depth tells how long a row was: it grows with the deviation, and gives it back.
    inside = deviation > 0
    order = deviation[inside].argsort()
    assert (kept[inside][order].diff() >= 0).all()
    back = kept * (eps / (1 - kept.square())).sqrt()
    assert torch.allclose(back, deviation, rtol=1e-9)


def test_gain_tilts_the_plane_and_makes_an_ellipse_and_bias_moves_it(steps: Any) -> None:
    step = steps[4]
    final = _tensors(step)[4]
    gain = torch.tensor(step["state"]["gain"][:3], dtype=torch.float64)
    bias = torch.tensor(step["state"]["bias"][:3], dtype=torch.float64)
    assert (step["state"]["stage"], step["to"]) == (2, 4)
    assert bias.norm() > 0.5
    assert ((final - bias) @ (1 / gain)).abs().max() < 1e-13
    normal = functional.normalize(1 / gain, dim=0)
    assert normal @ torch.full((3,), 1 / math.sqrt(3), dtype=torch.float64) < 0.97
    # The semi-axes are those of diag(g) C, and none points along a feature.
    centring = torch.eye(3, dtype=torch.float64) - 1 / 3
    directions, axes, _ = torch.linalg.svd(torch.diag(gain) @ centring)
    assert axes[0] / axes[1] > 1.3
    assert directions[:, :2].abs().max() < 0.99
    inside = ((final - bias) @ directions[:, :2]) / (math.sqrt(3) * axes[:2])
    assert inside.norm(dim=1).sub(1).abs().max() < 1e-13


def test_rmsnorm_keeps_direction_and_mean_and_fills_the_sphere(steps: Any) -> None:
    raw, _, scaled, *_ = _tensors(steps[5])
    assert steps[5]["state"]["mode"] == "rms"
    assert functional.cosine_similarity(raw, scaled).sub(1).abs().max() < 1e-14
    assert scaled.norm(dim=1).sub(math.sqrt(3)).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(scaled) == 3
    assert scaled.mean(1).abs().max() > 0.9
    flat = raw - raw.mean(1, keepdim=True)
    layer, rms = functional.layer_norm(flat, (3,), eps=0), functional.rms_norm(flat, (3,), eps=0)
    assert torch.allclose(layer, rms, rtol=0, atol=1e-14)


def test_batchnorm_is_one_map_of_the_cloud_and_depends_on_the_others(steps: Any) -> None:
    step = steps[6]
    raw = torch.tensor(step["raw"], dtype=torch.float64)
    batch, layer, rms = (torch.tensor(step["arms"][name], dtype=torch.float64) for name in ("batch", "layer", "rms"))
    # One shift and one stretch for all points.
    stretch = 1 / raw.std(0, correction=0)
    assert torch.allclose(batch, (raw - raw.mean(0)) * stretch, atol=1e-13)
    assert batch.norm(dim=1).max() / batch.norm(dim=1).min() > 1.2
    for image in (layer, rms):
        assert image.norm(dim=1).sub(math.sqrt(3)).abs().max() < 1e-13
    # Without its last neighbours a point lands elsewhere in BatchNorm, and in the same place in the two others.
    fewer = functional.batch_norm(raw[:-8], None, None, training=True, eps=1e-12)
    assert (fewer - batch[:-8]).norm(dim=1).min() > 0.1
    assert torch.allclose(functional.layer_norm(raw[:-8], (3,), eps=0), layer[:-8], atol=1e-13)
    assert torch.allclose(functional.rms_norm(raw[:-8], (3,), eps=0), rms[:-8], atol=1e-13)


def test_only_the_plane_orthogonal_to_all_ones_takes_shifted_copies_to_one_spot(steps: Any) -> None:
    step = steps[1]
    raw, projected, *_ = _tensors(step)
    copies = raw.view(4, 5, 3)
    shifts = copies - copies[:, :1]
    assert (shifts - shifts[..., :1]).abs().max() < 1e-14, "copies differ by one number in every entry"
    assert (projected.view(4, 5, 3) - projected.view(4, 5, 3)[:, :1]).norm(dim=-1).max() > 1
    centred = copies - copies.mean(-1, keepdim=True)
    assert (centred - centred[:, :1]).abs().max() < 1e-14
    # Of all normals, permutations of the features leave only all-ones (up to its sign) as it is.
    normals = functional.normalize(torch.randn(50, 3, dtype=torch.float64), dim=1)
    turned = torch.stack([normals[:, [1, 0, 2]], normals[:, [0, 2, 1]]])
    assert ((turned * normals).sum(-1).abs().min(0).values < 1 - 1e-9).all()


def _texts(page: Any) -> str:
    settle(page)
    return page.locator("#walk .step").inner_text()


def test_each_step_asks_then_plays_its_motion_and_answers(lasting_page: Any, steps: Any) -> None:
    page = lasting_page(reduced_motion="reduce")
    walk = page.locator("#walk")
    state = "normkitExplorer.store.get()"
    on, back = walk.locator(".turns button").last, walk.locator(".turns button").first
    assert on.inner_text() == "Start"
    for number, step in enumerate(steps, 1):
        on.click()
        assert step["question"] in _texts(page)
        assert step["answer"] not in _texts(page)
        assert walk.locator(".count").text_content() == f"Step {number} of 7"
        assert back.is_disabled() == (number == 1)
        before = page.evaluate(state)
        assert (before["walk"], before["stage"]) == (number, step["patch"]["stage"])
        on.click()
        page.wait_for_function("(to) => normkitExplorer.store.get().stage === to", arg=step["to"])
        page.wait_for_function("(text) => document.querySelector('#walk .step').innerText.includes(text)", arg="\n")
        page.locator("#walk .step", has_text=step["answer"]).wait_for()
        after = page.evaluate(state)
        assert after["walk"] == number
        assert [key for key in before if before[key] != after[key]] == (
            ["normal"] if number == 2 else ["edits"] if number == 7 else ["stage"]
        )
    assert on.is_disabled()
    assert walk.locator("[aria-current=step]").count() == 1
    assert walk.locator(".step").get_attribute("aria-live") == "polite"


def test_a_cross_dragged_to_where_the_point_will_land_is_measured_there(lasting_page: Any) -> None:
    page = lasting_page(reduced_motion="reduce")
    page.locator("#walk .turns button").last.click()
    page.wait_for_selector("[data-handle=guess]")
    assert page.locator("[data-handle]").count() == 1, "the point itself cannot be moved while it is asked about"
    # The world grows from stage 0 to 1, so the place is found with the radius of now.
    place = """async () => {
      const { layout, screen } = normkitExplorer["projection.js"];
      const { guessed } = normkitExplorer["frames.js"];
      const { store, frame } = normkitExplorer;
      const view = document.getElementById("view").getBoundingClientRect();
      const { compute } = normkitExplorer["computation.js"];
      const data = JSON.parse(document.getElementById("data").textContent);
      const { panels, radius } = frame();
      const { lands } = guessed(store.get(), compute(store.get(), data));
      const { x, y } = screen(lands, store.get(), layout(panels, view)[0], radius);
      return [x + view.x, y + view.y];
    }"""
    x, y = page.evaluate(place)
    handle = page.locator("[data-handle=guess]").bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(x + 20, y, steps=3)
    page.mouse.move(x, y)
    page.mouse.up()
    settle(page)
    assert page.locator("#walk .measured").inner_text() == ""
    page.locator("#walk .turns button").last.click()
    page.wait_for_function("() => normkitExplorer.store.get().stage === 1")
    settle(page)
    words = page.locator("#walk .measured").inner_text().split()
    miss, way = float(words[words.index("away") - 1]), float(words[-1].rstrip("."))
    assert miss < 0.03, "a pixel is about 0.01 here"
    assert way > 1
    assert page.locator("[data-handle=guess]").count() == 0


def test_the_plane_is_turned_by_hand_and_the_copies_are_measured(lasting_page: Any) -> None:
    page = lasting_page(walk=2)
    page.evaluate(
        "() => { const { WALK } = normkitExplorer['steps.js'];"
        " normkitExplorer.store.set({ ...WALK[1].state, walk: 2 }); }"
    )
    settle(page)
    measured = page.locator("#walk .measured")
    assert measured.inner_text() == "Copies of one point lie up to 3.3 apart."
    set_state(page, normal=[1, 1, 1])
    assert measured.inner_text() == "Copies of one point lie up to 0 apart."
    page.locator("#walk .step", has_text="Only the plane orthogonal to all-ones").wait_for()


def test_the_wrong_norm_is_corrected_and_only_batchnorm_moved_the_others(lasting_page: Any) -> None:
    page = lasting_page(reduced_motion="reduce")
    page.locator("#walk li button").nth(6).click(force=True)
    shown = "() => normkitExplorer.frame().panels.map(({ items }) => items.find(({ pick }) => pick).at.slice(0, -1))"
    settle(page)
    before = torch.tensor(page.evaluate(shown))
    page.locator("#walk .choices").get_by_role("button", name="RMSNorm").click()
    page.locator("#walk .measured", has_text="Not RMSNorm: BatchNorm.").wait_for()
    moved = (torch.tensor(page.evaluate(shown)) - before).norm(dim=-1)
    assert moved[0].min() > 0.05
    assert moved[1:].max() == 0


@pytest.mark.exhaustive
def test_a_motion_travels_and_can_be_paused_and_slowed(explorer: Any) -> None:
    page = explorer(hash="#walk=2")
    page.evaluate("() => { globalThis.seen = []; normkitExplorer.store.subscribe(({ normal }) => seen.push(normal)); }")
    page.locator("#pace").click()
    assert page.locator("#pace").inner_text() == "2×"
    page.locator("#walk .turns button").last.click()
    page.wait_for_function("() => seen.length > 3")
    page.get_by_role("button", name="Pause").click()
    paused = page.evaluate("seen.length")
    settle(page)
    assert page.evaluate("seen.length") == paused
    page.get_by_role("button", name="Play").click()
    page.locator("#walk .step", has_text="Only the plane").wait_for()
    assert page.evaluate("seen.length") > 12, "it travels, it does not jump"


def test_walked_with_keys_the_focus_stays_on_the_walk(lasting_page: Any) -> None:
    page = lasting_page(reduced_motion="reduce")
    page.locator("#walk .turns button").last.focus()
    for walk in range(1, 8):
        for expected in ("Show", "Next" if walk < 7 else "Previous"):
            page.keyboard.press("Enter")
            page.wait_for_function("(text) => document.activeElement.textContent === text", arg=expected)
        assert page.evaluate("normkitExplorer.store.get().walk") == walk


def test_a_touched_control_ends_it_and_keeps_the_picture(explorer: Any) -> None:
    page = explorer(hash="#walk=4")
    read = "['scene', 'cloud', 'eps', 'walk', 'stage'].map((key) => normkitExplorer.store.get()[key])"
    page.wait_for_selector("#walk h3")
    assert page.evaluate(read) == ["three", "small", 0.01, 4, 1]
    page.evaluate("normkitExplorer.store.set({ stage: 1.5, yaw: 1, selected: 4 })")
    settle(page)
    assert page.evaluate(read) == ["three", "small", 0.01, 4, 1.5]
    page.locator("#eps").press("ArrowRight")
    page.wait_for_selector("#walk h3", state="detached")
    scene, cloud, eps, walk, stage = page.evaluate(read)
    assert (scene, cloud, walk, stage) == ("three", "small", 0, 1.5)
    assert eps == pytest.approx(0.0126, abs=1e-3)
    assert page.locator("#walk").get_by_role("button", name="Start").is_visible()
