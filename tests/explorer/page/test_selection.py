"""What a query makes of keys: softmax and entropy as torch has them, and the selectable keys of `normkit.geometry`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from normkit.geometry import selectable

pytestmark = pytest.mark.browser


def _keys(count: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def test_attention_is_that_of_torch(modules: Any) -> None:
    keys, query, groups = (
        _keys(9, 0, 3.0),
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
        [0, 1, 0, 0, 1, 2, 0, 1, 1],
    )
    found = modules("selection.js", "attend", keys.tolist(), query.tolist(), groups)
    scores = keys @ query / math.sqrt(3)
    weights = scores.softmax(0)
    assert torch.allclose(torch.tensor(found["scores"], dtype=torch.float64), scores, rtol=1e-14)
    assert torch.allclose(torch.tensor(found["weights"], dtype=torch.float64), weights, rtol=1e-14)
    assert found["entropy"] == pytest.approx(torch.distributions.Categorical(weights).entropy().item(), rel=1e-12)
    members = torch.tensor(groups)
    assert found["shares"] == pytest.approx([weights[members == group].sum().item() for group in (0, 1)], rel=1e-14)
    # Scores that overflow exp are a choice of one key, and of none is neither NaN nor infinite.
    sure = modules("selection.js", "attend", [[1e4, 0, 0], [0, 0, 0]], [1e4, 0, 0], [0, 1])
    assert (sure["weights"], sure["entropy"]) == ([1, 0], 0)


def test_the_selectable_keys_are_those_of_the_geometry(modules: Any) -> None:
    cases = [_keys(count, seed) for count, seed in itertools.product((2, 3, 5, 8, 12), range(6))]
    # In a plane, on a circle, on a line, at the corners of a box and inside it, and twice at one place.
    cases += [functional.layer_norm(_keys(8, 20), (3,), eps=0), functional.layer_norm(_keys(8, 21), (3,), eps=0.5)]
    cases += [_keys(8, 22) @ torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))]
    cases += [torch.tensor([[t, 2 * t, -t] for t in (-1.0, 0.0, 0.5, 3.0)], dtype=torch.float64)]
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64)
    cases += [torch.cat([corners, torch.tensor([[0.0, 0, 0], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)])]
    cases += [torch.cat([corners[:4], corners[:1]])]
    found = modules.each("selection.js", "selectable", [[keys.tolist()] for keys in cases])
    assert found == [selectable(keys).tolist() for keys in cases]
    assert {False, True} == set(found[-2])
    assert all(found[30]), "on the circle of LayerNorm every key can be selected"


def test_the_edges_of_a_hull(modules: Any) -> None:
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64)
    box = torch.cat([corners, torch.zeros(1, 3, dtype=torch.float64)])
    found = torch.tensor(modules("selection.js", "hull", box.tolist()), dtype=torch.float64)
    assert len(found) == 12
    assert ((found[:, 0] - found[:, 1]).norm(dim=1) == 2).all(), "no diagonals"
    circle = functional.layer_norm(_keys(7, 3), (3,), eps=0)
    assert len(modules("selection.js", "hull", circle.tolist())) == 7
