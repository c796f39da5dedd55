"""Products of 16-bit matrices in float32 on a CPU without instructions for them: correctly rounded, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.identification import products
from normkit.identification.products import ProductsInFloat32

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def a_cpu_without_instructions(monkeypatch):
    """Every CPU computes 16-bit products in software, and few rows of a weight go at once."""
    monkeypatch.setattr(products, "software_dtypes", lambda: frozenset(DTYPES))
    monkeypatch.setattr(products, "_AT_ONCE", 1000)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def share_rounded_right(given: Tensor, exact: Tensor) -> float:
    """Float32 sums of 64 terms end on the wrong side of a tie in few of 1,000 outputs (float16: 13 bits of room)."""
    return float((given == exact.to(given.dtype)).double().mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_and_its_gradients_are_rounded_once(dtype, has_bias):
    given = [random(2, 7, 64, dtype=dtype), random(96, 64, dtype=dtype), random(96, dtype=dtype)][: 2 + has_bias]
    for each in given:
        each.requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in given]
    dy = random(2, 7, 96, dtype=dtype)
    with ProductsInFloat32():
        y = F.linear(*given)
    gradients = torch.autograd.grad(y, given, dy)
    y_exact = F.linear(*exact)
    for one, other in zip((y, *gradients), (y_exact, *torch.autograd.grad(y_exact, exact, dy.double())), strict=True):
        assert one.dtype == dtype
        assert share_rounded_right(one, other) > 0.99
    with torch.no_grad(), ProductsInFloat32():
        assert torch.equal(F.linear(*given), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "product",
    [
        lambda a: a @ a,
        lambda a: torch.matmul(a, a),
        lambda a: a.mm(a),
        lambda a: torch.addmm(a[0], a, a),
        lambda a: torch.bmm(a[None], a[None]),
        lambda a: torch.einsum("ij,jk->ik", a, a),
        lambda a: F.conv1d(a[None], a[:, :, None]),
        lambda a: F.conv2d(a[None, None], a[None, None, :3, :3], padding=1),
    ],
)
def test_other_products_are_rounded_once(product, dtype):
    a = random(64, 64, dtype=dtype)
    with ProductsInFloat32():
        assert share_rounded_right(product(a), product(a.double())) > 0.99


def test_what_it_is_not_meant_for_stays_as_it_is():
    wide, narrow = torch.randn(8, 8), torch.randn(8, 8).bfloat16()
    out = torch.empty(8, 8, dtype=torch.bfloat16)
    with ProductsInFloat32():
        assert torch.equal(wide @ wide, torch.mm(wide, wide))
        assert torch.matmul(narrow, narrow, out=out) is out
        assert F.linear(narrow, narrow[0]).shape == (8,)
        with pytest.raises(RuntimeError):
            narrow @ wide
        with pytest.raises(RuntimeError):
            F.linear(narrow, torch.randn(4, 7).bfloat16())


def test_an_inspection_and_a_recording_run_so_and_the_test_of_batch_invariance_does_not(monkeypatch):
    import normkit as nk

    calls = []

    def counted(*given: Tensor | None) -> Tensor:
        calls.append(1)
        return products_in_parts(*given)

    products_in_parts = products._in_parts
    monkeypatch.setattr(products, "_in_parts", counted)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    nk.inspect(model, torch.randn(2, 5, 8).bfloat16())
    assert calls
    calls.clear()
    nk.testing.assert_batch_invariant(model, torch.randn(2, 5, 8).bfloat16())
    assert not calls
