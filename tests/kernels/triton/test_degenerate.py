"""Rows without deviation, with NaN, of one feature or none: what the formula gives, and no neighbour touched."""

from __future__ import annotations

import math

import pytest
import torch

import normkit
from contract import (
    DTYPES,
    ROWS,
    Case,
    assert_alone,
    assert_gradients,
    assert_within,
    draw,
    outcome,
    truth,
)
from normkit import reference, specs
from triton_kernels import DEVICE, moved

pytestmark = pytest.mark.usefixtures("kernels")

FULL = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2}
BARE = {"layer_norm": specs.OLMO, "rms_norm": specs.NANOCHAT}
NARROW = ["fp32", "bf16", "fp16"]
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [1 / 3, -7.7, 1e4, 1e-7])
def test_a_constant_row_has_no_deviation(dtype, value):
    for n in (3, 65):
        case = moved(draw(specs.TORCH_LAYER_NORM, 3, n, dtype=DTYPES[dtype]))
        x = torch.full_like(case.x, value)
        y = normkit.layer_norm(x, (n,), case.weight, case.bias)
        assert torch.equal(y, case.bias.expand_as(y))
        assert normkit.layer_norm(x, (n,), eps=0.0).isnan().all()
    if dtype == "fp32":
        assert_gradients(specs.TORCH_LAYER_NORM, case._replace(x=x))


@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_a_zero_row_gives_the_bias_and_a_steep_gradient(name, dtype):
    spec = FULL[name]
    case = moved(draw(spec, 3, 17, dtype=DTYPES[dtype]))
    case = case._replace(x=torch.zeros_like(case.x))
    ours, _ = assert_gradients(spec, case)
    assert torch.equal(ours.y, torch.zeros_like(case.x) if case.bias is None else case.bias.expand_as(ours.y))
    assert torch.equal(ours.weight, torch.zeros_like(case.weight))
    assert normkit.normalize(case.x, spec.replace(eps=0.0), case.weight, case.bias).isnan().all()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.3])
def test_eps_where_nothing_deviates(name, placement, eps):
    spec = BARE[name].replace(eps=eps, eps_placement=placement)
    x, dy = torch.stack([torch.zeros(24), torch.full((24,), 2.5), torch.randn(24)]), torch.randn(3, 24)
    true = reference.backward(dy.double(), x.double(), spec.replace(output_dtype="input")).x
    ours = outcome(spec, moved(Case(x, dy, None, None)))
    assert_within(ours.y.cpu(), reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    flat = reference.statistics(x.double().unsqueeze(-2), spec, spec.eps).scale.flatten() == 0
    # dy / 0: infinite or NaN, by the order of the operations.
    assert not ours.x.cpu()[flat].isfinite().any()
    size = true.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True) + 1.0
    assert_within(ours.x.cpu()[~flat], true[~flat], size[~flat], 4, "dx")


def test_a_negative_eps_is_what_the_formula_gives():
    spec = specs.NANOCHAT.replace(eps=-0.5)
    x = torch.stack([torch.full((8,), 2.0), torch.full((8,), 0.1)])
    y = normkit.normalize(x.to(DEVICE), spec).cpu()
    assert_within(y, reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    assert y[1].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "both"])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_nan_and_infinity_stay_in_their_row(name, dtype, odd):
    for n in (1, 33):
        spec = FULL[name]
        case = moved(draw(spec, 5, n, dtype=DTYPES[dtype]))
        assert_alone(spec, case, odd)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_nan_in_an_upstream_gradient_stays_in_its_row(name, dtype, odd):
    case = moved(draw(FULL[name], 5, 40, dtype=DTYPES[dtype]))
    broken = case.dy.clone()
    broken[2, 3] = odd
    ours, clean = outcome(FULL[name], case._replace(dy=broken)), outcome(FULL[name], case)
    others, columns = [0, 1, 3, 4], [column for column in range(40) if column != 3]
    assert torch.equal(ours.x[others], clean.x[others])
    assert not ours.x[2].isfinite().any()
    assert not ours.weight[3].isfinite()
    assert torch.equal(ours.weight[columns], clean.weight[columns])


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_nan_in_a_parameter_stays_in_its_column(what):
    spec = specs.TORCH_LAYER_NORM
    case, column = moved(draw(spec, 5, 33)), 7
    clean, others = outcome(spec, case), [place for place in range(33) if place != column]
    broken = getattr(case, what).clone()
    broken[column] = math.nan
    ours = outcome(spec, case._replace(**{what: broken}))
    assert ours.y[:, column].isnan().all()
    assert torch.equal(ours.y[:, others], clean.y[:, others])
    assert torch.equal(ours.weight, clean.weight)
    assert torch.equal(ours.bias, clean.bias)
    assert ours.x.isnan().all() if what == "weight" else torch.equal(ours.x, clean.x)


@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "GEMMA", "NANOCHAT"])
@pytest.mark.parametrize("sizes", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0, 3, 8), (2, 3, 0)])
def test_no_rows_and_no_features(name, sizes):
    case = moved(draw(ROWS[name], *sizes, dtype=torch.bfloat16))
    ours = outcome(ROWS[name], case)
    assert ours.y.shape == ours.x.shape == sizes
    for what in ("weight", "bias"):
        if getattr(ours, what) is not None:
            assert torch.equal(getattr(ours, what), torch.zeros_like(getattr(case, what))), f"d{what} of {sizes}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(5, 1), (1,), (300, 1)])
def test_one_feature(dtype, shape):
    case = moved(draw(specs.TORCH_LAYER_NORM, *shape, dtype=DTYPES[dtype]))
    ours = outcome(specs.TORCH_LAYER_NORM, case)
    assert torch.equal(ours.y, case.bias.expand_as(ours.y))
    assert torch.equal(ours.x, torch.zeros_like(case.x))
    assert torch.equal(ours.weight, torch.zeros_like(case.weight))
    case = moved(draw(specs.OLMO2, *shape, dtype=DTYPES[dtype]))
    true, _ = truth(specs.OLMO2, case)
    assert_within(outcome(specs.OLMO2, case).y, true.y, true.y.abs(), 4, "y")
    assert normkit.normalize(case.x, specs.OLMO.replace(correction=1)).isnan().all()
