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
    """{y : |y| = radius}, of dimension n - 1: the image of RMSNorm without a gain at eps = 0.

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
        if self.n < 1:
            raise ShapeError(f"a sphere of rows of at least 1 feature is needed, got n = {self.n}")
        object.__setattr__(self, "radius", math.sqrt(self.n) if self.radius is None else self.radius)

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
        return 1.0 - length(self._part(require_features(y, self.n))) / self._radius

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, y * radius / |y|; for y = 0, where all are as near, radius along the first feature."""
        part = self._part(require_features(y, self.n))
        size = length(part).unsqueeze(-1)
        is_zero = size == 0
        first = torch.eye(1, self.n, dtype=y.dtype, device=y.device).squeeze(0)
        return self._radius * torch.where(is_zero, self._default(first), part / torch.where(is_zero, 1.0, size))

    def distance(self, y: Tensor) -> Tensor:
        """| |y| - radius |, of shape (...)."""
        return (length(require_features(y, self.n)) - self._radius).abs()

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether distance(y) <= tolerance (16 sqrt(n) radius machine epsilons of y's dtype, unless given)."""
        distance = self.distance(y)
        if tolerance is None:
            tolerance = 16 * math.sqrt(self.n) * torch.finfo(y.dtype).eps * self._radius
        return distance <= tolerance

    def tangent(self, y: Tensor, v: Tensor) -> Tensor:
        """v less its part along y, of the broadcast shape and in y's dtype; all of v for y = 0."""
        v = require_floating(v).to(y.dtype)
        return project_out(self._part(v), self._part(require_features(y, self.n)))

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Gaussian rows, projected, which is uniform on the sphere; shape (count, n)."""
        return self.project(torch.randn(count, self.n, generator=generator, dtype=dtype))

    @property
    def _radius(self) -> float:
        assert self.radius is not None
        return self.radius

    def _part(self, rows: Tensor) -> Tensor:
        """The part of rows in the space that the sphere spans."""
        return rows

    def _default(self, first: Tensor) -> Tensor:
        """The direction that stands for a zero row, given the one along the first feature."""
        return first


@dataclass(frozen=True)
class CentredSphere(Sphere):
    """{y : |y| = radius, sum(y) = 0}, of dimension n - 2.

    The image of LayerNorm without gain and bias at eps = 0: a sphere of the same radius, in the hyperplane with normal
    1. Depth, projection and tangent are those of centre(y) on a `Sphere`. All points are equally near to a constant
    row: its projection is along (1, -1, 0, ..., 0), or along the rounding errors that centring leaves.

    For n = 1 it has no point (dimension -1: `project` and `sample` give NaN, `contains` False), for n = 2 it has two.

    Raises:
        ShapeError: If n is below 1.

    Example:
        >>> from normkit.geometry import CentredSphere
        >>> CentredSphere(3).dimension, CentredSphere(2).project(torch.tensor([3.0, 4.0]))
        (1, tensor([-1.0000,  1.0000]))

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, section 2; its dimension stated here.
    """

    @property
    def dimension(self) -> int:
        """n - 2."""
        return self.n - 2

    def distance(self, y: Tensor) -> Tensor:
        """hypot(|centre(y)| - radius, sqrt(n) * mean(y)), of shape (...), with derivative 0 where it is 0."""
        across = length(centre(require_features(y, self.n))) - self._radius
        along = y.mean(-1) * math.sqrt(self.n)
        return length(torch.stack([across, along], -1)) * (torch.nan if self.n == 1 else 1.0)

    def _part(self, rows: Tensor) -> Tensor:
        return centre(rows)

    def _default(self, first: Tensor) -> Tensor:
        along = (first - first.roll(1, -1)) / math.sqrt(2.0)
        return along * torch.nan if self.n == 1 else along
