"""Float64's outputs and gradients, and the unit an error is measured in."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import PRESETS, arguments, assert_close
from normkit import reference
from normkit.conversion.truth import Truth, units


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_those_of_autograd(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=4)
    given = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = reference.forward(x, spec, weight, bias)
    dy = torch.randn_like(y)
    truth = Truth(spec, x.detach(), weight, bias)
    assert_close(truth.y, y)
    found = truth.gradients(dy)
    expected = torch.autograd.grad(y, given, dy)
    assert len(found) == len(expected)
    for (gradient, size), wanted in zip(found.values(), expected, strict=True):
        assert_close(gradient, wanted, units=64)
        assert size.shape == gradient.shape
        assert (size >= gradient.abs() * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", PRESETS)
def test_an_output_is_no_larger_than_its_terms(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=4)
    truth = Truth(spec, x, weight, bias)
    # Two terms of one size and sign add to sqrt(2) times their root sum of squares.
    assert (truth.y.abs() <= math.sqrt(2) * truth.y_size * (1 + 1e-12)).all()


def test_a_bias_that_cancels_is_still_a_term():
    spec = PRESETS["TORCH_LAYER_NORM"]
    x, weight, _ = arguments(spec)
    scaled = reference.forward(x[:1], spec.replace(has_bias=False), weight)
    truth = Truth(spec, x[:1], weight, -scaled.flatten())
    assert float(truth.y.abs().max()) < 1e-12
    assert (truth.y_size >= scaled.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_unit_is_the_epsilon_of_the_size(dtype):
    true = torch.tensor([1.0, 1.0], dtype=torch.float64)
    size = torch.tensor([1.0, 4.0], dtype=torch.float64)
    actual = true.to(dtype) + torch.tensor([0.0, 2 * torch.finfo(dtype).eps], dtype=dtype)
    assert units(actual, true, size) == pytest.approx(0.5, rel=1e-3)
    assert units(actual[:1], true[:1], size[:1]) == 0.0
    assert units(torch.tensor([math.nan], dtype=dtype), true[:1], size[:1]) == math.inf
