"""Outputs of the Triton kernels keep the numbers contract, as those of the compiled ones do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import normkit
from contract import DTYPES, ROWS, UNITS, assert_forward, assert_within, draw, truth
from kernel_laws import BARE, FULL, has_the_exact_output, rounds_16_bit_rows_once
from normkit import reference, specs
from triton_kernels import DEVICE, moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")
NARROW = ["fp32", "bf16", "fp16"]
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")]
LENGTHS = [1, 2, 3, 16, 17, 130, 1000]
MIXED = [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16")]


@pytest.mark.parametrize("sizes", [(64, 33), on_gpu_only((400, 768))])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ROWS)
def test_outputs_of_every_preset(name, dtype, sizes):
    assert_forward(ROWS[name], moved(draw(ROWS[name], *sizes, dtype=DTYPES[dtype], mean=0.5)))


@pytest.mark.parametrize("sizes", [(48, 40), on_gpu_only((256, 768))])
@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "DEBERTA", "LLAMA", "GEMMA", "T5"])
@pytest.mark.parametrize(("dtype", "parameter_dtype"), MIXED)
def test_parameters_of_another_dtype(name, dtype, parameter_dtype, sizes):
    case = draw(ROWS[name], *sizes, dtype=DTYPES[dtype], parameter_dtype=DTYPES[parameter_dtype])
    assert_forward(ROWS[name], moved(case))


@pytest.mark.parametrize("mean", [1.0, 1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("sizes", [(16, 130), on_gpu_only((64, 4096)), on_gpu_only((64, 1000))])
@pytest.mark.parametrize("name", FULL)
def test_float32_on_a_large_mean(name, sizes, mean):
    case = moved(draw(FULL[name], *sizes, mean=mean))
    y, true = assert_forward(FULL[name], case)
    if name == "layer_norm":
        theirs = F.layer_norm(case.x, sizes[1:], case.weight, case.bias)
        assert (y - true).abs().max() <= (theirs - true).abs().max()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("mean", [0.0, 1e5])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e13, 1e18, 1e25, 1e37])
def test_float32_rows_of_any_size(name, size, eps, mean):
    """Against 50 digits. Squares of these leave float32 at both ends."""
    if mean * size > 1e20:
        return
    x = ((torch.rand(3, 17) + torch.arange(17) % 2 + mean) * size).float()
    has_the_exact_output(x, BARE[name].replace(eps=eps), device=DEVICE)


@pytest.mark.parametrize("placement", ["outside", "clamp"])
@pytest.mark.parametrize("eps", [1e-30, 1e-6, 1e3])
@pytest.mark.parametrize("name", BARE)
def test_an_eps_beside_rows_of_any_size(name, eps, placement):
    """The power that a row is scaled by is bounded by its eps, which is to stay a float32 number."""
    x = torch.randn(12, 17) * torch.logspace(-40, 15, 12, dtype=torch.float64).unsqueeze(1).float()
    has_the_exact_output(x, BARE[name].replace(eps=eps, eps_placement=placement), device=DEVICE)


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [1e-45, 6e-8, 1e-5, 1e4, 1e18, 1e38])
def test_16_bit_rows_of_any_size(name, dtype, size):
    rounds_16_bit_rows_once(name, dtype, size, (40, 64), DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_every_length(name, dtype):
    for n in LENGTHS:
        case = moved(draw(FULL[name], 3, n, dtype=DTYPES[dtype], mean=1.0))
        true, size = truth(FULL[name], case)
        y = normkit.normalize(case.x, FULL[name], case.weight, case.bias)
        # Of so few elements no fraction can be asked.
        assert_within(y, true.y, size.y, UNITS.get(y.dtype, 1), f"y of {n}")


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "early"])
def test_outputs_by_a_small_gain(name, dtype):
    """Subnormal numbers are rounded like any other."""
    spec, dtype = {**FULL, "early": specs.LLAMA}[name], DTYPES[dtype]
    case = draw(spec, 40, 64, dtype=dtype)
    small = torch.finfo(dtype).smallest_normal / 8
    weight = (case.weight.double() * small).to(dtype)
    bias = None if case.bias is None else (case.bias.double() * small).to(dtype)
    case = moved(case._replace(weight=weight, bias=bias))
    program = reference.forward(case.x, spec, case.weight, case.bias)
    is_subnormal = (program != 0) & (program.abs() < torch.finfo(dtype).smallest_normal)
    assert is_subnormal.double().mean() > 0.5
    if dtype == torch.float32:
        y = normkit.normalize(case.x, spec, case.weight, case.bias)
        size = truth(spec, case)[1].y
        assert_within(y, program.double(), size, UNITS[dtype], "y")
    else:
        assert_forward(spec, case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("sizes", [(1, 1_000_003), (3, 100_000), (3, 16_384), (2000, 16_384), (5, 16_385), (9, 8193)])
def test_long_rows(name, dtype, sizes):
    assert_forward(FULL[name], moved(draw(FULL[name], *sizes, dtype=DTYPES[dtype], mean=2.0)))
