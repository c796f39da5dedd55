from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_close, taylor_slopes
from normkit.errors import DtypeError
from normkit.geometry import (
    Sphere,
    chordal_distance,
    exponential,
    geodesic_distance,
    interpolate,
    logarithm,
    parallel_transport,
    project_out,
)

UNIT = torch.finfo(torch.float64).eps


def pairs(n: int = 5, count: int = 20, radius: float = 3.0) -> tuple[Tensor, Tensor]:
    sphere = Sphere(n, radius)
    return sphere.sample(count), sphere.sample(count)


def exact_angle(x: list[float], y: list[float]) -> mpmath.mpf:
    """The angle between two vectors, from their exact values, in 60 digits."""
    x, y = [mpmath.mpf(value) for value in x], [mpmath.mpf(value) for value in y]
    dot = mpmath.fsum(a * b for a, b in zip(x, y, strict=True))
    squares = mpmath.fsum(a * a for a in x) * mpmath.fsum(b * b for b in y)
    return mpmath.atan2(mpmath.sqrt(max(squares - dot**2, 0)), dot)


@pytest.mark.parametrize("angle", [1e-300, 1e-200, 1e-12, 1e-8, 1e-3, 0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("is_near_pi", [False, True])
def test_distance_has_all_its_digits(angle, is_near_pi):
    x = torch.tensor([3.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    along = torch.tensor([0.0, 0.6, -0.8, 0.0], dtype=torch.float64)
    y = math.cos(angle) * x + 3 * math.sin(angle) * along
    y = -y if is_near_pi else y
    with mpmath.workdps(700):
        exact = exact_angle(x.tolist(), y.tolist())
        found = mpmath.mpf(float(geodesic_distance(x, y))) / 3
        assert abs(found - exact) <= 4 * UNIT * exact
        # Near pi what is missing to it is as good as the number that holds it.
        if not is_near_pi:
            length = mpmath.mpf(float(logarithm(x, y).norm())) / 3
            assert abs(length - exact) <= 4 * UNIT * exact or angle < 1e-150


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 5e-7, 1e-3, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("angle", [1e-3, 1.0, 3.0])
def test_only_the_direction_of_y_counts(angle, scale, dtype):
    """A short y lay at no distance from anything, and the way to it was 0."""
    x = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    y = scale * torch.tensor([math.cos(angle), 0.6 * math.sin(angle), -0.8 * math.sin(angle)], dtype=torch.float64)
    x, y = x.to(dtype), y.to(dtype)
    expected = 2 * angle
    # The angle of rows as they are rounded; y of another length than x leaves a rounding of 1 in place of the angle.
    unit = 4 * torch.finfo(dtype).eps * max(1, 1 / angle)
    assert float(geodesic_distance(x, y)) == pytest.approx(expected, rel=unit)
    assert float(logarithm(x, y).double().norm()) == pytest.approx(expected, rel=unit)
    middle = torch.tensor([math.cos(angle / 2), *(math.sin(angle / 2) * v for v in (0.6, -0.8))], dtype=torch.float64)
    assert torch.allclose(interpolate(x, y, 0.5).double(), 2 * middle, rtol=0.0, atol=16 * unit)


@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1e-4])
def test_tiny_distances_of_arbitrary_points(angle):
    x = torch.randn(6, dtype=torch.float64)
    y = exponential(x, angle * project_out(torch.randn(6, dtype=torch.float64), x))
    for other in (y, -y):
        with mpmath.workdps(60):
            exact = exact_angle(x.tolist(), other.tolist())
            size = mpmath.sqrt(mpmath.fsum(mpmath.mpf(value) ** 2 for value in x.tolist()))
            found = mpmath.mpf(float(geodesic_distance(x, other))) / size
            # y's own length is rounded, and so are its components: that is in `exact` too.
            assert abs(found - exact) <= 8 * UNIT * exact


@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1e-4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_way_to_near_and_nearly_opposite_rows(angle, sign):
    x = torch.randn(6, dtype=torch.float64)
    y = sign * exponential(x, angle * project_out(torch.randn(6, dtype=torch.float64), x))
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(value) for value in row.tolist()] for row in (x, y)]
        share = mpmath.fsum(a * b for a, b in zip(*rows, strict=True)) / mpmath.fsum(a * a for a in rows[0])
        across = torch.tensor([float(b - share * a) for a, b in zip(*rows, strict=True)], dtype=torch.float64)
    way = logarithm(x, y)
    assert (way / way.norm() - across / across.norm()).abs().max() < 8 * UNIT


