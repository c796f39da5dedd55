"""Calls in 16 bits: how many outputs a program gives bit for bit, and in which order of operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from helpers import PRESETS
from normkit import NormSpec, reference, specs
from normkit.identification import half_precision_calls
from normkit.identification.gain_and_bias import Affine
from normkit.identification.half_precision_calls import DEFINITION, outputs
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed

WEIGHT = Affine(weight="weight")


def made(norm, spec, affine, shape):
    with undisturbed():
        return half_precision_calls.make_runs(Specimen(norm), spec, affine, shape, torch.Generator().manual_seed(0))


def test_dtypes_of_the_runs():
    found = made(nk.Norm(specs.LLAMA, 64), specs.LLAMA, WEIGHT, (2, 64))
    half, full, other = torch.bfloat16, torch.float32, torch.float16
    pairs = [(half, half), (full, half), (half, full), (other, other), (full, other), (other, full)]
    assert [(run.weight.dtype, run.x.dtype) for run in found] == pairs
    assert all(run.x.numel() >= 8192 for run in found)
    alone = made(nk.Norm(specs.NANOCHAT, 64), specs.NANOCHAT, Affine(), (2, 64))
    assert [run.x.dtype for run in alone] == [half, other]


def test_a_short_weight_is_drawn_again_in_as_many_outputs():
    found = made(nk.Norm(specs.LLAMA, 4), specs.LLAMA, WEIGHT, (2, 4))
    assert len({tuple(run.weight.tolist()) for run in found if run.weight.dtype == torch.bfloat16}) >= 4
    assert sum(run.x.numel() for run in found[:12:3]) == 8192


def test_an_offset_loses_bits_of_every_entry():
    for run in made(nk.Norm(specs.GEMMA, 64), specs.GEMMA, WEIGHT, (2, 64)):
        if run.weight.dtype != torch.float32:
            lost = run.weight + 1 != run.weight.float() + 1
            assert lost.double().mean() > 0.8


def test_rows_of_two_are_felt_by_eps():
    # Without it each output is +-1, exact in any dtype, and late and early casts are one.
    spec = NormSpec(has_weight=False, has_bias=False)
    run = made(nk.Norm(spec, 2), spec, Affine(), (2, 2))[0]
    assert 0.2 < float(((run.y.abs() > 0.05) & (run.y.abs() < 0.95)).double().mean()) < 0.9


def test_match_counts_equal_bits():
    run = made(nk.Norm(specs.NANOCHAT, 64), specs.NANOCHAT, Affine(), (2, 64))[0]
    assert run.match(run.y) == 1.0
    other = run.y.clone()
    other.view(-1)[:82] *= 2
    assert run.match(other) == pytest.approx(1 - 82 / run.y.numel())
    not_numbers = half_precision_calls.Run(x=run.x, y=torch.full_like(run.y, torch.nan), weight=None, bias=None)
    assert not_numbers.match(not_numbers.y) == 1.0
    assert not_numbers.match(run.y) == 0.0


def test_float32_outputs_match_to_a_few_ulp():
    y = torch.ones(8)
    run = half_precision_calls.Run(x=y.half(), y=y, weight=None, bias=None)
    assert run.match(y.double() * (1 + 4e-7)) == 1.0
    assert run.match(y.double() * (1 + 4e-6)) == 0.0


def test_the_rate_names_the_order():
    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)

    spec = specs.OLMO.replace(cast="none", statistics_dtype="input", round_rstd=True)
    with undisturbed():
        found = made(norm, spec, Affine(), (2, 16))
        own = half_precision_calls.rate(found[:1], spec)
        wrong = half_precision_calls.rate(found[:1], specs.OLMO)
    assert own.share == 1.0
    # Without vector instructions torch.var gives the bits of the definition.
    assert own.order in ("x * (1 / s), v by torch.var", DEFINITION)
    assert wrong.order == DEFINITION
    assert wrong.share < 0.9


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), True),
        (lambda x: (x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype), False),
        (nn.LayerNorm(64), False),
    ],
)
def test_overflow(norm, expected):
    with undisturbed():
        assert half_precision_calls.overflows(Specimen(norm), (2, 64), torch.Generator().manual_seed(0)) is expected


HALF = [torch.bfloat16, torch.float16]


def drawn(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shares(x, y, spec, weight=None, bias=None):
    """Share of the outputs that each order gives bit for bit."""
    computed = {DEFINITION: reference.forward(x, spec, weight, bias), **dict(outputs(x, spec, weight, bias))}
    return {order: float((each == y).double().mean()) for order, each in computed.items()}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("parameters", [torch.float32, "as the input"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_order_computes_the_spec(name, parameters, dtype):
    spec = PRESETS[name]
    channels = spec.axes in ((1,), "all_but_batch")
    x = drawn(dtype, *((4, 64, 3, 5) if channels else (4, 3, 64)))
    wanted = dtype if parameters == "as the input" else parameters
    weight = drawn(wanted, 64, seed=1) if spec.has_weight else None
    bias = drawn(wanted, 64, seed=2) if spec.has_bias else None
    exact = reference.forward(x.double(), spec.replace(cast="late", statistics_dtype="float32"), weight, bias)
    orders = [(DEFINITION, reference.forward(x, spec, weight, bias)), *outputs(x, spec, weight, bias)]
    assert len({order for order, _ in orders}) == len(orders) >= 3
    # Up to six roundings, at sizes of up to the largest output.
    tolerance = 6 * torch.finfo(dtype).eps
    for order, y in orders:
        assert y.dtype == orders[0][1].dtype, order
        assert y.shape == x.shape, order
        error = (y.double() - exact).abs().max() / exact.abs().max()
        assert error < tolerance, order


@pytest.mark.parametrize("dtype", HALF)
def test_orders_of_real_code_in_16_bits(dtype):
    x, weight, bias = drawn(dtype, 64, 96), drawn(dtype, 96, seed=1), drawn(dtype, 96, seed=2)
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    annotated = shares(x, weight * (x - mean) / (std + 1e-6) + bias, specs.ANNOTATED_TRANSFORMER, weight, bias)
    assert annotated["(gain * x) / s, sqrt(v) by torch.std"] == 1.0
    assert annotated[DEFINITION] < 0.9
    imagegpt = shares(x, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight, specs.IMAGEGPT, weight)
    assert imagegpt["x / s, v as a mean of squares"] == 1.0
    l2 = shares(x, F.normalize(x, dim=-1), specs.L2_NORM)
    assert l2["x / s, sqrt(v) by torch.norm"] == 1.0
    folded = shares(x, x * (weight * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)), specs.POCKET_TTS, weight)
    assert folded["x * (gain / s), v by torch.var"] == 1.0
    # A float32 gain makes what it multiplies first float32 as well.
    wide = weight.float() * 1.0001
    y = x * (wide * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5))
    assert shares(x, y, specs.POCKET_TTS, wide)["x * (gain / s), v by torch.var"] == 1.0
    # A rounded rstd is another program than a division.
    assert max(shares(x, x / (x.var(-1, keepdim=True) + 1e-5).sqrt(), specs.POCKET_TTS).values()) < 0.9


@pytest.mark.parametrize("dtype", HALF)
def test_torchs_kernels(dtype):
    x, weight, bias = drawn(dtype, 96, 64), drawn(dtype, 64, seed=1), drawn(dtype, 64, seed=2)
    fused = "by torch's kernel, gain and bias in it"
    layer = F.layer_norm(x.float(), (64,), weight.float(), bias.float()).to(dtype)
    assert shares(x, layer, specs.TORCH_LAYER_NORM, weight, bias)[fused] == 1.0
    rms = F.rms_norm(x.float(), (64,), weight.float(), 1e-6).to(dtype)
    assert shares(x, rms, specs.OLMO2, weight)[fused] == 1.0
    groups = specs.POOLFORMER.replace(groups=4)
    images = x.reshape(24, 64, 4)
    assert (
        shares(images, F.group_norm(images.float(), 4, weight.float(), bias.float()).to(dtype), groups, weight, bias)[
            fused
        ]
        == 1.0
    )
    # Groups of the last axis of three have no function of their own.
    assert fused not in shares(
        x.reshape(2, 48, 64), x.reshape(2, 48, 64), specs.TORCH_LAYER_NORM.replace(groups=4), weight, bias
    )
