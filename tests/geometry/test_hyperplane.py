from __future__ import annotations

import pytest
import torch

from helpers import assert_close
from normkit.errors import DtypeError, InputError, ShapeError
from normkit.geometry import Hyperplane, centre


def test_it_obeys_the_laws_of_sets(case, law):
    shape = case.build()
    assert shape.dimension == case.dimension
    law(shape)


def test_the_all_ones_normal_centres():
    y = torch.randn(5, 7, dtype=torch.float64) + 3
    plane = Hyperplane(torch.ones(7, dtype=torch.float64))
    assert_close(plane.project(y), centre(y), length=7)
    assert_close(plane.distance(y), 7**0.5 * y.mean(-1).abs(), length=7)


def test_against_least_squares():
    normal, point, y = torch.randn(3, 5, dtype=torch.float64)
    # The nearest point is point + basis c for the c of least squares, with any basis of the normal's complement.
    basis = torch.linalg.svd(normal[None]).Vh[1:].T
    nearest = point + basis @ torch.linalg.lstsq(basis, (y - point)[:, None]).solution.squeeze(1)
    plane = Hyperplane(normal, point)
    assert (plane.project(y) - nearest).abs().max() < 1e-14
    assert float(plane.distance(y)) == pytest.approx(float((y - nearest).norm()), rel=1e-13)


@pytest.mark.parametrize("size", [1e-100, 1.0, 1e100])
def test_the_length_of_the_normal_does_not_matter(size):
    y = torch.randn(4, 3, dtype=torch.float64)
    normal = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    assert_close(Hyperplane(size * normal).project(y), Hyperplane(normal).project(y))


def test_tolerance_grows_with_what_is_rounded():
    plane = Hyperplane(torch.ones(3))
    assert plane.contains(centre(1e6 + torch.randn(20, 3))).all()
    assert not plane.contains(torch.tensor([1e-5, 0.0, 0.0]))
    assert plane.contains(torch.tensor([1e-5, 0.0, 0.0]), tolerance=1e-5)


def test_samples_are_gaussian_about_the_point():
    point = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    samples = Hyperplane(torch.ones(3, dtype=torch.float64), point).sample(40_000)
    # Five standard errors of a mean and of a covariance.
    assert (samples.mean(0) - point).abs().max() < 5 / 200
    assert (samples.T.cov() - (torch.eye(3) - 1 / 3)).abs().max() < 5 * 2**0.5 / 200


def test_what_is_no_hyperplane_is_refused():
    with pytest.raises(InputError, match="got 0"):
        Hyperplane(torch.zeros(3))
    with pytest.raises(ShapeError, match=r"one shape \(n,\) are needed, got \(3,\) and \(2,\)"):
        Hyperplane(torch.ones(3), torch.ones(2))
    with pytest.raises(ShapeError, match=r"got \(1, 3\)"):
        Hyperplane(torch.ones(1, 3))
    with pytest.raises(DtypeError):
        Hyperplane(torch.ones(3, dtype=torch.int64))