def test_distances_against_arc_cosine_and_chord():
    x, y = pairs()
    cosine = (x * y).sum(-1) / 9
    assert_close(geodesic_distance(x, y), 3 * cosine.acos(), length=5)
    assert_close(chordal_distance(x, y), 6 * (geodesic_distance(x, y) / 6).sin(), length=5)
    assert_close(geodesic_distance(x, 7 * y), geodesic_distance(x, y), length=5)


def test_exponential_against_the_geodesic_equation():
    x, v = torch.randn(2, 4, dtype=torch.float64)
    v = project_out(v, x)
    # c'' = -(|v| / |x|)^2 c through x with speed v, as the exponential of its matrix.
    rate = float((v.norm() / x.norm()).square())
    flow = torch.linalg.matrix_exp(torch.tensor([[0.0, 1.0], [-rate, 0.0]], dtype=torch.float64))
    assert_close(exponential(x, v), flow[0, 0] * x + flow[0, 1] * v, units=16)


unit_interval = st.floats(0, 1, allow_subnormal=False)


@pytest.mark.slow
@given(st.integers(2, 9), st.integers(0, 1000), st.floats(1e-12, 3.14), st.floats(1e-100, 1e100))
def test_logarithm_is_undone_by_exponential(n, seed, angle, radius):
    generator = torch.Generator().manual_seed(seed)
    x = Sphere(n, radius).sample(1, generator=generator)[0]
    v = project_out(torch.randn(n, generator=generator, dtype=torch.float64), x)
    v = v / v.norm() * (angle * radius)
    y = exponential(x, v)
    assert float(y.norm()) == pytest.approx(radius, rel=8 * UNIT)
    back = logarithm(x, y)
    # y is rounded, in units of the radius; near the opposite point that turns v.
    assert (back - v).abs().max() <= 32 * UNIT * radius * max(1.0, angle / math.sin(angle))
    assert (exponential(x, back) - y).abs().max() <= 16 * UNIT * radius
    assert float((back * x).sum()) == pytest.approx(0, abs=8 * UNIT * float(back.norm()) * radius)
    assert float(back.norm()) == pytest.approx(float(geodesic_distance(x, y)), rel=8 * UNIT)


@pytest.mark.slow
@given(unit_interval)
def test_interpolation_divides_the_distance(share):
    x, y = pairs()
    between = interpolate(x, y, share)
    whole = geodesic_distance(x, y)
    assert_close(between.norm(dim=-1), x.norm(dim=-1))
    # The point between is rounded, in units of the radius.
    assert_close(geodesic_distance(x, between), share * whole, units=32, terms=whole)
    assert_close(geodesic_distance(between, y), (1 - share) * whole, units=32, terms=whole)


def test_interpolation_of_two_by_their_sum():
    x, y = pairs()
    middle = 3 * torch.nn.functional.normalize(x + y, dim=-1)
    assert_close(interpolate(x, y, 0.5), middle, length=5, units=16)
    assert_close(interpolate(x, y, torch.zeros(20)), x, units=2)
    assert_close(interpolate(x, y, torch.ones(20)), y, units=16)
    shares = torch.linspace(-1, 2, 20, dtype=torch.float64)
    assert_close(interpolate(x, y, shares), torch.stack([interpolate(*row) for row in zip(x, y, shares, strict=True)]))


