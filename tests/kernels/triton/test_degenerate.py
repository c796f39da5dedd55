"""Rows without deviation, with NaN, of one feature or none: what the formula gives, and no neighbour touched."""

from __future__ import annotations

import math

import pytest
import torch

from contract import DTYPES, ROWS, assert_alone, draw
from kernel_laws import (
    BARE,
    FULL,
    divides_by_eps_where_nothing_deviates,
    does_with_a_negative_eps_what_the_formula_does,
    gives_the_bias_and_a_steep_gradient_of_a_zero_row,
    gives_the_bias_for_one_feature,
    gives_zeros_for_no_rows_and_no_features,
    keeps_an_odd_upstream_gradient_in_its_row,
    keeps_nan_of_a_parameter_in_its_column,
    sees_no_deviation_in_a_constant_row,
)
from normkit import specs
from triton_kernels import DEVICE, moved

pytestmark = pytest.mark.usefixtures("kernels")
NARROW = ["fp32", "bf16", "fp16"]
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [1 / 3, -7.7, 1e4, 1e-7])
def test_a_constant_row_has_no_deviation(dtype, value):
    for n in (3, 65):
        sees_no_deviation_in_a_constant_row(moved(draw(specs.TORCH_LAYER_NORM, 3, n, dtype=DTYPES[dtype])), value)


@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_a_zero_row_gives_the_bias_and_a_steep_gradient(name, dtype):
    gives_the_bias_and_a_steep_gradient_of_a_zero_row(FULL[name], moved(draw(FULL[name], 3, 17, dtype=DTYPES[dtype])))


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.3])
def test_eps_where_nothing_deviates(name, placement, eps):
    divides_by_eps_where_nothing_deviates(BARE[name].replace(eps=eps, eps_placement=placement), DEVICE)


def test_a_negative_eps_is_what_the_formula_gives():
    does_with_a_negative_eps_what_the_formula_does(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "both"])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_nan_and_infinity_stay_in_their_row(name, dtype, odd):
    for n in (1, 33):
        assert_alone(FULL[name], moved(draw(FULL[name], 5, n, dtype=DTYPES[dtype])), odd)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_nan_in_an_upstream_gradient_stays_in_its_row(name, dtype, odd):
    keeps_an_odd_upstream_gradient_in_its_row(FULL[name], moved(draw(FULL[name], 5, 40, dtype=DTYPES[dtype])), odd)


def test_nan_in_a_parameter_stays_in_its_column():
    keeps_nan_of_a_parameter_in_its_column(specs.TORCH_LAYER_NORM, moved(draw(specs.TORCH_LAYER_NORM, 5, 33)))


@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "GEMMA", "NANOCHAT"])
@pytest.mark.parametrize("sizes", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0, 3, 8), (2, 3, 0)])
def test_no_rows_and_no_features(name, sizes):
    gives_zeros_for_no_rows_and_no_features(ROWS[name], moved(draw(ROWS[name], *sizes, dtype=torch.bfloat16)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(5, 1), (1,), (300, 1)])
def test_one_feature(dtype, shape):
    gives_the_bias_for_one_feature(*(moved(draw(spec, *shape, dtype=DTYPES[dtype])) for spec in FULL.values()))
