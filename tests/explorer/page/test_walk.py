"""The walk: each step's words are true of the points that its picture shows, and a touched control ends it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from drawing import settle
from normkit.explorer import document

pytestmark = pytest.mark.browser

_STEPS = """async (data) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { WALK } = await load("walk.js");
  return WALK.map(({ title, sentence, state: patch }) => {
    const state = startFrom(patch);
    const { stages, rows, raw, arms, shown } = compute(state, data);
    const images = arms && Object.fromEntries(Object.entries(arms).map(([name, arm]) => [name, arm.shown]));
    return { title, sentence, patch, state, stages, rows, raw, shown, arms: images };
  });
}"""


@pytest.fixture(scope="module")
def steps(modules: Any) -> Any:
    """The six steps with what the page computes for each."""
    clouds = json.loads((Path(document.__file__).parent / "page" / "clouds.json").read_text(encoding="utf-8"))
    return modules.run(_STEPS, {"clouds": clouds, "models": []})


def _tensors(step: Any) -> list[torch.Tensor]:
    return [torch.tensor(stage, dtype=torch.float64) for stage in step["stages"]]


def test_there_are_six_short_steps_and_each_is_a_state_that_holds(steps: Any) -> None:
    titles = [step["title"] for step in steps]
    assert titles == [
        "Why a plane",
        "Why a sphere",
        "What epsilon does to small vectors",
        "What gain and bias do",
        "Why RMSNorm drops the plane",
        "Why BatchNorm is another thing",
    ]
    for step in steps:
        assert step["sentence"].count(". ") <= 1
        assert step["sentence"].endswith(".")
        assert all(step["state"][key] == value for key, value in step["patch"].items())


def test_centring_moves_along_all_ones_into_one_plane(steps: Any) -> None:
    raw, centred, *_ = _tensors(steps[0])
    assert steps[0]["state"]["stage"] == 1
    moved = raw - centred
    assert (moved - moved[:, :1]).abs().max() < 1e-15
    assert centred.sum(1).abs().max() < 1e-14
    # Only the height is lost: with it the point is back, and it is sqrt(n) times the mean.
    height = raw @ torch.ones(3, dtype=torch.float64) / math.sqrt(3)
    assert torch.allclose(height, raw.mean(1) * math.sqrt(3), atol=1e-14)
    assert torch.linalg.matrix_rank(centred) == 2


def test_dividing_by_the_deviation_gives_the_length_2_and_a_sphere(steps: Any) -> None:
    _, centred, scaled, *_ = _tensors(steps[1])
    assert steps[1]["state"]["stage"] == 2
    assert scaled.square().mean(1).sub(1).abs().max() < 1e-14
    assert scaled.norm(dim=1).sub(2).abs().max() < 1e-14
    # A surface of dimension 2 in the hyperplane of dimension 3: n - 2 of n - 1.
    assert torch.linalg.matrix_rank(scaled) == 3
    assert functional.cosine_similarity(centred, scaled).sub(1).abs().max() < 1e-14


def test_epsilon_keeps_what_the_sentence_says(steps: Any) -> None:
    step = steps[2]
    raw, _, scaled, *_ = _tensors(step)
    eps, deviation = step["state"]["eps"], raw.std(1, correction=0)
    assert eps == 0.01
    assert "0.01" in step["sentence"]
    kept = scaled.norm(dim=1) / math.sqrt(3)
    assert torch.allclose(kept, deviation / (deviation.square() + eps).sqrt(), atol=1e-14)
    # Half is lost at sqrt(eps / 3), 0.058; the cloud has rows on both sides of it, and long ones that hardly notice.
    half = math.sqrt(eps / 3)
    assert f"{half:.3f}" in step["sentence"]
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
    step = steps[3]
    final = _tensors(step)[4]
    gain = torch.tensor(step["state"]["gain"][:3], dtype=torch.float64)
    bias = torch.tensor(step["state"]["bias"][:3], dtype=torch.float64)
    assert step["state"]["stage"] == 4
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
    raw, _, scaled, *_ = _tensors(steps[4])
    assert steps[4]["state"]["mode"] == "rms"
    assert functional.cosine_similarity(raw, scaled).sub(1).abs().max() < 1e-14
    assert scaled.norm(dim=1).sub(math.sqrt(3)).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(scaled) == 3
    assert scaled.mean(1).abs().max() > 0.9
    flat = raw - raw.mean(1, keepdim=True)
    layer, rms = functional.layer_norm(flat, (3,), eps=0), functional.rms_norm(flat, (3,), eps=0)
    assert torch.allclose(layer, rms, rtol=0, atol=1e-14)


def test_batchnorm_is_one_map_of_the_cloud_and_depends_on_the_others(steps: Any) -> None:
    step = steps[5]
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


def test_it_is_walked_with_buttons(lasting_page: Any) -> None:
    page = lasting_page()
    walk = page.locator("#walk")
    state = "normkitExplorer.store.get()"
    walk.get_by_role("button", name="Start").click()
    page.wait_for_selector("#walk h3")
    assert walk.locator("h3").inner_text() == "Why a plane"
    assert walk.locator(".step").get_attribute("aria-live") == "polite"
    assert walk.locator(".count").text_content() == "Step 1 of 6"
    assert walk.locator(".turns button").first.is_disabled()
    walk.get_by_role("button", name="Next").click()
    page.wait_for_selector("#walk h3:text-is('Why a sphere')")
    assert page.evaluate(f"{state}.scene") == "four"
    walk.get_by_role("button", name="Previous").click()
    walk.locator("li button").nth(5).click()
    page.wait_for_selector("#walk h3:text-is('Why BatchNorm is another thing')")
    assert walk.locator("[aria-current=step]").count() == 1
    assert walk.locator(".turns button").last.is_disabled()
    assert page.evaluate(f"[{state}.scene, {state}.walk]") == ["clusters", 6]


def test_walked_with_keys_the_focus_stays_on_the_walk(lasting_page: Any) -> None:
    page = lasting_page()
    focused = "() => document.activeElement.textContent"
    page.locator("#walk .turns button").last.focus()
    for _ in range(5):
        page.keyboard.press("Enter")
        settle(page)
        assert page.evaluate(focused) == "Next"
    page.keyboard.press("Enter")
    page.wait_for_function("() => normkitExplorer.store.get().walk === 6")
    page.wait_for_function("() => document.activeElement.textContent === 'Previous'")


def test_a_touched_control_ends_it_and_keeps_the_picture(explorer: Any) -> None:
    page = explorer(hash="#walk=3")
    read = "['scene', 'cloud', 'eps', 'walk', 'stage'].map((key) => normkitExplorer.store.get()[key])"
    page.wait_for_selector("#walk h3")
    assert page.evaluate(read) == ["three", "small", 0.01, 3, 2]
    page.evaluate("normkitExplorer.store.set({ stage: 1.5, yaw: 1, selected: 4 })")
    settle(page)
    assert page.evaluate(read) == ["three", "small", 0.01, 3, 1.5]
    page.locator("#eps").press("ArrowRight")
    page.wait_for_selector("#walk h3", state="detached")
    scene, cloud, eps, walk, stage = page.evaluate(read)
    assert (scene, cloud, walk, stage) == ("three", "small", 0, 1.5)
    assert eps == pytest.approx(0.0126, abs=1e-3)
    assert page.locator("#walk").get_by_role("button", name="Start").is_visible()
