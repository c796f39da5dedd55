"""The ellipsoid that a gain and a bias make of the sphere of normalized rows."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from normkit.errors import ShapeError
from normkit.geometry.axes import downdate_eigenvalues, downdate_eigenvectors
from normkit.geometry.centring import centre, project_out
from normkit.geometry.rows import require_features, require_floating
from normkit.geometry.scaling import length

_HALVINGS = 12
_NEWTON_STEPS = 4
_LARGE = 1e-2


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """{g * z + b : |z| = radius}, and sum(z) = 0 if centred: all outputs of a norm at eps = 0.

    Without a zero gain it is a surface: of dimension n - 1, with the features for axes, if not centred; else of
    dimension n - 2, in the hyperplane with normal 1/g through b. k zero gains pin k coordinates to the bias. A
    centred ellipsoid with k = 1 is still a surface; else (k >= 2, or k >= 1 if not centred) the sphere is flattened,
    and its image is the ellipsoid with its inside, of dimension n - k: `is_filled`.

    For n = 1 a centred one has no point (dimension -1: `project` and `sample` give NaN); for n = 2 it has two points.

    Raises:
        DtypeError: If gain or bias is not of a floating dtype.
        ShapeError: If they are not of one shape (n,).

    Example:
        >>> from normkit.geometry import Ellipsoid
        >>> ellipsoid = Ellipsoid(torch.tensor([1.0, 1.0, 2.0]), is_centred=True)
        >>> ellipsoid.dimension, ellipsoid.semi_axes(), ellipsoid.normal
        (1, tensor([1.7321, 3.0000]), tensor([0.6667, 0.6667, 0.3333]))

    Source:
        Riechers 2024, arXiv:2405.04134, for the centred one; zero gains, and what is filled, derived here.
    """

    gain: Tensor
    """g, as it acts, shape (n,)."""
    bias: Tensor | None = None
    """b, shape (n,), or None for 0."""
    _: KW_ONLY
    is_centred: bool
    """Whether the rows z are centred (LayerNorm) or not (RMSNorm)."""
    radius: float | None = None
    """Length of z; sqrt(n) unless given."""

    def __post_init__(self) -> None:
        """Fill in the radius; refuse what is no gain or no bias of one row."""
        shapes = [tuple(require_floating(part).shape) for part in (self.gain, self.bias) if part is not None]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ShapeError(
                f"a gain and a bias of one shape (n,) are needed, got {' and '.join(map(str, shapes))}; "
                "take one row's part of them"
            )
        if self.radius is None:
            object.__setattr__(self, "radius", math.sqrt(self.ambient))

    @property
    def ambient(self) -> int:
        """n: the dimension of the space it lies in."""
        return len(self.gain)

    @cached_property
    def zero_gains(self) -> int:
        """k: the number of gains that are exactly 0."""
        return int((self.gain == 0).sum())

    @property
    def rank(self) -> int:
        """Dimension of the flat it spans: min(n - 1, n - k) if centred, else n - k."""
        flat = self.ambient - self.zero_gains
        return min(self.ambient - 1, flat) if self.is_centred else flat

    @property
    def is_filled(self) -> bool:
        """Whether its inside belongs to it: k >= 2 zero gains if centred, else k >= 1."""
        return self.zero_gains >= (2 if self.is_centred else 1)

    @property
    def dimension(self) -> int:
        """rank - 1 for a surface, rank where it is filled; -1 where it has no point."""
        return self.rank if self.is_filled else self.rank - 1

    @property
    def centre(self) -> Tensor:
        """b, shape (n,)."""
        return torch.zeros_like(self.gain) if self.bias is None else self.bias

    @property
    def normal(self) -> Tensor | None:
        """Unit normal of the hyperplane it spans: along 1/g, or along e_i if g_i alone is 0; None if it spans none."""
        if not self.is_centred or self.zero_gains > 1:
            return None
        is_zero = self.gain == 0
        if self.zero_gains:
            return is_zero.to(self.gain)
        reciprocal = self.gain.abs().amin() / self.gain
        return reciprocal / length(reciprocal)

    def semi_axes(self, places: Tensor | None = None) -> Tensor:
        """Lengths of the semi-axes, ascending: radius |g_i| or, if centred, radius sqrt(eigenvalue).

        The eigenvalues are those of `downdate_eigenvalues` that are not 0. In float64, rounded to the gain's dtype.

        Args:
            places: Indices of those wanted, from 0 to rank - 1, which take O(n) each; all by default, in O(n**2).

        Returns:
            Tensor of shape (rank,), or that of the places.
        """
        if places is None:
            return self._wide_semi_axes.to(self.gain.dtype)
        gain = self.gain.detach().double()
        from_last = places + self.ambient - self.rank
        sizes = downdate_eigenvalues(gain, from_last).sqrt() if self.is_centred else gain.abs().sort().values[from_last]
        return (self._radius * sizes).to(self.gain.dtype)

    def axes(self) -> tuple[Tensor, Tensor]:
        """The semi-axes, ascending, shape (rank,), and their unit directions, shape (n, rank), one a column."""
        return self.semi_axes(), self._wide_directions.to(self.gain.dtype)

    @cached_property
    def _wide_semi_axes(self) -> Tensor:
        gain = self.gain.detach().double()
        if self.is_centred:
            return self._radius * downdate_eigenvalues(gain)[self.ambient - self.rank :].sqrt()
        return self._radius * gain.abs().sort().values[self.zero_gains :]

    @cached_property
    def _wide_directions(self) -> Tensor:
        gain = self.gain.detach().double()
        if self.is_centred:
            return downdate_eigenvectors(gain)[:, self.ambient - self.rank :]
        order = gain.abs().argsort(stable=True)[self.zero_gains :]
        return torch.eye(self.ambient, dtype=gain.dtype, device=gain.device)[:, order]

    def depth(self, y: Tensor) -> Tensor:
        """How far a vector is below the surface: 1 at the centre, 0 on the surface, negative outside.

        1 - |z| / radius for z = (y - b) / g. Before that, y is brought to the flat that the ellipsoid spans, by the
        shortest way; if centred, the z of zero gains are all equal and make the sum 0: the shortest z that goes to y.

        Args:
            y: Of shape (..., n).

        Returns:
            Tensor of shape (...), in y's dtype.
        """
        return 1.0 - length(self._pull_back(y)) / self._radius

    def project(self, y: Tensor, *, filled: bool | None = None) -> Tensor:
        """The nearest point of the set; within a filled one, that is y brought to its flat.

        In the coordinates c along the axes a, it is p_i = a_i**2 c_i / (a_i**2 + t), with t the largest root of
        sum_i (a_i c_i / (a_i**2 + t))**2 = 1. That is solved for the distance of t from its pole -min(a)**2, by
        bisection of its exponent and Newton's method; two more steps make the result differentiable, twice.

        A y far inside can have two nearest points or more (for an ellipse: on its long axis, within (a**2 - b**2) / a
        of the centre). The one on the positive side of the first shortest axis is returned; the derivative is that of
        staying on this side.

        Args:
            y: Of shape (..., n).
            filled: Whether to count the inside to the set; as `is_filled` says, unless given.

        Returns:
            Tensor of y's shape and dtype, in O(n**2) operations per row; the axes are found once.

        Source:
            Eberly 2013, "Distance from a point to an ellipse, an ellipsoid, or a hyperellipsoid"; More and Sorensen
            1983 for Newton's method on the reciprocal length.
        """
        require_features(y, self.ambient)
        filled = self.is_filled if filled is None else filled
        middle = self.centre.to(y.dtype)
        if not self.rank:
            return torch.zeros_like(y) * (1.0 if filled else torch.nan) + middle
        axes, directions = self._wide_semi_axes.to(y.dtype), self._wide_directions.to(y.dtype)
        coordinates = (y - middle) @ directions
        nearest = _nearest_point(coordinates, axes)
        if filled:
            is_inside = (coordinates / axes).square().sum(-1, keepdim=True) <= 1
            nearest = torch.where(is_inside, coordinates, nearest)
        return nearest @ directions.T + middle

    def distance(self, y: Tensor, *, filled: bool | None = None) -> Tensor:
        """Distance to the nearest point, shape (...); its derivative is taken as 0 where it is 0."""
        return length(y - self.project(y, filled=filled))

    def contains(self, y: Tensor, tolerance: float | None = None, *, filled: bool | None = None) -> Tensor:
        """Whether distance(y) <= tolerance, as bools of shape (...).

        The tolerance is 16 sqrt(n) (radius max|g| + |b|) machine epsilons of y's dtype, unless given.
        """
        if tolerance is None:
            size = self._radius * self.gain.abs().amax().to(y.dtype) + length(self.centre).to(y.dtype)
            return self.distance(y, filled=filled) <= 16 * math.sqrt(self.ambient) * torch.finfo(y.dtype).eps * size
        return self.distance(y, filled=filled) <= tolerance

    def tangent(self, y: Tensor, v: Tensor) -> Tensor:
        """The part of v that is tangent to the set at y: orthogonal to its normals there.

        These are the normals of the flat it spans and, unless it is filled, (y - b) / g**2 within that flat. A filled
        set is taken as at its inside. At the centre of a surface v's part in the flat comes back.

        Args:
            y: Of shape (..., n), a point of the set, or near it.
            v: Of shape (..., n).

        Returns:
            Tensor of the broadcast shape, in y's dtype.
        """
        v = self._in_flat(require_floating(v).to(y.dtype)) + torch.zeros_like(y)
        if self.is_filled:
            return v
        z = self._pull_back(y)
        is_zero, divisor = self._safe_gain(y)
        # With a zero gain its z is minus the sum of the others, and moves with each of them.
        pinned = (z * is_zero).sum(-1, keepdim=True)
        return project_out(v, self._in_flat(torch.where(is_zero, 0.0, (z - pinned) / divisor)))

    def sample(
        self, count: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Gaussian rows after a norm: uniform on the sphere, pushed forward by z -> g * z + b; shape (count, n).

        So it is not uniform in area: the ends of the long axes get more points an area than those of the short ones
        (on an ellipse, a / b times as many).
        """
        shape, device = (count, self.ambient), self.gain.device
        z = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        z = centre(z) if self.is_centred else z
        scaled = z * (self._radius / length(z).unsqueeze(-1))
        if self.dimension < 0:
            scaled = scaled * torch.nan
        return scaled * self.gain.to(dtype) + self.centre.to(dtype)

    @property
    def _radius(self) -> float:
        assert self.radius is not None
        return self.radius

    def _safe_gain(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """A mask of the zero gains, and the gain with 1 in their place."""
        is_zero = self.gain == 0
        return is_zero, torch.where(is_zero, 1.0, self.gain).to(y.dtype)

    def _in_flat(self, v: Tensor) -> Tensor:
        """v's part along the flat that the ellipsoid spans."""
        if self.normal is not None:
            return project_out(v, self.normal)
        return torch.where(self.gain == 0, 0.0, v)

    def _pull_back(self, y: Tensor) -> Tensor:
        """The shortest z with g * z + b = y, once y is in the flat."""
        require_features(y, self.ambient)
        is_zero, divisor = self._safe_gain(y)
        z = self._in_flat(y - self.centre.to(y.dtype)) / divisor
        if self.is_centred and self.zero_gains:
            z = torch.where(is_zero, -z.sum(-1, keepdim=True) / self.zero_gains, z)
        return z


def _nearest_point(coordinates: Tensor, axes: Tensor) -> Tensor:
    """The point of sum((p / a)**2) = 1 nearest to each row of coordinates; axes ascending."""
    unit = axes[-1]
    a, c = axes / unit, coordinates / unit
    gaps = (a - a[0]) * (a + a[0])
    # On the plane of symmetry both sides are as near: a coordinate far below rounding is moved to the positive side.
    nudge = torch.finfo(c.dtype).eps ** 1.5
    unsure = (torch.arange(len(a), device=a.device) == 0) & (c.abs() < nudge)
    c = c + torch.where(unsure, nudge - c, 0.0).detach()
    weighted = a * c
    offset = _offset(weighted.detach(), gaps)
    for _ in range(2):
        offset = offset + _newton_step(weighted, gaps, offset)
    first, others = (weighted / (gaps + offset)).split_with_sizes([1, len(a) - 1], -1)
    # Near that plane the first is a ratio of two tiny numbers, whose derivatives would cancel: the others fix it.
    is_large = first.detach().square() > _LARGE
    rest = torch.where(is_large, 1.0 - others.square().sum(-1, keepdim=True), 1.0)
    first = torch.where(is_large, first.detach().sign() * rest.sqrt(), first)
    return unit * a * torch.cat([first, others], -1)


def _offset(weighted: Tensor, gaps: Tensor) -> Tensor:
    """The s > 0 with sum((weighted / (gaps + s))**2) = 1, of shape (..., 1)."""
    low = (weighted.abs() - gaps).amax(-1, keepdim=True).clamp_min(torch.finfo(weighted.dtype).tiny)
    high = length(weighted).unsqueeze(-1)
    for _ in range(_HALVINGS):
        middle = low.sqrt() * high.sqrt()
        is_below = (weighted / (gaps + middle)).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    for _ in range(_NEWTON_STEPS):
        low = low + _newton_step(weighted, gaps, low)
    return low


def _newton_step(weighted: Tensor, gaps: Tensor, offset: Tensor) -> Tensor:
    """Newton's step for the s at which 1 / |weighted / (gaps + s)| = 1: that function is concave and almost a line."""
    ratio = weighted / (gaps + offset)
    square = ratio.square().sum(-1, keepdim=True)
    return (square.sqrt() - 1) * square / (ratio.square() / (gaps + offset)).sum(-1, keepdim=True)
