"""What a call does beside its result: to its input, to a module's state, to random generators."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification import side_effects
from normkit.identification.behaviour import identify
from normkit.identification.specimen import Specimen, undisturbed


def readings(norm, shape=(2, 6)):
    with undisturbed():
        return side_effects.side_effect_readings(Specimen(norm), shape, torch.Generator().manual_seed(0))


def in_place(x):
    x = x.float()
    return x.mul_((x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def scribbles(x):
    y = F.rms_norm(x, (6,))
    x.zero_()
    return y


@pytest.mark.parametrize(
    ("norm", "value", "said"),
    [
        (nn.LayerNorm(6), "kept", "the same after the call"),
        (nn.Identity(), "kept", "lies in the memory of the input"),
        (in_place, "overwritten", "works in place"),
        (scribbles, "overwritten", "changes its own input"),
    ],
)
def test_the_input(norm, value, said):
    reading = readings(norm)["input"]
    assert reading.value == value
    assert said in " ".join(reading.evidence)


def test_a_norm_in_place_is_still_found():
    passport = identify(in_place, 6)
    assert passport.spec.eps == 1e-6
    assert passport.readings["input"].value == "overwritten"


class Counting(nn.Module):
    """Remembers what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.rms_norm(x, (6,)) * (self.calls if self.training else 1.0)


@pytest.mark.parametrize(
    ("norm", "output", "updates"),
    [
        (nn.LayerNorm(6), "as in eval", []),
        (nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.5)), "random", []),
        (nn.BatchNorm1d(6), "batch statistics", ["num_batches_tracked", "running_mean", "running_var"]),
        (nn.BatchNorm1d(6, momentum=0.0, affine=False), "batch statistics", ["num_batches_tracked"]),
        (Counting(), "different", ["calls"]),
    ],
)
def test_training_mode(norm, output, updates):
    assert readings(norm)["training"].value == {"output": output, "updates": updates}


def test_a_function_has_no_mode():
    assert "training" not in readings(torch.tanh)


def test_a_module_that_cannot_be_trained_is_left_open():
    class Frozen(nn.Module):
        def forward(self, x):
            if self.training:
                raise RuntimeError("eval only")
            return F.rms_norm(x, (6,))

    reading = readings(Frozen())["training"]
    assert reading.value is None
    assert "eval only" in reading.undecidable


@pytest.mark.parametrize(
    ("norm", "said", "is_norm_like"),
    [
        (lambda x: F.dropout(x, 0.5), "draws random numbers", False),
        (lambda x: torch.rand_like(x), "draws random numbers", False),
        (lambda x: torch.tanh(x) + 0.01 * torch.randn_like(x), "draws random numbers", False),
        (lambda x: F.rms_norm(x, (6,)) + 0.01 * torch.randn_like(x), "draws random numbers", True),
        (lambda x: F.rms_norm(x, (6,)) * (1 + 0.01 * random.random()), "keeps a state", True),
    ],
)
def test_what_is_not_repeatable_is_undecidable(norm, said, is_norm_like):
    passport = identify(norm, 6)
    assert (passport.verdict, passport.spec) == ("undecidable", None)
    assert said in passport.evidence[0]
    assert passport.readings["repeatable"].value is False
    assert ("scale" in passport.readings) is is_norm_like


def test_all_random_generators_come_back():
    def draws(x):
        return F.layer_norm(x, (6,)) * (1 + 0 * (random.random() + float(np.random.rand()) + float(torch.rand(()))))

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    identify(draws, 6)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert bool((np.random.get_state()[1] == before[2]).all())


class Holder:
    """A callable that is no module, and holds one."""

    def __init__(self, module):
        self.parts = [module]

    def __call__(self, x):
        return self.parts[0](x)

    def method(self, x):
        return self.parts[0](x)


GLOBAL = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))


def ways_to_hold(module):
    def through_a_default(x, module=module):
        return module(x)

    return {
        "closure": lambda x: module(x),
        "closure of a closure": (lambda inner: lambda x: inner(x))(lambda x: module(x)),
        "partial": partial(lambda held, x: held(x), module),
        "object": Holder(module),
        "method of an object": Holder(module).method,
        "default": through_a_default,
        "method": module.forward,
    }


@pytest.mark.parametrize("way", ways_to_hold(nn.Identity()))
def test_a_module_that_a_function_holds_comes_back_bit_for_bit(way):
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = dict(module.named_buffers()) | dict(module.named_parameters())
    identify(ways_to_hold(module)[way], 6)
    assert all(part.training for part in module.modules())
    for name, value in (dict(module.named_buffers()) | dict(module.named_parameters())).items():
        assert value is tensors[name]
        assert torch.equal(value, state[name])


def test_a_global_module_comes_back_too():
    GLOBAL.train()
    identify(lambda x: GLOBAL(x), 6)
    assert bool((GLOBAL[0].running_mean == 0).all())
    assert GLOBAL.training


def test_modes_and_replaced_buffers_come_back():
    module = nn.BatchNorm1d(6).train()
    mean = module.running_mean

    def careless(x):
        module.eval()
        module.running_mean = torch.ones(6)
        module.register_buffer("extra", torch.ones(1))
        return module(x)

    with side_effects.kept(careless):
        careless(torch.randn(2, 6))
    assert module.training
    assert module.running_mean is mean
    assert "extra" not in dict(module.named_buffers())


def test_what_a_module_counts_for_itself_comes_back():
    module = nn.LayerNorm(6)
    module.calls = 0

    def counting(x):
        module.calls += 1
        module.last = x
        return module(x)

    identify(counting, 6)
    assert module.calls == 0
    assert not hasattr(module, "last")


def test_tensors_in_a_closure_come_back():
    average = torch.zeros(6)

    def tracking(x):
        average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return F.rms_norm(x, (6,))

    version = average._version
    with side_effects.kept(tracking):
        pass
    # What did not change is not written to.
    assert average._version == version
    assert identify(tracking, 6).verdict == "norm"
    assert bool((average == 0).all())
