"""Which parameter a gain or bias is, from how it changes when the parameters are drawn again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.conventions.rows import Rows
from normkit.identification.behaviour import identify
from normkit.identification.gain_and_bias import Affine, bias_of, gain_of, made_of

LAST, CHANNELS = Rows(), Rows((1,))


def draws(**shapes):
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()} for _ in range(2)]


def test_a_gain_follows_a_parameter_with_slope_and_offset():
    parameters = draws(other=(6,), weight=(6,))
    gains = [0.5 * draw["weight"].double().expand(3, 6) + 1.0 for draw in parameters]
    part = gain_of(gains, parameters, LAST)
    assert part.name == "weight"
    assert part.slope == pytest.approx(0.5)
    assert part.intercept == pytest.approx(1.0)
    assert part.constant is None


@pytest.mark.parametrize(("shape", "rows"), [((4, 6), LAST), ((4, 1), LAST), ((1,), LAST), ((4,), CHANNELS)])
def test_a_gain_may_be_spread_in_several_ways(shape, rows):
    parameters = draws(weight=shape)
    weights = [draw["weight"].reshape(4, 1) if rows is CHANNELS else draw["weight"] for draw in parameters]
    gains = [weight.double().expand(4, 6) for weight in weights]
    assert gain_of(gains, parameters, rows).name == "weight"
    if shape in ((4, 6), (4,)):
        # Spread along the other axes, the same parameter is not it.
        assert gain_of(gains, parameters, LAST if rows is CHANNELS else CHANNELS) is None


def test_a_gain_that_is_a_product_of_two_is_not_explained():
    parameters = draws(weight=(6,), scale=(6,))
    gains = [(draw["weight"] * draw["scale"]).double() for draw in parameters]
    assert gain_of(gains, parameters, LAST) is None


def test_a_gain_that_no_parameter_changes_keeps_its_values():
    values = torch.arange(1.0, 7.0, dtype=torch.float64)
    part = gain_of([values.expand(3, 6)] * 2, draws(weight=(6,)), LAST)
    assert part.name is None
    torch.testing.assert_close(part.values, values)
    assert part.constant is None
    along = gain_of([values.reshape(6, 1).expand(6, 3)], [{}], CHANNELS)
    torch.testing.assert_close(along.values, values)


def test_a_constant_gain_is_seen():
    assert gain_of([torch.full((3, 6), 0.25).double()], [{}], LAST).constant == 0.25


def test_bias():
    parameters = draws(bias=(6,))
    biases = [draw["bias"].double().expand(3, 6) for draw in parameters]
    assert bias_of(biases, parameters, LAST, scale=1.0).name == "bias"
    absent = bias_of([1e-7 * bias for bias in biases], parameters, LAST, scale=1.0)
    assert absent.name is None
    assert absent.values is None
    assert bias_of([2 * bias for bias in biases], parameters, LAST, scale=1.0) is None
    assert bias_of([bias + 1 for bias in biases], parameters, LAST, scale=1.0) is None


def test_arguments_of_a_spec():
    module = nn.LayerNorm(4)
    fixed = torch.tensor([3.0], dtype=torch.float64)
    weight, bias = Affine(weight="weight", bias=fixed).of(module)
    assert weight is module.weight
    assert bias.item() == 3.0
    assert Affine(weight="weight").names == {"weight"}
    assert Affine(weight="weight").parameters_reached
    assert not Affine(bias=fixed).parameters_reached
    assert Affine().of(None) == (None, None)


def test_what_a_computed_gain_or_bias_is_made_of():
    (parameters, _) = draws(weight=(6,), bias=(6,))
    weight, bias = parameters["weight"].double(), parameters["bias"].double()
    assert made_of(weight.square(), bias, parameters) == "the gain acts as the square of weight: it is multiplied twice"
    assert made_of(weight, 2 * bias, parameters) == "the bias acts as 2 * bias: it is added twice"
    early = "the bias acts as weight * bias: it is added before the gain multiplies"
    assert made_of(weight, weight * bias, parameters) == early
    assert made_of(weight.exp(), bias, parameters) is None
    ones = {"weight": torch.ones(6), "bias": torch.zeros(6)}
    assert made_of(ones["weight"], ones["bias"], ones) is None


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", ["gain", "bias"])
def test_a_parameter_that_is_rounded_to_16_bits_whatever_dtype_it_has(role, dtype, offset):
    class Rounded(nn.LayerNorm):
        def forward(self, x):
            weight, bias = self.weight + offset, self.bias
            if role == "gain":
                weight = weight.to(dtype).float()
            else:
                bias = bias.to(dtype).float()
            return weight * nn.functional.layer_norm(x, x.shape[-1:]) + bias

    passport = identify(Rounded(64), 64)
    name = {"gain": "1 + weight" if offset else "weight", "bias": "bias"}[role]
    words = f"the {role} acts as {name} rounded to {str(dtype).removeprefix('torch.')}"
    assert passport.undecidable.keys() >= {"gain", "bias"}
    assert passport.readings[role].evidence == (words,)
