"""What comes back through a norm, and how exactly; what repeating, rescaling and shifting change."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import PRESETS, arguments, assert_close, assert_differentiable, exact
from normkit import NormSpec, reference
from normkit.errors import DtypeError, InputError, SpecError
from normkit.geometry import centre, fiber, idempotence, scale_shift_defects, shrink_factor
from normkit.geometry.rows import sphere_radius

U = 2.0**-53
ROUND_TRIPS = {
    name: spec
    for name, spec in PRESETS.items()
    if spec.axes == (-1,) and spec.groups == 1 and spec.centre_numerator == spec.centre_statistics
}


def divided(x, spec, weight=None):
    """The row that a norm divides by s."""
    if weight is not None and spec.weight_placement == "before":
        x = x * (weight + spec.weight_offset)
    return centre(x) if spec.centre_numerator else x


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_with_eps_only_the_mean_is_lost(name, placement):
    # eps is so large that the clamp holds every row.
    spec = ROUND_TRIPS[name].replace(eps=30.0, eps_placement=placement)
    x, weight, bias = arguments(spec, rows=5, features=24)
    y = reference.forward(x, spec, weight, bias)
    found = fiber(y, spec, weight, bias)
    expected = divided(x, spec, weight)
    # 1 - q is of order 1 here; the smallest gain magnifies the rounding of y - bias.
    assert_close(found.centred, expected, units=400)
    assert found.is_inside.all()
    assert not found.is_scaled.any()
    radius = sphere_radius(spec, 24)
    carried = radius / math.sqrt(24) if spec.multiplier == "one" else radius / 24
    eps = 30.0 * (carried**2 if placement == "inside" else carried)
    assert_close(1.0 - found.depth, shrink_factor(expected, eps=eps, eps_placement=placement), units=400)


@pytest.mark.parametrize("spec", [NormSpec(), PRESETS["LLAMA"], PRESETS["NEMOTRON"]], ids=str)
def test_every_point_of_the_fiber_has_the_same_output(spec):
    x, weight, bias = arguments(spec, rows=3, features=24)
    y = reference.forward(x, spec, weight, bias)
    centred = fiber(y, spec, weight, bias).centred
    for height in [-1e3, 0.0, 7.0] if spec.centre_numerator else [0.0]:
        # Moving a row by the height rounds it in proportion to that.
        again = reference.forward(centred + height, spec, weight, bias)
        assert_close(again, y, units=8 * (1 + abs(height)), length=24)


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("spec", [NormSpec(), PRESETS["LLAMA"], PRESETS["L2_NORM"]], ids=str)
def test_without_eps_only_the_direction_is_left(spec, placement):
    spec = spec.replace(eps=0.0, eps_placement=placement)
    x, weight, bias = arguments(spec, rows=5, features=24)
    found = fiber(reference.forward(x, spec, weight, bias), spec, weight, bias)
    u = divided(x, spec)
    assert found.is_scaled.all()
    assert not found.is_inside.any()
    assert_close(found.depth, torch.zeros(5).double(), units=64, terms=torch.ones(()))
    assert_close(found.centred, u / u.square().mean(-1, keepdim=True).sqrt(), units=64)


def test_above_a_clamp_only_the_direction_is_left():
    spec = PRESETS["X_TRANSFORMERS_RMS"].replace(eps=2.0, has_weight=False)
    short, long = torch.tensor([[0.3, -0.4, 0.1], [30.0, -40.0, 10.0]], dtype=torch.float64)
    found = fiber(reference.forward(torch.stack([short, long]), spec), spec)
    assert found.is_inside.tolist() == [True, False]
    assert found.is_scaled.tolist() == [False, True]
    assert_close(found.centred, torch.stack([short, long / long.square().mean().sqrt()]))
    # Rounding puts half of such outputs a little below the surface; they are no rows at the clamp's edge.
    many = 100 * torch.randn(500, 7, dtype=torch.float64)
    assert fiber(reference.forward(many, spec), spec).is_scaled.all()


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize(("placement", "power"), [("inside", 2), ("outside", 1)])
@pytest.mark.parametrize("scale", [0.05, 0.1, 1.0, 10.0])
def test_the_error_is_that_of_the_conditioning(placement, power, scale, eps):
    # Rows of rms from `scale` to twice that: the relative error with which each comes back.
    spec = NormSpec(eps=eps, eps_placement=placement)
    rms = scale * (1.0 + torch.rand(400, dtype=torch.float64))
    centred = centre(torch.randn(400, 96, dtype=torch.float64))
    centred = centred * (rms / centred.square().mean(-1).sqrt())[:, None]
    found = fiber(reference.forward(centred, spec), spec).centred
    errors = (found - centred).norm(dim=-1) / centred.norm(dim=-1)
    predicted = U * (rms**power / eps + 1)
    if predicted.median() > 1e-3:
        # The length is lost: it is wrong in the fourth digit, or no number at all.
        assert errors.nan_to_num(math.inf).median() > 1e-4
        return
    # One rounding of |p|, magnified so; it has a few, and they add up or cancel.
    assert 0.1 < (errors / predicted).median() < 2
    assert (errors / predicted).max() < 10


@pytest.mark.parametrize(("placement", "eps"), [("inside", 1e-5), ("outside", 1e-5), ("clamp", 5.0)])
def test_the_formula_in_fifty_digits(placement, eps):
    spec = NormSpec(eps=eps, eps_placement=placement, has_weight=False, has_bias=False)
    x = torch.randn(3, 12, dtype=torch.float64)
    found = fiber(exact(x, spec), spec).centred
    with mpmath.workdps(50):
        for got, row in zip(found, exact(x, spec).tolist(), strict=True):
            values = [mpmath.mpf(value) for value in row]
            q = mpmath.fsum(value**2 for value in values) / 12
            factor = {
                "inside": mpmath.sqrt(mpmath.mpf(eps) / (1 - q)),
                "outside": mpmath.mpf(eps) / (1 - mpmath.sqrt(q)),
                "clamp": mpmath.mpf(eps),
            }[placement]
            expected = torch.tensor([float(value * factor) for value in values], dtype=torch.float64)
            # Only the rounding of |p| is magnified here, by s / eps at most.
            assert_close(got, expected, units=16 / min(1.0, eps))


@pytest.mark.parametrize(
    ("spec", "zeros", "is_recovered"),
    [
        (NormSpec(eps=0.1), 1, True),
        (NormSpec(eps=0.1), 2, False),
        (PRESETS["LLAMA"].replace(eps=0.1), 1, False),
        (NormSpec(eps=0.1, weight_placement="before"), 2, True),
    ],
    ids=str,
)
def test_what_zero_gains_lose(spec, zeros, is_recovered):
    x, weight, bias = arguments(spec, rows=4, features=24)
    weight[:zeros] = -spec.weight_offset
    found = fiber(reference.forward(x, spec, weight, bias), spec, weight, bias)
    if is_recovered:
        assert_close(found.centred, divided(x, spec, weight), units=4000)
        assert found.is_inside.all()
    else:
        assert found.centred.isnan().all()
        assert found.depth.isnan().all()
        assert not found.is_inside.any()


def test_outputs_that_no_input_has():
    # Of lengths 6, 2 and 1, where the sphere has 2.
    y = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)[:, None] * torch.tensor([1.0, -1.0, 1.0, -1.0])
    for placement in ("inside", "outside"):
        found = fiber(y, NormSpec(eps_placement=placement))
        assert found.centred.isnan().any(-1).tolist() == [True, True, False]
        assert found.is_inside.tolist() == [False, False, True]
        assert found.depth.tolist() == pytest.approx([-2.0, 0.0, 0.5])
    assert fiber(y * 0.0, NormSpec(eps=0.0)).centred.isnan().all()


def test_the_bias_itself_comes_from_constant_rows():
    spec = NormSpec(eps=0.25)
    bias = torch.arange(4.0, dtype=torch.float64)
    found = fiber(bias, spec, None, bias)
    assert torch.equal(found.centred, torch.zeros(4).double())
    assert float(found.depth) == 1.0
    jacobian = torch.func.jacrev(lambda y: fiber(y, spec, None, bias).centred)(bias)
    assert_close(jacobian, 0.5 * torch.eye(4, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
def test_derivatives_and_transforms(placement):
    spec = NormSpec(eps=3.0, eps_placement=placement)
    x, weight, bias = arguments(spec, rows=3, features=6)
    y = reference.forward(x, spec, weight, bias)

    def recovered(row):
        return fiber(row, spec, weight, bias).centred

    assert_differentiable(recovered, y)
    # It undoes the norm, so on the rows of mean 0 its derivative undoes the norm's.
    forward = torch.func.jacrev(lambda row: reference.forward(row, spec, weight, bias))(x[0])
    projection = torch.eye(6, dtype=torch.float64) - 1 / 6
    backward = torch.func.jacfwd(recovered)(y[0])
    assert_close(projection @ backward @ forward, projection, units=400, terms=torch.ones(()))


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize(("eps", "size"), [(0.0, 2.0), (0.5, 1.0), (0.5, 0.0)])
def test_gradients_are_finite_on_the_surface_and_inside_it(placement, eps, size):
    # Of length 2 exactly the row lies on the sphere; its depth has no rounding to hide behind.
    y = torch.tensor([size, 0.0, 0.0, 0.0], dtype=torch.float64)
    spec = PRESETS["NANOCHAT"].replace(eps=eps, eps_placement=placement)
    assert fiber(y, spec).centred.isfinite().all()
    assert torch.func.jacrev(lambda value: fiber(value, spec).centred)(y).isfinite().all()
    assert torch.func.jacfwd(lambda value: fiber(value, spec).centred)(y).isfinite().all()


@pytest.mark.parametrize("name", [*ROUND_TRIPS, "POCKET_TTS"])
def test_idempotence_is_what_a_second_norm_does(name):
    spec = PRESETS[name].replace(eps=0.1, has_weight=False, has_bias=False, weight_offset=0.0, weight_placement="after")
    x = arguments(spec, rows=5, features=24)[0]
    once = reference.forward(x, spec)
    twice = reference.forward(once, spec)
    expected = (twice - once).norm(dim=-1) / once.norm(dim=-1)
    assert_close(idempotence(x, spec), expected, length=24, terms=torch.ones(()))


def test_a_second_norm_changes_nothing_without_eps_and_with_it_by_the_closed_form():
    x = arguments(NormSpec(), rows=5, features=24)[0]
    for spec in (NormSpec(eps=0.0), NormSpec(eps=0.0, correction=1, multiplier="sqrt_n"), PRESETS["L2_NORM"]):
        assert idempotence(x, spec).max() < 1e-15
    # A mean that counts below the fraction bar but not above it is gone the second time.
    assert idempotence(x, NormSpec(eps=0.0, centre_statistics=False)).min() > 1e-3
    variance = x.var(-1, correction=0)
    expected = (1.0 / (variance / (variance + 0.1) + 0.1).sqrt() - 1.0).abs()
    assert_close(idempotence(x, NormSpec(eps=0.1)), expected, length=24, terms=torch.ones(()))


def test_idempotence_at_the_zero_row():
    zero = torch.zeros(4, dtype=torch.float64)
    for placement, limit in (("inside", 1.0), ("outside", 3.0), ("clamp", 3.0)):
        spec = NormSpec(eps=0.25, eps_placement=placement)
        assert float(idempotence(zero, spec)) == pytest.approx(limit)
        assert torch.func.jacrev(lambda x, spec=spec: idempotence(x, spec))(zero).isfinite().all()
        near = idempotence(zero + 1e-9 * torch.arange(4.0), spec)
        assert float(near) == pytest.approx(limit, rel=1e-6)
    assert idempotence(zero, NormSpec(eps=0.0)).isnan()


@pytest.mark.slow
@given(
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-1e3, 1e3),
    placement=st.sampled_from(["inside", "outside", "clamp"]),
    seed=st.integers(0, 99),
)
def test_the_laws_of_scale_and_shift(scale, shift, placement, seed):
    for base in (
        NormSpec(eps=0.3, eps_placement=placement),
        PRESETS["LLAMA"].replace(eps=0.3, eps_placement=placement),
    ):
        x = arguments(base, rows=4, features=24, seed=seed)[0]
        laws = scale_shift_defects(x, base, scale, shift)
        assert laws.rescaled_eps_defect.max() < 1e-13
        assert laws.odd_defect.max() == 0.0
        free = scale_shift_defects(x, base.replace(eps=0.0), scale, shift)
        assert free.scale_defect.max() < 1e-13
        if base.centre_numerator:
            # The shifted row rounds in proportion to the shift.
            assert laws.shift_defect.max() < 1e-13 * (1 + abs(shift))


def test_where_the_laws_end():
    x = arguments(NormSpec(), rows=4, features=24)[0]
    layer = scale_shift_defects(x, NormSpec(eps=0.3), 3.0, 5.0)
    near, far = shrink_factor(centre(x), eps=0.3), shrink_factor(3.0 * centre(x), eps=0.3)
    assert_close(layer.scale_defect, far / near - 1, units=64)
    assert layer.scale_defect.min() > 0.01
    assert scale_shift_defects(x, PRESETS["LLAMA"], 3.0, 5.0).shift_defect.min() > 0.1
    # Against the definition, for a norm that has none of the symmetries of eps.
    spec = PRESETS["POCKET_TTS"].replace(has_weight=False)
    plain, moved = reference.forward(x, spec), reference.forward(x + 5.0, spec)
    expected = (moved - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert_close(scale_shift_defects(x, spec, 3.0, 5.0).shift_defect, expected, length=24)


def test_what_does_not_fit_is_refused():
    for function in (fiber, idempotence, lambda x, spec: scale_shift_defects(x, spec, 2.0, 1.0)):
        with pytest.raises(SpecError, match=r"spec\.rows\.split"):
            function(torch.zeros(2, 4), NormSpec(groups=2))
        with pytest.raises(DtypeError, match="floating"):
            function(torch.arange(4), NormSpec())
    with pytest.raises(SpecError, match="no sphere"):
        fiber(torch.ones(4), PRESETS["POCKET_TTS"])
    with pytest.raises(SpecError, match="eps of at least 0"):
        fiber(torch.ones(4), NormSpec(eps=-1.0))
    for scale in (0.0, -2.0, math.nan):
        with pytest.raises(InputError, match="above 0"):
            scale_shift_defects(torch.ones(4), NormSpec(), scale, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype):
    spec = NormSpec(eps=0.5)
    x = torch.randn(4, 8).to(dtype)
    y = reference.forward(x, spec)
    # s**2 / eps is a few units, by which the rounding of y's dtype grows.
    assert_close(fiber(y, spec).centred, fiber(y.double(), spec).centred, dtype=dtype, units=64)
    assert fiber(y, spec).depth.dtype == idempotence(x, spec).dtype == dtype
    assert scale_shift_defects(x, spec, 2.0, 1.0).odd_defect.dtype == dtype
