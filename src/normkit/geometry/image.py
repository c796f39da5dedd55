"""The sets that normalized rows land on: a hyperplane, two spheres, and the image of a norm, eps included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.eps import PLACEMENTS, EpsPlacement
from normkit.errors import InputError, ShapeError, SpecError
from normkit.geometry.centring import centre, project_out
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.rows import require_features, require_floating, require_row, sphere_radius
from normkit.geometry.scaling import length
from normkit.spec import NormSpec


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """All outputs of one norm.

    - eps = 0: the `surface` itself, of dimension n - 2 (LayerNorm) or n - 1 (RMSNorm); constant (zero) rows have no
      output. Where zero gains fill it, it has its inside and its edge.
    - eps > 0, inside or outside the root: the open inside of the surface, of one dimension more, as every normalized
      row is shorter than the radius; the surface is approached by long rows. Constant rows map to the centre.
    - eps > 0 as a clamp: the inside, by rows below eps, and the surface, by all others.

    k zero gains: the inside has dimension min(n - 1, n - k) (LayerNorm) or n - k (RMSNorm); the image at eps = 0 is a
    surface, of one less, for k <= 1 (k = 0), and of the same dimension for k >= 2 (k >= 1). LayerNorm of n = 1 feature:
    no point at eps = 0 (dimension -1), else only the bias (dimension 0); of n = 2: two points, else the line between.
    """

    surface: Ellipsoid
    """The image at eps = 0."""
    eps: float
    """As a number, also where the spec has None."""
    eps_placement: EpsPlacement

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return self.surface.ambient

    @property
    def dimension(self) -> int:
        """Dimension of the image: that of the surface at eps = 0, of the flat it spans with eps > 0."""
        return self.surface.rank if self.eps else self.surface.dimension

    @property
    def is_open(self) -> bool:
        """Whether no output lies on the surface: eps > 0, unless it is a clamp."""
        return self.eps > 0 and PLACEMENTS[self.eps_placement].shortens_every_row

    def depth(self, y: Tensor) -> Tensor:
        """How far an output is below the surface: 1 - |z| / radius for the shortest normalized z that maps to y.

        0 on the surface, 1 at the centre, negative outside: `Ellipsoid.depth`. If no gain is 0, it is the share of the
        row's length that eps takes: 1 - s_0 / s with the row's scale s and its scale s_0 without eps, about
        eps / (2 variance).

        Args:
            y: Of shape (..., n).

        Returns:
            Tensor of shape (...), in y's dtype.
        """
        return self.surface.depth(y)

    def contains(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether y is no further from the image than a tolerance, as bools of shape (...).

        An open image and its closure are the same here: no rounded number tells them apart. Use `depth`.

        Args:
            y: Of shape (..., n).
            tolerance: A distance; 16 sqrt(n) (radius max|g| + |b|) machine epsilons of y's dtype, unless given.
        """
        return self.surface.contains(y, tolerance, filled=True if self.eps else None)


def image_of(spec: NormSpec, n: int, weight: Tensor | None = None, bias: Tensor | None = None) -> Image:
    """The set of all outputs of a norm of rows of n features.

    With g the gain as it acts and r the length of a normalized row at eps = 0 (`sphere_radius`: sqrt(n) for LayerNorm
    and RMSNorm): {g * z + b : |z| = r} at eps = 0, |z| < r with eps > 0, and sum(z) = 0 if the norm centres. A gain
    that multiplies before the norm leaves no trace: it only moves rows about, and g = 1.

    Args:
        spec: The conventions.
        n: Features of a row.
        weight: Stored gain, of shape (n,), or one number; the spec's offset is added.
        bias: Bias, of shape (n,), or one number.

    Returns:
        The image; its numbers are in the dtype of the gain (else of the bias, else float64).

    Raises:
        SpecError: If a row is not the last axis; if the mean counts on one side of the fraction bar only; if eps < 0;
            if n - correction is 0.
        ShapeError: If a parameter does not fit n features.
        DtypeError: If a parameter is not of a floating dtype.
        InputError: If a gain that multiplies before the norm has zeros: rows then lie in a flat across the features.

    Example:
        >>> from normkit.geometry import image_of
        >>> image_of(NormSpec(eps=0.0), 768).dimension, image_of(NormSpec(eps=1e-5), 768).dimension
        (766, 767)

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, and Riechers 2024, arXiv:2405.04134, at eps = 0; eps and zero
        gains derived here.
    """
    require_row(spec)
    radius = sphere_radius(spec, n)
    if not radius:
        raise SpecError(f"at least 2 features are needed for a correction of 1, got {n}: 0 / 0 has no image")
    gain = _gain(spec, n, weight, bias)
    eps = reference.machine_eps(gain, spec)
    if eps < 0:
        raise SpecError(f"the image of a norm with eps >= 0 is needed, got eps = {eps}")
    shift = None if bias is None else _of_features(bias, n)
    surface = Ellipsoid(gain, shift, is_centred=spec.centring.numerator, radius=radius)
    return Image(surface=surface, eps=eps, eps_placement=spec.placement.name)


def _gain(spec: NormSpec, n: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The gain of the ellipsoid, shape (n,)."""
    if weight is None:
        return torch.ones(n, dtype=torch.float64) if bias is None else torch.ones(n).to(bias)
    wide = torch.promote_types(torch.float32, weight.dtype)
    gain = _of_features(spec.gain.effective(weight, wide), n)
    if not spec.gain.is_before:
        return gain
    if bool((gain == 0).any()):
        raise InputError("a gain before the norm is needed without zeros for its image, got some; leave them out of n")
    return torch.ones_like(gain)


def _of_features(parameter: Tensor, n: int) -> Tensor:
    """A parameter of shape (n,), (1,) or () as one of shape (n,)."""
    if parameter.shape not in ((n,), (1,), ()):
        raise ShapeError(f"a parameter for {n} features is needed, got shape {tuple(parameter.shape)}")
    return parameter.expand(n)
