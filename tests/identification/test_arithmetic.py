"""A program's outputs in each usual order of operation: all near the definition, and those of real code among them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import PRESETS
from normkit import reference, specs
from normkit.identification.arithmetic import DEFINITION, outputs

HALF = [torch.bfloat16, torch.float16]


def drawn(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shares(x, y, spec, weight=None, bias=None):
    """Share of the outputs that each order gives bit for bit."""
    return {order: float((each == y).double().mean()) for order, each in outputs(x, spec, weight, bias)}


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
    orders = list(outputs(x, spec, weight, bias))
    assert orders[0][0] == DEFINITION
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
