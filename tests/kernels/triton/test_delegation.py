"""Long plain RMSNorms go to torch's own kernel where it would take them, and come back as if they were ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import normkit
from contract import DTYPES, assert_within, draw, truth
from normkit import specs
from normkit.kernels.triton import delegation
from normkit.kernels.triton.program import program
from normkit.ops.plans import plan

SPEC = specs.TORCH_RMS_NORM.replace(eps=1e-6)


def of(spec, n, dtype=torch.bfloat16, weight_dtype=None):
    return program(*plan(spec)[1:4], n, dtype, dtype, weight_dtype or dtype, None)


def large(n=65536, rows=2048, dtype=torch.bfloat16, *, is_contiguous=True):
    """What is asked of an input."""
    return SimpleNamespace(
        is_cuda=True,
        dtype=dtype,
        numel=lambda: rows * n,
        is_contiguous=lambda: is_contiguous,
        device=SimpleNamespace(index=0),
    )


def weight(dtype=torch.bfloat16):
    return SimpleNamespace(dtype=dtype)


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(delegation, "has_native_kernel", lambda index: index == 0)


@pytest.mark.usefixtures("native")
def test_delegated_calls():
    for n in (32768, 65536):
        assert delegation.is_delegated(of(SPEC, n), large(n), weight(), None)
        assert delegation.is_delegated(of(SPEC, n), large(n), None, None)
    assert delegation.is_delegated(of(SPEC, 65537, torch.float32), large(65537, dtype=torch.float32), None, None)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "spec",
    [
        SPEC.replace(weight_offset=1.0),
        SPEC.replace(cast="early"),
        SPEC.replace(eps_placement="outside"),
        SPEC.replace(correction=1),
        SPEC.replace(multiplier="sqrt_n"),
        SPEC.replace(round_rstd=True),
        specs.TORCH_LAYER_NORM,
    ],
)
def test_another_formula_is_not_delegated(spec):
    assert not delegation.is_delegated(of(spec, 65536), large(), weight(), None)


@pytest.mark.usefixtures("native")
def test_calls_that_torchs_kernel_does_not_take_or_speed_up():
    plain = of(SPEC, 65536)
    assert not delegation.is_delegated(plain, large(), weight(), weight())
    assert not delegation.is_delegated(
        of(SPEC, 65536, weight_dtype=torch.float32), large(), weight(torch.float32), None
    )
    assert not delegation.is_delegated(plain, large(is_contiguous=False), weight(), None)
    assert not delegation.is_delegated(of(SPEC, 65537), large(65537), weight(), None)
    assert not delegation.is_delegated(plain, large(rows=128), weight(), None)
    assert not delegation.is_delegated(of(SPEC, 4096), large(4096, 65536), weight(), None)


def test_no_kernel_of_torch_no_delegation(monkeypatch):
    monkeypatch.setattr(delegation, "has_native_kernel", lambda index: False)  # noqa: ARG005
    assert not delegation.is_delegated(of(SPEC, 65536), large(), weight(), None)


@pytest.mark.parametrize(("capability", "operations", "is_there"), [
    ((9, 0), ["_fused_rms_norm"], True),
    ((10, 0), ["_fused_rms_norm"], True),
    ((8, 0), ["_fused_rms_norm"], False),
    ((12, 0), ["_fused_rms_norm"], False),
    ((9, 0), [], False),
])  # fmt: skip
def test_whether_torch_has_its_kernel(monkeypatch, capability, operations, is_there):
    from torch.backends import python_native

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)  # noqa: ARG005
    monkeypatch.setattr(python_native, "get_dsl_operations", lambda name: operations, raising=False)  # noqa: ARG005
    delegation.has_native_kernel.cache_clear()
    assert delegation.has_native_kernel(0) == is_there
    delegation.has_native_kernel.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_delegated_calls_have_our_gradients(monkeypatch, dtype):
    from normkit.kernels.triton import operators

    case = draw(SPEC, 5, 40, dtype=DTYPES[dtype])
    asked = []
    monkeypatch.setattr(operators, "is_delegated", lambda *given: bool(asked.append(given) or True))
    x, gain = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    for _ in range(2):
        y = normkit.rms_norm(x, (40,), gain, 1e-6)
        dx, dweight = torch.autograd.grad(y, [x, gain], case.dy)
    assert len(asked) == 1, "the second call knows"
    true, size = truth(SPEC, case)
    # torch keeps 1 / s in float32, so no gradient is better than four units of it.
    for what, found, expected, scale in (
        ("y", y, true.y, size.y),
        ("dx", dx, true.x, size.x),
        ("dweight", dweight, true.weight, size.weight),
    ):
        assert_within(found.detach(), expected, scale, 4, what)