def test_opposite_rows_take_the_stated_arc():
    x = torch.tensor([[1.0, -0.5, 0.25], [0.0, 2.0, 0.0]], dtype=torch.float64)
    v = logarithm(x, -3 * x)
    assert torch.equal(v, logarithm(x, -x))
    assert_close(v.norm(dim=-1), torch.pi * x.norm(dim=-1))
    assert (v * x).sum(-1).abs().max() < 1e-15
    # In the plane of x and the axis of its smallest entry, and towards it.
    assert v[0, 2] > 0
    assert torch.linalg.matrix_rank(torch.stack([v[0], x[0], torch.eye(3).double()[2]]), atol=1e-12) == 2
    assert v[1].tolist() == pytest.approx([2 * math.pi, 0, 0])
    assert_close(exponential(x, v), -x)
    assert_close(geodesic_distance(x, -x), torch.pi * x.norm(dim=-1))
    assert interpolate(x, -x, 0.5).norm(dim=-1).tolist() == pytest.approx(x.norm(dim=-1).tolist())


def test_values_and_gradients_at_no_distance():
    x = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    across = torch.eye(3, dtype=torch.float64) - torch.outer(x, x) / 9
    assert torch.equal(exponential(x, zero), x)
    assert torch.equal(logarithm(x, x), zero)
    assert float(geodesic_distance(x, x)) == float(chordal_distance(x, x)) == 0
    assert torch.equal(logarithm(x, 3 * x), zero)
    along_v = torch.func.jacrev(exponential, argnums=1)
    along_y = torch.func.jacrev(logarithm, argnums=1)
    assert torch.allclose(along_v(x, zero), across, atol=1e-15)
    assert torch.allclose(torch.func.jacrev(exponential, argnums=0)(x, zero), torch.eye(3).double(), atol=1e-15)
    assert torch.allclose(along_y(x, x), across, atol=1e-15)
    assert torch.allclose(torch.func.jacrev(logarithm, argnums=0)(x, x), -across, atol=1e-15)
    assert torch.allclose(along_y(x, 3 * x), across / 3, atol=1e-15)
    for distance in (geodesic_distance, chordal_distance):
        assert torch.equal(torch.func.grad(distance, argnums=1)(x, x), zero)
    # Second order: the path leaves its tangent by -x |v|^2 / (2 |x|^2).
    second = torch.func.jacfwd(along_v, argnums=1)(x, zero)
    assert torch.allclose(second, -x[:, None, None] * across / 9, atol=1e-15)


@pytest.mark.parametrize("function", [geodesic_distance, chordal_distance, exponential, logarithm, interpolate])
def test_gradients_are_finite_everywhere(function):
    x = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    others = torch.stack([x, -x, 2 * x, torch.zeros(3), torch.eye(3)[0], x + 1e-9, 1e-9 - x]).double()
    # The zero row is a tangent, but no point of a sphere.
    others = others if function in (exponential, chordal_distance) else others[[0, 1, 2, 4, 5, 6]]
    arguments = (0.3,) if function is interpolate else ()
    for argument in (0, 1):
        derivative = torch.func.jacrev(function, argnums=argument)
        assert torch.stack([derivative(x, other, *arguments) for other in others]).isfinite().all()
        assert torch.stack([function(x, other, *arguments) for other in others]).isfinite().all()


@pytest.mark.parametrize("size", [1e-9, 0.01, 0.0999, 0.1001, 1.0, 5.0])
def test_both_sides_of_the_power_series(size):
    x = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    v = (torch.tensor([0.0, 0.0, size], dtype=torch.float64)).requires_grad_()
    expected = [0.6 * math.cos(size), 0.8 * math.cos(size), math.sin(size)]
    assert exponential(x, v).tolist() == pytest.approx(expected, rel=4 * UNIT, abs=1e-16)
    assert torch.autograd.gradcheck(lambda v: exponential(x, v), v)
    assert torch.autograd.gradgradcheck(lambda v: exponential(x, v), v)


