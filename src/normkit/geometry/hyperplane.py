"""A hyperplane by its normal: centring projects onto one, and LayerNorm's ellipsoid lies in one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry.centring import project_out
from normkit.geometry.rows import require_features, require_floating
from normkit.geometry.scaling import length


@dataclass(frozen=True, eq=False)
class Hyperplane:
    """{y : normal . (y - point) = 0}, of dimension n - 1.

    LayerNorm centres onto the one with normal 1 through 0, and its outputs lie in the one with normal 1/gain through
    the bias.

    Raises:
        DtypeError: If normal or point is not of a floating dtype.
        ShapeError: If they are not of one shape (n,).
        InputError: If the normal is 0.

    Example:
        >>> from normkit.geometry import Hyperplane
        >>> plane = Hyperplane(torch.tensor([0.0, 0.0, 5.0]), point=torch.tensor([0.0, 0.0, 1.0]))
        >>> plane.project(torch.tensor([1.0, 2.0, 6.0])), plane.distance(torch.tensor([1.0, 2.0, 6.0]))
        (tensor([1., 2., 1.]), tensor(5.))

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, section 2, for normal 1.
    """

    normal: Tensor
    """Shape (n,), of any length but 0."""
    point: Tensor | None = None
    """One of its points, shape (n,); None for 0."""

    def __post_init__(self) -> None:
        """Refuse what is no normal and no point of one space."""
        shapes = [tuple(require_floating(part).shape) for part in (self.normal, self.point) if part is not None]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ShapeError(f"a normal and a point of one shape (n,) are needed, got {' and '.join(map(str, shapes))}")
        if not bool((self.normal != 0).any()):
            raise InputError("a normal with a direction is needed, got 0; every vector is orthogonal to it")

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return len(self.normal)

    @property
    def dimension(self) -> int:
        """n - 1."""
        return self.ambient - 1

    def project(self, y: Tensor) -> Tensor:
        """The nearest point: y less its part (from the point on) along the normal; shape (..., n)."""
        return project_out(self._from_point(y), self._unit(y)) + self._point(y)

    def distance(self, y: Tensor) -> Tensor:
        """|unit normal . (y - point)|, of shape (...)."""
        return (self._from_point(y) * self._unit(y)).sum(-1).abs()

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether distance(y) <= tolerance, as bools of shape (...).

        The tolerance is 16 sqrt(n) (|y| + |point|) machine epsilons of y's dtype, unless given.
        """
        if tolerance is None:
            size = length(y) + length(self._point(y))
            return self.distance(y) <= 16 * math.sqrt(self.ambient) * torch.finfo(y.dtype).eps * size
        return self.distance(y) <= tolerance

    def tangent(self, y: Tensor, v: Tensor) -> Tensor:
        """The part of v along the hyperplane, of the broadcast shape and in y's dtype: the same at every y."""
        return project_out(require_floating(v).to(y.dtype), self._unit(y)) + torch.zeros_like(y)

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Standard Gaussian rows, projected: a standard Gaussian of the hyperplane about its point; (count, n)."""
        z = torch.randn(count, self.ambient, generator=generator, dtype=dtype, device=self.normal.device)
        return project_out(z, self._unit(z)) + self._point(z)

    def _point(self, y: Tensor) -> Tensor:
        return torch.zeros_like(self.normal, dtype=y.dtype) if self.point is None else self.point.to(y.dtype)

    def _from_point(self, y: Tensor) -> Tensor:
        return require_features(y, self.ambient) - self._point(y)

    def _unit(self, y: Tensor) -> Tensor:
        # Before its dtype is changed: a short normal could vanish.
        return (self.normal / length(self.normal)).to(y.dtype)
