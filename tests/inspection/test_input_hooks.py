"""Pre-hooks on norms: those that change what enters are named with their place, the others are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import inspect
from normkit.inspection.input_hooks import changed_inputs


def clamp(_module, args):
    return (args[0].clamp(-1, 1),)


def widen(_module, args):
    return (args[0].double().float(),)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))


def test_a_hook_that_changes_what_enters_is_named_and_one_that_looks_is_not():
    net, x = model(), 3 * torch.randn(2, 6, 16)
    net[1].register_forward_pre_hook(widen)
    net[3].register_forward_pre_hook(clamp)
    seen = []
    net[3].register_forward_pre_hook(lambda _module, args: seen.append(args[0].amax()))
    (found,) = changed_inputs(net, ["1", "3"], lambda: net(x))
    assert found.path == "3"
    assert "clamp of" in found.hooks[0]
    assert 0 < found.change < 1
    assert len(net[3]._forward_pre_hooks) == 2


@pytest.mark.slow
def test_an_inspection_warns_of_it():
    net = model()
    x = 3 * torch.randn(2, 6, 16)
    assert "E5" not in [found.rule for found in inspect(net, {"input": x}).findings]
    net[3].register_forward_pre_hook(clamp)
    found = next(found for found in inspect(net, {"input": x}).findings if found.rule == "E5")
    assert (found.severity, found.sites) == ("warning", ("3",))
    assert "a hook changes what enters" in found.evidence[0]
