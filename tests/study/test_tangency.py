import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study.tangency import tangencies

N = 12


def network(norm):
    return nn.Sequential(nn.Linear(5, N), norm, nn.Tanh(), nn.Linear(N, 3)).double()


def loss(model, batch):
    return model(batch[0]).square().sum()


def found(spec, norm=None):
    norm = nk.Norm(spec, N) if norm is None else norm
    model = network(norm)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, N))
    return tangencies(model, {"norm": model[1]}, spec, (torch.randn(7, 5, dtype=torch.float64),), loss)["norm"]


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_without_eps_the_backward_pass_is_the_projection(spec):
    result = found(spec.replace(eps=1e-30))
    assert result.projected < 1e-13
    assert result.exact < 1e-13
    assert 0 < result.removed < 1


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_an_eps_leaves_part_of_the_radial_direction(spec):
    result = found(spec.replace(eps=0.1))
    assert result.projected > 1e-3
    assert result.exact < 1e-13


def test_a_norm_that_computes_another_formula_is_off():
    rms = specs.TORCH_RMS_NORM.replace(eps=1e-30)
    result = found(specs.TORCH_LAYER_NORM.replace(eps=1e-30), nk.Norm(rms, N))
    assert min(result.projected, result.exact) > 0.01


def test_a_norm_without_a_gain_is_compared_too():
    assert found(specs.TORCH_LAYER_NORM.replace(eps=1e-30, has_weight=False)).projected < 1e-13
