"""Rows without deviation or features, with NaN, of a million features: what the formula gives, no neighbour touched."""

from __future__ import annotations

import math

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    ROWS,
    assert_alone,
    assert_forward,
    assert_gradients,
    assert_within,
    draw,
    has_closed_casts,
)
from kernel_laws import (
    BARE,
    FULL,
    divides_by_eps_where_nothing_deviates,
    does_with_a_negative_eps_what_the_formula_does,
    gives_the_bias_and_a_steep_gradient_of_a_zero_row,
    gives_the_bias_for_one_feature,
    gives_zeros_for_no_rows_and_no_features,
    has_the_exact_output,
    keeps_an_odd_upstream_gradient_in_its_row,
    keeps_nan_of_a_parameter_in_its_column,
    sees_no_deviation_in_a_constant_row,
)
from normkit import specs, units

PLACEMENTS = ["inside", "outside", "clamp"]
LENGTHS = [1, 3, 16, 65, 1000, 4097]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1 / 3, -7.7, 1e4, 1e-7])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_constant_row_has_no_deviation(dtype, value, n):
    sees_no_deviation_in_a_constant_row(draw(specs.TORCH_LAYER_NORM, 3, n, dtype=DTYPES[dtype]), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_zero_row_gives_the_bias_and_a_steep_gradient(dtype, name, n):
    gives_the_bias_and_a_steep_gradient_of_a_zero_row(FULL[name], draw(FULL[name], 3, n, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.3])
def test_eps_where_nothing_deviates(name, placement, eps):
    divides_by_eps_where_nothing_deviates(BARE[name].replace(eps=eps, eps_placement=placement))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("multiplier", ["one", "sqrt_n"])
def test_every_scale_that_a_row_can_have(name, placement, correction, multiplier):
    for reduction in ("mean",) if correction else ("mean", "sum"):
        for eps in (1e-5, 3.0):
            spec = FULL[name].replace(
                eps=eps, eps_placement=placement, correction=correction, reduction=reduction, multiplier=multiplier
            )
            case = draw(spec, 24, 40, mean=0.3)
            assert_forward(spec, case)
            assert_gradients(spec, case)


def test_a_negative_eps_is_what_the_formula_gives():
    does_with_a_negative_eps_what_the_formula_does()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_nan_and_infinity_stay_in_their_row(name, dtype, odd, n):
    assert_alone(FULL[name], draw(FULL[name], 5, n, dtype=DTYPES[dtype]), odd)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
def test_nan_in_an_upstream_gradient_stays_in_its_row(name, dtype, odd):
    keeps_an_odd_upstream_gradient_in_its_row(FULL[name], draw(FULL[name], 5, 70, dtype=DTYPES[dtype]), odd)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_no_features(name, dtype):
    for sizes in ((0, 8), (3, 0), (0, 0), (2, 0, 8), (0, 3, 8), (2, 3, 0)):
        gives_zeros_for_no_rows_and_no_features(ROWS[name], draw(ROWS[name], *sizes, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (1, 1), (1,), (3000, 1)])
def test_one_feature(dtype, shape):
    gives_the_bias_for_one_feature(*(draw(spec, *shape, dtype=DTYPES[dtype]) for spec in FULL.values()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("sizes", [(1, 1_000_003), (3, 100_000)])
def test_long_rows(name, dtype, sizes):
    """A float32 sum of so many terms, added one by one, would be off by a thousand units."""
    case = draw(FULL[name], *sizes, dtype=DTYPES[dtype], mean=2.0)
    assert_forward(FULL[name], case)
    assert_gradients(FULL[name], case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", [1, 7, 33, 1000])
def test_nan_in_a_parameter_stays_in_its_column(name, dtype, n):
    keeps_nan_of_a_parameter_in_its_column(FULL[name], draw(FULL[name], 5, n, dtype=DTYPES[dtype]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BARE)
def test_a_million_features_on_a_large_mean(name):
    x = torch.randn(1, 1_000_003) + 1e5
    assert_within(normkit.normalize(x, BARE[name]), *units.output(x, BARE[name]), 4, "y")
    # The truth leans on a float64 mean of a million numbers: here it is summed without any rounding.
    assert abs(math.fsum(x[0].tolist()) / x.shape[1] - x.double().mean().item()) <= 1e-9


def test_rows_of_every_size_beside_each_other():
    """Each row is scaled by itself: 1e-38 and 1e18 stand side by side in one batch."""
    x = torch.randn(60, 48) * torch.logspace(-38, 18, 60).unsqueeze(1)
    for spec in BARE.values():
        has_the_exact_output(x, spec.replace(eps=0.0))


def test_the_presets_that_a_gradient_contract_holds_for_are_not_few():
    assert sum(has_closed_casts(spec, torch.bfloat16) for spec in ROWS.values()) >= 15
