"""Claims C01 to C13: what the norms are, where their eps sits, and what gain and bias are for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import below, exact
from normkit import NormSpec, geometry, identify, reference, specs

PLAIN = NormSpec(has_weight=False, has_bias=False)


@pytest.fixture
def x():
    return torch.randn(64, 12, dtype=torch.float64) + 0.5


def test_c01_layer_norm_is_the_formula_with_eps_inside(x, measured):
    gain, bias = torch.randn(2, 12, dtype=torch.float64)
    ours = exact(x, NormSpec(), gain, bias)
    measured("error " + below(ours - F.layer_norm(x, (12,), gain, bias, 1e-5), 1e-13))


def test_c02_without_eps_a_constant_row_has_no_output(x, measured):
    constant = torch.full((1, 12), 3.0, dtype=torch.float64)
    assert reference.forward(constant, PLAIN.replace(eps=0.0)).isnan().all()
    difference = reference.forward(x, PLAIN.replace(eps=0.0)) - reference.forward(x, PLAIN)
    assert difference.abs().max() > 1e-6
    measured(f"NaN on a constant row; with eps = 1e-5 rows of unit scale differ by {below(difference, 1e-4)}")


def test_c03_one_number_inside_and_outside_is_not_one_strength(measured):
    x = torch.tensor([0.01, -0.01], dtype=torch.float64)
    inside = geometry.shrink_factor(x, eps=1e-5, eps_placement="inside").item()
    outside = geometry.shrink_factor(x, eps=1e-5, eps_placement="outside").item()
    scale = geometry.agreement_scale(1e-5)
    y = torch.tensor([scale, -scale], dtype=torch.float64)
    agree = geometry.shrink_factor(y, eps=1e-5) - geometry.shrink_factor(y, eps=1e-5, eps_placement="outside")
    below(agree, 1e-15)
    measured(f"at std 0.01 inside keeps {inside:.4f} of the length, outside {outside:.4f}; equal at std {scale:.6f}")


def test_c04_eps_gives_a_constant_row_the_bias(measured):
    constant, bias = torch.full((1, 12), 3.0, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    assert torch.equal(reference.forward(constant, NormSpec(has_weight=False), None, bias)[0], bias)
    assert reference.forward(constant, NormSpec(has_weight=False, eps=0.0), None, bias).isnan().all()
    gradient = reference.backward(torch.randn(1, 12, dtype=torch.float64), constant, PLAIN).x
    assert gradient.isfinite().all()
    measured("a constant row gives the bias exactly, and a finite gradient; NaN with eps = 0")


def test_c05_an_eps_of_1e_12_needs_wide_statistics(measured):
    assert torch.tensor(1e-12, dtype=torch.float16) == 0
    constant = torch.zeros(1, 12, dtype=torch.float16)
    narrow = NormSpec(eps=1e-12, statistics_dtype="input", cast="none", has_weight=False, has_bias=False)
    assert reference.forward(constant, narrow).isnan().all()
    assert (reference.forward(constant, PLAIN.replace(eps=1e-12)) == 0).all()
    measured("1e-12 is 0 in float16: a zero row gives NaN; 0 with float32 statistics")


def test_c06_the_snippet_with_var_is_another_function(measured):
    gain, bias = torch.ones(6), torch.zeros(6)

    def snippet(x):
        return gain * (x - x.mean(dim=-1, keepdim=True)) / torch.sqrt(x.var(dim=-1, keepdim=True) + 1e-5) + bias

    assert identify(snippet, 6).spec.correction == 1
    x = torch.randn(1, 6)
    short = 1 - (snippet(x).norm() / F.layer_norm(x, (6,)).norm()).item()
    assert short == pytest.approx(1 - math.sqrt(5 / 6), abs=1e-5)
    measured(f"divides by n - 1: {100 * short:.1f} % too short at n = 6; `identify` says correction=1")


def test_c07_rms_norm_is_the_formula_with_eps_inside(x, measured):
    gain = torch.randn(12, dtype=torch.float64)
    ours = exact(x, specs.TORCH_RMS_NORM.replace(eps=1e-5), gain)
    measured("error " + below(ours - F.rms_norm(x, (12,), gain, 1e-5), 1e-13))


def test_c08_rms_norm_as_shipped_has_an_eps_and_no_bias(measured):
    layer = torch.nn.RMSNorm(12)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert (layer(torch.zeros(1, 12)) == 0).all()
    without = reference.forward(torch.zeros(1, 12), specs.TORCH_RMS_NORM.replace(eps=0.0))
    assert without.isnan().all()
    measured("`torch.nn.RMSNorm` has no bias; on a zero row it gives 0, the formula without eps NaN")


def test_c09_rms_norm_does_not_normalize_the_variance(measured):
    row = torch.randn(4096, dtype=torch.float64)
    row = 3 + (row - row.mean()) / row.std(correction=0)
    y = reference.forward(row, specs.TORCH_RMS_NORM.replace(has_weight=False, eps=0.0))
    variance = y.var(correction=0).item()
    assert variance == pytest.approx(1 / (1 + 3**2), rel=1e-12)
    measured(f"a row of mean 3 and variance 1 leaves with variance {variance:.3f}")


def test_c10_mean_0_and_variance_1_hold_in_a_row_and_not_in_a_feature(measured):
    x = torch.randn(1000, 12, dtype=torch.float64) + torch.arange(12.0, dtype=torch.float64)
    y = reference.forward(x, PLAIN.replace(eps=0.0))
    below(y.mean(-1), 1e-14)
    below(y.var(-1, correction=0) - 1, 1e-13)
    low, high = y.mean(0).min().item(), y.mean(0).max().item()
    measured(f"every row: mean 0, variance 1; the features of one cloud have means from {low:.2f} to {high:.2f}")


def test_c11_a_fresh_layer_is_not_the_identity(measured):
    layer = torch.nn.LayerNorm(12, dtype=torch.float64)
    assert (layer.weight == 1).all()
    assert (layer.bias == 0).all()
    row = torch.linspace(0, 11, 12, dtype=torch.float64)
    moved = ((layer(row) - row).norm() / row.norm()).item()
    assert torch.equal(geometry.affine(row, layer.weight, layer.bias), row)
    measured(f"the affine map is; the layer moves the row 0, 1, ..., 11 by {100 * moved:.0f} % of its length")


def test_c12_gain_and_bias_set_mean_and_scale_of_each_feature(measured):
    gain, bias = torch.rand(2, 8, dtype=torch.float64) + 0.5
    z = reference.forward(torch.randn(4000, 8, dtype=torch.float64), PLAIN)
    y = geometry.affine(z, gain, bias)
    error = torch.cat([y.mean(0) - (gain * z.mean(0) + bias), y.std(0) - gain * z.std(0)])
    measured(
        f"mean and deviation of each feature become gain * mean + bias and gain * deviation, {below(error, 1e-13)}"
    )


def test_c13_a_linear_layer_behind_the_norm_can_hold_gain_and_bias(x, measured):
    gain, bias = torch.randn(2, 12, dtype=torch.float64)
    weight = torch.randn(5, 12, dtype=torch.float64)
    with_affine = reference.forward(x, NormSpec(), gain, bias) @ weight.T
    folded = reference.forward(x, PLAIN) @ (weight * gain).T + weight @ bias
    measured(f"folded and unfolded differ by {below(folded - with_affine, 1e-13)}")
