from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import PRESETS, assert_close, normal, taylor_slopes
from normkit import NormSpec, reference, specs
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry import contributions

LAYER_NORM = specs.TORCH_LAYER_NORM
ROWS = {
    **{name: spec for name, spec in PRESETS.items() if spec.axes == (-1,) and spec.groups == 1},
    "gain before": NormSpec(weight_placement="before", eps_placement="outside", correction=1),
    "centred above only": NormSpec(centre_statistics=False, multiplier="sqrt_n", reduction="sum"),
    "clamp": NormSpec(eps_placement="clamp", eps=0.5, weight_offset=1.0),
}


def affine(spec: NormSpec, n: int) -> tuple[Tensor | None, Tensor | None]:
    weight = 1 - spec.weight_offset + 0.3 * normal(n, seed=91) if spec.has_weight else None
    return weight, normal(n, seed=92) if spec.has_bias else None


@pytest.mark.parametrize("spec", ROWS.values(), ids=ROWS)
def test_frozen_parts_add_up_recomputed_parts_are_norms_and_linearised_parts_are_slopes(spec):
    parts, (weight, bias) = normal(5, 3, 16) + 0.5, affine(spec, 16)
    found = contributions(parts, spec, weight, bias)
    whole = reference.forward(parts.sum(0), spec, weight, bias).double()
    assert torch.equal(found.total, whole)
    # A few roundings of terms whose sizes add up to this.
    terms = found.frozen.abs().sum(0) + found.bias.abs()
    assert_close(found.frozen.sum(0) + found.bias, whole, terms=terms)
    assert_close(found.remainder, torch.zeros(3, 16, dtype=torch.float64), terms=terms + 1)
    assert_close(found.recomputed + found.bias, reference.forward(parts, spec, weight, bias).double())
    for part, slope in zip(parts, found.linearised, strict=True):
        _, by_autograd = torch.func.jvp(lambda x: reference.forward(x, spec, weight).double(), (parts.sum(0),), (part,))
        assert_close(slope, by_autograd, length=16, units=32)


def test_linearised_parts_are_derivatives_and_recomputed_parts_do_not_add_up():
    parts, weight = normal(3, 16), 1 + 0.3 * normal(16, seed=1)
    found = contributions(parts, LAYER_NORM, weight)

    def whole(x):
        return reference.forward(x, LAYER_NORM, weight)

    assert ((taylor_slopes(whole, parts.sum(0), parts[1], found.linearised[1]) - 2).abs() < 0.2).all()
    assert float((found.recomputed.sum(0) - found.total).abs().max()) > 0.5


def test_linearised_parts_sum_to_what_eps_leaves():
    parts = normal(4, 7, 16)
    without = contributions(parts, LAYER_NORM.replace(eps=0.0)).linearised
    assert float(without.sum(0).abs().max()) < 1e-14
    assert float(without.abs().max()) > 0.1
    with_eps = contributions(parts, LAYER_NORM.replace(eps=0.5)).linearised
    x = parts.sum(0)
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert_close(with_eps.sum(0), 0.5 * centred / scale**3, units=64)


def test_interference_by_hand_and_of_the_only_part():
    parts = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 12.0]], dtype=torch.float64)
    whole = contributions(parts, specs.LLAMA).interference
    assert_close(whole, torch.tensor([3 / 160**0.5, 4 / 153**0.5, 12 / 5], dtype=torch.float64))
    deviation = parts - parts.mean(-1, keepdim=True)
    others = torch.stack([deviation[[j for j in range(3) if j != i]].sum(0) for i in range(3)])
    assert_close(contributions(parts, LAYER_NORM).interference, deviation.norm(dim=1) / others.norm(dim=1))
    assert contributions(torch.stack([parts[0], torch.zeros(3)]), LAYER_NORM).interference.tolist() == [torch.inf, 0]
    assert contributions(parts[:1], LAYER_NORM).interference.tolist() == [torch.inf]


