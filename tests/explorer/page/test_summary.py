"""The scene in words: short whatever the state, and true of the numbers that PyTorch gives."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.browser

_SUMMARIES = """async ([cases, data]) => {
  const { compute } = await load("computation.js");
  const { startFrom } = await load("state.js");
  const { summary } = await load("summary.js");
  return cases.map((patch) => {
    const state = startFrom(patch);
    return summary(state, compute(state, data));
  });
}"""
_AFFINE = {"gain": [1.5, 0.6, 1.1, 0.8], "bias": [0.5, -0.3, 0.4, 0.2]}
_ODD = {"gain": [-1.2345, 0.001234, 1.5678, -2.3456], "bias": [-0.1234, 1.2345, 2.3456, -1.2345]}


def _summaries(modules: Any, data: Any, *cases: dict[str, Any]) -> list[str]:
    return modules.run(_SUMMARIES, [list(cases), data])


def test_it_has_at_most_sixty_words_in_every_state(modules: Any, page_data: Any, model_data: Any) -> None:
    data = page_data | model_data[1]
    data["models"][0]["sites"][0]["path"] = "a very long name " * 40
    scenes = {
        "three": "small",
        "four": "four",
        "gradient": "small",
        "clusters": "clusters",
        "model": "",
        "attention": "keys",
        "depth": "",
    }
    modes = ["layer", "rms", "batch", "length", "plane"]
    few = {
        "gradient": [*modes[:2], *modes[3:]],
        "model": ["layer", "rms", "length"],
        "attention": ["layer", "rms", "length"],
    }
    cases = [
        {
            "scene": scene,
            "cloud": cloud or "none",
            "mode": mode,
            "stage": stage,
            "eps": eps,
            "selected": 40,
            "depth": 2,
            **_ODD,
        }
        for (scene, cloud), mode, stage, eps in itertools.product(
            scenes.items(), modes, [0, 0.4, 1, 1.6, 2, 2.5, 3, 3.5, 4], [0, 0.001234]
        )
        if mode in few.get(scene, modes)
    ]
    for case, words in zip(cases, _summaries(modules, data, *cases), strict=True):
        assert 3 <= len(words.split()) <= 60, (case, words)
        assert words.endswith(".")
        assert "undefined" not in words
        assert "NaN" not in words


def test_it_says_where_the_points_lie(modules: Any, page_data: Any) -> None:
    three = [{"cloud": "scatter", "stage": stage, "eps": 0, **_AFFINE} for stage in (0, 1, 1.5, 2, 3, 4)]
    raw, centred, way, scaled, gained, biased = _summaries(modules, page_data, *three)
    assert raw == "40 points in 3 dimensions, LayerNorm. They lie where they were given."
    assert centred.endswith("They lie in the plane orthogonal to all-ones.")
    assert way.endswith("They move to lie on the circle of radius 1.732, orthogonal to all-ones.")
    assert scaled.endswith("They lie on the circle of radius 1.732, orthogonal to all-ones.")
    assert gained.endswith("They lie on the ellipse, orthogonal to 1 / gain.")
    assert biased.endswith("They lie on the ellipse, orthogonal to 1 / gain, centre (0.5, −0.3, 0.4).")
    rms, held, four, four_rms, batch, plane, only = _summaries(
        modules,
        page_data,
        {"mode": "rms", "stage": 2, "eps": 0},
        {"mode": "rms", "stage": 2, "eps": 0.01},
        {"scene": "four", "cloud": "four", "stage": 2, "eps": 0},
        {"scene": "four", "cloud": "four", "stage": 2, "eps": 0, "mode": "rms"},
        {"mode": "batch", "stage": 2},
        {"mode": "plane", "stage": 3, "eps": 0, **_AFFINE},
        {"mode": "length", "stage": 2, "eps": 0},
    )
    assert rms.endswith("They lie on the sphere of radius 1.732.")
    assert held.endswith("They lie on or inside the sphere of radius 1.732.")
    assert four.endswith("They lie on the sphere of radius 2, orthogonal to all-ones.")
    assert four_rms.endswith("They lie on the 3-sphere of radius 2.")
    assert batch.endswith("They lie about the origin with deviations up to 1, on no sphere.")
    assert plane.endswith("They lie on the ellipse, orthogonal to the normal / gain.")
    assert only.endswith("They lie on the sphere of radius 1.")


def test_it_says_so_where_nothing_moves_and_where_a_gain_is_0(modules: Any, page_data: Any) -> None:
    four = {"scene": "four", "cloud": "four"}
    stays, way, plane, moved, flat, clusters = _summaries(
        modules,
        page_data,
        {"mode": "rms", "stage": 1},
        {"mode": "length", "stage": 0.5},
        four | {"stage": 1},
        {"mode": "batch", "stage": 4, **_AFFINE},
        {"stage": 4, **_AFFINE, "gain": [1.5, 0, 1]},
        {"scene": "clusters", "cloud": "clusters", "stage": 0.5},
    )
    assert stays.endswith("They lie where they were given: nothing is centred.")
    assert way.endswith("They lie where they were given: nothing is centred.")
    assert plane.endswith("They lie in the hyperplane orthogonal to all-ones.")
    assert moved.endswith("They lie about (0.5, −0.3, 0.4), stretched by (1.5, 0.6, 1.1).")
    assert flat.endswith("They lie flattened along axis 2, where the gain is 0, centre (0.5, −0.3, 0.4).")
    assert "LayerNorm: they move to lie in the plane" in clusters
    assert clusters.endswith("RMSNorm: they lie where they were given: nothing is centred.")


def test_a_page_without_activations_says_where_to_get_some(modules: Any, page_data: Any) -> None:
    [words] = _summaries(modules, page_data, {"scene": "model"})
    assert words.startswith("This page holds no activations.")
    assert "normkit explore" in words


def test_an_epsilon_that_takes_nothing_is_not_told(modules: Any, page_data: Any) -> None:
    [words] = _summaries(modules, page_data, {"cloud": "scatter", "stage": 2, "eps": 1e-12, "selected": 0})
    assert "Point 1 is at" in words
    assert "epsilon" not in words


def test_the_plane_that_it_names_is_the_plane_of_the_points(page_data: Any) -> None:
    """Orthogonal to 1 / gain, and to normal / gain: of points that PyTorch normalized."""
    x = torch.tensor(page_data["clouds"]["scatter"]["points"], dtype=torch.float64)
    gain, normal = torch.tensor([1.5, 0.6, 1.1], dtype=torch.float64), torch.tensor([0.3, 1, 0.5], dtype=torch.float64)
    y = functional.layer_norm(x, (3,), weight=gain, eps=0)
    assert (y @ (1 / gain)).abs().max() < 1e-13
    u = functional.normalize(normal, dim=0)
    centred = x - (x @ u)[:, None] * u
    y = gain * centred / centred.square().mean(1, keepdim=True).sqrt()
    assert (y @ (normal / gain)).abs().max() < 1e-13


def test_it_tells_what_epsilon_does_to_the_selected_point(modules: Any, page_data: Any) -> None:
    case = {"cloud": "small", "stage": 2, "eps": 0.01, "selected": 0}
    [words] = _summaries(modules, page_data, case)
    x = torch.tensor(page_data["clouds"]["small"]["points"][:1], dtype=torch.float64)
    kept = functional.layer_norm(x, (3,), eps=0.01).norm().item() / math.sqrt(3)
    [told] = re.findall(r"epsilon keeps ([\d.]+) % of its radius", words)
    assert float(told) == pytest.approx(100 * kept, rel=6e-4)
    assert kept < 0.9


def test_it_counts_what_is_0_over_0(modules: Any, page_data: Any) -> None:
    case = {"cloud": "small", "stage": 2, "eps": 0}
    layer, rms, held, raw, chosen = _summaries(
        modules,
        page_data,
        case,
        case | {"mode": "rms"},
        case | {"eps": 1e-12},
        case | {"stage": 0},
        case | {"selected": 41},
    )
    assert layer.endswith("2 points are 0/0.")
    assert rms.endswith("Point 42 is 0/0.")
    assert "0/0" not in held
    assert "0/0" not in raw
    assert "Point 42 is at" not in chosen


def test_the_gradient_is_told_with_what_is_left_along_normal_and_row(modules: Any, page_data: Any) -> None:
    case = {"scene": "gradient", "selected": 3, "stage": 2, "eps": 0.1, "gain": [1, 1, 1], "upstream": [1, -0.5, 0.8]}
    held, free, lost = _summaries(
        modules, page_data, case, case | {"mode": "rms", "eps": 0}, case | {"cloud": "small", "selected": 41, "eps": 0}
    )
    x = torch.tensor(page_data["clouds"]["scatter"]["points"][3], dtype=torch.float64, requires_grad=True)
    functional.layer_norm(x, (3,), eps=0.1).backward(torch.tensor([1, -0.5, 0.8], dtype=torch.float64))
    centred = (x - x.mean()).detach()
    size, ones, along = re.findall(r"[−-]?\d[\d.]*(?:e-\d+)?(?=:| along|\.$)", held)
    assert float(size) == pytest.approx(x.grad.norm().item(), rel=6e-4)
    assert abs(float(ones.replace("−", "-"))) < 1e-15
    expected = (x.grad @ centred / centred.norm()).item()
    assert float(along.replace("−", "-")) == pytest.approx(expected, rel=6e-4)
    assert "along the normal" not in free
    [along] = re.findall(r"([−-]?\d[\d.]*(?:e-\d+)?) along the row", free)
    assert abs(float(along.replace("−", "-"))) < 1e-15
    assert "The gradient at point 42 is 0/0." in lost


def test_the_stacks_are_told_at_their_ends(modules: Any, page_data: Any) -> None:
    [words] = _summaries(modules, page_data, {"scene": "depth", "depth": 5, "spread": 2, "residual": False})
    stack = modules("depth.js", "stack", {"depth": 5, "spread": 2, "residual": False, "seed": 1})
    assert words.startswith("5 random layers, weights times 2, without residual. ")
    told = [float(number) for number in re.findall(r"(?:norm|LN|Norm) ([\d.]*\d(?:e[+-]\d+)?)", words)]
    arms = ("none", "post", "pre", "rms", "batch")
    expected = [stack[arm]["rms"][5] for arm in arms] + [stack[arm]["gradient"][0] for arm in arms]
    # Tiny and huge numbers are told with two digits.
    assert told == pytest.approx(expected, rel=0.05)


def test_a_model_s_site_and_token_are_told_as_text(modules: Any, page_data: Any, model_data: Any) -> None:
    data = page_data | model_data[1]
    whole, chosen, one = _summaries(
        modules,
        data,
        {"scene": "model", "stage": 2},
        {"scene": "model", "stage": 2, "selected": 1},
        {"scene": "model", "stage": 2, "mode": "length"},
    )
    assert whole.startswith("40 rows in 16 dimensions, LayerNorm. Site block.0.<b>norm</b>; drawn are all-ones")
    assert "The sphere has radius 4." in whole
    assert 'Token "<script>alert(1)</script>" is at (' in chosen
    assert "The sphere has radius 1." in one


def test_no_points(modules: Any, page_data: Any) -> None:
    data = page_data | {"clouds": {"none": {"label": "", "n": 3, "points": [], "groups": []}}}
    assert (
        _summaries(modules, data, {"cloud": "none"}, {"cloud": "none", "scene": "clusters"})
        == ["There are no points."] * 2
    )
