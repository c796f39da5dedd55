from __future__ import annotations

import math

import pytest
import torch

from helpers import assert_close
from normkit import NormSpec, reference, specs
from normkit.errors import ShapeError
from normkit.geometry import CentredSphere, Ellipsoid, Sphere


def test_it_obeys_the_laws_of_sets(case, law):
    shape = case.build()
    assert shape.dimension == case.dimension
    law(shape)


@pytest.mark.parametrize("n", [2, 3, 768])
def test_norms_without_parameters_put_their_rows_there(n):
    x = 5 + torch.randn(20, n, dtype=torch.float64)
    assert CentredSphere(n).contains(reference.forward(x, NormSpec(eps=0.0))).all()
    assert Sphere(n).contains(reference.forward(x, specs.TORCH_RMS_NORM.replace(eps=0.0))).all()
    # The projections are the norms.
    assert_close(CentredSphere(n).project(x), reference.forward(x, NormSpec(eps=0.0)), length=n, units=16)
    assert_close(Sphere(n).project(x), reference.forward(x, specs.TORCH_RMS_NORM.replace(eps=0.0)), length=n)


@pytest.mark.parametrize("sphere", [Sphere(6), CentredSphere(6), CentredSphere(2, radius=3.0)])
def test_they_are_ellipsoids_of_equal_gains(sphere):
    gain = torch.ones(sphere.n, dtype=torch.float64)
    twin = Ellipsoid(gain, is_centred=isinstance(sphere, CentredSphere), radius=sphere.radius)
    y = 2 * torch.randn(30, sphere.n, dtype=torch.float64)
    v = torch.randn_like(y)
    assert twin.dimension == sphere.dimension
    for name in ("project", "distance", "depth"):
        assert_close(getattr(sphere, name)(y), getattr(twin, name)(y), length=sphere.n, units=32)
    assert_close(sphere.tangent(y, v), twin.tangent(y, v), length=sphere.n, units=32, terms=v.abs().max())


def test_samples_are_uniform():
    # Archimedes: a coordinate of a uniform point of the sphere in three dimensions is uniform itself.
    heights = Sphere(3, radius=1.0).sample(20_000)[:, 2].sort().values
    uniform = torch.linspace(-1, 1, len(heights), dtype=torch.float64)
    # Kolmogorov's bound at one in a million.
    assert (heights - uniform).abs().max() / 2 < 2.7 / math.sqrt(len(heights))
    samples = CentredSphere(4).sample(40_000)
    expected = 4 / 3 * (torch.eye(4) - 1 / 4)
    assert (samples.T @ samples / len(samples) - expected).abs().max() < 5 * 2 / 200


def test_where_no_point_is_nearest_one_is_chosen():
    assert Sphere(3).project(torch.zeros(3)).tolist() == pytest.approx([3**0.5, 0, 0])
    assert CentredSphere(4).project(torch.full((4,), 7.0)).tolist() == pytest.approx([2**0.5, -(2**0.5), 0, 0])
    assert float(Sphere(3).distance(torch.zeros(3))) == pytest.approx(3**0.5)


def test_a_centred_row_of_one_feature_is_nowhere():
    point = CentredSphere(1)
    assert point.dimension == -1
    assert point.project(torch.ones(2, 1)).isnan().all()
    assert point.sample(2).isnan().all()
    assert not point.contains(torch.zeros(2, 1)).any()


def test_equality_and_radius():
    assert Sphere(4) == Sphere(4, radius=2.0) != Sphere(4, radius=1.0)
    assert CentredSphere(4).radius == 2.0
    with pytest.raises(ShapeError, match="got n = 0"):
        Sphere(0)
