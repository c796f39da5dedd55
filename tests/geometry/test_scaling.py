"""Scaling against 50 digits from 1e-300 to 1e300, the two epsilons side by side, and derivatives at their limits."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_close, assert_differentiable, exact, normal, taylor_slopes
from normkit import NormSpec, geometry
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry import affine, agreement_scale, inside_equivalent, shrink_factor, to_sphere
from normkit.geometry.scaling import length

PLACEMENTS = ["inside", "outside", "clamp"]
# From rows that eps swallows to rows that do not feel it; the outermost have squares that no float64 holds.
EXPONENTS = [-300, -160, -20, -10, -5, -2, 0, 5, 20, 160, 300]
DEGENERATE = {
    "zero": torch.zeros(5),
    "constant": torch.full((5,), 0.1),
    "one-hot": torch.eye(5)[2],
    "one feature": torch.tensor([-3.0]),
    "two features": torch.tensor([1.0, -2.0]),
    "huge mean": 1e8 + torch.arange(5.0, dtype=torch.float64),
    "large": torch.tensor([1e300, -2e300, 5e299], dtype=torch.float64),
    "small": torch.tensor([1e-300, -2e-300, 5e-299], dtype=torch.float64),
}


def rows(*shape, seed=0):
    return normal(*shape, seed=seed) + 0.5


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5, 10.0])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_shrink_factor_in_fifty_digits(exponent, eps, placement):
    for row in rows(4, 33) * 10.0**exponent:
        with mpmath.workdps(50):
            rms = mpmath.sqrt(mpmath.fsum(mpmath.mpf(value) ** 2 for value in row.tolist()) / 33)
            formulas = {
                "inside": rms / mpmath.sqrt(rms**2 + mpmath.mpf(eps)),
                "outside": rms / (rms + mpmath.mpf(eps)),
                "clamp": min(mpmath.mpf(1), rms / mpmath.mpf(eps)),
            }
            exact_shrink = float(formulas[placement])
        shrink = shrink_factor(row, eps=eps, eps_placement=placement)
        # A sum of 33 squares, a root, a hypotenuse, a quotient: four units in the last place.
        assert float(shrink) == pytest.approx(exact_shrink, rel=4 * 2**-52, abs=0.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.5])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_scaled_row_in_fifty_digits(exponent, eps, placement):
    x = rows(3, 33) * 10.0**exponent
    spec = NormSpec(centre_numerator=False, centre_statistics=False, eps=eps, eps_placement=placement)
    expected = exact(x, spec)
    y = to_sphere(x, eps=eps, eps_placement=placement)
    # Entry by entry, as eps may leave them as small as they were.
    assert_close(y, expected, terms=expected.abs())
    if eps:
        shrink = shrink_factor(x, eps=eps, eps_placement=placement)
        assert_close(length(y) / math.sqrt(33), shrink, length=33, terms=shrink)
    else:
        assert_close(length(y), torch.full((3,), math.sqrt(33), dtype=torch.float64))


@pytest.mark.parametrize("exponent", [-307, -160, 0, 160, 300])
def test_lengths_that_can_be_represented_and_those_of_what_is_no_number(exponent):
    row = torch.tensor([3.0, -4.0, 12.0], dtype=torch.float64) * 10.0**exponent
    assert float(length(row)) == pytest.approx(13.0 * 10.0**exponent, rel=2**-50)
    assert_close(torch.func.jacrev(length)(row), torch.tensor([3.0, -4.0, 12.0], dtype=torch.float64) / 13.0)
    odd = length(torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0], [1.0, 0.0]]))
    assert odd.isnan().tolist() == [False, True, False, False]
    assert odd[[0, 2, 3]].tolist() == [math.inf, 0.0, 1.0]


def test_nothing_is_shortened_without_eps_and_a_negative_one_does_as_the_formula_says():
    for placement in PLACEMENTS:
        assert torch.equal(shrink_factor(rows(9, 7), eps=0.0, eps_placement=placement), torch.ones(9).double())
    x = torch.tensor([[3.0, -3.0], [1.0, 1.0]], dtype=torch.float64)
    assert_close(to_sphere(x, eps=-4.0), x / (x.square().mean(-1, keepdim=True) - 4.0).sqrt())
    assert shrink_factor(x, eps=-4.0).isnan().tolist() == [False, True]


def test_the_zero_row():
    zero = torch.zeros(4, dtype=torch.float64)
    for placement, slope in (("inside", 1 / math.sqrt(0.25)), ("outside", 1 / 0.25), ("clamp", 1 / 0.25)):
        kept = {"eps": 0.25, "eps_placement": placement}
        assert torch.equal(to_sphere(zero, **kept), zero)
        assert torch.equal(shrink_factor(zero, **kept), zero[0])
        # Near 0 the map is x / sqrt(eps), or x / eps.
        derivative = torch.func.jacrev(lambda x, kept=kept: to_sphere(x, **kept))(zero)
        assert_close(derivative, slope * torch.eye(4, dtype=torch.float64))
        assert torch.equal(torch.func.jacrev(lambda x, kept=kept: shrink_factor(x, **kept))(zero), zero)
        # Without eps there is no direction; the NaN stays in its row.
        both = torch.stack([zero, zero + 1])
        assert to_sphere(both, eps_placement=placement).isnan().all(-1).tolist() == [True, False]
        assert shrink_factor(both, eps=0.0, eps_placement=placement).isnan().tolist() == [True, False]


@pytest.mark.slow
@given(eps=st.floats(1e-12, 10.0), scale=st.floats(1e-10, 1e10), seed=st.integers(0, 99))
def test_an_eps_outside_has_an_equal_inside_for_one_row(eps, scale, seed):
    row = to_sphere(rows(16, seed=seed)) * scale
    outside = shrink_factor(row, eps=eps, eps_placement="outside")
    inside = shrink_factor(row, eps=inside_equivalent(eps, scale))
    # The row's rms is `scale` up to a few roundings.
    assert float(inside) == pytest.approx(float(outside), rel=1e-14)
    assert torch.equal(inside_equivalent(0.5, torch.tensor([0.0, 2.0])), torch.tensor([0.25, 2.25]))


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 1e-2, 0.5, 0.9])
def test_one_number_agrees_with_itself_at_one_scale(eps):
    scale = agreement_scale(eps)
    assert inside_equivalent(eps, scale) == pytest.approx(eps, rel=1e-15)
    # Shorter rows lose more inside; longer ones outside.
    row = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)[:, None].expand(3, 8) * scale
    same, shorter, longer = shrink_factor(row, eps=eps, eps_placement="outside") - shrink_factor(row, eps=eps)
    assert abs(same) < 4 * 2**-53
    assert longer < 0 < shorter
    # Above 1 outside always takes more.
    assert agreement_scale(2.0) < 0
    row = torch.logspace(-8, 8, 50, dtype=torch.float64)[:, None].expand(50, 3)
    assert (shrink_factor(row, eps=2.0, eps_placement="outside") < shrink_factor(row, eps=2.0)).all()


def test_affine_is_a_diagonal_map_and_a_shift():
    x, weight, bias = rows(5, 4), rows(4, seed=1), rows(4, seed=2)
    dense = x @ torch.diag(weight) + bias
    assert_close(affine(x, weight, bias), dense)
    assert_close(affine(x, weight), x @ torch.diag(weight))
    assert_close(affine(x, bias=bias), x + bias)
    assert affine(x) is x
    assert affine(x.float(), weight, bias).dtype == torch.float32
    # As the docstring says: the sphere becomes the ellipsoid, its plane the one with normal 1 / weight.
    z = to_sphere(x - x.mean(-1, keepdim=True))
    y = affine(z, weight, bias)
    assert_close((((y - bias) / weight) ** 2).sum(-1), torch.full((5,), 4.0, dtype=torch.float64), length=4)
    assert_close(((y - bias) / weight).sum(-1), torch.zeros(5).double(), length=4, terms=torch.tensor(20.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("function", [to_sphere, shrink_factor])
def test_derivatives_and_transforms(function, placement):
    apply = partial(function, eps_placement=placement)
    small = partial(apply, eps=1e-5)
    for x in DEGENERATE.values():
        for value in (small, torch.func.jacrev(small), torch.func.jacfwd(small)):
            assert value(x.double()).isfinite().all()
    # One row on each side of the clamp.
    assert_differentiable(partial(apply, eps=0.2), torch.stack([rows(6), 0.05 * rows(6, seed=1)]))
    # 10 puts every row below the clamp, where to_sphere is linear; 0.2 above it, where its length is fixed.
    curved = partial(apply, eps=0.2 if function is to_sphere else 10.0)
    assert (taylor_slopes(curved, rows(6), rows(6, seed=3)) - 2).abs().max() < 0.1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = rows(4, 8).to(dtype)
        assert_close(apply(x, eps=1e-3), apply(x.double(), eps=1e-3), dtype=dtype, length=8)


def test_what_does_not_fit_is_refused_and_no_rows_are_no_trouble():
    for function in (to_sphere, shrink_factor):
        with pytest.raises(DtypeError, match="floating"):
            function(torch.arange(3), eps=1e-5)
        with pytest.raises(ShapeError, match="n >= 1"):
            function(torch.zeros(2, 0), eps=1e-5)
        with pytest.raises(SpecError, match="'beside'"):
            function(torch.ones(3), eps=1e-5, eps_placement="beside")
    with pytest.raises(DtypeError, match="floating"):
        affine(torch.arange(3))
    empty = torch.zeros(0, 4)
    assert to_sphere(empty).shape == (0, 4)
    assert length(empty).shape == shrink_factor(empty, eps=1.0).shape == (0,)


RMS, LAYER = NormSpec(centre_numerator=False, centre_statistics=False, eps=0.0), NormSpec(eps=0.0)
HALF = LAYER.replace(centre_numerator=False)


FINITE = {
    "jacobian": lambda x: geometry.jacobian(x, LAYER),
    "jacobian, eps outside": lambda x: geometry.jacobian(x, RMS.replace(eps=1e-5, eps_placement="outside")),
    "jacobian, eps below a row": lambda x: geometry.jacobian(x, LAYER.replace(eps=1e-5)),
    "jacobian, clamp": lambda x: geometry.jacobian(x, LAYER.replace(eps=1e-5, eps_placement="clamp")),
    "jvp": lambda x: geometry.jvp(x, x.flip(-1), HALF),
    "vjp": lambda x: geometry.vjp(x, x.flip(-1), LAYER),
    "euler_defect": lambda x: geometry.euler_defect(x, LAYER.replace(eps=1e-5, eps_placement="outside")),
    "jacobian_spectrum": lambda x: geometry.jacobian_spectrum(x, HALF).block,
    "jacobian_norm_bound": lambda x: geometry.jacobian_norm_bound(x, RMS),
    "decompose": lambda x: geometry.decompose(x, LAYER).output,
    "idempotence": lambda x: geometry.idempotence(x, LAYER.replace(correction=1)),
    # Beside 1, as what vanishes is the rounding of what is of size 1.
    "scale_shift_defects": lambda x: (
        1 + torch.stack([*vars(geometry.scale_shift_defects(x, LAYER.replace(eps=1e-5), 3.0, 0.0)).values()])
    ),
    "frozen": lambda x: geometry.contributions(x, LAYER).frozen,
    "recomputed": lambda x: geometry.contributions(x, RMS).recomputed,
    "linearised": lambda x: geometry.contributions(x, RMS).linearised,
    "interference": lambda x: geometry.contributions(x, LAYER).interference,
    "rogue_dimensions": lambda x: geometry.rogue_dimensions(x).contribution,
    "rogue_dimensions, standardised": lambda x: geometry.rogue_dimensions(x).standardised_contribution,
    "centred_defect": geometry.centred_defect,
    "reader_defect": geometry.reader_defect,
    "weightless_defect": geometry.weightless_defect,
    "effective_learning_rate, adam": lambda x: geometry.effective_learning_rate(x, 0.1, optimizer="adam", dims=-1),
    "effective_learning_rate, sgd": lambda x: geometry.effective_learning_rate(x, x[0, 0], optimizer="sgd"),
    "radial_cosine": lambda x: geometry.radial_cosine(x, x.flip(0), dims=(0, 1)),
    "logit_bound": lambda x: geometry.logit_bound(x, 1 / x),
    "scale_over_batch": lambda x: geometry.scale_over_batch(x),
    "geodesic_distance": lambda x: geometry.geodesic_distance(x, x.flip(-1)),
    "angle_between": lambda x: geometry.angle_between(x, x.flip(-1)),
    "preconditioning": lambda x: geometry.preconditioning(x, RMS).raw,
}


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
@pytest.mark.parametrize("name", FINITE)
def test_float32_is_finite_where_the_mathematics_is(name, scale):
    """Squares of these rows are no float32 numbers; the answers are."""
    x = torch.tensor([[1.0, 2.0, 6.0, -3.0], [0.5, -2.0, 1.0, 4.0], [-1.0, 3.0, 0.25, 2.0]]) * scale
    expected = FINITE[name](x.double())
    assert expected.isfinite().all()
    # A dozen roundings; where terms cancel, those of the largest.
    assert_close(FINITE[name](x).double(), expected, units=16 * 2.0**29)
