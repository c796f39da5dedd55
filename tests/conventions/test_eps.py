"""Each placement of eps: its scale, derivative, shrink and inverses agree with one another."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.conventions.eps import PLACEMENTS, eps_in, machine_epsilon

EPS = 0.25
ROOTS = torch.tensor([0.0, 1e-3, 0.1, 0.24, 0.26, 0.6, 3.0], dtype=torch.float64)


@pytest.fixture(params=PLACEMENTS)
def placement(request):
    return PLACEMENTS[request.param]


def scale(placement, root, eps=EPS):
    return placement.scale(root**placement.power, eps)


def test_codes_negative_eps_and_machine_epsilons():
    assert [each.code for each in PLACEMENTS.values()] == [0, 1, 2]
    found = PLACEMENTS["inside"].scale_of_root(torch.tensor([1.0], dtype=torch.float64), -0.75)
    assert found.item() == pytest.approx(0.5, rel=1e-15)
    assert machine_epsilon(is_float64=False) == torch.finfo(torch.float32).eps
    assert machine_epsilon(is_float64=True) == torch.finfo(torch.float64).eps
    assert math.isclose(PLACEMENTS["inside"].length(machine_epsilon(is_float64=True)), 2**-26)
    assert eps_in("bfloat16", None) == eps_in(torch.bfloat16, None) == 2**-23
    assert eps_in("float64", None) == eps_in(torch.float64, None) == 2**-52
    assert eps_in("float64", 1e-6) == 1e-6


def test_both_scales_are_one_with_the_slope_of_autograd_and_the_remainder_of_a_scaling(placement):
    assert torch.allclose(placement.scale_of_root(ROOTS, EPS), scale(placement, ROOTS), rtol=1e-15)
    square = ROOTS[1:].square().requires_grad_()
    root = square.sqrt()
    (expected,) = torch.autograd.grad(scale(placement, root).sum(), square)
    root, scales = root.detach(), scale(placement, root.detach())
    quotient, is_flat = placement.slope(root, scales, EPS)
    assert torch.allclose(torch.where(is_flat, 0.0, 0.5 / quotient), expected, rtol=1e-12)
    expected = torch.where(is_flat, 1.0, 1 - root.square() / (scales * quotient))
    assert torch.allclose(placement.remainder(root, scales, EPS), expected, atol=1e-15)


def test_shrink_is_the_root_over_the_scale_and_its_inverse_gives_it_back(placement):
    expected = ROOTS / scale(placement, ROOTS)
    assert torch.allclose(placement.shrink(ROOTS / placement.length(EPS)), expected, rtol=1e-14)
    for share in (0.9, 0.99):
        ratio = torch.tensor(placement.ratio_at(share), dtype=torch.float64)
        assert placement.shrink(ratio).item() == pytest.approx(share, rel=1e-14)
    # Only a clamp leaves long rows as they are.
    is_shortened = placement.shrink(torch.tensor(1e3, dtype=torch.float64)).item() < 1
    assert placement.shortens_every_row == is_shortened == (placement.name != "clamp")


def test_the_scale_is_found_again_from_what_is_missing(placement):
    # Above a clamp nothing is missing.
    root = ROOTS[placement.length(EPS) > ROOTS] if placement.name == "clamp" else ROOTS[1:]
    room = 1 - root / scale(placement, root)
    assert torch.allclose(placement.scale_below(room, EPS), scale(placement, root), rtol=1e-12)


def test_rescaled_eps_does_the_same_to_longer_rows(placement):
    assert torch.allclose(scale(placement, 8 * ROOTS, placement.rescaled(EPS, 8.0)), 8 * scale(placement, ROOTS))


def test_texts_hold_eps(placement):
    texts = (placement.plain("v", "r", EPS), placement.latex("v", EPS), placement.mathml("v", EPS))
    assert all("0.25" in text for text in texts)
