"""The formula of every mode and step, and the invariant below it: its numbers are those of the points, by PyTorch."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch.nn import functional

from normkit.explorer.exploration import explore

pytestmark = pytest.mark.browser

_WORDS = """async ([cases, data]) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { invariant } = await load("formulas.js");
  return cases.map((patch) => {
    const state = startFrom(patch);
    const computed = compute(state, data);
    return { words: invariant(state, computed), shown: computed.shown, raw: computed.raw };
  });
}"""
_FORMULAS = """async (cases) => {
  const { startFrom } = await load("state.js");
  const { formula } = await load("formulas.js");
  return cases.map((patch) => {
    const found = formula(startFrom(patch));
    const foreign = [found, ...found.querySelectorAll("*")].filter((node) => !(node instanceof MathMLElement));
    return { text: found.textContent, foreign: foreign.length, roots: found.querySelectorAll("msqrt").length };
  });
}"""
_AFFINE = {"gain": [1.5, 0.6, 1.1, 0.8], "bias": [0.5, -0.3, 0.4, 0.2], "normal": [0.3, 1, 0.5, 0.2]}
_MODES = ["layer", "rms", "batch", "length", "plane"]


def _formulas(modules: Any, *cases: dict[str, Any]) -> list[str]:
    found = modules.run(_FORMULAS, list(cases))
    assert all(case["foreign"] == 0 for case in found)
    return [case["text"] for case in found]


def _measured(text: str) -> list[float]:
    """The numbers of a sentence, in order."""
    found = re.findall(r"(?<![\w/])[−-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?! ?dimensions)", text)
    return [float(number.replace("−", "-")) for number in found]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-0.0, "0"),
        (1, "1"),
        (-1.5, "−1.5"),
        (math.sqrt(3), "1.732"),
        (2.220446e-16, "2.2e-16"),
        (1e-5, "1e-5"),
        (123456, "1.2e+5"),
        (0.00123456, "0.001235"),
        (math.nan, "0/0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers_are_short(modules: Any, value: float, text: str) -> None:
    given = "NaN" if math.isnan(value) else ("-Infinity" if value < 0 else "Infinity") if math.isinf(value) else None
    call = f'async (value) => (await load("formulas.js")).number({given or "value"})'
    assert modules.run(call, None if given else value) == text


def test_each_mode_has_the_formula_of_each_step(modules: Any) -> None:
    expected = {
        "layer": ["x=(x1,…,x3)", "c=x−13∑jxj𝟏", "z=c13∑jcj2+10−5", "y=g⊙z,g=(1.5,0.6,1.1)"],
        "rms": ["x=(x1,…,x3)", "c=x,nothing is centred", "z=c13∑jcj2+10−5", "y=g⊙z,g=(1.5,0.6,1.1)"],
        "length": ["x=(x1,…,x3)", "c=x,nothing is centred", "z=c∑jcj2+10−5", "y=g⊙z,g=(1.5,0.6,1.1)"],
        "plane": ["x=(x1,…,x3)", "c=x−(u·x)u,u=(0.2592,0.8639,0.4319)", "z=c13∑jcj2+10−5", "y=g⊙z,g=(1.5,0.6,1.1)"],
        "batch": ["xij,i=1,…,N", "cij=xij−1N∑kxkj", "zij=cij1N∑kckj2+10−5", "yij=gjzij,g=(1.5,0.6,1.1)"],
    }
    for mode, texts in expected.items():
        assert _formulas(modules, *({"mode": mode, "stage": stage, **_AFFINE} for stage in range(4))) == texts
    [last] = _formulas(modules, {"mode": "layer", "stage": 4, **_AFFINE})
    assert last == "y=g⊙z+b,g=(1.5,0.6,1.1),b=(0.5,−0.3,0.4)"


def test_between_two_stages_the_formula_is_that_of_the_step_under_way(modules: Any) -> None:
    early, late, there = _formulas(modules, {"stage": 1.01}, {"stage": 1.99}, {"stage": 2})
    assert early == late == there


def test_epsilon_stands_in_its_place_with_its_value(modules: Any) -> None:
    inside, outside, zero = _formulas(
        modules,
        {"stage": 2, "eps": 0.01},
        {"stage": 2, "eps": 0.01, "place": "outside"},
        {"stage": 2, "eps": 0},
    )
    assert inside == outside == "z=c13∑jcj2+0.01"
    assert zero == "z=c13∑jcj2+0"
    parts = """async (place) => {
      const { startFrom } = await load("state.js");
      const whole = (await load("formulas.js")).formula(startFrom({ stage: 2, eps: 0.01, place }));
      return [whole.querySelector("msqrt").textContent, whole.querySelector("msubsup").textContent];
    }"""
    assert modules.run(parts, "inside") == ["13∑jcj2+0.01", "cj2"]
    assert modules.run(parts, "outside") == ["13∑jcj2", "cj2"]


def test_each_scene_has_its_formulas(modules: Any) -> None:
    four, model, three, gradient, outside, depth, plain = _formulas(
        modules,
        {"scene": "four", "stage": 3, "cloud": "four", **_AFFINE},
        {"scene": "model", "stage": 3},
        {"scene": "clusters", "stage": 2},
        {"scene": "gradient", "stage": 2},
        {"scene": "gradient", "stage": 2, "place": "outside", "mode": "length"},
        {"scene": "depth", "spread": 1.5},
        {"scene": "depth", "residual": False},
    )
    assert four.endswith("g=(1.5,0.6,1.1,0.8)")
    assert model == "y=g⊙z"
    assert three.index("BatchNorm: zij") < three.index("LayerNorm: z=c") < three.index("RMSNorm: z=c")
    assert gradient.endswith("dx=1s(I−𝟏𝟏T3−zzT3)(g⊙dy),s=13∑jcj2+10−5")
    assert outside.endswith("dx=1s(I−srzzT)(g⊙dy),s=∑jcj2+10−5=r+10−5")
    assert "Post-LN: h←LN(h+f(h))" in depth
    assert "(0,2·1.5264)" in depth
    assert "Post-LN: h←LN(f(h))" in plain


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_gradient_formula_is_the_gradient(place: str) -> None:
    """Its form for both places of eps, against automatic differentiation."""
    x = torch.tensor([0.3, -1.1, 0.5], dtype=torch.float64, requires_grad=True)
    upstream, eps = torch.tensor([1.0, -0.5, 0.8], dtype=torch.float64), 0.1
    c = x - x.mean()
    root = c.square().mean().sqrt()
    s = (c.square().mean() + eps).sqrt() if place == "inside" else root + eps
    z = c / s
    z.backward(upstream)
    stretch = 1 if place == "inside" else s / root
    expected = (upstream - upstream.mean() - stretch * z * (z @ upstream) / 3) / s
    assert torch.allclose(x.grad, expected.detach(), rtol=1e-13, atol=1e-14)


def _norm(mode: str, x: torch.Tensor, eps: float, normal: list[float]) -> torch.Tensor:
    n = x.shape[1]
    if mode == "layer":
        return functional.layer_norm(x, (n,), eps=eps)
    if mode == "rms":
        return functional.rms_norm(x, (n,), eps=eps)
    if mode == "batch":
        centred = x - x.mean(0)
        return centred / (centred.square().mean(0) + eps).sqrt()
    if mode == "length":
        return x / (x.square().sum(1, keepdim=True) + eps).sqrt()
    u = functional.normalize(torch.tensor(normal[:n], dtype=x.dtype), dim=0)
    centred = x - (x @ u)[:, None] * u
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("scene", ["three", "four"])
@pytest.mark.parametrize("mode", _MODES)
def test_the_invariant_is_true_in_every_mode(modules: Any, page_data: Any, mode: str, scene: str) -> None:
    cases = [
        {
            "scene": scene,
            "cloud": "four" if scene == "four" else "scatter",
            "mode": mode,
            "stage": stage,
            "eps": eps,
            **_AFFINE,
        }
        for stage, eps in itertools.product([0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4], [0, 0.01])
    ]
    for case, found in zip(cases, modules.run(_WORDS, [cases, page_data]), strict=True):
        words, x = found["words"], torch.tensor(found["raw"], dtype=torch.float64)
        z = _norm(mode, x, case["eps"], case["normal"])
        stage = case["stage"]
        assert len(words.split()) <= 30
        for error in re.findall(r"largest error ([^)]+)\)", words):
            assert float(error) < 1e-14, words
        # Gain and bias taken off: of y / g, and of (y - b) / g.
        assert (" of y / g" in words) == (2 < stage <= 3)
        assert (" of (y − b) / g" in words) == (stage > 3)
        if stage >= 2:
            sizes = z.std(0, correction=0) if mode == "batch" else z.norm(dim=1)
            radius = 1 if mode in ("length", "batch") else math.sqrt(x.shape[1])
            size = "deviation" if mode == "batch" else "length"
            assert f"Every {size}{' there' if stage > 2 else ''} is " in words
            assert f"{radius:.4g}" in words
            assert ("largest error" in words[words.index("Every") :]) == (case["eps"] == 0)
            if case["eps"] > 0:
                [taken] = re.findall(r"epsilon takes up to ([\d.e-]+\d)", words)
                assert float(taken) == pytest.approx((radius - sizes.min()).item(), rel=6e-4)
                assert sizes.max() <= radius
        if mode in ("rms", "length"):
            means = (z if stage >= 2 else torch.tensor(found["shown"])).mean(1)
            assert words.startswith("Nothing is centred: means")
            assert _measured(words)[:2] == pytest.approx([means.min().item(), means.max().item()], abs=6e-4)
        else:
            what = {"plane": "part along u", "batch": "mean of every column"}.get(mode, "mean of every row")
            assert words.startswith(f"The {what}")
            assert (" is 0 (largest error" in words) == (stage >= 1)


def test_what_is_0_over_0_is_named(modules: Any, page_data: Any) -> None:
    cases = [{"cloud": "small", "mode": mode, "stage": 2, "eps": eps} for eps in (0, 0.01) for mode in _MODES]
    layer, rms, batch, length, plane, *others = [found["words"] for found in modules.run(_WORDS, [cases, page_data])]
    assert layer.endswith("0/0 at rows 41, 42: entries all equal.")
    assert rms.endswith("0/0 at row 42: entries all 0.")
    assert length.endswith("0/0 at row 42: entries all 0.")
    assert plane.endswith("0/0 at row 42: it lies along u.")
    assert "0/0" not in batch
    assert not any("0/0" in words for words in others)


def test_a_constant_column_and_a_lone_point_are_0_over_0_to_batchnorm(modules: Any, page_data: Any) -> None:
    clouds = {"column": {"label": "", "n": 3, "points": [[1, 2, 0], [2, 2, 1], [4, 2, 5]], "groups": [0, 0, 0]}}
    clouds["lone"] = {"label": "", "n": 3, "points": [[1, 2, 4]], "groups": [0]}
    cases = [{"cloud": name, "mode": "batch", "stage": 2, "eps": eps} for name in clouds for eps in (0, 0.01)]
    column, held, lone, alone = [
        found["words"] for found in modules.run(_WORDS, [cases, page_data | {"clouds": clouds}])
    ]
    assert column.endswith("0/0 at column 2: values all equal.")
    assert "Every deviation is 1 (largest error" in column
    assert held.endswith("epsilon takes up to 1.")
    assert lone.endswith("0/0 at columns 1, 2, 3: values all equal.")
    assert "Every deviation" not in lone
    assert "0/0" not in alone


def test_no_points_and_nothing_but_0_over_0(modules: Any, page_data: Any) -> None:
    clouds = {"none": {"label": "", "n": 3, "points": [], "groups": []}}
    clouds["equal"] = {"label": "", "n": 3, "points": [[1, 1, 1], [2, 2, 2]], "groups": [0, 0]}
    cases = [{"cloud": name, "stage": 2, "eps": 0} for name in clouds]
    none, equal = [found["words"] for found in modules.run(_WORDS, [cases, page_data | {"clouds": clouds}])]
    assert none == "There are no points."
    assert equal == "0/0 at rows 1, 2: entries all equal."


def test_a_gain_of_zero_is_told_and_measured(modules: Any, page_data: Any) -> None:
    case = {"stage": 4, "gain": [1.5, 0, 1, 1], "bias": [0.5, -0.3, 0.4, 0]}
    [found] = modules.run(_WORDS, [[case], page_data])
    assert found["words"] == "Gain 0 flattens axis 2: only its bias, −0.3, is left there."
    assert {row[1] for row in found["shown"]} == {-0.3}


def test_three_norms_each_have_their_own(modules: Any, page_data: Any) -> None:
    case = {"scene": "clusters", "cloud": "clusters", "stage": 2, "eps": 0}
    [found] = modules.run(_WORDS, [[case], page_data])
    batch, layer, rms = found["words"].split("\n")
    assert batch.startswith("BatchNorm: The mean of every column is 0")
    assert "Every deviation is 1" in batch
    assert layer.startswith("LayerNorm: The mean of every row is 0")
    assert rms.startswith("RMSNorm: Nothing is centred")
    assert max(len(line.split()) for line in (batch, layer, rms)) <= 20


def test_the_stacks_are_read_out_at_their_layer(modules: Any, page_data: Any) -> None:
    cases = [{"scene": "depth", "depth": 6, "layer": layer} for layer in (-1, 2)]
    last, second = [found["words"] for found in modules.run(_WORDS, [cases, page_data])]
    options = {"depth": 6, "spread": 1, "residual": True, "seed": 1}
    stack = modules("depth.js", "stack", options)
    for words, layer in ((last, 6), (second, 2)):
        assert words.startswith(f"Rms at layer {layer}: no norm ")
        told = [float(number) for number in re.findall(r"(?:norm|LN|Norm) ([\d.]*\d)", words)]
        assert told == pytest.approx([arm["rms"][layer] for arm in stack.values()], rel=6e-4)
    assert max(abs(size - 1) for size in stack["post"]["rms"][1:]) < 1e-3


def test_a_model_s_rows_are_told_from_their_full_vectors(modules: Any, page_data: Any, model_data: Any) -> None:
    vectors, data = model_data
    modes = ["layer", "rms", "length"]
    cases = [{"scene": "model", "mode": mode, "stage": stage, "eps": 0} for mode in modes for stage in range(5)]
    for case, found in zip(cases, modules.run(_WORDS, [cases, page_data | data]), strict=True):
        words = found["words"]
        z = _norm(case["mode"], vectors, 0, [])
        if case["stage"] >= 2:
            radius = "1" if case["mode"] == "length" else "√16 = 4"
            assert re.search(rf"Every length(?: there)? is {radius}\.", words)
        assert "error" not in words, "of three coordinates no error can be measured"
        if case["mode"] == "layer" and case["stage"] >= 1:
            assert re.search(r"The mean of every row.* is 0\.", words)
        else:
            means = (z if case["stage"] >= 2 else vectors).mean(1)
            told = _measured(words)[:2]
            assert told == pytest.approx([means.min().item(), means.max().item()], abs=1e-3)
        assert "Drawn are 3 of 16 coordinates" in words
        assert words.endswith(", the shadow of an ellipsoid.") == (case["stage"] > 2)


def test_without_the_residual_the_growth_of_gradients_is_measured_and_explained(modules: Any, page_data: Any) -> None:
    cases = [{"scene": "depth", "depth": 24, "residual": residual} for residual in (False, True)]
    bare, whole = [found["words"].split("\n") for found in modules.run(_WORDS, [cases, page_data])]
    assert len(whole) == 1
    stack = modules("depth.js", "stack", {"depth": 24, "spread": 1, "residual": False, "seed": 1})
    told = [float(number) for number in re.findall(r"(?:norm|LN|Norm) (\d(?:\.\d+)?)", bare[1])]
    grown = [(arm["gradient"][0] / arm["gradient"][24]) ** (1 / 24) for arm in stack.values()]
    assert told == pytest.approx(grown + [arm["stretch"] for arm in stack.values()], rel=6e-4)
    assert re.search(r"1\.211 for wide layers", bare[1])
    assert 1 / math.sqrt(1 - 1 / math.pi) == pytest.approx(1.211, abs=5e-4)


def test_a_massive_token_is_named_with_its_measured_size(modules: Any, page_data: Any) -> None:
    rows = torch.randn(30, 16, dtype=torch.float64)
    rows[4, 2] = 3000
    data = explore(rows, labels=[f"token {i}" for i in range(30)]).data
    [found] = modules.run(_WORDS, [[{"scene": "model", "stage": 2}], page_data | {"models": data["models"]}])
    rms = rows.square().mean(1).sqrt()
    told = re.search(r"Token “token 4” has rms ([\d.]+), ([\d.]+) times the median row's", found["words"])
    assert float(told[1]) == pytest.approx(float(rms[4]), rel=1e-3)
    assert re.search(r"feature 2 alone is (100|99\.\d+) % of its squared length, a massive activation", found["words"])
    assert float(told[2]) == pytest.approx(float(rms[4] / rms.sort().values[15]), rel=6e-3)
