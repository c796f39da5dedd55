"""Rows without deviation or features, with NaN, of a million features: what the formula gives, no neighbour touched."""

from __future__ import annotations

import math

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    GAIN_UNITS,
    ROWS,
    UNITS,
    Case,
    assert_alone,
    assert_within,
    draw,
    has_closed_casts,
    outcome,
    truth,
)
from helpers import exact
from normkit import reference, specs, units

FULL = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2}
BARE = {"layer_norm": specs.OLMO, "rms_norm": specs.NANOCHAT}
PLACEMENTS = ["inside", "outside", "clamp"]
LENGTHS = [1, 3, 16, 65, 1000, 4097]


def truth_scale(x, spec):
    return reference.statistics(x.double().unsqueeze(-2), spec, spec.eps).scale.flatten()


def assert_outcome(spec, case):
    """Everything within the units of its dtype: float32 and float64 alone."""
    ours, (true, size) = outcome(spec, case), truth(spec, case)
    assert_within(ours.y, true.y, size.y, UNITS[case.x.dtype], "y")
    assert_within(ours.x, true.x, size.x, UNITS[case.x.dtype], "dx")
    for what in ("weight", "bias"):
        if getattr(ours, what) is not None:
            dtype = getattr(case, what).dtype
            assert_within(getattr(ours, what), getattr(true, what), getattr(size, what), GAIN_UNITS[dtype], f"d{what}")
    return ours


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1 / 3, -7.7, 1e4, 1e-7])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_constant_row_has_no_deviation(dtype, value, n):
    """The sum of equal numbers is exact in float64, and so is their mean: the deviation is 0, not almost 0."""
    case = draw(specs.TORCH_LAYER_NORM, 3, n, dtype=DTYPES[dtype])
    x = torch.full_like(case.x, value)
    y = normkit.layer_norm(x, (n,), case.weight, case.bias)
    assert torch.equal(y, case.bias.expand_as(y))
    if DTYPES[dtype].itemsize > 2:
        assert_outcome(specs.TORCH_LAYER_NORM, case._replace(x=x))
    if DTYPES[dtype] != torch.float64 or n < 1000:
        assert normkit.layer_norm(x, (n,), eps=0.0).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_zero_row_gives_the_bias_and_a_steep_gradient(dtype, name, n):
    spec = FULL[name]
    case = draw(spec, 3, n, dtype=DTYPES[dtype])
    case = case._replace(x=torch.zeros_like(case.x))
    ours = outcome(spec, case)
    assert torch.equal(ours.y, torch.zeros_like(case.x) if case.bias is None else case.bias.expand_as(ours.y))
    assert torch.equal(ours.weight, torch.zeros_like(case.weight))
    if DTYPES[dtype].itemsize > 2:
        assert_outcome(spec, case)
    # A sign is not part of a NaN, and 0 / 0 is one.
    assert normkit.normalize(case.x, spec.replace(eps=0.0), case.weight, case.bias).isnan().all()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.3])
@pytest.mark.parametrize("constant", [0.0, 2.5])
def test_eps_where_nothing_deviates(name, placement, eps, constant):
    spec = BARE[name].replace(eps=eps, eps_placement=placement)
    x = torch.stack([torch.full((24,), constant), torch.randn(24)])
    dy = torch.randn(2, 24)
    true = reference.backward(dy.double(), x.double(), spec.replace(output_dtype="input")).x
    ours = outcome(spec, Case(x, dy, None, None))
    assert_within(ours.y, reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    if eps == 0.0 and not truth_scale(x, spec)[0]:
        # dy / 0: infinite or NaN, by the order of the operations.
        assert not ours.x[0].isfinite().any()
        ours, true = ours._replace(x=ours.x[1:]), true[1:]
    # The terms of a row without deviation are dy over its scale, which may be as small as eps.
    size = true.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True) + 1.0
    assert_within(ours.x, true, size, 4, "dx")


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
            assert_outcome(spec, draw(spec, 24, 40, mean=0.3))