def test_interference_is_exact_for_a_part_that_dwarfs_the_others():
    parts = torch.stack([1e12 * normal(16), normal(16, seed=1), normal(16, seed=2)])
    with mpmath.workdps(40):
        rows = [[mpmath.mpf(value) for value in row] for row in parts.tolist()]
        size = mpmath.norm(rows[0])
        exact = float(size / mpmath.norm([a + b for a, b in zip(rows[1], rows[2], strict=True)]))
    assert float(contributions(parts, specs.LLAMA).interference[0]) == pytest.approx(exact, rel=1e-13)


@pytest.mark.slow
@given(seed=st.integers(0, 2**16), shift=st.floats(-10, 10), k=st.integers(1, 6))
def test_a_layer_norm_does_not_see_the_mean_of_a_part(seed, shift, k):
    parts = normal(k, 12, seed=seed)
    shifted = parts + shift * torch.linspace(-1, 1, k, dtype=torch.float64)[:, None]
    before, after = contributions(parts, LAYER_NORM), contributions(shifted, LAYER_NORM)
    for name in ("total", "frozen", "recomputed", "linearised", "interference"):
        assert torch.allclose(getattr(before, name), getattr(after, name), rtol=1e-9, atol=1e-9)


def test_parts_that_cancel_a_huge_mean():
    offset = torch.full((1, 16), 1e8, dtype=torch.float64)
    found = contributions(torch.cat([normal(2, 16) + offset, -2 * offset]), LAYER_NORM)
    # Adding 1e8 rounds a part to 1e-8.
    assert torch.allclose(found.frozen[:2], contributions(normal(2, 16), LAYER_NORM).frozen, atol=1e-7)
    assert torch.equal(found.frozen[2], torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["zero", "constant", "one-hot"])
def test_degenerate_parts_are_finite_with_eps(n, kind):
    row = {"zero": torch.zeros(n), "constant": torch.ones(n), "one-hot": torch.eye(n)[0]}[kind].double()
    parts = torch.stack([row, torch.zeros(n).double()]).requires_grad_()
    found = contributions(parts, LAYER_NORM, torch.zeros(n).double())
    values = torch.cat([found.total, *found.frozen, *found.recomputed, *found.linearised, found.remainder])
    assert values.isfinite().all()
    (gradient,) = torch.autograd.grad(values.sum(), parts)
    assert gradient.isfinite().all()


def test_vmap_over_rows_is_the_batch_and_single_precision_stays():
    parts, weight = normal(3, 5, 16), normal(16, seed=1)
    batch = contributions(parts, LAYER_NORM, weight)
    for name in ("linearised", "frozen"):
        mapped = torch.vmap(lambda row, name=name: getattr(contributions(row, LAYER_NORM, weight), name), 1, 1)(parts)
        assert_close(mapped, getattr(batch, name))
    found = contributions(parts.float(), LAYER_NORM, torch.ones(16), torch.zeros(16))
    assert {getattr(found, name).dtype for name in found.__dataclass_fields__} == {torch.float32}
    assert_close(found.frozen.sum(0), found.total, terms=found.frozen.abs().sum(0))


def test_the_derivative_of_a_frozen_part_is_one_over_the_scale_less_what_the_scale_does():
    parts = normal(3, 8)
    whole = torch.func.jacrev(lambda part: contributions(part, LAYER_NORM).frozen.sum(0))(parts)
    direct = torch.func.jacrev(lambda x: reference.forward(x, LAYER_NORM))(parts.sum(0))
    assert_close(whole, direct[:, None].expand(8, 3, 8), length=8)


def test_what_cannot_be_taken_apart():
    with pytest.raises(ShapeError, match=r"k >= 1, are needed, got \(4,\)"):
        contributions(torch.ones(4), LAYER_NORM)
    with pytest.raises(ShapeError, match="stack them"):
        contributions(torch.ones(0, 4), LAYER_NORM)
    with pytest.raises(DtypeError, match="floating"):
        contributions(torch.ones(2, 4, dtype=torch.long), LAYER_NORM)
    with pytest.raises(SpecError, match="last axis"):
        contributions(torch.ones(2, 4, 4), NormSpec(groups=2))
