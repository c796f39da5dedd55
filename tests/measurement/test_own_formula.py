"""Sampled outputs against their own formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

import normkit as nk
from normkit import reference, specs
from normkit.identification.passport import Passport, Reading
from normkit.measurement.sampling import RowFormula, RowPicker, RowSample

WIDTH = 64
# A correctly rounded output is half a unit off at most; float32 arithmetic adds a few roundings.
ROUNDED = 4.0


def passport_of(spec, *shape, dtype=torch.float32):
    weight = torch.randn(shape or (WIDTH,)).to(dtype) if spec.has_weight else None
    bias = torch.randn(shape or (WIDTH,)).to(dtype) if spec.has_bias else None
    return Passport(verdict="norm", spec=spec, readings={}, weight=weight, bias=bias)


def error(passport, x, y, mask=None):
    """What a sample of one call says."""
    sample, picker = RowSample(passport.spec, RowFormula.of(passport)), RowPicker(0, mask)
    sample.enter(x, picker)
    sample.leave(y, picker)
    return sample.error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.LLAMA, specs.GEMMA, specs.ANNOTATED_TRANSFORMER])
def test_a_norm_is_on_its_formula_and_a_wrong_one_is_not(spec, dtype):
    passport = passport_of(spec, dtype=dtype)
    x = (torch.randn(2, 9, WIDTH) + 3.0).to(dtype)
    y = reference.forward(x, spec, passport.weight, passport.bias)
    assert error(passport, x, y) < ROUNDED
    y[0, 0, 3] += 0.5
    eps = torch.finfo(dtype).eps
    # The largest of the row's outputs is below 16, and so is what its mean of 3 deviations leaves.
    assert error(passport, x, y) > 0.5 / eps / 32


def test_a_gain_for_each_head():
    passport = passport_of(specs.LLAMA, 4, WIDTH)
    x = torch.randn(2, 5, 4, WIDTH)
    y = reference.forward(x, passport.spec, passport.weight, passport.bias)
    assert error(passport, x, y) < ROUNDED
    assert error(passport, x, y.flip(2)) > 1e3


def test_channels_and_groups():
    for spec, shape in (
        (specs.TORCH_LAYER_NORM.replace(axes=(1,)), (2, 8, 5)),
        (specs.TORCH_LAYER_NORM.replace(axes="all_but_batch", groups=2), (3, 8, 6)),
        (specs.TORCH_LAYER_NORM.replace(groups=2), (3, 5, 8)),
    ):
        passport, x = passport_of(spec, 8), torch.randn(shape)
        y = reference.forward(x, spec, passport.weight, passport.bias)
        assert error(passport, x, y) < ROUNDED
        assert error(passport, x, 2 * y) > 1e3


def test_a_large_mean_leaves_what_its_size_does():
    passport = passport_of(specs.TORCH_LAYER_NORM)
    x = torch.randn(4, WIDTH) + 3000.0
    y = torch.nn.functional.layer_norm(x, (WIDTH,), passport.weight, passport.bias)
    assert error(passport, x, y) < ROUNDED


def test_the_coarsest_dtype_is_the_unit():
    passport = passport_of(specs.LLAMA)
    x = torch.randn(4, WIDTH).bfloat16()
    y = reference.forward(x, specs.LLAMA, passport.weight)
    assert y.dtype == torch.float32
    assert error(passport, x, y) < ROUNDED


def test_nan_where_the_formula_is_finite_is_infinitely_wrong_and_rows_that_are_not_tell_nothing():
    passport = passport_of(specs.LLAMA)
    x = torch.randn(4, WIDTH)
    y = reference.forward(x, specs.LLAMA, passport.weight)
    x[0], y[0] = math.nan, math.nan
    assert error(passport, x, y) < ROUNDED
    y[1, 5] = math.nan
    assert error(passport, x, y) == math.inf
    assert math.isnan(error(passport, x[:1], y[:1]))


def test_what_is_open_is_not_held_against_anything():
    passport = passport_of(specs.LLAMA)
    bare = Passport(verdict="norm", spec=specs.LLAMA, readings={})
    open_eps = Passport(
        verdict="norm", spec=specs.LLAMA, readings={"eps": Reading.open("it is")}, weight=passport.weight
    )
    assert RowFormula.of(bare) is None
    assert RowFormula.of(open_eps) is None
    assert RowFormula.of(nk.identify(torch.nn.GELU(), 8)) is None
    x = torch.randn(4, 8)
    assert math.isnan(error(passport, x, x))


def test_only_the_tokens_that_count_are_held_against_it():
    passport, x = passport_of(specs.LLAMA), torch.randn(2, 6, WIDTH)
    y = reference.forward(x, specs.LLAMA, passport.weight)
    y[0, 0] = 100.0
    mask = torch.ones(2, 6, dtype=torch.bool)
    assert error(passport, x, y, mask) > 1e3
    mask[0, 0] = False
    assert error(passport, x, y, mask) < ROUNDED


def test_the_worst_batch_stays():
    passport, x = passport_of(specs.LLAMA), torch.randn(4, WIDTH)
    y = reference.forward(x, specs.LLAMA, passport.weight)
    sample = RowSample(specs.LLAMA, RowFormula.of(passport))
    for batch, factor in enumerate((1.0, 2.0, math.nan, 1.0)):
        picker = RowPicker(batch, None)
        sample.enter(x if factor == factor else x * math.nan, picker)
        sample.leave(factor * y, picker)
    assert 1e3 < sample.error < math.inf
