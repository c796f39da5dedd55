"""Numbers below the smallest normal one are rounded like any other: none is flushed to zero, none is lost on the way.

A CPU's fast conversions to bfloat16 take such numbers for zero, and gradients of a mean in float16 are such numbers.
"""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    GAIN_UNITS,
    HALF,
    UNITS,
    assert_rounded,
    assert_within,
    draw,
    outcome,
    truth,
)
from kernel_laws import BARE, FULL
from normkit import reference, specs
from normkit.units import spacing

EARLY = {"layer_norm": specs.DEBERTA, "rms_norm": specs.LLAMA}
NARROW = ["bf16", "fp16", "fp32"]
# The least gain whose products are subnormal, and the greatest that leaves some of them not zero.
RANGE = [1.0, 2.0**-3, 2.0**-6]


def is_subnormal(tensor):
    return (tensor != 0) & (tensor.double().abs() < torch.finfo(tensor.dtype).smallest_normal)


def assert_many_subnormal(tensor, fraction):
    """Else the test is of something else."""
    assert is_subnormal(tensor).double().mean() > fraction


def assert_forward(spec, case, fraction):
    program = reference.forward(case.x, spec, case.weight, case.bias)
    assert_many_subnormal(program, fraction)
    y = normkit.normalize(case.x, spec, case.weight, case.bias)
    size = truth(spec, case)[1].y
    if y.dtype in HALF:
        assert_rounded(y, program, spec, {y.dtype}, size)
    else:
        assert_within(y, program.double(), size, UNITS[y.dtype], "y")


@pytest.mark.parametrize("factor", RANGE)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", [*FULL, "early layer_norm", "early rms_norm"])
def test_outputs_by_a_small_gain(name, dtype, factor):
    spec = EARLY[name[6:]] if name.startswith("early") else FULL[name]
    dtype = DTYPES[dtype]
    case = draw(spec, 64, 768, dtype=dtype)
    small = torch.finfo(dtype).smallest_normal * factor
    weight = (case.weight.double() * small).to(dtype)
    bias = None if case.bias is None else (case.bias.double() * small / 8).to(dtype)
    assert_forward(spec, case._replace(weight=weight, bias=bias), 0.5)


@pytest.mark.parametrize("n", [7, 16, 33, 64, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_outputs_beside_one_huge_element(dtype, n):
    """One element holds all of the length of its row; the others come out 1e-38 of it, or 1e-5 in float16."""
    dtype = DTYPES[dtype]
    information = torch.finfo(dtype)
    rows = 65536 // n
    case = draw(specs.NANOCHAT, rows, n, dtype=dtype)
    huge = information.max / 4
    rest = torch.rand(rows, n, dtype=torch.float64) * information.smallest_normal * huge / n**0.5
    x = (rest * torch.randn(rows, n).sign()).to(dtype)
    x[:, n // 2] = huge
    assert_forward(specs.NANOCHAT.replace(eps=0.0), case._replace(x=x), 0.3)


@pytest.mark.parametrize("factor", RANGE)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", FULL)
def test_gradients_of_a_small_upstream_gradient(name, dtype, factor):
    """dy, dx and the gradients of gain and bias are all subnormal."""
    spec, dtype = FULL[name], DTYPES[dtype]
    case = draw(spec, 4, 768, dtype=dtype)
    dy = (torch.randn(4, 768, dtype=torch.float64) * torch.finfo(dtype).smallest_normal * factor / 4).to(dtype)
    case = case._replace(dy=dy)
    ours, (true, size) = outcome(spec, case), truth(spec, case)
    assert_many_subnormal(ours.x, 0.2)
    assert_many_subnormal(ours.weight, 0.2)
    if dtype == torch.float32:
        assert_within(ours.x, true.x, size.x, UNITS[dtype], "dx")
    else:
        # Rounded once; on the way it may pass float32 numbers, also subnormal: a step is 2^16 of theirs.
        once = 0.5 * torch.maximum(torch.finfo(dtype).eps * true.x.abs(), torch.tensor(spacing(dtype)))
        bound = 1.001 * once + 4 * torch.finfo(torch.float32).eps * size.x
        error = (ours.x.double() - true.x).abs()
        assert (error <= bound).all(), f"dx: {(error / bound).max():.3g} of what rounding once leaves"
    assert_within(ours.weight, true.weight, size.weight, GAIN_UNITS[dtype], "dweight")
    if ours.bias is not None:
        assert torch.equal(ours.bias, dy.double().sum(0).to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", BARE)
def test_rows_of_subnormal_numbers(name, dtype):
    """Read as what they are: to lanes that take them for zero this would be a batch of zero rows."""
    dtype = DTYPES[dtype]
    spec = BARE[name].replace(eps=0.0)
    case = draw(spec, 64, 768, dtype=dtype)
    x = (case.x.double() * torch.finfo(dtype).smallest_normal / 8).to(dtype)
    assert_many_subnormal(x, 0.9)
    program = reference.forward(x, spec)
    y = normkit.normalize(x, spec)
    size = program.double().abs().amax(-1, keepdim=True)
    assert_within(y, program.double(), size, 4 if dtype == torch.float32 else 1, "y")
    assert (y == program).double().mean() >= (0.5 if dtype == torch.float32 else 0.9995)


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_a_stream_of_subnormal_numbers(pair):
    """The sum of two of them is exact, or rounded once."""
    dtypes = [DTYPES[name] for name in pair]
    small = torch.finfo(dtypes[1]).smallest_normal / 8
    x, residual = ((torch.randn(64, 96, dtype=torch.float64) * small).to(dtype) for dtype in dtypes)
    _, new = normkit.add_normalize(x, residual, specs.NANOCHAT)
    assert_many_subnormal(new, 0.9)
    assert torch.equal(new, (x.double() + residual.double()).to(dtypes[1]))
