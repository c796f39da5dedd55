"""What the tests mend of Triton's interpreter is still wrong, and is right where it is mended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triton_kernels import HAS_GPU, rounding_interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the kernels run on the GPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@triton.jit
def converted(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def multiplied(a, b, c, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


def numbers(dtype):
    """Of every size, ties between two bfloat16 numbers, subnormal ones, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(2000, generator=generator, dtype=torch.float64)
    spread *= torch.logspace(-44, 39, 2000, dtype=torch.float64)
    ties = 1 + torch.arange(32, dtype=torch.float64) / 256
    odd = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 6e-8, 65520.0], dtype=torch.float64
    )
    return torch.cat([spread, ties, -ties, odd]).to(dtype)[:2048].contiguous()


def convert(x, dtype):
    target = torch.empty(x.shape, dtype=dtype)
    with np.errstate(all="ignore"):
        converted[(1,)](x, target, N=len(x))
    return target


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_mended_conversions_are_torchs(source, target):
    x = numbers(source)
    with rounding_interpreter():
        assert same(convert(x, target), x.to(target))


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_each_mended_fault_is_there_without_the_mend(source, target):
    """Else the mending can go: a float32 is cut off, a float64 becomes a whole number, a subnormal is lost."""
    x = numbers(source)
    assert not same(convert(x, target), x.to(target))


def test_a_fused_sum_is_rounded_once():
    a, b = (torch.tensor([1 + 2.0**-12]) for _ in range(2))
    c, target = torch.tensor([-(1 + 2.0**-11)]), torch.empty(1)
    with rounding_interpreter():
        multiplied[(1,)](a, b, c, target, N=1)
    assert target.item() == 2.0**-24
    multiplied[(1,)](a, b, c, target, N=1)
    assert target.item() == 0.0
