from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize

from normkit.errors import DtypeError, ShapeError
from normkit.geometry import Ellipsoid, centring_matrix

GAIN = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.2], dtype=torch.float64)
BIAS = torch.tensor([0.3, -2.0, 1.0, 0.0, 5.0], dtype=torch.float64)


def test_it_obeys_the_laws_of_sets(case, law):
    shape = case.build()
    assert shape.dimension == case.dimension
    law(shape)


@pytest.mark.parametrize("zeros", range(6))
@pytest.mark.parametrize("is_centred", [True, False])
def test_axes_against_the_singular_values(zeros, is_centred):
    gain = GAIN.clone()
    gain[:zeros] = 0
    ellipsoid = Ellipsoid(gain, BIAS, is_centred=is_centred, radius=3.0)
    onto = centring_matrix(5) if is_centred else torch.eye(5, dtype=torch.float64)
    stretch = 3.0 * torch.diag(gain) @ onto
    lengths, directions = ellipsoid.axes()
    assert len(lengths) == ellipsoid.rank == int(torch.linalg.matrix_rank(stretch))
    assert torch.allclose(lengths, torch.linalg.svdvals(stretch).flip(0)[5 - len(lengths) :], rtol=1e-14)
    assert torch.equal(lengths, ellipsoid.semi_axes())
    assert torch.allclose(directions.T @ directions, torch.eye(len(lengths), dtype=torch.float64), atol=1e-15)
    assert torch.allclose((directions * lengths.square()) @ directions.T, stretch @ stretch.T, atol=1e-13)


@pytest.mark.parametrize("is_centred", [True, False])
def test_the_ends_of_the_axes_belong_to_it(is_centred):
    ellipsoid = Ellipsoid(GAIN, BIAS, is_centred=is_centred)
    lengths, directions = ellipsoid.axes()
    ends = BIAS + (directions * lengths).T
    assert ellipsoid.contains(ends).all()
    assert ellipsoid.depth(ends).abs().max() < 1e-14
    # Along the axes the nearest point of a far vector is the end.
    assert torch.allclose(ellipsoid.project(BIAS + 10 * (directions * lengths).T), ends, atol=1e-14)


def test_the_normal_is_along_the_reciprocal_gain():
    ellipsoid = Ellipsoid(GAIN, BIAS, is_centred=True)
    assert torch.allclose(ellipsoid.normal * GAIN, (ellipsoid.normal * GAIN)[0].expand(5))
    assert float(ellipsoid.normal.norm()) == pytest.approx(1.0)
    assert ((ellipsoid.sample(100) - BIAS) @ ellipsoid.normal).abs().max() < 1e-14
    assert Ellipsoid(torch.tensor([1.0, 0.0, 2.0]), is_centred=True).normal.tolist() == [0.0, 1.0, 0.0]
    assert Ellipsoid(torch.tensor([0.0, 0.0, 2.0]), is_centred=True).normal is None
    assert Ellipsoid(GAIN, is_centred=False).normal is None


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("is_centred", [True, False])
def test_the_nearest_point_against_scipy(zeros, is_centred):
    gain = GAIN.clone()
    gain[:zeros] = 0
    ellipsoid = Ellipsoid(gain, BIAS, is_centred=is_centred)
    y = 4 * torch.randn(5, dtype=torch.float64)

    def at(z: torch.Tensor) -> torch.Tensor:
        z = z - z.mean() if is_centred else z
        return gain * z * math.sqrt(5) / z.norm() + BIAS

    def cost(values):
        z = torch.tensor(values, requires_grad=True)
        square = (at(z) - y).square().sum()
        square.backward()
        return square.item(), z.grad.numpy()

    starts = torch.randn(20, 5, dtype=torch.float64)
    best = min(minimize(cost, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-10}).fun for start in starts)
    # A minimum is flat: its value is known better than its place.
    assert float(ellipsoid.distance(y)) == pytest.approx(math.sqrt(best), rel=1e-9)


def ellipse(long: float, short: float) -> Ellipsoid:
    return Ellipsoid(torch.tensor([long, short], dtype=torch.float64), is_centred=False, radius=1.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0, 1.001, 2.0])
def test_inside_an_ellipse_on_its_long_axis(share, sign):
    # Up to (a^2 - b^2) / a the nearest points are a pair beside the axis; from there on it is the end. Where the two
    # meet, the distance grows with the fourth power, and what is below its rounding cannot be told.
    focal = sign * (4 - 1) / 2
    nearest = ellipse(2.0, 1.0).project(torch.tensor([share * focal, 0.0], dtype=torch.float64))
    along = min(share * abs(focal) * 4 / 3, 2.0)
    expected = [sign * along, math.sqrt(1 - along**2 / 4)]
    assert nearest.tolist() == pytest.approx(expected, abs=1e-4 if share == 1 else 1e-13)


def test_beside_the_long_axis_the_side_is_kept():
    shape = ellipse(2.0, 1.0)
    y = torch.tensor([[0.7, 1e-12], [0.7, 0.0], [0.7, -1e-12]], dtype=torch.float64)
    assert (shape.project(y)[:, 1] > 0).tolist() == [True, True, False]
    above, on, below = torch.func.vmap(torch.func.jacrev(shape.project))(y)
    side = torch.tensor([1.0, -1.0])
    assert (above - on).abs().max() < 1e-11
    assert (above - side[:, None] * below * side).abs().max() < 1e-11


