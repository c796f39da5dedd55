"""Rows that are taken in pieces, and several tiles a program, at lengths that the interpreter has time for."""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import DTYPES, Case, assert_forward, assert_gradients, assert_within, draw, outcome
from helpers import exact
from normkit import specs, units
from normkit.kernels.triton.configuration import Tiling
from triton_kernels import DEVICE, cut_into, moved

pytestmark = pytest.mark.usefixtures("kernels")

FULL = {"layer_norm": specs.TORCH_LAYER_NORM, "rms_norm": specs.OLMO2, "deberta": specs.DEBERTA}
BARE = {"layer_norm": specs.OLMO, "rms_norm": specs.NANOCHAT}
IN_PIECES = Tiling(rows=2, columns=64, tiles=2, warps=4, stages=2, is_whole=False)
SEVERAL_TILES = Tiling(rows=2, columns=512, tiles=3, warps=4, stages=3, is_whole=True)
CUTS = {"in pieces": IN_PIECES, "several tiles": SEVERAL_TILES}
# Each norm, each dtype.
THREE = [("layer_norm", "fp32"), ("rms_norm", "bf16"), ("layer_norm", "fp16")]


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """How rows are cut."""
    cut_into(monkeypatch, CUTS[request.param])
    return request.param


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("sizes", [(5, 300), (3, 65)])
@pytest.mark.parametrize(("name", "dtype"), THREE)
def test_outputs_and_gradients(name, dtype, sizes):
    case = moved(draw(FULL[name], *sizes, dtype=DTYPES[dtype], mean=2.0))
    assert_forward(FULL[name], case)
    assert_gradients(FULL[name], case)


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("placement", ["outside", "clamp"])
def test_other_scales_and_casts(placement):
    spec = specs.TORCH_LAYER_NORM.replace(eps=0.5, eps_placement=placement, multiplier="sqrt_n", correction=1)
    case = moved(draw(spec, 6, 130, parameter_dtype=torch.float32))
    case = case._replace(x=case.x * torch.tensor([1.0, 0.01], device=DEVICE).repeat(3).unsqueeze(1))
    assert_forward(spec, case)
    assert_gradients(spec, case)
    assert_forward(specs.DEBERTA, moved(draw(specs.DEBERTA, 5, 130, dtype=torch.bfloat16)))


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("drift", [1e2, 1e5])
@pytest.mark.parametrize("size", [1.0, 1e-40, 1e25])
def test_a_row_whose_first_piece_has_another_mean(drift, size):
    """Deviations from the first piece's mean would be all drift: they are taken once more, from the mean."""
    x = torch.randn(3, 300, dtype=torch.float64)
    x[:, :64] += drift
    x[1] = x[1].flip(0)
    spec = specs.OLMO.replace(eps=0.0)
    x = (x * size).float()
    true = exact(x, spec)
    assert_within(normkit.normalize(x.to(DEVICE), spec).cpu(), true, units.output(x, spec).size, 4, "y")


@pytest.mark.slow
def test_a_row_of_16_bits_whose_first_piece_has_another_mean(monkeypatch):
    """One reading would lose what 64 pieces lie away from the first: a hundredth of the last bit, of many a tie."""
    cut_into(monkeypatch, Tiling(rows=1, columns=16, tiles=1, warps=1, stages=1, is_whole=False))
    case = draw(specs.OLMO, 3, 1024, dtype=torch.float16, scale=20.0)
    case.x[:, :16] += 5000.0
    assert_forward(specs.OLMO, moved(case))


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("name", "mean"), [("layer_norm", 1e5), ("rms_norm", 1e3), ("deberta", 1e4)])
def test_a_large_mean(name, mean):
    case = moved(draw(FULL[name], 3, 140, mean=mean))
    assert_forward(FULL[name], case)
    assert_gradients(FULL[name], case)


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", BARE)
def test_rows_of_every_size_beside_each_other(name):
    size = torch.logspace(-40, 18, 12, dtype=torch.float64).unsqueeze(1)
    x = (torch.randn(12, 150, dtype=torch.float64) * size).float()
    spec = BARE[name].replace(eps=0.0)
    true = exact(x, spec)
    assert_within(normkit.normalize(x.to(DEVICE), spec).cpu(), true, units.output(x, spec).size, 4, "y")
    case = Case(x, torch.randn(12, 150) * size.clamp(1e-20, 1e10).float(), None, None)
    assert_gradients(spec, moved(case))


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_row(odd):
    spec = specs.TORCH_LAYER_NORM
    case = moved(draw(spec, 5, 130, dtype=torch.bfloat16))
    broken = case.x.clone()
    broken[2, 100] = odd
    ours, clean = outcome(spec, case._replace(x=broken)), outcome(spec, case)
    others = [0, 1, 3, 4]
    assert torch.equal(ours.y[others], clean.y[others])
    assert torch.equal(ours.x[others], clean.x[others])
    assert ours.y[2].isnan().any()
    assert ours.x[2].isnan().any()


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", ["layer_norm"])
def test_bits_follow_the_row_alone(name):
    case = moved(draw(FULL[name], 2, 3, 130, dtype=torch.bfloat16))
    expected = outcome(FULL[name], case)
    alone = outcome(FULL[name], case._replace(x=case.x[1, 2], dy=case.dy[1, 2]))
    assert torch.equal(alone.y, expected.y[1, 2])
    assert torch.equal(alone.x, expected.x[1, 2])
    turned = outcome(FULL[name], case._replace(x=_turned(case.x), dy=_turned(case.dy)))
    assert all(a is None or torch.equal(a, b) for a, b in zip(turned, expected, strict=True))


def _turned(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("cut")
def test_a_norm_after_an_addition():
    spec, case = specs.TORCH_LAYER_NORM, moved(draw(specs.TORCH_LAYER_NORM, 5, 130, dtype=torch.bfloat16))
    residual = torch.randn(5, 130, device=DEVICE)
    y, new = normkit.add_normalize(case.x, residual, spec, case.weight, case.bias)
    assert torch.equal(new, case.x.float() + residual)
    theirs = normkit.normalize(new, spec, case.weight.float(), case.bias.float())
    assert (y.float() - theirs).abs().max() <= 0.02
    assert_within(y, theirs.double(), theirs.double().abs() + 1.0, 0.51, "y")
