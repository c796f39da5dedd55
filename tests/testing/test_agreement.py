"""Outputs against the spec: where they differ, where only their bits do, and where nothing does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import normkit as nk
from faulty_norms import (
    CancellingVariance,
    Gain,
    GainAndBias,
    MultiplyThenCast,
    RsqrtSlip,
    SixteenBitStatistics,
    WrongPower,
)
from normkit import specs
from normkit.testing import agreement, violations
from normkit.testing.norm_under_test import Subject

HALF = (torch.bfloat16, torch.float16)


def under_test(norm, spec, dtype=torch.float32, parameter_dtype=None):
    return Subject(norm, spec, None, None, None, None, None, torch.float32).in_dtype(spec, dtype, parameter_dtype)


@pytest.mark.parametrize("n", [8, 64, 4096])
@pytest.mark.parametrize("spec", [specs.OLMO2, specs.TORCH_LAYER_NORM, specs.X_TRANSFORMERS_RMS])
def test_eps_and_the_divisor_show_at_every_width(n, spec):
    right = nk.Norm(spec, n)
    assert agreement.misfit(under_test(right, spec)) is None
    near = agreement.misfit(under_test(right, spec.replace(eps=1.001 * spec.eps)))
    assert near is not None
    assert near.at == "length"
    if spec.reduction == "mean":
        assert agreement.misfit(under_test(right, spec.replace(correction=1))).at == "large"


class Bounded(Gain):
    """A right norm whose rows, or what leaves, are bounded by a number that ordinary rows do not reach."""

    def __init__(self, of_rows=100.0, of_outputs=100.0):
        super().__init__()
        self.of_rows, self.of_outputs = of_rows, of_outputs

    def forward(self, x):
        rows = self.rms(x).clamp(-self.of_rows, self.of_rows)
        return (self.weight.float() * rows).clamp(-self.of_outputs, self.of_outputs).to(x.dtype)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("bounds", [{"of_rows": 6.0}, {"of_rows": 7.5}, {"of_outputs": 6.0}, {"of_outputs": 10.0}])
def test_outputs_that_are_bounded(bounds):
    # Rows of 64 that are long in one entry reach 8, times a gain of 1.49.
    seen = violations(Bounded(**bounds), specs.OLMO2)[0]
    assert seen.check == "formula"
    assert re.search(r"an output of -?\d.* where a row is long in one entry: it saturates", seen.found)
    assert violations(Bounded(), specs.OLMO2) == ()


@pytest.mark.slow
def test_a_bound_that_only_longer_rows_reach():
    def norm(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).clamp(-8, 8).to(x.dtype)

    [seen] = violations(norm, specs.NANOCHAT, 64)
    assert seen.check == "formula"
    assert "torch.randn(1, 3, 256)" in seen.confirm


class Flushed(Gain):
    def __init__(self, below=None):
        super().__init__()
        self.below = below

    def forward(self, x):
        below = torch.finfo(x.dtype).tiny if self.below is None else self.below
        return (self.weight.float() * self.rms(torch.where(x.abs() < below, 0, x))).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("below", [None, 1e-9, 1e-4])
def test_small_numbers_that_are_taken_for_zero_are_no_other_eps(below):
    found = violations(Flushed(below), specs.OLMO2)
    assert [violation.check for violation in found] == ["formula"]


def test_two_numbers_are_told_apart():
    assert agreement._apart(1.15101, 1.15099) == "1.15101 in place of 1.15099"
    assert agreement._apart(1.0, 2.0) == "1 in place of 2"
    assert agreement._apart(1.0, 1.0) == "1 in place of 1"


@pytest.mark.parametrize(("norm", "power"), [(WrongPower(), -3.0), (RsqrtSlip(), -1.0), (nn.LayerNorm(64), 0.0)])
def test_degree(norm, power):
    spec = specs.OLMO2 if isinstance(norm, RsqrtSlip) else specs.TORCH_LAYER_NORM
    assert agreement.degree(under_test(norm, spec)) == pytest.approx(power, abs=0.01)


def test_a_variance_that_cancels():
    class Welford(GainAndBias):
        """One pass, and right."""

        def forward(self, x):
            wide = x.float()
            mean, total = wide[..., :1], torch.zeros_like(wide[..., :1])
            for count in range(2, wide.shape[-1] + 1):
                step = wide[..., count - 1 : count] - mean
                mean = mean + step / count
                total = total + step * (wide[..., count - 1 : count] - mean)
            return self.affine((wide - mean) * torch.rsqrt(total / wide.shape[-1] + self.eps), x)

    assert agreement.cancelling_variance(under_test(CancellingVariance(), specs.TORCH_LAYER_NORM)) is not None
    assert agreement.cancelling_variance(under_test(Welford(), specs.TORCH_LAYER_NORM)) is None
    assert agreement.cancelling_variance(under_test(nn.LayerNorm(64), specs.TORCH_LAYER_NORM)) is None
    # What has no variance has none that cancels.
    assert agreement.cancelling_variance(under_test(SixteenBitStatistics(), specs.LLAMA)) is None


def test_rows_whose_squares_overflow():
    seen = agreement.large_rows(under_test(SixteenBitStatistics(), specs.LLAMA, torch.float16))
    assert "as for a zero row" in seen.found
    assert agreement.large_rows(under_test(SixteenBitStatistics(), specs.LLAMA, torch.bfloat16)) is None
    assert agreement.large_rows(under_test(MultiplyThenCast(), specs.LLAMA, torch.float16)) is None
    # A spec that says so may.
    assert agreement.large_rows(under_test(SixteenBitStatistics(), specs.IMAGEGPT, torch.float16)) is None


@pytest.mark.parametrize("dtype", HALF)
def test_bits(dtype):
    assert agreement.difference_in_bits(under_test(MultiplyThenCast(), specs.OLMO2, dtype)) is None
    assert agreement.match_rate(under_test(MultiplyThenCast(), specs.OLMO2, dtype)) > 0.995
    assert "% of the outputs so" in agreement.difference_in_bits(under_test(MultiplyThenCast(), specs.LLAMA, dtype))
    assert agreement.match_rate(under_test(MultiplyThenCast(), specs.LLAMA, dtype)) < 0.9


def test_float32_parameters_show_what_sixteen_bit_ones_hide():
    # In bfloat16 throughout, a cast to the weight's dtype is an early cast.
    early = nk.Norm(specs.LLAMA, 64)
    assert agreement.difference_in_bits(under_test(early, specs.T5, torch.bfloat16)) is None
    mixed = under_test(early, specs.T5, torch.bfloat16, torch.float32)
    assert "with float32 parameters" in agreement.difference_with_wide_parameters(mixed)
    mixed = under_test(early, specs.LLAMA, torch.bfloat16, torch.float32)
    assert agreement.difference_with_wide_parameters(mixed) is None

    class NoMixture(nn.LayerNorm):
        def forward(self, x):
            assert x.dtype == self.weight.dtype
            return super().forward(x)

    mixed = under_test(NoMixture(8), specs.TORCH_LAYER_NORM, torch.bfloat16, torch.float32)
    assert agreement.difference_with_wide_parameters(mixed) is None


def test_output_dtype():
    mixed = under_test(MultiplyThenCast(), specs.LLAMA, torch.bfloat16, torch.float32)
    seen = agreement.output_dtype(mixed)
    assert seen.expected == "float32 for bfloat16 input and float32 parameters"
    assert seen.found == "bfloat16"
    assert agreement.output_dtype(under_test(MultiplyThenCast(), specs.LLAMA, torch.bfloat16)) is None
