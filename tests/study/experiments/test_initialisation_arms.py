import pytest
import torch
from torch import nn

from normkit.study.experiments.initialisation_arms import DEEP, SHALLOW, begin, configuration
from normkit.study.transformer import Transformer


def built(name):
    model = Transformer(configuration(name, 2, width=16, heads=2, context=8))
    begin(model, name, 0)
    return model


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@pytest.mark.parametrize(("name", "gain"), [("gain 1, bias 0", 1), ("gain 0.1", 0.1), ("gain 0.5", 0.5), ("gain 2", 2)])
def test_all_gains_start_at_the_arms(name, gain):
    found = norms(built(name))
    assert len(found) == 5
    assert all(torch.equal(norm.weight, torch.full((16,), gain)) and not norm.bias.any() for norm in found)


def test_random_biases_differ_from_norm_to_norm_and_not_from_run_to_run():
    first, second = norms(built("random bias")), norms(built("random bias"))
    assert all(torch.equal(a.bias, b.bias) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0].bias, first[1].bias)
    assert all((norm.weight == 1).all() for norm in first)


@pytest.mark.parametrize(("name", "factor"), [("outputs at 0", 0.0), ("outputs over sqrt(2L)", 0.5)])
def test_only_the_outputs_of_branches_are_scaled(name, factor):
    usual, scaled = built("gain 1, bias 0"), built(name)
    for (path, expected), weight in zip(usual.named_parameters(), scaled.parameters(), strict=True):
        output = path.endswith(("out.weight", "down.weight"))
        torch.testing.assert_close(weight, expected * (factor if output else 1))


def test_deep_arms_have_their_factors():
    factors = {name: (configuration(name, 8).residual_scale, configuration(name, 8).branch_gain) for name in DEEP}
    alpha, beta = 2.0, pytest.approx(64**-0.25)
    assert factors == {
        "post": (1.0, 1.0),
        "alpha alone": (alpha, 1.0),
        "beta alone": (1.0, beta),
        "DeepNorm": (alpha, beta),
    }
    assert {configuration(name, 8).placement for name in DEEP} == {"post"}
    assert {configuration(name, 8).placement for name in SHALLOW} == {"pre"}
