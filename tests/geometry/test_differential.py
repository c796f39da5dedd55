"""Jacobians in closed form: against autograd for every spec, as linear maps, at degenerate rows, under transforms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import jacfwd, jacrev, vmap

from helpers import arguments, assert_close, taylor_slopes, valid_specs
from normkit import NormSpec, reference, specs
from normkit.errors import DtypeError, ShapeError
from normkit.geometry import centre, euler_defect, jacobian, jvp, tangent_projection, vjp
from normkit.geometry.differential import row_derivative

EPS = st.sampled_from([0.0, 1e-12, 1e-5, 0.3, 10.0, None])
ANY_SPEC = valid_specs(eps=EPS, max_groups=3)
LAYER_NORM = NormSpec(has_weight=False, has_bias=False)
RMS_NORM = specs.NANOCHAT.replace(eps=1e-5)
PLACEMENTS = [
    pytest.param(base.replace(eps=0.3, eps_placement=placement), id=f"{name}-{placement}")
    for name, base in (
        ("layer", LAYER_NORM),
        ("rms", RMS_NORM),
        ("numerator", LAYER_NORM.replace(centre_statistics=False)),
        ("statistics", LAYER_NORM.replace(centre_numerator=False)),
    )
    for placement in ("inside", "outside", "clamp")
]
DEGENERATE = {
    "zero": torch.zeros(5),
    "constant": torch.full((5,), 3.0),
    "one-hot": torch.eye(5)[1],
    "n = 1": torch.tensor([2.0]),
    "n = 2": torch.tensor([1.0, 4.0]),
    "huge mean": torch.linspace(-1, 1, 5).double() + 1e8,
}


def blocks(full, x, spec):
    """The blocks of a Jacobian of shape (*x.shape, *x.shape), and the largest magnitude outside them."""
    size = x.numel()
    full = full.reshape(size, size)
    index = spec.rows.split(torch.arange(size).reshape(x.shape))
    rows, columns = index[..., :, None], index[..., None, :]
    outside = full.clone()
    outside[rows, columns] = 0.0
    return full[rows, columns], outside.abs().max()


@pytest.mark.slow
@given(ANY_SPEC, st.integers(0, 99))
def test_jacobian_products_and_euler_defect_of_any_spec(spec, seed):
    x, weight, bias = arguments(spec, seed=seed)
    v, u = arguments(spec, seed=seed + 1)[0], arguments(spec, seed=seed + 2)[0]
    y = reference.forward(x, spec, weight)
    expected, coupling = blocks(jacrev(lambda x: reference.forward(x, spec, weight))(x), x, spec)
    assert coupling == 0
    found = jacobian(x, spec, weight)
    is_row = spec.axes == (-1,) and spec.groups == 1
    assert_close(found, expected.squeeze(-3) if is_row else expected, units=64)
    # Products with it.
    matrix = found.reshape(*spec.rows.split(x).shape, -1)
    forward = spec.rows.joined((matrix @ spec.rows.split(v)[..., None]).squeeze(-1), x)
    backward = spec.rows.joined((matrix.mT @ spec.rows.split(u)[..., None]).squeeze(-1), x)
    size, length = matrix.abs().max() * max(v.abs().max(), u.abs().max()), matrix.shape[-1]
    along, back = jvp(x, v, spec, weight), vjp(x, u, spec, weight)
    assert_close(along, forward, units=64, length=length, terms=size)
    assert_close(back, backward, units=64, length=length, terms=size)
    # They are adjoint.
    products = (along * u).abs().sum() + (back * v).abs().sum()
    assert_close((along * u).sum(), (back * v).sum(), units=64, length=x.numel(), terms=products)
    defined = reference.backward(u, x, spec, weight, bias).x
    assert_close(back, defined, units=64, terms=u.abs().max() * defined.abs().max().clamp_min(1))
    defect = euler_defect(x, spec, weight)
    assert_close(defect, jvp(x, x, spec, weight), units=64, length=x[0].numel(), terms=y.abs().max())


@pytest.mark.parametrize("spec", PLACEMENTS)
def test_remainder_of_a_step_falls_with_its_square(spec):
    x, v = torch.randn(2, 9, dtype=torch.float64)
    # Several, since the second derivative along one may happen to be small.
    outputs = torch.randn(5, 9, dtype=torch.float64)

    def forward(x):
        return reference.forward(x, spec)

    slope = jvp(x, v, spec)
    assert (taylor_slopes(forward, x, v, slope) - 2).abs().max() < 0.1
    along = torch.stack([vjp(x, u, spec) @ v for u in outputs])
    assert (taylor_slopes(lambda x: outputs @ forward(x), x, v, along) - 2).abs().max() < 0.1
    # Were the derivative wrong, the remainder would fall with the step itself.
    assert taylor_slopes(forward, x, v, 1.1 * slope).max() < 1.2


@pytest.mark.parametrize("spec", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_clamp_takes_over_exactly_at_eps(spec):
    spec = spec.replace(eps=0.3, eps_placement="clamp")
    x = centre(torch.randn(8, dtype=torch.float64))
    x = x / x.square().mean().sqrt() * 0.3
    below, above = x * (1 - 1e-9), x * (1 + 1e-9)
    # Below the clamp the norm is linear; above, it does not see the scale of x.
    assert_close(jacobian(below, spec), jacobian(torch.zeros_like(x), spec))
    assert_close(jvp(above, x, spec), torch.zeros_like(x), terms=torch.ones(()))
    assert_close(euler_defect(below, spec), below / 0.3)
    assert euler_defect(above, spec).abs().max() == 0


@pytest.mark.parametrize("spec", PLACEMENTS)
def test_parts_of_a_row_are_what_their_formulas_say(spec):
    x = torch.randn(3, 8, dtype=torch.float64) + 0.5
    at = row_derivative(x, spec)
    y = reference.forward(x, spec)
    scale = (centre(x) if spec.centre_numerator else x) / y
    assert_close(at.scale, scale[:, :1], units=64)
    gradient = vmap(jacrev(lambda x: reference.statistics(x, spec, 0.3).scale.squeeze(-1)))(x)
    assert_close(at.scale_gradient, gradient, units=64)
    v = (at.scale - 0.3 if spec.eps_placement == "outside" else at.scale).square()
    v = v - 0.3 if spec.eps_placement == "inside" else v
    quotient = {"inside": at.scale, "outside": v.sqrt(), "clamp": v.sqrt()}[spec.eps_placement]
    assert_close(at.remainder, 1 - v / (at.scale * quotient), units=64, terms=torch.ones(()))
    assert_close(at.bulk, 1 / at.scale)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "is_centred"), [(LAYER_NORM, True), (RMS_NORM, False)], ids=["layer", "rms"])
@given(seed=st.integers(0, 99), n=st.integers(2, 20), eps=st.sampled_from([0.0, 1e-5, 0.3]))
def test_gradient_is_the_tangent_part_divided_by_the_scale(spec, is_centred, seed, n, eps):
    generator = torch.Generator().manual_seed(seed)
    x, u, gain = torch.randn(3, 4, n, generator=generator, dtype=torch.float64)
    spec = spec.replace(eps=eps, has_weight=True)
    at = row_derivative(x, spec)
    h = gain * u
    tangent = tangent_projection(h, x, is_centred=is_centred)
    radial = (centre(h) if is_centred else h) - tangent
    # Of the radial part exactly the share eps / s**2 is left.
    expected = (tangent + eps / at.scale.square() * radial) / at.scale
    assert_close(vjp(x, u, spec, gain), expected, units=64, terms=(h.abs().amax(-1, keepdim=True) / at.scale))
    if eps == 0:
        assert_close(
            vjp(x, u, spec, gain), tangent / at.scale, units=64, terms=h.abs().amax(-1, keepdim=True) / at.scale
        )


@pytest.mark.slow
@given(seed=st.integers(0, 99), n=st.integers(1, 20), is_centred=st.booleans())
def test_tangent_projection_is_the_orthogonal_projection(seed, n, is_centred):
    generator = torch.Generator().manual_seed(seed)
    v, x = torch.randn(2, 3, n, generator=generator, dtype=torch.float64)
    normals = [centre(x), torch.ones_like(x)] if is_centred else [x]
    if n == 1 and is_centred:
        normals = normals[1:]
    basis = torch.linalg.qr(torch.stack(normals, -1)).Q
    expected = v - (basis @ (basis.mT @ v[..., None])).squeeze(-1)
    tangent = tangent_projection(v, x, is_centred=is_centred)
    assert_close(tangent, expected, units=64, terms=v.norm(dim=-1, keepdim=True))
    again = tangent_projection(tangent, x, is_centred=is_centred)
    assert_close(again, tangent, units=64, terms=v.norm(dim=-1, keepdim=True))


def test_tangent_projection_keeps_what_has_no_radial_direction():
    v = torch.tensor([1.0, 2.0, 6.0])
    assert torch.equal(tangent_projection(v, torch.full((3,), 2.0)), centre(v))
    assert torch.equal(tangent_projection(v, torch.zeros(3), is_centred=False), v)
    gradient = jacrev(tangent_projection, argnums=(0, 1))(v, torch.zeros(3))
    assert all(part.isfinite().all() for part in gradient)


@pytest.mark.parametrize("x", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("spec", PLACEMENTS)
def test_degenerate_rows_are_finite_and_right(spec, x):
    x = x.double()
    v = torch.linspace(1, 2, x.numel(), dtype=torch.float64)
    matrix = jacobian(x, spec)
    # At a kink both sides take the derivative of the root as 0.
    expected = jacrev(lambda x: reference.forward(x, spec))(x)
    # A deviation of a row with mean 1e8 is known to 1e8 machine epsilons.
    loss = 1 + x.abs().max()
    assert_close(matrix, expected, units=64, terms=loss * expected.abs().max())
    assert_close(jvp(x, v, spec), expected @ v, units=64, terms=10 * loss * expected.abs().max())
    assert_close(vjp(x, v, spec), expected.mT @ v, units=64, terms=10 * loss * expected.abs().max())
    for function in (jacobian, euler_defect, lambda x, spec: jvp(x, v, spec), lambda x, spec: vjp(x, v, spec)):
        assert jacrev(lambda x, function=function: function(x, spec))(x).isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_shift_does_not_change_the_jacobian_of_layer_norm(offset):
    # Multiples of 1/4 survive the shift exactly.
    x = torch.tensor([-1.0, 0.25, 0.5, 3.0], dtype=torch.float64)
    assert_close(jacobian(x + offset, LAYER_NORM), jacobian(x, LAYER_NORM), units=8)
    assert_close(euler_defect(x + offset, LAYER_NORM), euler_defect(x, LAYER_NORM), units=8)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", PLACEMENTS)
def test_transforms_agree_with_loops(spec):
    x, v = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    for function in (lambda x, v: jvp(x, v, spec), lambda x, v: vjp(x, v, spec), lambda x, v: jacobian(x + v, spec)):
        assert_close(vmap(vmap(function))(x, v), function(x, v))
    row, along = x[0, 0], v[0, 0]
    second = jacrev(jacrev(lambda x: reference.forward(x, spec)))(row)
    for mode in (jacrev, jacfwd):
        assert_close(mode(lambda x: jacobian(x, spec))(row), second, units=256)
        assert_close(mode(lambda x: jvp(x, along, spec))(row), (second * along[:, None]).sum(1), units=256)
        assert_close(mode(lambda x: vjp(x, along, spec))(row), (second * along[:, None, None]).sum(0), units=256)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_results_keep_the_dtype_of_x(dtype, offset):
    spec = NormSpec(has_bias=False, weight_offset=offset)
    exact_x, weight, _ = arguments(spec)
    x = exact_x.to(dtype)
    v = torch.randn_like(exact_x)
    expected = jacobian(x.double(), spec, weight)
    assert_close(jacobian(x, spec, weight), expected, dtype=dtype, units=16)
    for product in (jvp, vjp):
        expected = product(x.double(), v, spec, weight)
        assert_close(product(x, v, spec, weight), expected, dtype=dtype, units=16, length=x.shape[-1])
    defect = euler_defect(x, spec, weight)
    assert_close(defect, euler_defect(x.double(), spec, weight), dtype=dtype, units=16)
    assert tangent_projection(x, x).dtype == dtype


def test_gain_of_one_number_and_of_heads():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    one, heads = torch.tensor(2.0, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    for weight in (one, heads):
        expected, coupling = blocks(jacrev(lambda x, w=weight: reference.forward(x, NormSpec(), w))(x), x, NormSpec())
        assert coupling == 0
        assert_close(jacobian(x, NormSpec(), weight), expected.squeeze(-3), units=64)


def test_undefined_is_nan_zero_gain_is_no_obstacle_and_what_cannot_be_used_is_refused():
    spec = LAYER_NORM.replace(eps=0.0)
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]])
    for found in (jacobian(x, spec), jvp(x, x, spec), vjp(x, x, spec), euler_defect(x, spec)):
        assert found[0].isnan().all()
        assert found[1].isfinite().all()
    with pytest.raises(DtypeError, match="floating"):
        jacobian(x.long(), LAYER_NORM)
    with pytest.raises(DtypeError, match="floating"):
        tangent_projection(x.long(), x)
    with pytest.raises(ShapeError, match=r"v must have x's shape \(2, 3\), got \(3,\)"):
        jvp(x, x[0], LAYER_NORM)
    with pytest.raises(ShapeError, match="u must have x's shape"):
        vjp(x, x[0], LAYER_NORM)
    with pytest.raises(ShapeError, match="n >= 1"):
        euler_defect(torch.ones(2, 0), LAYER_NORM)
    x, gain = torch.randn(4, dtype=torch.float64), torch.tensor([0.0, 1.0, 0.0, -2.0], dtype=torch.float64)
    for placement in ("after", "before"):
        spec = NormSpec(has_bias=False, weight_placement=placement)
        expected = jacrev(lambda x, spec=spec: reference.forward(x, spec, gain))(x)
        assert_close(jacobian(x, spec, gain), expected, units=64)
