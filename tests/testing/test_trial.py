"""A trial: inputs in its dtype, the values of the parameters, and how large things are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.testing.subject import Subject
from normkit.testing.trial import Trial


def trial(norm, spec, dtype=torch.float32, shape=None, parameter_dtype=None):
    return Trial.of(Subject(norm, spec, shape, None, None, None, None, torch.float32), spec, dtype, parameter_dtype)


def test_everything_has_its_dtype():
    half = trial(nn.LayerNorm(8), specs.TORCH_LAYER_NORM, torch.float16)
    assert half.is_half
    assert half.normal(3).dtype == half.weight.dtype == half.module.weight.dtype == torch.float16
    assert half.words == "float16"
    mixed = trial(nn.LayerNorm(8), specs.TORCH_LAYER_NORM, torch.bfloat16, parameter_dtype=torch.float32)
    assert (mixed.normal(3).dtype, mixed.weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(mixed.module.weight, mixed.weight)


def test_the_same_numbers_every_time():
    one, other = (trial(nn.LayerNorm(8), specs.TORCH_LAYER_NORM) for _ in range(2))
    assert torch.equal(one.normal(2), other.normal(2))
    assert torch.equal(one.weight, other.weight)


def test_expected_is_the_program_in_sixteen_bits_and_exact_in_thirty_two():
    half = trial(nn.RMSNorm(8, eps=1e-6), specs.LLAMA, torch.bfloat16)
    x = half.normal(4)
    assert torch.equal(half.expected(x).value, half.program(x).double())
    assert torch.equal(half.expected(x).size, half.truth(x).size)
    full = trial(nn.RMSNorm(8, eps=1e-6), specs.LLAMA)
    assert torch.equal(full.expected(x).value, full.truth(x).value)


def test_the_input_stays_and_gradients_come_back():
    full = trial(nn.ReLU(inplace=True), specs.OLMO, shape=(2, 4))
    x = -full.normal(2).abs()
    assert bool((full.y(x) == 0).all())
    assert bool((x < 0).all())
    dx, dweight, dbias = full.gradients(-x, torch.ones_like(x))
    assert bool((dx == 1).all())
    assert (dweight, dbias) == (None, None)


@pytest.mark.parametrize(
    ("spec", "felt"),
    [
        (specs.OLMO2, 1e-3),
        (specs.TORCH_RMS_NORM, 2**-11.5),
        (specs.OLMO2.replace(eps_placement="outside"), 1e-6),
        (specs.L2_NORM, 1e-12 / 4),
        (specs.OLMO2.replace(eps=0.0), 0.0),
    ],
)
def test_which_rows_feel_eps(spec, felt):
    assert math.isclose(trial(nn.RMSNorm(16), spec, shape=(2, 16)).felt(), felt)


def test_samples_are_bounded_by_rows_and_by_elements():
    narrow = trial(nn.LayerNorm(16), specs.TORCH_LAYER_NORM)
    assert narrow.row_length == 16
    assert narrow.samples(300, 1 << 20) == 100
    assert narrow.samples(1 << 16, 480) == 10
    assert narrow.samples(1, 1) == 1
