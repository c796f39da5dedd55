"""The definition holds: against exact arithmetic, against autograd, under every transform, at degenerate points."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from helpers import PRESETS, arguments, assert_close, exact, valid_specs
from normkit import NormSpec, reference, specs

EPS = st.sampled_from([0.0, 1e-12, 1e-5, 0.3, 10.0, None])
LAST_AXIS = {name: spec for name, spec in PRESETS.items() if spec.axes == (-1,)}
BARE = {"layer_norm": NormSpec(has_weight=False, has_bias=False), "rms_norm": specs.NANOCHAT}
BARE_LAYER_NORM, BARE_RMS_NORM = BARE.values()


def wide(spec: NormSpec) -> NormSpec:
    """The same formula with nothing rounded before the end."""
    return spec.replace(cast="late", statistics_dtype="float32", round_rstd=False, output_dtype="input")


def autograd(dy, x, spec, weight, bias):
    """What autograd makes of `reference.forward`."""
    tensors = [None if tensor is None else tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    y = reference.forward(tensors[0], spec, *tensors[1:])
    gradients = iter(torch.autograd.grad(y, [tensor for tensor in tensors if tensor is not None], dy))
    return [None if tensor is None else next(gradients) for tensor in tensors]


def assert_gradients_close(actual, expected, units=64):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs, units=units)


@pytest.mark.parametrize("name", LAST_AXIS)
def test_forward_is_exact_for_presets(name):
    spec = LAST_AXIS[name]
    x, weight, bias = arguments(spec, rows=3)
    assert_close(reference.forward(x, spec, weight, bias), exact(x, spec, weight, bias))


@given(valid_specs(eps=EPS, max_groups=3), st.integers(0, 99))
def test_forward_is_exact_for_any_spec(spec, seed):
    spec = spec.replace(axes=(-1,))
    x, weight, bias = arguments(spec, seed=seed)
    assert_close(reference.forward(x, spec, weight, bias), exact(x, spec, weight, bias))


@pytest.mark.parametrize("name", BARE)
def test_statistics_are_exact(name):
    x = torch.randn(3, 12, dtype=torch.float64) + 4.0
    mean, scale = reference.statistics(x.unsqueeze(-2), BARE[name], 1e-5)
    centre = mean if BARE[name].centre_statistics else 0.0
    assert mean.shape == scale.shape == (3, 1, 1)
    assert_close(
        (x.unsqueeze(-2) - (mean if BARE[name].centre_numerator else 0.0)) / scale,
        exact(x, BARE[name], eps=1e-5).unsqueeze(-2),
    )
    assert_close(scale**2, (x.unsqueeze(-2) - centre).square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_and_channels_are_rows_of_their_own(groups):
    spec = NormSpec(axes="all_but_batch", groups=groups)
    x, weight, bias = arguments(spec)
    assert_close(reference.forward(x, spec, weight, bias), F.group_norm(x, groups, weight, bias))
    x = torch.randn(5, 12, dtype=torch.float64)
    grouped = reference.forward(x, BARE_RMS_NORM.replace(groups=groups))
    assert_close(grouped, reference.forward(x.reshape(5, groups, -1), BARE_RMS_NORM).reshape(5, 12))
    x, weight, bias = arguments(specs.CONVNEXT)
    last = reference.forward(x.movedim(1, -1), specs.CONVNEXT.replace(axes=(-1,)), weight, bias)
    assert torch.equal(reference.forward(x, specs.CONVNEXT, weight, bias), last.movedim(-1, 1))


@pytest.mark.parametrize("name", PRESETS)
def test_closed_form_equals_autograd_for_presets(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=3)
    dy = torch.randn_like(x)
    assert_gradients_close(reference.backward(dy, x, spec, weight, bias), autograd(dy, x, spec, weight, bias))


@settings(max_examples=200)
@given(valid_specs(eps=EPS, max_groups=3), st.integers(0, 99))
def test_closed_form_equals_autograd_for_any_spec(spec, seed):
    x, weight, bias = arguments(spec, seed=seed)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assert_gradients_close(reference.backward(dy, x, spec, weight, bias), autograd(dy, x, spec, weight, bias))


@pytest.mark.parametrize("shape", [(3, 12), (12,), (1, 3, 1), (2, 3, 12)])
def test_parameters_broadcast_and_their_gradients_sum(shape):
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    weight, bias = torch.randn(*shape, dtype=torch.float64), torch.randn(*shape, dtype=torch.float64)
    dy = torch.randn_like(x)
    ours = reference.backward(dy, x, NormSpec(), weight, bias)
    assert ours.weight.shape == ours.bias.shape == shape
    assert_gradients_close(ours, autograd(dy, x, NormSpec(), weight, bias))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PRESETS)
def test_derivatives_of_first_and_second_order(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=2, features=3)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]

    def function(x, *parameters):
        given = iter(parameters)
        return reference.forward(x, spec, next(given) if spec.has_weight else None, next(given, None))

    gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "LLAMA", "GEMMA", "ANNOTATED_TRANSFORMER", "SCALE_NORM"])
def test_function_transforms(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=4, features=5)
    dy = torch.randn_like(x)

    def loss(row, direction):
        return (reference.forward(row, spec, weight, bias) * direction).sum()

    expected = reference.backward(dy, x, spec, weight, bias).x
    assert_close(torch.func.grad(loss)(x, dy), expected, units=32)
    assert_close(torch.func.vmap(torch.func.grad(loss))(x, dy), expected, units=32)
    assert_close(
        torch.func.vmap(lambda row: reference.forward(row, spec, weight, bias))(x),
        reference.forward(x, spec, weight, bias),
    )

    def row(value):
        return reference.forward(value, spec, weight, bias)

    jacobian = torch.func.jacrev(row)(x[0])
    assert_close(torch.func.jacfwd(row)(x[0]), jacobian, units=32)
    assert_close(dy[0] @ jacobian, expected[0], units=32)
    hessian = torch.func.hessian(loss)(x[0], dy[0])
    assert_close(hessian, hessian.mT, units=32)
    assert_close(hessian, torch.func.jacrev(torch.func.jacrev(loss))(x[0], dy[0]), units=32)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("constant", [0.0, 3.0])
def test_a_row_without_deviation(name, constant):
    """y is the bias, and the gradient passes through 1/s alone: s = sqrt(eps), or eps outside the root."""
    spec = PRESETS[name]
    if constant and not (spec.centre_numerator and spec.centre_statistics):
        spec = spec.replace(centre_numerator=True, centre_statistics=True)
    x, weight, bias = arguments(spec)
    x = torch.full_like(x, constant)
    if spec.weight_placement == "before" and constant:
        weight = torch.zeros_like(weight)
    dy = torch.randn_like(x)
    gain = torch.ones(()) if weight is None else weight + spec.weight_offset
    shift = torch.zeros(()) if bias is None else bias
    if spec.rows.channel_axis == 1:
        gain, shift = (tensor.reshape(-1, 1) if tensor.dim() else tensor for tensor in (gain, shift))
    eps = reference.machine_eps(x, spec)
    direct = reference.to_rows(dy if spec.weight_placement == "before" else dy * gain, spec)
    if spec.centre_numerator:
        direct = direct - direct.mean(-1, keepdim=True)
    if spec.multiplier == "sqrt_n":
        direct = direct * math.sqrt(direct.shape[-1])
    dx = reference.from_rows(direct / (math.sqrt(eps) if spec.eps_placement == "inside" else eps), x, spec)
    dx = dx * gain if spec.weight_placement == "before" else dx
    assert_close(reference.forward(x, spec, weight, bias), shift.double().expand_as(x))
    assert_close(reference.backward(dy, x, spec, weight, bias).x, dx)
    assert_close(autograd(dy, x, spec, weight, bias)[0], dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_constant_row_has_no_deviation_at_all(dtype):
    x = torch.full((2, 1000), 1 / 3).to(dtype)
    assert torch.equal(reference.forward(x, BARE_LAYER_NORM), torch.zeros_like(x))
    assert reference.forward(x, BARE_LAYER_NORM.replace(eps=0.0)).isnan().all()


def test_float64_rows_on_a_large_mean():
    x = torch.randn(4, 64, dtype=torch.float64) + 1e8
    # Centring once leaves 1e-8 here: the mean is rounded in proportion to itself.
    assert_close(reference.forward(x, BARE_LAYER_NORM), exact(x, BARE_LAYER_NORM), units=4)


def test_one_feature():
    x, dy = torch.randn(5, 1, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    assert torch.equal(reference.forward(x, BARE_LAYER_NORM), torch.zeros_like(x))
    assert torch.equal(reference.backward(dy, x, BARE_LAYER_NORM).x, torch.zeros_like(x))
    assert_close(reference.forward(x, BARE_RMS_NORM), x / (x**2 + 1e-6).sqrt())
    scale = (x**2 + 1e-6).sqrt()
    # dy / s - x * (x * dy) / s**3 cancels down to eps: its error is that of the terms.
    assert_close(reference.backward(dy, x, BARE_RMS_NORM).x, dy * 1e-6 / scale**3, terms=dy.abs() / scale)
    bessel = BARE_LAYER_NORM.replace(correction=1)
    assert reference.forward(x, bessel).isnan().all()
    assert reference.backward(dy, x, bessel).x.isnan().all()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-20, 1.0, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_float32_rows_of_any_size(name, size, eps):
    x = ((torch.rand(4, 64) + torch.arange(64) % 2) / 2 * size).float()
    spec = BARE[name].replace(eps=eps)
    truth = exact(x, spec)
    # The value is rounded once: half an ulp, which below the smallest normal number is half a subnormal.
    terms = truth.abs().clamp_min(torch.finfo(torch.float32).tiny)
    assert_close(reference.forward(x, spec), truth, dtype=torch.float32, units=0.5001, terms=terms)


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e2, 1e4, 1e5])
@pytest.mark.parametrize("n", [64, 1000])
def test_float32_rows_on_a_large_mean(mean, n):
    x, weight, bias = torch.randn(4, n) + mean, 1 + 0.3 * torch.randn(n), torch.randn(n)
    spec = specs.TORCH_LAYER_NORM
    truth = exact(x, spec, weight, bias)
    ours = reference.forward(x, spec, weight, bias)
    # Root sum of squares of the two terms of an element; one rounding at the end is at most 0.71 of these units.
    terms = ((truth - bias.double()).square() + bias.double().square()).sqrt()
    assert_close(ours, truth, dtype=torch.float32, units=0.75, terms=terms)
    theirs = F.layer_norm(x, (n,), weight, bias)
    # torch 2.13 errs by 1e-2 at a mean of 1e5.
    assert (ours - truth).abs().max() <= (theirs - truth).abs().max()

    dy = torch.randn(4, n)
    gradients = reference.backward(dy, x, spec, weight, bias)
    assert_close(
        gradients.x,
        autograd(dy.double(), x.double(), spec, weight.double(), bias.double())[0],
        dtype=torch.float32,
        units=1,
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_row(name, odd):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, rows=3, dtype=torch.float32)
    dy = torch.randn_like(x)
    broken = x.clone()
    broken[1, 1] = odd
    y, clean = reference.forward(broken, spec, weight, bias), reference.forward(x, spec, weight, bias)
    assert torch.equal(y[0], clean[0])
    assert torch.equal(y[2], clean[2])
    assert y[1].isnan().any()
    for gradients, expected in (
        (reference.backward(dy, broken, spec, weight, bias), reference.backward(dy, x, spec, weight, bias)),
        (autograd(dy, broken, spec, weight, bias), autograd(dy, x, spec, weight, bias)),
    ):
        assert torch.equal(gradients[0][0], expected[0][0])
        assert torch.equal(gradients[0][2], expected[0][2])
        assert gradients[0][1].isnan().any()
        assert weight is None or gradients[1].isnan().any()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows_and_no_features(name, dtype):
    spec = PRESETS[name]
    for sizes in ({"rows": 0}, {"features": 0}):
        x, weight, bias = arguments(spec, dtype=dtype, **sizes)
        y = reference.forward(x, spec, weight, bias)
        gradients = reference.backward(torch.ones_like(x), x, spec, weight, bias)
        assert y.shape == gradients.x.shape == x.shape
        for gradient, parameter in ((gradients.weight, weight), (gradients.bias, bias)):
            assert parameter is None or torch.equal(gradient, torch.zeros_like(parameter))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strides_do_not_show(name, dtype):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, dtype=dtype, rows=5)
    dy = torch.randn(x.shape).to(dtype)
    expected, gradients = reference.forward(x, spec, weight, bias), reference.backward(dy, x, spec, weight, bias)

    def transposed(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    def every_other(tensor):
        return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=dtype)[..., ::2].copy_(tensor)

    for strided in (transposed, every_other):
        assert not strided(x).is_contiguous()
        assert torch.equal(reference.forward(strided(x), spec, weight, bias), expected)
        for ours, theirs in zip(
            reference.backward(strided(dy), strided(x), spec, weight, bias), gradients, strict=True
        ):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_late_cast_is_the_rounded_exact_value(name, dtype):
    spec = wide(PRESETS[name])
    if spec.weight_placement == "before" or spec.eps is None or spec.offset_dtype == "parameter":
        spec = spec.replace(weight_placement="after", eps=1e-6, offset_dtype="float32")
    x, weight, bias = arguments(spec, dtype=dtype, rows=64)
    parameters = [None if tensor is None else tensor.double() for tensor in (weight, bias)]
    truth = reference.forward(x.double(), spec, *parameters)
    assert torch.equal(reference.forward(x, spec, weight, bias), truth.to(dtype))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_closed_form_gradients_are_rounded_once(name, dtype):
    """Every cast is the identity: the gradients of the exact formula, in the dtype of what they belong to."""
    spec = PRESETS[name]
    spec = spec if spec.eps else spec.replace(eps=1e-6)
    x, weight, bias = arguments(spec, dtype=dtype, rows=64)
    if spec.offset_dtype == "parameter":
        spec = spec.replace(offset_dtype="float32")
    dy = torch.randn(x.shape).to(dtype)
    exactly = reference.backward(
        *(None if t is None else t.double() for t in (dy, x)),
        wide(spec),
        *(None if t is None else t.double() for t in (weight, bias)),
    )
    for ours, theirs in zip(reference.backward(dy, x, spec, weight, bias), exactly, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs.to(dtype))


@pytest.mark.parametrize(
    ("spec", "given", "expected"),
    [
        (specs.TORCH_LAYER_NORM, (torch.bfloat16, torch.float32, torch.float32), torch.bfloat16),
        (specs.LLAMA, (torch.bfloat16, torch.float32, None), torch.float32),
        (specs.LLAMA, (torch.bfloat16, torch.bfloat16, None), torch.bfloat16),
        (specs.LLAMA, (torch.float32, torch.bfloat16, None), torch.float32),
        (specs.DEBERTA, (torch.float16, torch.float16, torch.float32), torch.float32),
        (specs.T5, (torch.float32, torch.bfloat16, None), torch.bfloat16),
        (specs.T5, (torch.bfloat16, torch.float32, None), torch.float32),
        (specs.NANOCHAT.replace(output_dtype="weight"), (torch.bfloat16, None, None), torch.bfloat16),
        (specs.NANOCHAT.replace(output_dtype="float32"), (torch.bfloat16, None, None), torch.float32),
        (specs.LLAMA.replace(output_dtype="float32"), (torch.bfloat16, torch.bfloat16, None), torch.float32),
        (specs.LLAMA.replace(output_dtype="float32"), (torch.float64, torch.bfloat16, None), torch.float64),
    ],
)
def test_output_dtype(spec, given, expected):
    x, weight, bias = (None if dtype is None else torch.ones(2, 4, dtype=dtype) for dtype in given)
    assert reference.output_dtype(x.dtype, spec, weight, bias) == expected
    assert reference.forward(x, spec, weight, bias).dtype == expected


def test_an_offset_is_added_where_the_spec_says():
    weight = torch.tensor([2.0**-9]).bfloat16()
    wide_sum = reference.effective_weight(weight, specs.GEMMA, torch.float32)
    assert wide_sum.dtype == torch.float32
    assert wide_sum.item() == 1 + 2.0**-9
    assert reference.effective_weight(weight, specs.MUSE_SPARK, torch.float32).item() == 1.0
    assert reference.effective_weight(weight, specs.LLAMA, torch.float32) is weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_code_that_stays_in_16_bits_rounds_every_step(dtype):
    spec = specs.ANNOTATED_TRANSFORMER
    x, weight, bias = arguments(spec, dtype=dtype, rows=512)
    by_hand = weight * ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)) + bias
    # Each reduction rounds once, and may fall to the other side of a near-tie: then its row is off.
    assert (reference.forward(x, spec, weight, bias) == by_hand).double().mean() >= 0.999
    scaled = weight * (x / (x.var(-1, keepdim=True) + 1e-5).sqrt())
    divided = specs.POCKET_TTS.replace(round_rstd=False)
    assert (reference.forward(x, divided, weight) == scaled).double().mean() >= 0.999


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_where_gain_and_bias_act(parameters):
    x, weight, bias = (part.to(parameters) for part in arguments(NormSpec(), dtype=torch.float32, rows=64))
    row = reference.forward(x := x.bfloat16(), specs.OLMO)
    # An output in float32 has a gain that acts there.
    spec = NormSpec(cast="early", output_dtype="float32")
    assert torch.equal(reference.forward(x, spec, weight, bias), row * weight.float() + bias.float())
    # Gain and bias are rounded where the cast says so.
    rounded = row * weight.bfloat16() + bias.bfloat16()
    assert torch.equal(reference.forward(x, NormSpec(cast="input"), weight, bias), rounded)
    early = reference.forward(x, NormSpec(cast="early"), weight, bias)
    assert torch.equal(early, rounded) == (parameters == torch.bfloat16)
    # An offset in float32 makes a float32 gain after an early cast.
    x, weight, _ = arguments(specs.GEMMA, dtype=torch.float32, rows=64)
    expected = reference.forward(x, specs.NANOCHAT) * (1.0 + weight)
    assert torch.equal(reference.forward(x, specs.GEMMA.replace(cast="early"), weight), expected)
