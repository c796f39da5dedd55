"""The script that "Copy as Python" gives: it runs, and prints the numbers of the table."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.browser

_SCRIPTS = """async ([cases, data]) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { grid } = await load("table.js");
  const { python } = await load("python.js");
  return cases.map((patch) => {
    const state = startFrom(patch);
    const computed = compute(state, data);
    return { script: python(state, computed), table: grid(state, computed), gradient: computed.gradient?.input };
  });
}"""


def _run(scripts: list[str]) -> list[list[str]]:
    """What each script prints, run in a namespace of its own."""
    before, printed = torch.get_default_dtype(), []
    for script in scripts:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                exec(script, {})
            finally:
                torch.set_default_dtype(before)
        printed.append(output.getvalue().rstrip("\n").split("\n"))
    return printed


def _same(told: list[str], numbers: list[float], tolerance: float) -> bool:
    return all(
        math.isnan(number) if text == "nan" else math.isclose(float(text), number, rel_tol=tolerance, abs_tol=1e-12)
        for text, number in zip(told, numbers, strict=True)
    )


def _check(modules: Any, data: Any, cases: list[dict[str, Any]], tolerance: float = 1e-12) -> list[dict[str, Any]]:
    found = modules.run(_SCRIPTS, [cases, data])
    for case, page, lines in zip(cases, found, _run([each["script"] for each in found]), strict=True):
        table = page["table"]
        told = [line.split("\t") for line in lines if not line.startswith("#")]
        assert told[0] == [table["what"], *table["columns"]], case
        assert len(told) == len(table["lines"]) + 1
        for line, row in zip(told[1:], table["lines"], strict=True):
            assert _same(line[1:], row["raw"] + row["values"], tolerance), (case, line, row)
        page["printed"] = lines
    return found


def test_it_prints_the_numbers_of_every_mode_and_stage(modules: Any, page_data: Any) -> None:
    modes = ["layer", "rms", "batch", "length", "plane"]
    cases = [
        {"scene": scene, "cloud": cloud, "mode": mode, "stage": stage, "eps": eps, "place": place}
        for (scene, cloud), mode, (eps, place), stage in itertools.product(
            [("three", "scatter"), ("three", "small"), ("four", "four")],
            modes,
            [(0, "inside"), (1e-5, "inside"), (0.01, "outside")],
            [2, 3.25, 4],
        )
    ]
    _check(modules, page_data, [*cases, {"stage": 0}, {"stage": 0.5}, {"stage": 1, "mode": "batch"}])


def test_moved_points_lone_points_and_three_norms_and_attention(modules: Any, page_data: Any) -> None:
    clouds = page_data["clouds"] | {"lone": {"label": "", "n": 3, "points": [[1, 2, 4]], "groups": [0]}}
    cases = [
        {"edits": {3: [1e-9, -250.5, 1 / 3]}, "stage": 4},
        {"cloud": "lone", "mode": "batch", "stage": 4, "eps": 0.5},
        {"cloud": "lone", "mode": "batch", "stage": 2, "eps": 0},
        {"scene": "clusters", "cloud": "clusters", "stage": 3.5},
        {"scene": "attention", "cloud": "keys", "stage": 4, "size": 1.5, "query": [0.2, -1, 2]},
        {"scene": "attention", "cloud": "keys", "stage": 1, "mode": "rms", "edits": {2: [1, 2, 3]}},
    ]
    _check(modules, page_data | {"clouds": clouds}, cases)


def test_it_agrees_on_what_is_0_over_0(modules: Any, page_data: Any) -> None:
    points = [[0.1, 0.1, 0.1], [0.0, 0.0, 0.0], [0.21, 0.7, 0.35], [1.0, 0.1, 3.0]]
    clouds = {"odd": {"label": "", "n": 3, "points": points, "groups": [0] * 4}}
    clouds["column"] = {"label": "", "n": 3, "points": [[0.1 * k, 0.1, 0.3] for k in range(23)], "groups": [0] * 23}
    cases = [
        {"cloud": cloud, "mode": mode, "stage": 2, "eps": 0, "place": place, "normal": normal}
        for cloud, mode, place, normal in itertools.product(
            clouds, ["layer", "batch", "plane"], ["inside", "outside"], [[0.3, 1, 0.5], [2.5] * 3]
        )
    ]
    found = _check(modules, page_data | {"clouds": clouds}, cases)
    assert all("nan" in line for page in found[:4] for line in page["printed"][1:3])


def test_the_gradient_is_printed(modules: Any, page_data: Any) -> None:
    cases = [
        {"scene": "gradient", "mode": mode, "selected": 2, "stage": 4, "eps": 0.1, "place": place}
        for mode, place in itertools.product(["layer", "rms", "length", "plane"], ["inside", "outside"])
    ]
    for page in _check(modules, page_data, cases):
        [line] = [line for line in page["printed"] if line.startswith("#")]
        assert line.startswith("# gradient at point 3: ")
        assert _same(line.split(": ")[1].split(), page["gradient"], 1e-12)


def test_it_runs_the_random_layers_again(modules: Any, page_data: Any) -> None:
    cases = [
        {"scene": "depth", "depth": 3, "seed": 0},
        {"scene": "depth", "depth": 12, "seed": 4294967295, "spread": 1.3},
        {"scene": "depth", "depth": 6, "residual": False, "spread": 0.5},
    ]
    # Sums of 64 products in another order, once a layer.
    _check(modules, page_data, cases, tolerance=1e-11)


def test_a_model_s_coordinates_are_called_projections(modules: Any, page_data: Any, model_data: Any) -> None:
    data = page_data | model_data[1]
    [page] = _check(modules, data, [{"scene": "model", "stage": 3.5}])
    assert "The page holds projections only: of each row three coordinates" in page["script"]
    assert "# Rows of 16 features at " in page["script"]
    assert "F.layer_norm" not in page["script"]


def test_a_name_that_is_code_is_never_run(modules: Any, page_data: Any, model_data: Any) -> None:
    data = page_data | model_data[1]
    data["models"][0]["sites"][0]["path"] = 'x"""\nraise SystemExit(1)\n#\r\u2028raise SystemExit(2)'
    data["models"][0]["tokens"] = ['"])\nraise SystemExit(3)\n', "\\", "a\u2028b", "\t", "x"]
    [found] = modules.run(_SCRIPTS, [[{"scene": "model"}], data])
    assert len(_run([found["script"]])) == 1
