"""Gradients keep the numbers contract: dx within four float32 units, gain and bias within one of their own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from contract import DTYPES, HALF, ROWS, assert_gradients, draw, has_closed_casts
from helpers import diagonal
from kernel_laws import (
    BARE,
    FULL,
    counts_the_rows_in_a_bias_gradient,
    has_the_same_gradients_whichever_are_wanted,
    of_one_sign,
)

LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 513, 768, 1023, 1025, 4097]
# Around the blocks of rows that a gain gradient is summed in.
ROW_COUNTS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 511, 513, 1025]
CASES = [(name, dtype) for name, spec in ROWS.items() for dtype in DTYPES if has_closed_casts(spec, DTYPES[dtype])]
# (input, parameters) of the gain gradients.
MIXED = [
    *(("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")),
    *(("fp32", "fp16"), ("bf16", "fp64"), ("fp64", "fp32")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_of_every_preset(name, dtype):
    assert_gradients(ROWS[name], draw(ROWS[name], 256, 384, dtype=DTYPES[dtype], mean=0.5))


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("n", [64, 1000, 4096])
@pytest.mark.parametrize("name", FULL)
def test_float32_on_a_large_mean_and_never_worse_than_torch(name, n, mean):
    case = draw(FULL[name], 64, n, mean=mean)
    ours, true = assert_gradients(FULL[name], case)
    leaf = case.x.clone().requires_grad_()
    if name == "layer_norm":
        y = F.layer_norm(leaf, (n,), case.weight, case.bias)
    else:
        y = F.rms_norm(leaf, (n,), case.weight, eps=1e-6)
    theirs = torch.autograd.grad(y, leaf, case.dy)[0]
    assert (ours.x - true.x).abs().max() <= (theirs - true.x).abs().max()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("mean", [0.0, 1e5])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e13])
def test_float32_rows_of_any_size(name, size, eps, mean):
    """dy grows with the row, so that what has to come out stays a float32 number."""
    spec = BARE[name].replace(eps=eps)
    case = draw(spec, 8, 65, mean=mean, scale=size)
    assert_gradients(spec, case._replace(dy=case.dy * size))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1e12, 1e30])
def test_upstream_gradients_of_any_size(name, size):
    case = draw(FULL[name], 16, 96)
    assert_gradients(FULL[name], case._replace(dy=case.dy * size))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("size", [1e-20, 1e-5, 1e5, 1e18])
def test_parameter_gradients_of_rows_of_any_size(name, size):
    spec = FULL[name].replace(eps=0.0)
    assert_gradients(spec, draw(spec, 100, 48, scale=size))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(name, dtype):
    for n in LENGTHS:
        assert_gradients(FULL[name], draw(FULL[name], 3, n, dtype=DTYPES[dtype], mean=1.0))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(name, dtype):
    for rows in ROW_COUNTS:
        assert_gradients(FULL[name], draw(FULL[name], rows, 33, dtype=DTYPES[dtype]))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtypes", "mean"), diagonal(["TORCH_LAYER_NORM", "LLAMA", "GEMMA", "T5"], MIXED, [3.0, 0.0])
)
def test_parameter_gradients_over_65536_rows(name, dtypes, mean):
    dtype, parameter_dtype = dtypes
    case = draw(ROWS[name], 65536, 8, dtype=DTYPES[dtype], parameter_dtype=DTYPES[parameter_dtype], mean=mean)
    assert_gradients(ROWS[name], case)


@pytest.mark.parametrize(
    ("rows", "dtypes", "name"), diagonal([1, 15, 16, 17, 511], [*MIXED[1:5], ("fp32", "fp32")], [*FULL])
)
def test_parameter_gradients_of_every_short_length(rows, dtypes, name):
    dtype, parameter_dtype = dtypes
    for n in (*range(1, 34), 4096) if rows < 100 else (1, 2, 15, 16, 17, 31, 33):
        case = draw(FULL[name], rows, n, dtype=DTYPES[dtype], parameter_dtype=DTYPES[parameter_dtype])
        assert_gradients(FULL[name], case)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtypes", "n", "name"), diagonal([*MIXED[1:5], ("fp32", "fp32")], [1, 17, 16, 33], [*FULL]))
def test_parameter_gradients_of_other_lengths_over_65536_rows(dtypes, n, name):
    dtype, parameter_dtype = dtypes
    case = draw(FULL[name], 65536, n, dtype=DTYPES[dtype], parameter_dtype=DTYPES[parameter_dtype])
    assert_gradients(FULL[name], case)


@pytest.mark.parametrize(
    ("sizes", "dtype", "name"),
    diagonal([(1, 262_144), (4, 65_536), (5, 33_333), (3, 100_000)], ["fp32", "bf16", "fp16"], [*FULL]),
)
def test_few_long_rows(sizes, dtype, name):
    """Columns are then what is split among threads."""
    torch.set_num_threads(3)
    assert_gradients(FULL[name], draw(FULL[name], *sizes, dtype=DTYPES[dtype], mean=1.0))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, None])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 511, 4096, 8192, 65536])
@pytest.mark.parametrize("n", [1, 16, 33])
def test_a_bias_gradient_counts_the_rows(dtype, parameter_dtype, rows, n):
    counts_the_rows_in_a_bias_gradient(torch.randn(rows, n).to(dtype), parameter_dtype)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 511, 8192])
def test_sums_of_one_sign(name, dtype, rows):
    assert_gradients(FULL[name], of_one_sign(draw(FULL[name], rows, 20, dtype=DTYPES[dtype])))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x and weight", "weight and bias"])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(name, dtype, wanted):
    case = draw(FULL[name], 40, 100, dtype=DTYPES[dtype])
    has_the_same_gradients_whichever_are_wanted(FULL[name], case, wanted)