def test_on_a_plane_of_symmetry_outside_the_derivative_is_whole():
    # Straight ahead of the end of the long axis: the point there moves sideways by b^2 / (b^2 + t).
    y = torch.tensor([5.0, 0.0], dtype=torch.float64)
    t = 5 * 2 - 4
    derivative = torch.func.jacrev(ellipse(2.0, 1.0).project)(y)
    assert torch.allclose(derivative, torch.tensor([[0.0, 0.0], [0.0, 1 / (1 + t)]], dtype=torch.float64), atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e-3, 1e-8, 1e-12])
def test_thin_ones(ratio):
    shape = ellipse(1.0, ratio)
    angle = torch.linspace(0, 2 * torch.pi, 200_001, dtype=torch.float64)
    points = torch.stack([angle.cos(), ratio * angle.sin()], 1)
    y = torch.randn(50, 2, dtype=torch.float64)
    nearest = shape.project(y)
    # On it to rounding, as its equation says, and as near as any of the dense points.
    assert (nearest / torch.tensor([1.0, ratio], dtype=torch.float64)).norm(dim=-1).sub(1).abs().max() < 1e-14
    gain = torch.cdist(y, points).amin(1) - shape.distance(y)
    assert gain.min() > -1e-14
    assert gain.max() < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("is_centred", [True, False])
def test_derivatives_of_the_nearest_point_to_second_order(is_centred):
    ellipsoid = Ellipsoid(GAIN, BIAS, is_centred=is_centred)
    y = (3 * torch.randn(2, 5, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(ellipsoid.project, y)
    assert torch.autograd.gradgradcheck(ellipsoid.project, y)


def test_samples_are_not_uniform_in_length():
    shape = ellipse(3.0, 1.0)
    samples = shape.sample(400_000)
    reach = 0.05
    at_long_end = ((samples - torch.tensor([3.0, 0.0])).norm(dim=1) < reach).sum()
    at_short_end = ((samples - torch.tensor([0.0, 1.0])).norm(dim=1) < reach).sum()
    # Uniform in the angle, which passes 1 of length at the long end and 3 at the short one. Five standard errors.
    assert float(at_long_end / at_short_end) == pytest.approx(3.0, rel=5 * float(1 / at_short_end.sqrt()))


def test_zero_gains_flatten_the_sphere_onto_its_inside():
    flat = Ellipsoid(torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64), is_centred=True)
    assert (flat.rank, flat.dimension, flat.is_filled) == (2, 2, True)
    assert flat.contains(torch.zeros(4, dtype=torch.float64))
    assert not flat.contains(torch.zeros(4, dtype=torch.float64), filled=False)
    inside = 0.5 * flat.sample(50)
    assert torch.allclose(flat.project(inside), inside, atol=1e-15)
    assert torch.allclose(flat.project(inside + torch.tensor([3.0, -1.0, 0.0, 0.0])), inside, atol=1e-15)
    assert flat.depth(flat.sample(1000)).min() > -1e-15
    edge = flat.project(inside, filled=False)
    assert flat.depth(edge).abs().max() < 1e-14


def test_a_centred_row_of_one_feature_is_nowhere_and_dtypes_of_gain_and_rows_are_apart():
    empty = Ellipsoid(torch.tensor([2.0]), torch.tensor([1.0]), is_centred=True)
    assert (empty.rank, empty.dimension) == (0, -1)
    assert empty.semi_axes().shape == (0,)
    assert empty.project(torch.ones(3, 1)).isnan().all()
    assert empty.sample(3).isnan().all()
    assert not empty.contains(torch.ones(3, 1)).any()
    shape = Ellipsoid(GAIN.float(), BIAS.float(), is_centred=True)
    assert shape.semi_axes().dtype == torch.float32
    assert shape.project(torch.ones(5, dtype=torch.float64)).dtype == torch.float64
    assert shape.contains(shape.sample(10)).all()


def test_the_depth_is_that_of_the_shortest_preimage():
    gain = torch.tensor([0.0, 1.5, 0.0, 2.0, -1.0], dtype=torch.float64)
    shape = Ellipsoid(gain, BIAS, is_centred=True)
    y = shape.sample(1)[0]
    # Least norm of z with g * z = y - b and sum(z) = 0, by dense linear algebra.
    conditions = torch.cat([torch.diag(gain), torch.ones(1, 5, dtype=torch.float64)])
    shortest = torch.linalg.pinv(conditions) @ torch.cat([y - BIAS, torch.zeros(1)])
    assert float(shape.depth(y)) == pytest.approx(1 - float(shortest.norm()) / math.sqrt(5), abs=1e-14)


def test_what_is_no_ellipsoid_is_refused():
    with pytest.raises(ShapeError, match=r"one shape \(n,\) are needed, got \(5,\) and \(3,\)"):
        Ellipsoid(GAIN, torch.ones(3), is_centred=True)
    with pytest.raises(ShapeError, match=r"got \(2, 3\)"):
        Ellipsoid(torch.ones(2, 3), is_centred=True)
    with pytest.raises(DtypeError):
        Ellipsoid(torch.ones(3, dtype=torch.int64), is_centred=False)


@pytest.mark.parametrize("is_centred", [True, False])
def test_a_few_semi_axes_are_those_of_all(is_centred):
    ellipsoid = Ellipsoid(torch.tensor([0.0, 0.5, -1.0, 1.0, 2.0, 3.0], dtype=torch.float64), is_centred=is_centred)
    places = torch.tensor([ellipsoid.rank - 1, 0, 2])
    assert torch.equal(ellipsoid.semi_axes(places), ellipsoid.semi_axes()[places])
