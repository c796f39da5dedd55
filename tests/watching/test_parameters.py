"""What each parameter is, and what the optimizers do with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit.watching.parameters import WatchedParameter, watched_parameters
from normkit.watching.surveying import Arguments, surveyed
from small_training import Transformer


def watched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, WatchedParameter]:
    structure = surveyed(model, Arguments(args=(torch.zeros(2, 9, dtype=torch.long),), kwargs={}))
    return {each.path: each for each in watched_parameters(model, structure, optimizers)}


@pytest.mark.slow
def test_gains_and_biases_belong_to_their_norms():
    found = watched(Transformer())
    assert {path: (each.kind, each.site, each.block) for path, each in found.items() if "norm" in path} == {
        "blocks.0.norm_1.weight": ("gain", "blocks.0.norm_1", 0),
        "blocks.0.norm_1.bias": ("bias of a norm", "blocks.0.norm_1", 0),
        "blocks.0.norm_2.weight": ("gain", "blocks.0.norm_2", 0),
        "blocks.1.norm_1.weight": ("gain", "blocks.1.norm_1", 1),
        "blocks.1.norm_1.bias": ("bias of a norm", "blocks.1.norm_1", 1),
        "blocks.1.norm_2.weight": ("gain", "blocks.1.norm_2", 1),
        "norm.weight": ("gain", "norm", None),
        "norm.bias": ("bias of a norm", "norm", None),
    }
    kinds = {path: found[path].kind for path in ("embedding.weight", "head.weight", "head.bias")}
    assert kinds == {"embedding.weight": "embedding", "head.weight": "weight", "head.bias": "bias"}


def test_a_tied_parameter_is_there_once_and_packed_integers_are_not():
    model = Transformer()
    model.head.weight = model.embedding.weight
    model.packed = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    found = watched(model)
    assert "embedding.weight" in found
    assert not {"head.weight", "packed"} & found.keys()


def test_settings_are_those_of_the_group_as_it_is_now():
    model = Transformer()
    optimizer = torch.optim.SGD([model.norm.weight], lr=0.5)
    found = watched(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    assert found["norm.weight"].setting("lr") == 0.125
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert found["norm.weight"].setting("lr") == 0.25
    for odd in (None, (1e-30, 1e-3)):
        optimizer.param_groups[0]["lr"] = odd
        assert math.isnan(found["norm.weight"].setting("lr"))
    assert math.isnan(found["norm.bias"].setting("lr"))
    assert found["norm.bias"].optimizer is None
