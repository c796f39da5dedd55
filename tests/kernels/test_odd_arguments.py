"""What a kernel reading plain memory could stumble over: other devices and storages, an `out` that overlaps."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

import kernel_laws
import normkit
from contract import draw
from normkit import specs
from normkit.errors import NormkitError, ShapeError

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.ones(16)

# Whatever torch says to them, a result of ours is one it would give, and a refusal one it would raise.
ODD = {
    "a weight on another device": lambda: (X, WEIGHT.to("meta")),
    "an input on another device": lambda: (X.to("meta"), WEIGHT),
    "all on another device": lambda: (X.to("meta"), WEIGHT.to("meta")),
    "sparse": lambda: (X.to_sparse(), WEIGHT),
    "sparse rows": lambda: (X.to_sparse_csr(), WEIGHT),
    "a sparse weight": lambda: (X, WEIGHT.to_sparse()),
    "a symbol of zero": lambda: (torch._efficientzerotensor((6, 16)), WEIGHT),
    "a subclass": lambda: (torch.nn.Parameter(X), torch.nn.Parameter(WEIGHT)),
    "for inference": lambda: (torch.nn.Buffer(X), WEIGHT),
    "a negated view": lambda: (torch._neg_view(X), torch._neg_view(WEIGHT)),
    "a part of complex numbers": lambda: (torch.randn(6, 16, dtype=torch.complex64).conj().imag, WEIGHT),
    "a quantized tensor": lambda: (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), WEIGHT),
}


# torch warns of beta and of deprecated storages.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("case", ODD)
def test_odd_tensors_are_computed_or_refused(name, case):
    x, weight = ODD[case]()
    results = []
    for function in (getattr(normkit, name), getattr(F, name)):
        try:
            results.append(function(x, (16,), weight))
        except Exception as error:
            results.append(error)
    ours, theirs = results
    if isinstance(ours, Exception):
        assert isinstance(ours, (NormkitError, NotImplementedError, RuntimeError)), repr(ours)
        assert isinstance(theirs, Exception), f"torch computes it, normkit says {ours!r}"
    elif not isinstance(theirs, Exception):
        assert (ours.device, ours.dtype, ours.shape) == (theirs.device, theirs.dtype, theirs.shape)
        if ours.device.type == "cpu":
            torch.testing.assert_close(ours.detach(), theirs.detach())


def test_an_inference_tensor_is_computed():
    with torch.inference_mode():
        x = X.clone()
        assert torch.equal(normkit.rms_norm(x, (16,)), normkit.rms_norm(X, (16,)))
    assert torch.equal(normkit.rms_norm(x, (16,)), normkit.rms_norm(X, (16,)))


@pytest.mark.parametrize("spec", [specs.NANOCHAT, specs.OLMO])
def test_out_may_be_the_input(spec):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        kernel_laws.may_write_over_its_input(spec, draw(spec, 6, 16, dtype=dtype))


@pytest.mark.parametrize("spec", [specs.NANOCHAT, specs.OLMO])
@pytest.mark.parametrize("shift", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("is_forward", [True, False])
def test_an_out_that_overlaps_the_input_is_right_or_refused(spec, shift, is_forward):
    base = torch.randn(X.numel() + shift)
    first, second = base[: X.numel()].view(6, 16), base[shift:].view(6, 16)
    x, out = (first, second) if is_forward else (second, first)
    kernel_laws.is_right_or_refuses_where_out_overlaps(x, out, spec)


@pytest.mark.parametrize("spec", [specs.NANOCHAT, specs.OLMO])
def test_out_may_have_any_strides_but_not_overlap_itself(spec):
    expected = normkit.normalize(X, spec)
    for out in (torch.empty(16, 6).T, torch.empty(12, 16)[::2], torch.empty(6, 20)[:, :16], torch.empty(6, 32)[:, ::2]):
        assert normkit.normalize(X, spec, out=out) is out
        assert torch.equal(out, expected)
    empty = torch.empty(16, 0).T
    assert normkit.normalize(X[:0], spec, out=empty) is empty
    around = torch.full((8, 20), 7.0)
    normkit.normalize(X, spec, out=around[1:7, 2:18])
    around[1:7, 2:18] = 7.0
    assert torch.equal(around, torch.full((8, 20), 7.0))
    with pytest.raises(RuntimeError):
        normkit.normalize(X, spec, out=torch.empty(1, 16).expand(6, 16))


@pytest.mark.parametrize("spec", [specs.LLAMA, specs.TORCH_LAYER_NORM])
def test_out_may_be_a_parameter(spec):
    """A gain that is overwritten by its own result: read before it is written, or refused."""
    weight = torch.randn(16)
    bias = torch.randn(16) if spec.has_bias else None
    expected = normkit.normalize(X[0], spec, weight, bias)
    with contextlib.suppress(ShapeError):
        normkit.normalize(X[0], spec, weight, bias, out=weight)
        assert torch.equal(weight, expected)


def test_an_input_changed_before_backward_is_noticed_or_kept():
    x, dy = X.clone().requires_grad_(), torch.randn(6, 16)
    (expected,) = torch.autograd.grad(normkit.rms_norm(x, (16,), WEIGHT), x, dy)
    inner = x * 1.0
    y = normkit.rms_norm(inner, (16,), WEIGHT)
    inner.add_(1.0)
    message = ""
    try:
        (ours,) = torch.autograd.grad(y, x, dy)
    except RuntimeError as error:
        ours, message = expected, str(error)
    assert not message or "modified by an inplace operation" in message
    assert torch.equal(ours, expected)
