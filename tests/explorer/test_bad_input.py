"""Hostile, degenerate and very many points in a real browser: shown or told, never executed, no error of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import normkit as nk
from normkit.explorer.activations import activations
from normkit.explorer.exploration import Exploration, explore_models

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

Open = Callable[..., "Page"]

# The page is in words, and its address is written.
TOLD = "() => document.getElementById('summary').textContent"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
# Drawn, and painted too: to paint takes a sixtieth of a second.
STAGES, PAINTED = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4], [0.5, 2, 4]

# Every stage of every mode that a scene offers, with eps and without, drawn and put into words.
_TOUR = """async ([stages, painted]) => {
  const { store } = normkitExplorer;
  const { modesOf } = normkitExplorer["state.js"];
  const { summary } = normkitExplorer["summary.js"];
  const { compute } = normkitExplorer["computation.js"];
  const data = JSON.parse(document.getElementById("data").textContent);
  let drawn = 0;
  for (const mode of modesOf(store.get().scene)) {
    for (const eps of [1e-5, 0]) {
      for (const stage of stages) {
        store.set({ mode, eps, stage, selected: 0 });
        if (painted.includes(stage)) await new Promise(requestAnimationFrame);
        const frame = normkitExplorer.frame();
        const places = frame.panels.flatMap((panel) => (panel.items ?? [])
          .filter((item) => item.kind === "points").flatMap((item) => item.at));
        if (!places.flat().every(Number.isFinite)) throw new Error(`${mode} ${eps} ${stage}: no number`);
        if (!summary(store.get(), compute(store.get(), data))) throw new Error("no words");
        drawn += normkitExplorer.commands().length;
      }
    }
  }
  return drawn;
}"""


def opened(explorer: Open, page: Exploration, **options: Any) -> Page:
    return explorer(dict(page.data), **options)


def assert_unharmed(page: Page) -> None:
    """No element of the hostile text is one of the page."""
    assert page.locator("img, .still svg").count() == 0
    assert page.locator("script").count() == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [3, 4, 6])
def test_a_token_that_is_markup_is_text(explorer: Open, n: int) -> None:
    points = torch.randn(5, n)
    made = nk.explore(points, labels=[HOSTILE, "<b>bold</b>", "&lt;", "\x00\u202e", ""], title=HOSTILE)
    page = opened(explorer, made)
    page.evaluate("() => normkitExplorer.store.set({ selected: 0, stage: 3 })")
    page.evaluate("() => { for (const part of document.querySelectorAll('details')) part.open = true; }")
    page.wait_for_function("() => location.hash.includes('stage=3')")
    assert HOSTILE in page.locator("body").inner_text()
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("b").count() == 0
    assert_unharmed(page)


def test_a_model_whose_names_are_markup(explorer: Open) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.LayerNorm(6))
    gathered = activations(
        model, {"input": torch.randn(2, 9, 6)}, name=HOSTILE, decode=lambda token: f"{HOSTILE}{token}"
    )
    made = explore_models([gathered])
    data = {**made.data, "notes": [HOSTILE]}
    data["models"][0]["sites"][0]["path"] = HOSTILE
    page = opened(explorer, Exploration(data=data))
    page.evaluate("() => { for (const part of document.querySelectorAll('details')) part.open = true; }")
    page.wait_for_function(TOLD)
    assert page.locator("#notes li").inner_text() == HOSTILE
    assert HOSTILE in page.locator("#model option").all_inner_texts()[0]
    assert HOSTILE in page.locator("#site option").all_inner_texts()[0]
    box = page.locator("#canvas").bounding_box()
    for share in (0.3, 0.45, 0.5, 0.55, 0.7):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    assert_unharmed(page)


CLOUDS = {
    "one point of three": torch.tensor([[1.0, 2.0, 4.0]]),
    "one point of one feature": torch.ones(1, 1),
    "two features": torch.randn(9, 2),
    "five features": torch.randn(9, 5),
    "zeros of three": torch.zeros(4, 3),
    "zeros of five": torch.zeros(4, 5),
    "constant rows of four": torch.arange(6.0)[:, None].expand(6, 4),
    "huge": 1e37 * torch.randn(9, 3),
    "huge, projected": 1e37 * torch.randn(9, 8),
    "tiny": 1e-37 * torch.randn(9, 3),
    "tiny, projected": 1e-37 * torch.randn(9, 8),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("points", CLOUDS.values(), ids=CLOUDS)
def test_few_and_degenerate_points_can_be_toured(explorer: Open, points: torch.Tensor) -> None:
    page = opened(explorer, nk.explore(points))
    assert page.evaluate(_TOUR, [STAGES, PAINTED]) > 0
    page.evaluate("() => normkitExplorer.store.set({ scene: 'attention' })")
    assert page.evaluate(_TOUR, [STAGES, PAINTED]) > 0
    assert "NaN" not in page.locator("#invariant").inner_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [3, 384])
def test_very_many_points_are_drawn_and_the_thinning_is_told(explorer: Open, n: int) -> None:
    points = torch.randn(100_000, 3) if n == 3 else torch.randn(3000, n)
    points[7] = torch.nan
    page = opened(explorer, nk.explore(points))
    notes = page.locator("#notes li").all_inner_texts()
    assert notes[0] == f"1 of {len(points):,} points holds NaN, infinity or more than float32 can, and is left out."
    assert notes[1] == f"2,000 of {len(points) - 1:,} points are shown, evenly spread over them all."
    assert page.evaluate(_TOUR, [[0, 2, 4], [2]]) > 2000


def test_a_page_without_models_says_so_in_their_scene(explorer: Open) -> None:
    page = opened(explorer, explore_models([]), hash="#v=1&scene=model")
    page.wait_for_function(TOLD)


def test_in_a_notebooks_frame(window: Open) -> None:
    complaints: list[str] = []
    page = window(
        listeners={
            "pageerror": lambda error: complaints.append(str(error)),
            "console": lambda message: complaints.append(message.text),
            "dialog": lambda dialog: (complaints.append(dialog.message), dialog.dismiss()),
        }
    )
    made = nk.explore(torch.randn(5, 3), labels=[HOSTILE] * 5, title=HOSTILE)
    page.set_content(f"<!doctype html><p>before</p>{made._repr_html_()}<p>after</p>")
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready='true']").wait_for(state="attached")
    assert page.locator("p").count() == 2
    assert frame.locator("h1").inner_text() == HOSTILE
    frame.locator("#stage").fill("2")
    assert complaints == []