def test_a_negative_eps_is_what_the_formula_gives():
    spec = specs.NANOCHAT.replace(eps=-0.5)
    x = torch.stack([torch.full((8,), 2.0), torch.full((8,), 0.1)])
    y = normkit.normalize(x, spec)
    assert_within(y, reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    assert y[1].isnan().all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_nan_and_infinity_stay_in_their_row(name, dtype, odd, n):
    spec = FULL[name]
    case = draw(spec, 5, n, dtype=DTYPES[dtype])
    assert_alone(spec, case, odd)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
def test_nan_in_an_upstream_gradient_stays_in_its_row(name, dtype, odd):
    case = draw(FULL[name], 5, 70, dtype=DTYPES[dtype])
    broken = case.dy.clone()
    broken[2, 3] = odd
    ours, clean = outcome(FULL[name], case._replace(dy=broken)), outcome(FULL[name], case)
    others, columns = [0, 1, 3, 4], [column for column in range(70) if column != 3]
    assert torch.equal(ours.x[others], clean.x[others])
    assert not ours.x[2].isfinite().any()
    assert not ours.weight[3].isfinite()
    assert torch.equal(ours.weight[columns], clean.weight[columns])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_no_features(name, dtype):
    for sizes in ((0, 8), (3, 0), (0, 0), (2, 0, 8), (0, 3, 8), (2, 3, 0)):
        case = draw(ROWS[name], *sizes, dtype=DTYPES[dtype])
        ours = outcome(ROWS[name], case)
        assert ours.y.shape == ours.x.shape == sizes
        for what in ("weight", "bias"):
            if getattr(ours, what) is not None:
                zeros = torch.zeros_like(getattr(case, what))
                assert torch.equal(getattr(ours, what), zeros), f"d{what} of {sizes}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (1, 1), (1,), (3000, 1)])
def test_one_feature(dtype, shape):
    case = draw(specs.TORCH_LAYER_NORM, *shape, dtype=DTYPES[dtype])
    ours = outcome(specs.TORCH_LAYER_NORM, case)
    assert torch.equal(ours.y, case.bias.expand_as(ours.y))
    assert torch.equal(ours.x, torch.zeros_like(case.x))
    assert torch.equal(ours.weight, torch.zeros_like(case.weight))
    case = draw(specs.OLMO2, *shape, dtype=DTYPES[dtype])
    true, _ = truth(specs.OLMO2, case)
    assert_within(outcome(specs.OLMO2, case).y, true.y, true.y.abs(), 4, "y")
    bessel = specs.OLMO.replace(correction=1)
    assert normkit.normalize(case.x, bessel).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("sizes", [(1, 1_000_003), (3, 100_000)])
def test_long_rows(name, dtype, sizes):
    """A float32 sum of so many terms, added one by one, would be off by a thousand units."""
    spec = FULL[name]
    case = draw(spec, *sizes, dtype=DTYPES[dtype], mean=2.0)
    ours, (true, size) = outcome(spec, case), truth(spec, case)
    allowed = 4 if dtype == "fp32" else 1
    assert_within(ours.y, true.y, size.y, allowed, "y")
    assert_within(ours.x, true.x, size.x, allowed, "dx")
    for what in ("weight", "bias"):
        if getattr(case, what) is not None:
            ours_of, true_of, size_of = (getattr(of, what) for of in (ours, true, size))
            assert_within(ours_of, true_of, size_of, GAIN_UNITS[ours_of.dtype], f"d{what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("n", [1, 7, 33, 1000])
def test_nan_in_a_parameter_stays_in_its_column(name, dtype, n):
    """Of the outputs; the gradient of every element of a row sees every gain."""
    case, column = draw(FULL[name], 5, n, dtype=DTYPES[dtype]), n // 2
    clean, others = outcome(FULL[name], case), [place for place in range(n) if place != column]
    for what in ("weight", "bias"):
        if getattr(case, what) is not None:
            broken = getattr(case, what).clone()
            broken[column] = math.nan
            ours = outcome(FULL[name], case._replace(**{what: broken}))
            assert ours.y[:, column].isnan().all()
            assert torch.equal(ours.y[:, others], clean.y[:, others])
            assert torch.equal(ours.weight, clean.weight)
            assert ours.bias is None or torch.equal(ours.bias, clean.bias)
            assert ours.x.isnan().all() if what == "weight" else torch.equal(ours.x, clean.x)


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
        spec = spec.replace(eps=0.0)
        true = exact(x, spec)
        assert_within(normkit.normalize(x, spec), true, units.output(x, spec).size, 4, "y")


def test_the_presets_that_a_gradient_contract_holds_for_are_not_few():
    assert sum(has_closed_casts(spec, torch.bfloat16) for spec in ROWS.values()) >= 15
