"""The functions take torch's arguments, refuse what torch refuses, and compute what the reference defines."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import functional as F

from helpers import PRESETS, arguments, assert_close
from normkit import functional, reference, specs
from normkit.errors import DtypeError, KindError, NormkitError, ShapeError, SpecError, UseError

NAMES = ["layer_norm", "rms_norm"]
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def both(name):
    return getattr(functional, name), getattr(F, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_torchs(name):
    ours, theirs = (inspect.signature(function).parameters.values() for function in both(name))
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_the_value_is_torchs(name, dtype, shape):
    ours, theirs = both(name)
    x = (torch.randn(5, 2, 3, 4) + 0.5).to(dtype)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    extra = {"weight": weight, "bias": bias} if name == "layer_norm" else {"weight": weight}
    for given in ({}, {"weight": weight}, extra, {**extra, "eps": 1e-2}, {"eps": 0.0}):
        # 16-bit statistics of torch are float32: the same value but for a near-tie, which is one ulp.
        assert_close(ours(x, shape, **given), theirs(x, shape, **given), units=4 if dtype.itemsize > 2 else 1)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_torchs_in_float64_and_a_shape_may_be_a_list_or_a_size(name):
    ours, theirs = both(name)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    count = 2 if name == "layer_norm" else 1
    parameters = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(theirs(x, (5,), *parameters), [x, *parameters], dy)
    for shape in ((5,), [5], x.shape[-1:]):
        found = torch.autograd.grad(ours(x, shape, *parameters), [x, *parameters], dy)
        for actual, expected in zip(found, wanted, strict=True):
            assert_close(actual, expected)


# Arguments that torch refuses, and the type it raises or a base of it; ours is that type and a NormkitError.
REFUSED = {
    "an integer input": (RuntimeError, (X.long(), (4,)), {}),
    "a boolean input": (RuntimeError, (X > 0, (4,)), {}),
    "a float8 input": (RuntimeError, (X.to(torch.float8_e4m3fn), (4,)), {}),
    "no tensor": (TypeError, ([1.0, 2.0], (2,)), {}),
    "None": (TypeError, (None, (2,)), {}),
    "an empty shape": (RuntimeError, (X, ()), {}),
    "another size": (RuntimeError, (X, (5,)), {}),
    "a negative size": (RuntimeError, (X, (-1,)), {}),
    "a bare size": (TypeError, (X, 4), {}),
    "a float size": (TypeError, (X, (4.0,)), {}),
    "a string": (TypeError, (X, "4"), {}),
    "no shape": (TypeError, (X, None), {}),
    "a tensor as shape": (TypeError, (X, torch.tensor([4])), {}),
    "a weight of another size": (RuntimeError, (X, (4,), torch.ones(5)), {}),
    "a weight with too many axes": (RuntimeError, (X, (4,), torch.ones(1, 4)), {}),
    "a list as weight": (TypeError, (X, (4,), [1.0, 1.0, 1.0, 1.0]), {}),
    "a string as eps": (TypeError, (X, (4,)), {"eps": "1e-5"}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused_with_the_same_type(name, case):
    error, args, keywords = REFUSED[case]
    ours, theirs = both(name)
    with pytest.raises(error):
        theirs(*args, **keywords)
    with pytest.raises(error) as caught:
        ours(*args, **keywords)
    assert isinstance(caught.value, NormkitError)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert "got" in message
    assert "\n" not in message


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(4)])
def test_too_few_dimensions_are_refused(x):
    for ours, theirs in map(both, NAMES):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            theirs(x, (2, 3, 4))
        with pytest.raises(type(caught.value)):
            ours(x, (2, 3, 4))


def test_what_only_one_of_torchs_functions_refuses_is_refused_by_ours():
    with pytest.raises(TypeError):
        F.layer_norm(X, (4,), eps=None)
    with pytest.raises(KindError, match="layer_norm: eps must be a number, got None"):
        functional.layer_norm(X, (4,), eps=None)
    for name in NAMES:
        with pytest.raises(DtypeError, match=r"weight must be float16, bfloat16, float32 or float64, got torch\.int64"):
            both(name)[0](X, (4,), torch.ones(4, dtype=torch.int64))
        with pytest.raises(DtypeError, match=r"got torch\.complex64"):
            both(name)[0](X.to(torch.complex64), (4,))


@pytest.mark.parametrize("name", NAMES)
def test_an_eps_that_is_no_number_is_refused_and_parameters_of_another_dtype_are_taken(name):
    ours, theirs = both(name)
    for eps in (float("nan"), float("inf")):
        with pytest.raises(SpecError, match="eps must be a finite number"):
            ours(X, (4,), eps=eps)
    weight = torch.randn(4).bfloat16()
    assert torch.equal(ours(X, (4,), weight), ours(X, (4,), weight.float()))
    if name == "layer_norm":
        # torch's rms_norm takes these.
        with pytest.raises(RuntimeError, match="mixed dtype"):
            theirs(X, (4,), weight)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_normalize_is_the_reference(name, dtype):
    x, weight, bias = arguments(PRESETS[name], dtype=dtype)
    y = functional.normalize(x, PRESETS[name], weight, bias)
    assert_close(y, reference.forward(x, PRESETS[name], weight, bias), units=1 if dtype == torch.bfloat16 else 8)


def test_normalize_takes_one_gain_for_all_and_one_a_head():
    x = torch.randn(2, 3, 8)
    assert functional.normalize(x, specs.SCALE_NORM, torch.tensor(2.0)).norm(dim=-1).allclose(torch.tensor(2.0))
    per_head = torch.randn(3, 8)
    assert_close(
        functional.normalize(x, specs.COHERE, per_head)[:, 1], functional.normalize(x[:, 1], specs.COHERE, per_head[1])
    )


@pytest.mark.parametrize(
    ("error", "message", "args"),
    [
        (ShapeError, "the spec says has_weight=True, got none; change the spec or the call", (X, specs.LLAMA)),
        (ShapeError, "the spec says has_bias=False, got one", (X, specs.LLAMA, torch.ones(4), torch.ones(4))),
        (ShapeError, "the spec says has_weight=False, got one", (X, specs.L2_NORM, torch.ones(4))),
        (ShapeError, "weight of shape (3,) does not fit an input of shape (3, 4)", (X, specs.LLAMA, torch.ones(3))),
        (ShapeError, "weight of shape (1, 3, 4) does not fit", (X, specs.LLAMA, torch.ones(1, 3, 4))),
        (ShapeError, "weight of shape (4,) does not fit", (X[None], specs.POOLFORMER, torch.ones(4), torch.ones(4))),
        (ShapeError, "bias of shape (1, 3) does not fit", (X[None], specs.POOLFORMER, torch.ones(3), torch.ones(1, 3))),
        (
            ShapeError,
            "need at least 2 dimensions, got shape (4,)",
            (X[0], specs.CONVNEXT, torch.ones(4), torch.ones(4)),
        ),
        (ShapeError, "axes (-1,) need at least 1 dimensions, got shape ()", (X[0, 0], specs.L2_NORM)),
        (ShapeError, "4 features do not divide into 3 groups", (X, specs.NANOCHAT.replace(groups=3))),
        (DtypeError, "x must be float16, bfloat16, float32 or float64, got torch.int64", (X.long(), specs.NANOCHAT)),
        (DtypeError, "weight must be float16", (X, specs.LLAMA, torch.ones(4).long())),
        (KindError, "x must be a tensor, got list", ([1.0], specs.NANOCHAT)),
        (KindError, "weight must be a tensor, got float", (X, specs.LLAMA, 2.0)),
        (KindError, "spec must be a NormSpec such as normkit.specs.LLAMA, got 'llama'", (X, "llama")),
    ],
)
def test_normalize_says_what_does_not_fit(error, message, args):
    with pytest.raises(error) as caught:
        functional.normalize(*args)
    assert str(caught.value).startswith("normalize: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_out_of_another_shape_or_dtype_is_refused():
    for shape in ((1, 4), (3, 3), (12,), (1, 3, 4)):
        with pytest.raises(ShapeError, match=r"out must have the result's shape \(3, 4\), got \("):
            functional.normalize(X, specs.NANOCHAT, out=torch.empty(shape))
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises(DtypeError, match=r"out must have the result's dtype torch\.float32, got torch\."):
            functional.normalize(X, specs.NANOCHAT, out=torch.empty(3, 4, dtype=dtype))


def test_out_that_overlaps_is_refused_with_torchs_type():
    memory = torch.randn(13)
    x, shifted = memory[:12].view(3, 4), memory[1:].view(3, 4)
    refused = {
        "shares part of its memory with an input": (x, shifted),
        "elements of out share memory": (X, torch.empty(1, 4).expand(3, 4)),
    }
    for message, (given, out) in refused.items():
        with pytest.raises(RuntimeError):
            torch.exp(given, out=out)
        with pytest.raises(ShapeError, match=message):
            functional.normalize(given, specs.NANOCHAT, out=out)


def test_out_is_refused_where_a_gradient_is_wanted_as_torch_refuses_it():
    x, out = X.clone().requires_grad_(), torch.empty(3, 4)
    with pytest.raises(RuntimeError, match="out="):
        torch.exp(x, out=out)
    weight = torch.ones(4, requires_grad=True)
    for given, keywords in (
        ((x, specs.NANOCHAT), {"out": out}),
        ((X, specs.LLAMA, weight), {"out": out}),
        ((X, specs.NANOCHAT), {"out": torch.empty(3, 4, requires_grad=True)}),
    ):
        with pytest.raises(UseError, match="there is no gradient through out; leave it out, or compute under"):
            functional.normalize(*given, **keywords)
        with torch.no_grad():
            assert functional.normalize(*given, **keywords) is keywords["out"]
    with pytest.raises(UseError, match=r"no gradient through out\[0\]"):
        functional.add_normalize(X, x, specs.NANOCHAT, out=(out, torch.empty(3, 4)))


ELSEWHERE = torch.ones(4, device="meta")


@pytest.mark.parametrize(
    ("label", "call"),
    [
        ("weight", lambda: functional.layer_norm(X, (4,), ELSEWHERE)),
        ("bias", lambda: functional.layer_norm(X, (4,), torch.ones(4), ELSEWHERE)),
        ("weight", lambda: functional.rms_norm(X, (4,), ELSEWHERE)),
        ("weight", lambda: functional.normalize(X, specs.LLAMA, ELSEWHERE)),
        ("residual", lambda: functional.add_rms_norm(X, X.to("meta"), (4,))),
        ("out", lambda: functional.normalize(X, specs.NANOCHAT, out=X.to("meta"))),
    ],
)
def test_another_device_is_refused(label, call):
    with pytest.raises(UseError, match=f"{label} must be on the input's device, cpu, got meta; move one of them"):
        call()


ADDED = {"add_layer_norm": functional.layer_norm, "add_rms_norm": functional.rms_norm}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_added_form_is_the_sum_and_its_norm(name, dtype):
    x, residual, weight = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype), torch.randn(4)
    y, new_residual = getattr(functional, name)(x, residual, (4,), weight, eps=1e-3)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(y, ADDED[name](x + residual, (4,), weight, eps=1e-3))


@pytest.mark.parametrize("name", ["LLAMA", "TORCH_LAYER_NORM", "T5", "CONVNEXT", "DEEPSEEK_V4_UNWEIGHTED"])
def test_a_wide_residual_stays_wide_and_casts_follow_the_input(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec, dtype=torch.bfloat16)
    residual = torch.randn(x.shape)
    y, new_residual = functional.add_normalize(x, residual, spec, weight, bias)
    assert torch.equal(new_residual, x.float() + residual)
    assert y.dtype == torch.bfloat16
    expected = functional.normalize(
        new_residual.double(), spec.replace(cast="late", output_dtype="input"), weight, bias
    )
    assert_close(y, expected.bfloat16(), units=2)


@pytest.mark.parametrize(
    ("error", "message", "residual", "keywords"),
    [
        (ShapeError, r"residual must have the shape of x, \(3, 4\), got \(4,\)", X[0], {}),
        (DtypeError, "residual must be float16", X.long(), {}),
        (KindError, "residual must be a tensor, got float", 2.0, {}),
        (KindError, "out must be two tensors", X, {"out": X.clone()}),
        (KindError, r"out\[1\] must be a tensor", X, {"out": (X.clone(), None)}),
        (DtypeError, r"out\[1\] must have the result's dtype", X, {"out": (X.clone(), X.double())}),
    ],
)
def test_add_normalize_says_what_does_not_fit(error, message, residual, keywords):
    with pytest.raises(error, match=f"add_normalize: {message}"):
        functional.add_normalize(X, residual, specs.NANOCHAT, **keywords)


def test_the_two_outputs_of_an_added_form_have_memory_of_their_own():
    one = torch.empty(3, 4)
    with pytest.raises(ShapeError, match="must not share memory"):
        functional.add_normalize(X, X, specs.NANOCHAT, out=(one, one))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 2, 4)])
def test_empty_inputs_give_empty_outputs(shape):
    x = torch.empty(shape, requires_grad=True)
    for ours, theirs in map(both, NAMES):
        weight = torch.ones(shape[-1:], requires_grad=True)
        y = ours(x, shape[-1:], weight)
        assert y.shape == theirs(x, shape[-1:], weight).shape == shape
        dx, dweight = torch.autograd.grad(y.sum(), [x, weight])
        assert dx.shape == shape
        assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm"])
def test_a_trace_of_torch_jit_has_gradients(name):
    """It held a call of Python, without a gradient."""

    def call(x, weight):
        y = getattr(functional, name)(x, *((x.sin(),) if name.startswith("add") else ()), (8,), weight)
        return y[0] if isinstance(y, tuple) else y

    given = [torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)]
    expected = torch.autograd.grad(call(*given).square().sum(), given)
    traced = torch.jit.trace(call, (torch.randn(3, 8), torch.randn(8)))
    for answer, wanted in zip(torch.autograd.grad(traced(*given).square().sum(), given), expected, strict=True):
        torch.testing.assert_close(answer, wanted)
