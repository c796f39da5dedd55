"""The truth is the reference's in float64; the unit of an error is as large as the terms that are added up."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import PRESETS, arguments, assert_close
from normkit import NormSpec, reference, specs, units
from normkit.conventions.eps import EPS
from normkit.units import Exact

CASES = {**PRESETS, "OUTSIDE": specs.TORCH_LAYER_NORM.replace(eps_placement="outside", eps=0.1)}


def drawn(name, **changes):
    spec = CASES[name].replace(**changes)
    x, weight, bias = arguments(spec, rows=4)
    return spec, x, weight, bias, torch.randn_like(x)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_autograd_and_no_larger_than_their_terms(name):
    spec, x, weight, bias, dy = drawn(name)
    given = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = reference.forward(x, spec, weight, bias)
    dy = dy.to(y.dtype)
    expected = [y, *torch.autograd.grad(y, given, dy)]
    found = [units.output(x, spec, weight, bias), *units.gradients(x, dy, spec, weight, bias)]
    plain = [units.output(x, spec, weight, bias, plain=True), *units.gradients(x, dy, spec, weight, bias, plain=True)]
    assert sum(each is not None for each in found) == len(expected)
    pairs = [pair for pair in zip(found, plain, strict=True) if pair[0] is not None]
    for (exact, other), wanted in zip(pairs, expected, strict=True):
        assert_close(exact.value, wanted, units=64)
        assert exact.size.shape == wanted.shape
        assert (exact.size >= exact.value.abs()).all()
        assert torch.equal(exact.value, other.value)
        assert (other.size >= exact.size).all()


@pytest.mark.parametrize("name", CASES)
def test_a_changed_term_moves_the_sum_by_no_more_than_its_size(name):
    """An input moved by one relative epsilon moves outputs and gradients by about one of their units."""
    spec, x, weight, bias, dy = drawn(name)
    exact = [units.output(x, spec, weight, bias), *units.gradients(x, dy, spec, weight, bias)]
    moved = x * (1 + 1e-7 * torch.randn_like(x))
    near = [units.output(moved, spec, weight, bias), *units.gradients(moved, dy, spec, weight, bias)]
    for one, other in zip(exact, near, strict=True):
        if one is not None:
            error = (one.value - other.value).abs() / one.size
            assert float(error.max()) < 1e-7 * 20 * math.sqrt(x.numel())


@pytest.mark.parametrize("n", [4, 64, 1024])
def test_the_size_of_an_output_by_hand(n):
    x = torch.randn(3, n, dtype=torch.float64) + 2.0
    weight, bias = torch.rand(n, dtype=torch.float64) + 0.5, torch.randn(n, dtype=torch.float64)
    z = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    in_mean = z.square().mean(-1, keepdim=True)
    ratio = x.mean(-1, keepdim=True).square() / (x.var(-1, correction=0, keepdim=True) + 1e-5)
    y = z * weight + bias
    for plain, own in ((False, in_mean / n), (True, in_mean + ratio)):
        expected = (weight.square() * (z.square() + own) + bias.square()).sqrt().maximum(y.abs())
        found = units.output(x, specs.TORCH_LAYER_NORM, weight, bias, plain=plain)
        assert_close(found.size, expected, units=64)


def test_the_sizes_of_gradients_by_hand():
    x, dy = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    weight = torch.rand(8, dtype=torch.float64) + 0.5
    spec = specs.OLMO2.replace(eps=0.0)
    scale = x.square().mean(-1, keepdim=True).sqrt()
    z, direct = x / scale, dy * weight / scale
    through = z * (direct * z).mean(-1, keepdim=True)
    in_scale = (z / 8).square() * (direct * z).square().sum(-1, keepdim=True)
    dx, dweight, dbias = units.gradients(x, dy, spec, weight)
    assert dbias is None
    assert_close(dx.value, direct - through, units=64)
    expected = (direct.square() + through.square() + in_scale).sqrt().maximum(dx.value.abs())
    assert_close(dx.size, expected, units=64)
    assert_close(dweight.size, (dy * z).square().sum(0).sqrt().maximum((dy * z).sum(0).abs()), units=64)
    plain = units.gradients(x, dy, spec, weight, plain=True)[0]
    expected = (direct.square() + through.square() + 8 * in_scale).sqrt().maximum(dx.value.abs())
    assert_close(plain.size, expected, units=64)


def test_a_gain_before_the_norm_is_a_factor_of_each_term():
    spec = NormSpec(centre_numerator=False, centre_statistics=False, has_weight=True, weight_placement="before")
    x, dy, weight = torch.randn(1, 8), torch.randn(1, 8), torch.rand(8) + 0.5
    inner = specs.NANOCHAT.replace(eps=spec.eps)
    row, (dinner, _, _) = x.double() * weight.double(), units.gradients(x.double() * weight.double(), dy, inner)
    dx, dweight, _ = units.gradients(x, dy, spec, weight)
    assert_close(dx.size, dinner.size * weight.double(), units=64)
    assert_close(dweight.value, (dinner.value * x.double())[0], units=64)
    assert_close(dweight.size, (dinner.size * x.double().abs())[0], units=64)
    assert_close(units.output(x, spec, weight).size, units.output(row, inner).size, units=64)


def test_a_bias_that_cancels_is_still_a_term():
    spec = PRESETS["TORCH_LAYER_NORM"]
    x, weight, _ = arguments(spec)
    scaled = reference.forward(x[:1], spec.replace(has_bias=False), weight)
    exact = units.output(x[:1], spec, weight, -scaled.flatten())
    assert float(exact.value.abs().max()) < 1e-12
    assert (exact.size >= scaled.abs()).all()


def test_units_are_roundings():
    one = Exact(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    actual = torch.tensor([1.0, 1.0 + 2**-7, float("nan")], dtype=torch.bfloat16)
    assert one.units(actual).tolist() == pytest.approx([0.0, 1.0, math.inf])
    assert one.units(actual.float(), torch.float16).tolist() == pytest.approx([0.0, 8.0, math.inf], rel=1e-3)
    assert one.largest(actual) == math.inf
    nothing = Exact(torch.tensor([float("nan"), 1e6], dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert nothing.units(torch.tensor([5.0, float("inf")], dtype=torch.float16)).tolist() == [0.0, 0.0]
    assert Exact(torch.zeros(0, 3), torch.zeros(0, 3)).largest(torch.zeros(0, 3)) == 0.0
    assert Exact(torch.tensor([3.0, 4.0]).double(), torch.ones(2)).relative(torch.tensor([3.0, 4.5])) == 0.1
    # The coarsest dtype has the largest epsilon.
    assert units.coarsest([torch.float32, torch.float16, torch.bfloat16]) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_unit_is_the_epsilon_of_the_size_and_no_less_than_the_smallest_number(dtype):
    size = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    smallest = torch.tensor(torch.finfo(dtype).smallest_normal, dtype=dtype) / 2
    while smallest / 2 > 0:
        smallest = smallest / 2
    eps = EPS[str(dtype).removeprefix("torch.")]
    assert eps == torch.finfo(dtype).eps
    assert units.unit(size, dtype).tolist() == pytest.approx([smallest.item(), eps, 4 * eps], rel=1e-3)


def test_the_offset_is_added_where_the_spec_adds_it():
    x, weight = torch.randn(2, 8), torch.full((8,), 2.0**-9).bfloat16()
    for spec in (specs.GEMMA, specs.MUSE_SPARK):
        expected = reference.forward(x.double(), specs.OLMO2, reference.effective_weight(weight, spec, torch.float64))
        assert torch.allclose(units.output(x, spec, weight).value, expected, rtol=1e-12)
