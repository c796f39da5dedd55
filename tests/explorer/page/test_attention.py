"""The scene of attention: the same keys before and after a norm under one query, and what is said of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

from drawing import set_state

pytestmark = pytest.mark.browser

COMPUTED = """async (patch) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  return patch.states.map((each) => {
    const state = startFrom({ scene: "attention", stage: 4, ...each });
    const { raw, shown, before, after, groups } = compute(state, patch.data);
    return { raw, shown, before, after, groups };
  });
}"""


def _computed(modules: Any, data: Any, *states: dict[str, Any]) -> Any:
    return modules.run(COMPUTED, {"states": list(states), "data": data})


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_layernorm_makes_scores_scale_free_and_all_keys_selectable(modules: Any, page_data: Any) -> None:
    one, large = _computed(modules, page_data, {"eps": 0}, {"eps": 0, "size": 4})
    raw = _tensor(one["raw"])
    assert torch.allclose(_tensor(one["shown"]), functional.layer_norm(raw, (3,), eps=0), atol=1e-14)
    assert one["before"]["selectable"].count(False) == 3
    assert all(one["after"]["selectable"])
    assert torch.allclose(_tensor(large["before"]["scores"]), 4 * _tensor(one["before"]["scores"]), rtol=1e-14)
    assert torch.allclose(_tensor(large["after"]["weights"]), _tensor(one["after"]["weights"]), rtol=1e-12)
    assert large["before"]["entropy"] < one["before"]["entropy"]
    assert one["after"]["change"] < 1e-14 < 0.01 < one["before"]["change"]


def test_a_query_along_all_ones_counts_the_majority_after_layernorm_alone(modules: Any, page_data: Any) -> None:
    layer, rms = _computed(modules, page_data, *({"mode": mode, "query": [1, 1, 1]} for mode in ("layer", "rms")))
    assert layer["groups"].count(0) == 5
    assert layer["after"]["shares"] == pytest.approx([5 / 8, 3 / 8], abs=1e-14)
    assert max(layer["after"]["weights"]) - min(layer["after"]["weights"]) < 1e-14
    assert max(layer["before"]["weights"]) > 0.3
    assert max(rms["after"]["weights"]) - min(rms["after"]["weights"]) > 0.05, (
        "RMSNorm keeps the means, which such a query sees"
    )


def test_in_a_narrow_panel_the_names_of_keys_do_not_touch(lasting_page: Any) -> None:
    page = lasting_page(scene="attention", stage=4)
    names = """(width) => normkitExplorer.frame().panels[0].strip({ x: 0, y: 0, width, height: 100 })
      .filter(({ text }) => /^8 ?×$/.test(text)).map(({ text }) => text)"""
    assert page.evaluate(names, 400) == ["8 ×"]
    assert page.evaluate(names, 190) == ["8×"], "it read 7×8× there"


def test_the_keys_travel_over_the_whole_timeline(modules: Any, page_data: Any) -> None:
    raw, centred, between = _computed(modules, page_data, *({"stage": stage, "eps": 0} for stage in (0, 2, 1)))
    assert raw["shown"] == raw["raw"]
    middle = _tensor(centred["shown"])
    assert middle.mean(1).abs().max() < 1e-14
    assert torch.allclose(_tensor(between["shown"]), (_tensor(raw["raw"]) + middle) / 2, atol=1e-14)
    assert raw["before"]["weights"] == raw["after"]["weights"]


def test_a_key_and_the_query_are_dragged_and_what_follows_is_said(lasting_page: Any) -> None:
    page = lasting_page(scene="attention", stage=4, selected=4, size=2)
    titles = page.evaluate("normkitExplorer.frame().panels.map(({ title }) => title)")
    assert titles == ["As they are", "After LayerNorm"]
    words = page.locator("#invariant").inner_text()
    assert re.search(r"As they are: .* selects 5 of the 8 keys", words)
    assert re.search(r"After the norm: .* selects 8 of the 8 keys", words)
    moved = {}
    for handle, key in (("query", "query"), ("point", "edits")):
        before = page.evaluate("normkitExplorer.store.get()")
        box = page.locator(f"[data-handle={handle}]").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 40, y - 30, steps=4)
        page.mouse.up()
        set_state(page)
        after = page.evaluate("normkitExplorer.store.get()")
        assert [name for name in before if before[name] != after[name]] == [key]
        moved[handle] = page.locator(f"[data-handle={handle}]").bounding_box()
        assert moved[handle]["x"] - box["x"] == pytest.approx(40, abs=8)
    assert page.locator("#invariant").inner_text() != words
    page.locator("#even").click()
    page.wait_for_function(
        "() => document.getElementById('invariant').innerText.includes('62.5 %: all keys count alike')"
    )


def test_a_key_that_is_0_over_0_takes_every_weight_with_it(lasting_page: Any) -> None:
    page = lasting_page(scene="attention", cloud="keys", stage=4, eps=0, edits={"2": [1, 1, 1]})
    words = page.locator("#invariant").inner_text()
    assert "After the norm: key 3 is 0/0, and with it every weight." in words
    assert "As they are: scores" in words
    page.wait_for_function("() => document.getElementById('summary').textContent.includes('every weight is 0/0')")
