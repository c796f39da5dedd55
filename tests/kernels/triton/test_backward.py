"""Gradients of the Triton kernels keep the numbers contract: dx within four float32 units, sums over rows in one."""

from __future__ import annotations

import pytest
import torch

from contract import (
    DTYPES,
    ROWS,
    assert_forward,
    assert_gradients,
    draw,
    has_closed_casts,
)
from kernel_laws import (
    BARE,
    FULL,
    counts_the_rows_in_a_bias_gradient,
    has_the_same_gradients_whichever_are_wanted,
    of_every_size,
    of_one_sign,
)
from normkit import specs
from normkit.kernels.triton import planning
from normkit.kernels.triton.configuration import Tiling
from normkit.kernels.triton.launching import compile_launch
from normkit.kernels.triton.program import program
from normkit.ops.plans import plan
from triton_kernels import DEVICE, cut_into, moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")

NARROW = ["fp32", "bf16", "fp16"]
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")]
LENGTHS = [1, 2, 3, 16, 17, 130, 1000]
ROW_COUNTS = [1, 2, 31, 33, 129]
CASES = [(name, dtype) for name, spec in ROWS.items() for dtype in NARROW if has_closed_casts(spec, DTYPES[dtype])]
MIXED = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")]
# 1024 rows a program, 16 tiles one after the other, so that what a sum loses is seen.
MANY_TILES = Tiling(rows=64, columns=8, tiles=16, warps=4, stages=3, is_whole=True)


def check(spec, case):
    return assert_gradients(spec, moved(case))


@pytest.mark.parametrize("sizes", [(20, 33), on_gpu_only((256, 384))])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_of_every_preset(name, dtype, sizes):
    check(ROWS[name], draw(ROWS[name], *sizes, dtype=DTYPES[dtype], mean=0.5))


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e5])
@pytest.mark.parametrize("sizes", [(5, 130), on_gpu_only((64, 4096))])
@pytest.mark.parametrize("name", FULL)
def test_float32_on_a_large_mean(name, sizes, mean):
    check(FULL[name], draw(FULL[name], *sizes, mean=mean))


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(("mean", "eps"), [(0.0, 0.0), (0.0, 1e-6), (1e5, 0.0)])
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e-20, 1e-5, 1e5, 1e13])
def test_float32_rows_of_any_size(name, size, eps, mean):
    """dy grows with the row, so that what has to come out stays a float32 number."""
    spec = BARE[name].replace(eps=eps)
    case = draw(spec, 5, 33, mean=mean, scale=size)
    check(spec, case._replace(dy=case.dy * size))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1e12, 1e30])
def test_upstream_gradients_of_any_size(name, size):
    case = draw(FULL[name], 8, 40)
    check(FULL[name], case._replace(dy=case.dy * size))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("size", [1e-20, 1e-5, 1e5, 1e18])
def test_parameter_gradients_of_rows_of_any_size(name, size):
    spec = FULL[name].replace(eps=0.0)
    check(spec, draw(spec, 20, 24, scale=size))


@pytest.mark.parametrize("name", FULL)
def test_rows_of_every_size_beside_each_other(name):
    spec = FULL[name].replace(eps=0.0)
    check(spec, of_every_size(spec, 29, 24))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_every_length(name, dtype):
    for n in LENGTHS:
        check(FULL[name], draw(FULL[name], 3, n, dtype=DTYPES[dtype], mean=1.0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_every_number_of_rows(name, dtype):
    for rows in ROW_COUNTS:
        check(FULL[name], draw(FULL[name], rows, 17, dtype=DTYPES[dtype]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*zip(["TORCH_LAYER_NORM", "LLAMA", "GEMMA", "TORCH_LAYER_NORM", "GEMMA", "LLAMA"], MIXED, strict=True)],
)
@pytest.mark.parametrize("rows", [1000, on_gpu_only(65_536)])
def test_parameter_gradients_over_many_rows(monkeypatch, name, dtypes, rows):
    dtype, parameter_dtype = (DTYPES[part] for part in dtypes)
    if rows == 1000:
        cut_into(monkeypatch, MANY_TILES)
    check(ROWS[name], draw(ROWS[name], rows, 7, dtype=dtype, parameter_dtype=parameter_dtype, mean=3.0))


@pytest.mark.parametrize(("name", "dtype"), [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")])
@pytest.mark.parametrize("rows", [17, 1024, on_gpu_only(65_536)])
def test_sums_of_one_sign(monkeypatch, name, dtype, rows):
    if rows == 1024:
        cut_into(monkeypatch, MANY_TILES)
    check(FULL[name], of_one_sign(draw(FULL[name], rows, 6, dtype=DTYPES[dtype])))


@pytest.mark.slow
def test_the_lines_that_programs_leave_are_added_in_float64():
    of = program(*plan(specs.TORCH_LAYER_NORM)[1:4], 6, *[torch.float32] * 4)
    sums = torch.rand(2, 2000, 6, dtype=torch.float64, device=DEVICE) + 1.0
    gradients = torch.empty(6, device=DEVICE), torch.empty(6, device=DEVICE)
    tensors = (sums, *gradients)
    compile_launch(planning._add(of, 2000), tensors)(tensors)
    assert all(torch.equal(ours, line.sum(0).float()) for ours, line in zip(gradients, sums, strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("parameter_dtype", [torch.float32, None])
@pytest.mark.parametrize("rows", [1, 17, 511, on_gpu_only(65_536)])
def test_a_bias_gradient_counts_the_rows(dtype, parameter_dtype, rows):
    counts_the_rows_in_a_bias_gradient(torch.randn(rows, 5, device=DEVICE).to(DTYPES[dtype]), parameter_dtype)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("factor", [1.0, 2.0**-6])
@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_a_small_upstream_gradient(name, dtype, factor):
    """dy, dx and the gradients of gain and bias are all subnormal."""
    spec, dtype = FULL[name], DTYPES[dtype]
    case = draw(spec, 4, 40, dtype=dtype)
    dy = (torch.randn(4, 40, dtype=torch.float64) * torch.finfo(dtype).smallest_normal * factor / 4).to(dtype)
    ours, _ = check(spec, case._replace(dy=dy))
    assert ((ours.x != 0) & (ours.x.abs() < torch.finfo(dtype).smallest_normal)).double().mean() > 0.2


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x and weight", "weight and bias"])
@pytest.mark.parametrize(("name", "dtype"), THREE)
@pytest.mark.parametrize("sizes", [(20, 40), on_gpu_only((300, 1000)), on_gpu_only((300, 20_000))])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(name, dtype, wanted, sizes):
    case = moved(draw(FULL[name], *sizes, dtype=DTYPES[dtype]))
    has_the_same_gradients_whichever_are_wanted(FULL[name], case, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("name", FULL)
def test_every_scale_that_a_row_can_have(name, placement):
    for correction, reduction, multiplier in ((0, "mean", "sqrt_n"), (1, "mean", "one"), (0, "sum", "one")):
        for eps in (1e-5, 3.0):
            spec = FULL[name].replace(
                eps=eps, eps_placement=placement, correction=correction, reduction=reduction, multiplier=multiplier
            )
            case = moved(draw(spec, 9, 24, mean=0.3))
            assert_forward(spec, case)
            assert_gradients(spec, case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("sizes", [(1, 262_144), (5, 33_333), (3, 100_000), (3, 8193), (3000, 8192), (70, 16_384)])
def test_long_rows(name, dtype, sizes):
    check(FULL[name], draw(FULL[name], *sizes, dtype=DTYPES[dtype], mean=1.0))
