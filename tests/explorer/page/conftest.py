"""A small model's activations as the page holds them, with the full vectors that they were projected from."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

_TOKENS = [" the", "<script>alert(1)</script>", "\n", "naïve", '"quoted"']


@pytest.fixture
def model_data() -> tuple[torch.Tensor, dict[str, Any]]:
    """Forty rows of 16 features; and `{"models": [...]}` with one site of a LayerNorm over them."""
    return _made_up_model()


@pytest.fixture(scope="module")
def made_up_model() -> tuple[torch.Tensor, dict[str, Any]]:
    """The same, for a page that the tests of a file share."""
    return _made_up_model()


def _made_up_model() -> tuple[torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, 16, generator=generator).double() * torch.rand(16, generator=generator).double() + 0.3
    gain, bias = (torch.randn(2, 16, generator=generator).double() * 0.3 + torch.tensor([[1.0], [0.0]])).unbind()
    centred = x - x.mean(1, keepdim=True)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    basis = torch.cat([torch.full((1, 16), 1 / math.sqrt(16), dtype=torch.float64), directions[:2]])
    seen = x @ basis.T
    rest = (centred.square().sum(1) - seen[:, 1:].square().sum(1)).sqrt()
    floats = torch.cat([seen, rest[:, None], (gain * centred) @ basis.T], 1).float().numpy()
    square = basis @ torch.diag(gain**2) @ basis.T
    site = {
        "path": "block.0.<b>norm</b>",
        "formula": "y",
        "mode": "layer",
        "eps": 1e-5,
        "place": "inside",
        "n": 16,
        "layer": 0,
        "count": 40,
        "floats": base64.b64encode(floats.astype("<f4").tobytes()).decode(),
        "token": [i % 5 for i in range(40)],
        "gain": (basis @ gain).tolist(),
        "bias": (basis @ bias).tolist(),
        "square": [square[i, j].item() for i in range(3) for j in range(i, 3)],
    }
    return x, {"models": [{"name": "small", "tokens": _TOKENS, "sites": [site]}]}


# What the page computes and what it draws of it, for patches of the default state; a chart draws into 500 x 300 pixels.
_PICTURES = """async ([patches, data]) => {
  const files = ["frames.js", "computation.js", "state.js"];
  const [{ frame }, { compute }, { DEFAULTS }] = await Promise.all(files.map(load));
  const box = { x: 0, y: 0, width: 500, height: 300 };
  return patches.map(({ drag = [], ...patch }) => {
    const state = { ...DEFAULTS, ...patch };
    const computed = compute(state, data);
    const found = frame(state, computed);
    const panels = found.panels.map((panel) => (panel.draw ? { ...panel, commands: panel.draw(box) } : panel));
    return { computed, ...found, panels, drag: drag.map(([id, delta]) => found.drag(id, delta)) };
  });
}"""


@pytest.fixture
def pictures(modules: Any, page_data: dict[str, Any]) -> Callable[..., list[Any]]:
    """`pictures({"stage": 2}, ..., data={...})`: the frame of each state, with what was computed for it."""

    def draw(*patches: dict[str, Any], data: dict[str, Any] | None = None) -> list[Any]:
        return modules.run(_PICTURES, [list(patches), page_data | (data or {})])

    return draw