@pytest.mark.parametrize("sine", [1e-9, 0.0316, 0.0317, 0.5, 1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_sides_of_the_series_of_the_logarithm(sine, sign):
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    y = torch.tensor([sine, sign * math.sqrt(1 - sine**2)], dtype=torch.float64)
    angle = math.asin(sine) if sign > 0 else math.pi - math.asin(sine)
    assert logarithm(x, y).tolist() == pytest.approx([angle, 0.0], rel=4 * UNIT, abs=1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("size", [0.03, 0.0999, 0.1001, 0.5])
def test_derivatives_on_both_sides_of_the_series(size, order):
    x, along = torch.eye(2, dtype=torch.float64)

    def derivative(function, at: float) -> Tensor:
        for _ in range(order):
            function = torch.func.jacfwd(function)
        return function(torch.tensor(at, dtype=torch.float64))

    turned = size + order * math.pi / 2
    path = derivative(lambda t: exponential(x, t * along), size)
    assert path.tolist() == pytest.approx([math.cos(turned), math.sin(turned)], abs=2e-13 if size < 0.1 else 1e-10)
    # The way to a point that moves at speed 1 grows at speed 1.
    way = derivative(lambda t: logarithm(x, t.cos() * x + t.sin() * along), min(size, 0.0315))
    assert way.tolist() == pytest.approx([0.0, 1.0 if order == 1 else 0.0], abs=1e-12)


@pytest.mark.parametrize("function", [geodesic_distance, chordal_distance, exponential, logarithm])
def test_derivatives_batches_vmap_and_float32(function):
    x, y = pairs(count=6)
    rows = torch.stack([function(one, other) for one, other in zip(x, y, strict=True)])
    assert_close(function(x, y), rows)
    assert_close(torch.func.vmap(function)(x, y), rows)
    assert_close(function(x[:, None], y)[2, 4], function(x[2], y[4]))
    assert_close(function(x.float(), y.float()), rows.float(), units=32)
    reverse, forward = (f(function, argnums=1)(x[0], y[0]) for f in (torch.func.jacrev, torch.func.jacfwd))
    assert torch.allclose(reverse, forward, atol=1e-14)
    assert (taylor_slopes(partial(function, x), y, torch.randn_like(y)) - 2).abs().max() < 0.2
    whole = torch.ones(5, dtype=torch.int64)
    for arguments in ((x, whole), (whole, x)):
        with pytest.raises(DtypeError, match="floating dtype"):
            function(*arguments)


def test_transport_turns_what_lies_along_the_arc_and_nothing_else():
    """By the rotation in the plane of the arc; over tiny arcs and between opposite rows, too."""
    x, y = pairs(count=12)
    y = torch.stack([*y[:6], *exponential(x[6:9], 1e-9 * project_out(y[6:9], x[6:9])), 2 * x[9], -x[10], -5 * x[11]])
    v = project_out(torch.randn(12, 5, dtype=torch.float64), x)
    start, way = x / 3, logarithm(x, y) / 3
    generator = way[:, :, None] * start[:, None] - start[:, :, None] * way[:, None]
    carried = parallel_transport(x, y, v)
    assert_close(carried, (torch.linalg.matrix_exp(generator) @ v[..., None]).squeeze(-1), length=5, units=32)
    assert (carried * y / y.norm(dim=-1, keepdim=True)).sum(-1).abs().max() < 64 * UNIT
    assert_close(parallel_transport(x, y, v + 7 * x), carried, length=5, units=64)
    for argument in (0, 1, 2):
        derivative = torch.func.vmap(torch.func.jacrev(parallel_transport, argnums=argument))(x, y, v)
        assert derivative.isfinite().all()
    with pytest.raises(DtypeError, match="floating dtype"):
        parallel_transport(x, y, torch.ones(5, dtype=torch.int64))


def test_where_there_is_no_sphere_the_answer_is_nan():
    zero, x = torch.zeros(3), torch.ones(3)
    assert geodesic_distance(zero, x).isnan()
    assert exponential(zero, x).isnan().all()
    assert logarithm(zero, x).isnan().all()
    assert logarithm(torch.ones(1), -torch.ones(1)).isnan().all()
