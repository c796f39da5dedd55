"""Outputs keep the numbers contract: 16 bits rounded once, float32 within four units, at any mean, size and length."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import normkit
from contract import DTYPES, ROWS, UNITS, assert_forward, assert_within, draw, truth
from helpers import exact
from kernel_laws import BARE, FULL, has_the_exact_output, rounds_16_bit_rows_once

# Around every vector width and unrolling: 8 to 64 numbers a step.
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 255, 257, 511, 513, 768]
LENGTHS += [1000, 1023, 1025, 2049, 4095, 4096, 4097, 8193]
# (input, parameters); half the models in the world keep float32 parameters beside 16-bit activations.
MIXED = [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("bf16", "fp64")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ROWS)
def test_16_bit_outputs_are_rounded_once_a_cast(name, dtype):
    assert_forward(ROWS[name], draw(ROWS[name], 400, 768, dtype=DTYPES[dtype], mean=0.5))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("mean", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_outputs_on_a_mean(name, dtype, mean):
    assert_forward(FULL[name], draw(FULL[name], 256, 1024, dtype=DTYPES[dtype], mean=mean))


@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "NEMOTRON", "DEBERTA", "OLMO2", "LLAMA", "GEMMA", "T5"])
@pytest.mark.parametrize(("dtype", "parameter_dtype"), MIXED)
def test_parameters_of_another_dtype(name, dtype, parameter_dtype):
    case = draw(ROWS[name], 256, 768, dtype=DTYPES[dtype], parameter_dtype=DTYPES[parameter_dtype])
    assert_forward(ROWS[name], case)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ROWS)
def test_wide_outputs_of_every_preset(name, dtype):
    assert_forward(ROWS[name], draw(ROWS[name], 64, 768, dtype=DTYPES[dtype], mean=0.5))


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("n", [64, 1000, 4096])
@pytest.mark.parametrize("name", FULL)
def test_float32_on_a_large_mean_and_never_worse_than_torch(name, n, mean):
    case = draw(FULL[name], 64, n, mean=mean)
    y, true = assert_forward(FULL[name], case)
    if name == "layer_norm":
        theirs = F.layer_norm(case.x, (n,), case.weight, case.bias)
        ours = normkit.layer_norm(case.x, (n,), case.weight, case.bias)
    else:
        theirs = F.rms_norm(case.x, (n,), case.weight, eps=1e-6)
        ours = normkit.rms_norm(case.x, (n,), case.weight, eps=1e-6)
    assert torch.equal(y, ours)
    assert (ours - true).abs().max() <= (theirs - true).abs().max()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("mean", [0.0, 1e5])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e13])
def test_float32_rows_of_any_size(name, size, eps, mean):
    """Against 50 digits. Squares of these leave float32 at both ends; the largest element is 1e18."""
    x = ((torch.rand(4, 65) + torch.arange(65) % 2 + mean) * size).float()
    has_the_exact_output(x, BARE[name].replace(eps=eps))


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("size", [1e18, 1e25, 1e37])
def test_float32_rows_up_to_the_largest_number(name, size):
    has_the_exact_output(((torch.rand(4, 65) + torch.arange(65) % 2) * size).float(), BARE[name])


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [1e-45, 6e-8, 1e-5, 1e4, 1e18, 1e38])
def test_16_bit_rows_of_any_size(name, dtype, size):
    rounds_16_bit_rows_once(name, dtype, size, (64, 4096))


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(("mean", "size"), [(0.0, 1.0), (1e5, 1.0), (0.0, 1e-150), (0.0, 1e150)])
def test_float64_against_50_digits(name, mean, size):
    x = (torch.randn(4, 65, dtype=torch.float64) + mean) * size
    has_the_exact_output(x, BARE[name].replace(eps=0.0), UNITS[torch.float64])


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(name, dtype):
    for n in LENGTHS:
        case = draw(FULL[name], 3, n, dtype=DTYPES[dtype], mean=1.0)
        true, size = truth(FULL[name], case)
        y = normkit.normalize(case.x, FULL[name], case.weight, case.bias)
        # A wrong tail is off by far more than the last bit; of so few elements no fraction can be asked.
        assert_within(y, true.y, size.y, UNITS.get(y.dtype, 1), f"y of {n}")


@pytest.mark.parametrize("name", BARE)
def test_the_float64_truth_is_the_50_digits_one(name):
    """What the rest of these tests lean on, at the hard end: a thousandth of a float32 unit."""
    x = torch.randn(4, 65) + 1e5
    true = exact(x, BARE[name])
    error = (truth(BARE[name], draw(BARE[name], 4, 65)._replace(x=x))[0].y - true).abs()
    assert (error <= 1e-3 * torch.finfo(torch.float32).eps * true.abs()).all()
