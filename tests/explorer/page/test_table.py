"""The table: the numbers of the points, moved by keyboard; what is not a number is refused."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from drawing import settle

pytestmark = pytest.mark.browser

_GRIDS = """async ([cases, data, most]) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { grid } = await load("table.js");
  return cases.map((patch) => {
    const state = startFrom(patch);
    return grid(state, compute(state, data), most);
  });
}"""
_OPEN = "document.querySelector('#table').closest('details').open = true"


def _grids(modules: Any, data: Any, *cases: dict[str, Any], most: int = 100) -> list[Any]:
    return modules.run(_GRIDS, [list(cases), data, most])


def test_a_line_holds_what_pytorch_says_of_the_row(modules: Any, page_data: Any) -> None:
    affine = {"gain": [1.5, 0.6, 1.1], "bias": [0.5, -0.3, 0.4]}
    [table] = _grids(modules, page_data, {"cloud": "scatter", "stage": 4, "eps": 0.01, **affine})
    facts = ["mean", "rms", "deviation", "length", "angle to all-ones, °"]
    assert table["columns"] == ["x1", "x2", "x3", *facts, "shown 1", "shown 2", "shown 3"]
    x = torch.tensor(page_data["clouds"]["scatter"]["points"], dtype=torch.float64)
    gain, bias = torch.tensor(list(affine.values()), dtype=torch.float64)
    y = functional.layer_norm(x, (3,), weight=gain, bias=bias, eps=0.01)
    angle = functional.cosine_similarity(x, torch.ones_like(x)).acos().rad2deg()
    measured = torch.stack([x.mean(1), x.square().mean(1).sqrt(), x.std(1, correction=0), x.norm(dim=1), angle], 1)
    told = torch.tensor([line["values"] for line in table["lines"]], dtype=torch.float64)
    assert torch.allclose(told, torch.cat([measured, y], 1), rtol=0, atol=1e-12)
    assert [line["raw"] for line in table["lines"]] == page_data["clouds"]["scatter"]["points"]


def test_each_scene_has_its_columns(modules: Any, page_data: Any, model_data: Any) -> None:
    data = page_data | model_data[1]
    clusters, model, depth, four = _grids(
        modules,
        data,
        {"scene": "clusters", "cloud": "clusters", "stage": 2},
        {"scene": "model", "stage": 1},
        {"scene": "depth", "depth": 4},
        {"scene": "four", "cloud": "four"},
    )
    assert clusters["columns"][8:] == [f"{n} {i}" for n in ("BatchNorm", "LayerNorm", "RMSNorm") for i in (1, 2, 3)]
    assert model["what"] == "token"
    assert model["columns"][0] == "mean"
    assert model["lines"][1]["label"] == "<script>alert(1)</script>"
    assert model["lines"][2]["label"] == '"\\n"'
    assert all(line["raw"] == [] for line in model["lines"])
    assert len(four["lines"][0]["raw"]) == 4
    stack = modules("depth.js", "stack", {"depth": 4, "spread": 1, "residual": True, "seed": 1})
    assert [line["label"] for line in depth["lines"]] == ["0", "1", "2", "3", "4"]
    assert depth["columns"][:4] == ["no norm rms", "no norm mean", "no norm gradient", "Post-LN rms"]
    assert depth["lines"][4]["values"][3] == stack["post"]["rms"][4]


def test_of_many_rows_the_first_hundred_and_the_selected_are_shown(modules: Any, page_data: Any) -> None:
    points = [[float(i), 1.0, 2.0] for i in range(2000)]
    data = page_data | {"clouds": {"many": {"label": "", "n": 3, "points": points, "groups": [0] * 2000}}}
    first, last, early = _grids(
        modules, data, {"cloud": "many"}, {"cloud": "many", "selected": 1500}, {"cloud": "many", "selected": 99}
    )
    assert [line["index"] for line in first["lines"]] == list(range(100))
    assert [line["index"] for line in last["lines"]] == [*range(99), 1500]
    assert [line["index"] for line in early["lines"]] == list(range(100))
    assert first["total"] == 2000


@pytest.fixture
def opened(lasting_page: Any) -> Any:
    """The page with its table open."""
    page = lasting_page(stage=2, eps=0, cloud="small")
    page.evaluate(_OPEN)
    page.wait_for_selector("#table td")
    return page


def test_a_point_is_moved_by_keyboard(opened: Any) -> None:
    page = opened
    cell = page.locator("#table tr").nth(3).locator("input").nth(1)
    assert cell.get_attribute("aria-label") == "x2 of point 3"
    assert cell.input_value() == "-0.05"
    cell.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("2.5")
    page.keyboard.press("Tab")
    assert page.evaluate("JSON.stringify(normkitExplorer.store.get().edits)") == json.dumps(
        {"2": [0.02, 2.5, 0.08]}, separators=(",", ":")
    )
    expected = functional.layer_norm(torch.tensor([0.02, 2.5, 0.08], dtype=torch.float64), (3,), eps=0)
    page.wait_for_selector("#table tr:nth-child(4) td:has-text('0.866667')")
    told = page.locator("#table tr").nth(3).locator("td").all_inner_texts()[-3:]
    assert [float(text.replace("−", "-")) for text in told] == pytest.approx(expected.tolist(), abs=1e-5)
    assert page.evaluate("normkitExplorer.store.get().selected") == 2
    assert page.locator("#table tr").nth(3).locator("button").get_attribute("aria-pressed") == "true"


def test_what_is_no_usable_number_is_refused(opened: Any) -> None:
    page = opened
    cell = page.locator("#table tr").nth(1).locator("input").first
    message = "x1 of point 1 takes a number from -1e9 to 1e9; it stays 0.08."
    for typed in ("", "1e999", "1e30", "-"):
        page.evaluate("document.querySelector('#message').textContent = ''")
        cell.focus()
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.keyboard.type(typed)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#message:text-is({json.dumps(message)})")
        assert cell.input_value() == "0.08"
    assert page.evaluate("Object.keys(normkitExplorer.store.get().edits).length") == 0


def test_0_over_0_is_named_in_its_cells(opened: Any) -> None:
    rows = opened.locator("#table tr")
    assert rows.nth(41).locator("td").all_inner_texts()[-3:] == ["0/0"] * 3
    assert rows.nth(40).locator("td").all_inner_texts()[-3] != "0/0"
    assert opened.locator("#table p").inner_text() == ""


def test_a_row_s_button_selects_it_and_a_layer_s_reads_it_out(opened: Any) -> None:
    page = opened
    page.locator("#table tr").nth(5).locator("button").click()
    assert page.evaluate("normkitExplorer.store.get().selected") == 4
    page.evaluate("normkitExplorer.store.set({ scene: 'depth', depth: 5 })")
    page.wait_for_selector("#table th:has-text('layer')")
    page.locator("#table tr").nth(3).locator("button").click()
    assert page.evaluate("normkitExplorer.store.get().layer") == 2


def test_tokens_are_text_and_many_rows_are_counted(explorer: Any, model_data: Any) -> None:
    data = model_data[1]
    site = data["models"][0]["sites"][0]
    raw = base64.b64decode(site["floats"])
    site |= {"count": 2000, "token": [i % 5 for i in range(2000)]}
    site["floats"] = base64.b64encode(raw * 50).decode()
    page = explorer(data=data, hash="#scene=model&selected=1501")
    settle(page)
    assert page.locator("#table td").count() == 0, "a closed table is left alone"
    page.evaluate(_OPEN)
    page.wait_for_selector("#table td")
    assert page.locator("#table p").inner_text() == "Showing 100 of 2,000."
    assert page.locator("#table tr").nth(2).locator("button").inner_text() == "<script>alert(1)</script>"
    assert page.locator("#table script").count() == 0
    assert page.locator("#table [aria-pressed=true]").count() == 1
    assert math.isfinite(float(page.locator("#table tr").nth(100).locator("td").first.inner_text().replace("−", "-")))
