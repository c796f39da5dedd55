"""What a look at a model changes comes back: random generators, settings, modes, buffers and attributes."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.identification.behaviour import identify
from normkit.identification.state import buffers_kept, function_state_kept, hooked, in_mode, undisturbed


def test_nothing_outside_is_disturbed():
    state = torch.get_rng_state()
    with undisturbed():
        torch.rand(3)
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_another_default_dtype_changes_nothing_and_comes_back():
    expected = identify(nn.LayerNorm(16), 16).spec
    torch.set_default_dtype(torch.float64)
    try:
        assert identify(nn.LayerNorm(16), 16).spec == expected
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


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

    with function_state_kept(careless):
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
    with function_state_kept(tracking):
        pass
    # What did not change is not written to.
    assert average._version == version
    assert identify(tracking, 6).verdict == "norm"
    assert bool((average == 0).all())


@pytest.mark.parametrize("training", [True, False])
def test_every_module_gets_its_own_mode_back(training):
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    with in_mode(model, training=training):
        assert [module.training for module in model.modules()] == [training] * 3
    assert [module.training for module in model.modules()] == [True, True, False]


def test_evaluation_runs_no_code_of_the_model_and_training_does():
    class Merging(nn.Module):
        def train(self, mode=True):
            calls.append(mode)
            return super().train(mode)

    calls = []
    model = nn.Sequential(Merging())
    with in_mode(model, training=False):
        assert calls == []
    with in_mode(model, training=True):
        assert calls == [True]


def test_buffers_come_back_as_the_same_tensors_with_the_same_values():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with buffers_kept(model):
        model(torch.randn(4, 6))
        model[1].running_mean = torch.ones(6)
        model[1].register_buffer("extra", torch.ones(1))
    assert all(now is then for now, (then, _) in zip(model.buffers(), before, strict=True))
    assert all(torch.equal(then, value) for then, value in before)


def test_hooks_are_taken_out_also_after_an_exception():
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    handles = (module.register_forward_hook(lambda *_: calls.append(1)) for module in model)
    with pytest.raises(RuntimeError), hooked(handles):
        nn.Sequential(model, nn.Linear(3, 3))(torch.zeros(1, 2))
    model(torch.zeros(1, 2))
    assert len(calls) == 2
