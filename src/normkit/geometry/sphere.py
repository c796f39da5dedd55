"""Spheres about the origin: of rows (RMSNorm), and of centred rows (LayerNorm)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.errors import ShapeError
from normkit.geometry.centring import centre, project_out
from normkit.geometry.rows import require_features, require_floating
from normkit.geometry.scaling import length


@dataclass(frozen=True)
class Sphere:
    """{y : |y| = radius}, of dimension n - 1: where RMSNorm without a gain puts its rows at eps = 0.

    For n = 1 it is two points.

    Raises:
        ShapeError: If n is below 1.

    Example:
        >>> from normkit.geometry import Sphere
        >>> Sphere(4).radius, Sphere(2, radius=1.0).project(torch.tensor([3.0, 4.0]))
        (2.0, tensor([0.6000, 0.8000]))

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4: RMSNorm forces the row onto a sphere of radius sqrt(n).
    """

    n: int
    """Features of a row, at least 1."""
    radius: float | None = None
    """sqrt(n) unless given."""

    def __post_init__(self) -> None:
        """Fill in the radius."""
        _fill_in(self, self.n, self.radius)

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return self.n

    @property
    def dimension(self) -> int:
        """n - 1."""
        return self.n - 1

    def depth(self, y: Tensor) -> Tensor:
        """1 - |y| / radius, of shape (...): 1 at the centre, 0 on the sphere, negative outside."""
        return 1.0 - length(require_features(y, self.n)) / _radius(self)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, y * radius / |y|; for y = 0, where all are as near, radius along the first feature."""
        return _radius(self) * _direction(require_features(y, self.n), _first(y))

    def distance(self, y: Tensor) -> Tensor:
        """| |y| - radius |, of shape (...)."""
        return (length(require_features(y, self.n)) - _radius(self)).abs()

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether distance(y) <= tolerance (16 sqrt(n) radius machine epsilons of y's dtype, unless given)."""
        return self.distance(y) <= (_tolerance(self, y) if tolerance is None else tolerance)

    def tangent(self, y: Tensor, v: Tensor) -> Tensor:
        """v less its part along y, of the broadcast shape and in y's dtype; all of v for y = 0."""
        return project_out(require_floating(v).to(y.dtype), require_features(y, self.n))

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Gaussian rows scaled to the radius, which is uniform on the sphere; shape (count, n)."""
        return self.project(torch.randn(count, self.n, generator=generator, dtype=dtype))


@dataclass(frozen=True)
class CentredSphere:
    """{y : |y| = radius, sum(y) = 0}, of dimension n - 2.

    Where LayerNorm without gain and bias puts its rows at eps = 0. It is a sphere of the same radius, in the hyperplane
    with normal 1. For n = 1 it has no point (dimension -1: `project` and `sample` give NaN, `contains` False), for
    n = 2 it has two.

    Raises:
        ShapeError: If n is below 1.

    Example:
        >>> from normkit.geometry import CentredSphere
        >>> CentredSphere(3).dimension, CentredSphere(2).project(torch.tensor([3.0, 4.0]))
        (1, tensor([-1.0000,  1.0000]))

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, section 2; its dimension stated here.
    """

    n: int
    """Features of a row, at least 1."""
    radius: float | None = None
    """sqrt(n) unless given."""

    def __post_init__(self) -> None:
        """Fill in the radius."""
        _fill_in(self, self.n, self.radius)

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return self.n

    @property
    def dimension(self) -> int:
        """n - 2."""
        return self.n - 2

    def depth(self, y: Tensor) -> Tensor:
        """1 - |centre(y)| / radius, of shape (...): 1 on the line of constant rows, 0 on the sphere."""
        return 1.0 - length(centre(require_features(y, self.n))) / _radius(self)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, centre(y) * radius / |centre(y)|.

        For a constant row all points are as near: the one along (1, -1, 0, ..., 0) comes back. A constant row that
        centres to rounding errors has their direction.
        """
        along = (_first(y) - _first(y).roll(1, -1)) / math.sqrt(2.0)
        if self.n == 1:
            along = along * torch.nan
        return _radius(self) * _direction(centre(require_features(y, self.n)), along)

    def distance(self, y: Tensor) -> Tensor:
        """hypot(|centre(y)| - radius, sqrt(n) * mean(y)), of shape (...); the derivative is taken as 0 where it is."""
        across = length(centre(require_features(y, self.n))) - _radius(self)
        along = y.mean(-1) * math.sqrt(self.n)
        return length(torch.stack([across, along], -1)) * (torch.nan if self.n == 1 else 1.0)

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether distance(y) <= tolerance (16 sqrt(n) radius machine epsilons of y's dtype, unless given)."""
        return self.distance(y) <= (_tolerance(self, y) if tolerance is None else tolerance)

    def tangent(self, y: Tensor, v: Tensor) -> Tensor:
        """v less its parts along 1 and along centre(y), of the broadcast shape and in y's dtype."""
        return project_out(centre(require_floating(v).to(y.dtype)), centre(require_features(y, self.n)))

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Gaussian rows, centred and scaled to the radius, which is uniform on this sphere; shape (count, n)."""
        return self.project(torch.randn(count, self.n, generator=generator, dtype=dtype))


def _fill_in(sphere: Sphere | CentredSphere, n: int, radius: float | None) -> None:
    if n < 1:
        raise ShapeError(f"a sphere of rows of at least 1 feature is needed, got n = {n}")
    object.__setattr__(sphere, "radius", math.sqrt(n) if radius is None else radius)


def _radius(sphere: Sphere | CentredSphere) -> float:
    assert sphere.radius is not None
    return sphere.radius


def _tolerance(sphere: Sphere | CentredSphere, y: Tensor) -> float:
    return 16 * math.sqrt(sphere.n) * torch.finfo(y.dtype).eps * _radius(sphere)


def _first(y: Tensor) -> Tensor:
    """The unit vector along the first feature."""
    return torch.eye(1, y.shape[-1], dtype=y.dtype, device=y.device).squeeze(0)


def _direction(y: Tensor, otherwise: Tensor) -> Tensor:
    """y / |y|, or a given vector where y is 0."""
    size = length(y).unsqueeze(-1)
    is_zero = size == 0
    return torch.where(is_zero, otherwise, y / torch.where(is_zero, 1.0, size))
