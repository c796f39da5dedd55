"""The rows that a norm cannot tell apart, as one point each of a Riemannian manifold, computed with on the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import SpecError
from normkit.geometry import paths
from normkit.geometry.centring import centre, project_out
from normkit.geometry.differential import jvp, row_derivative, tangent_projection
from normkit.geometry.inversion import fiber, normalized
from normkit.geometry.rows import require_floating, require_row, sphere_radius
from normkit.geometry.scaling import length
from normkit.spec import NormSpec


@dataclass(frozen=True)
class Quotient:
    """Rows up to what a norm ignores, with the metric in which the norm keeps lengths.

    Two rows are one point if the norm N, without gain and bias, gives them the same output. The metric at x is
    <u, v> = (J u) . (J v) with J the Jacobian of N at x. It does not depend on which row of a point is taken.

    At eps = 0 LayerNorm ignores a shift and a positive scale, RMSNorm a scale. Directions along these are vertical: J
    takes them to 0. The others are horizontal, and <u, v> = u . v / s**2 there (s the scale of x): the manifold is the
    round sphere of radius sqrt(n), of dimension n - 2 for LayerNorm and n - 1 for RMSNorm. A constant row (for RMSNorm:
    the row 0) is no point of it.

    With eps > 0 LayerNorm ignores the shift only, RMSNorm nothing. N is one to one from the points to the open ball of
    radius sqrt(n), and <u, v> the flat metric of that ball: the constant row is its centre, shortest paths are
    straight lines of outputs, and they end at the boundary sphere, which no row reaches: it is the manifold of eps = 0.

    Every method takes rows x of shape (..., n) and velocities of rows, broadcasts, and returns rows or velocities of
    rows. A mean that the norm ignores stays as it is in x; so does, at eps = 0, the length about it.

    Raises:
        SpecError: If a row of the spec is not the last axis, it centres above or below the bar but not at both, or its
            eps is negative or the bound of a clamp, where the points of long rows have a dimension less.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import Quotient
        >>> x, y = torch.tensor([[1.0, 2.0, 6.0], [9.0, 1.0, 2.0]], dtype=torch.float64)
        >>> layer_norm = Quotient(NormSpec(eps=0.0))
        >>> layer_norm.distance(x, y), layer_norm.distance(x, 5 * y - 3)
        (tensor(3.7578, dtype=torch.float64), tensor(3.7578, dtype=torch.float64))
        >>> layer_norm.interpolate(x, y, 0.5)
        tensor([ 4.1078, -0.0196,  4.9118], dtype=torch.float64)

    Source:
        Riemannian submersions as in Absil, Mahony and Sepulchre 2008, "Optimization Algorithms on Matrix Manifolds",
        section 3.6.2; the quotients of norms derived here.
    """

    spec: NormSpec
    """The norm; its gain and bias are left aside."""

    def __post_init__(self) -> None:
        require_row(self.spec)
        eps, placement = self.spec.eps, self.spec.placement
        if eps is not None and eps < 0:
            raise SpecError(f"a quotient needs eps of at least 0, got {eps}; give the spec as it should be")
        if eps != 0 and not placement.shortens_every_row:
            raise SpecError(
                "below a clamp the length of a row counts, above it not: that is no manifold; "
                "give a spec with eps = 0, or with eps inside or outside the root"
            )
        sphere_radius(self.spec, 1)

    def point(self, x: Tensor) -> Tensor:
        """The output of the norm: the same for all rows of a point, and no other's.

        At eps = 0 it is itself a row of that point, on the sphere of radius sqrt(n).

        Example:
            >>> Quotient(NormSpec(eps=0.0)).point(torch.tensor([[1.0, 3.0], [5.0, 9.0]]))
            tensor([[-1.,  1.],
                    [-1.,  1.]])
        """
        return normalized(x, self.spec)

    def horizontal(self, x: Tensor, v: Tensor) -> Tensor:
        """The part of a velocity v that moves the point; v less this part, the vertical one, does not.

        At eps = 0 `tangent_projection(v, x)`, with eps > 0 v less its mean (for RMSNorm v itself).

        Example:
            >>> x, v = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([2.0, -1.0, 8.0])
            >>> Quotient(NormSpec(eps=0.0)).horizontal(x, v)  # v = (2, -4, 2) + 3 * x + 3
            tensor([ 2.0000, -4.0000,  2.0000])
        """
        if self._is_sphere(x):
            return tangent_projection(v, x, is_centred=self.spec.centring.numerator)
        _, moved = _alike(x, self._centred(v))
        return moved

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The metric at x, (J u) . (J v), of shape (...): |v|**2 is `inner(x, v, v)`.

        Example:
            >>> x, v = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -2.0, 1.0])
            >>> Quotient(NormSpec(eps=0.0)).inner(torch.stack([x, 2 * x, 2 * x]), v, torch.stack([v, 2 * v, x]))
            tensor([9.0000, 4.5000, 0.0000])
        """
        x, u, v = _alike(x, u, v)
        return (jvp(x, u, self.spec) * jvp(x, v, self.spec)).sum(-1)

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Length of the shortest path from the point of x to that of y, of shape (...).

        At eps = 0 sqrt(n) times the angle between the rows (centred for LayerNorm: the arc cosine of their
        correlation); with eps > 0 the straight line |N(x) - N(y)|. As eps goes to 0 that becomes the chord
        2 sqrt(n) sin(angle / 2), and not the arc: with the smallest eps the ball still has an inside.

        Example:
            >>> x = torch.tensor([-1.0, 1.0], dtype=torch.float64)
            >>> Quotient(NormSpec(eps=0.0, centre_numerator=False, centre_statistics=False)).distance(x, -x)
            tensor(4.4429, dtype=torch.float64)
            >>> Quotient(NormSpec(eps=1e-12)).distance(x, -x)
            tensor(2.8284, dtype=torch.float64)
        """
        if self._is_sphere(x):
            start = self._centred(x)
            return (
                sphere_radius(self.spec, x.shape[-1]) * paths.geodesic_distance(start, self._centred(y)) / length(start)
            )
        return length(self.point(x) - self.point(y))

    def exponential(self, x: Tensor, v: Tensor) -> Tensor:
        """The point that the shortest path from x with the velocity v reaches after the time 1, as a row.

        At eps = 0 the great circle about the mean of x; a vertical part of v is left out. With eps > 0 the row behind
        N(x) + J v, NaN if that is not inside the ball: straight lines end there. That row loses digits with its length,
        by s**2 / eps, as in `fiber`.

        Example:
            >>> x, v = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([-1.0, -1.0, 2.0])
            >>> Quotient(NormSpec(eps=0.0)).exponential(x, v)  # of the length of x about its mean 2
            tensor([1.5907, 1.2696, 3.1397])
        """
        start = self._centred(x)
        if self._is_sphere(x):
            return x - start + paths.exponential(start, self._centred(v))
        x, v = _alike(x, v)
        return x - start + fiber(self.point(x) + jvp(x, v, self.spec), self.spec).centred

    def logarithm(self, x: Tensor, y: Tensor) -> Tensor:
        """The horizontal velocity at x that `exponential` follows to the point of y, by the shortest path.

        At eps = 0 rows with opposite points are joined by every half circle; the one of `geometry.logarithm` is taken.

        Example:
            >>> x, y = torch.tensor([[1.0, 2.0, 6.0], [9.0, 1.0, 2.0]], dtype=torch.float64)
            >>> manifold = Quotient(NormSpec(eps=0.0))
            >>> manifold.point(torch.stack([manifold.exponential(x, manifold.logarithm(x, y)), y]))
            tensor([[ 1.4049, -0.8429, -0.5620],
                    [ 1.4049, -0.8429, -0.5620]], dtype=torch.float64)
        """
        if self._is_sphere(x):
            return paths.logarithm(self._centred(x), self._centred(y))
        return self._lifted(x, self.point(y) - self.point(x))

    def interpolate(self, x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
        """A row at the share t of the shortest path from x to y; t is a number, or one for each row."""
        share = t.unsqueeze(-1) if isinstance(t, Tensor) else t
        return self.exponential(x, share * self.logarithm(x, y))

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """A velocity at x carried along the shortest path to y, without turning: a horizontal velocity at y.

        Inner products stay. At eps = 0 `parallel_transport` times |y| / |x| (of centred rows), with eps > 0 the
        velocity of y that moves its output as v moves that of x.

        Example:
            >>> x, y = torch.tensor([[1.0, 2.0, 6.0], [9.0, 1.0, 2.0]], dtype=torch.float64)
            >>> manifold = Quotient(NormSpec(eps=0.0))
            >>> v = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
            >>> w = manifold.transport(x, y, v)
            >>> manifold.inner(x, v, v), manifold.inner(y, w, w)
            (tensor(0.4133, dtype=torch.float64), tensor(0.4133, dtype=torch.float64))
        """
        if self._is_sphere(x):
            start, end = self._centred(x), self._centred(y)
            carried = paths.parallel_transport(start, end, self.horizontal(x, v))
            return carried * (length(end, keepdim=True) / length(start, keepdim=True))
        x, y, v = _alike(x, y, v)
        return self._lifted(y, jvp(x, v, self.spec))

    def gradient(self, x: Tensor, slope: Tensor) -> Tensor:
        """The gradient in the metric of a loss of the normalized row, from the ordinary gradient by x, `slope`.

        The horizontal r with `inner(x, r, v)` = slope . v for every v. At eps = 0 it is s**2 * slope, so that a step of
        gradient descent with the rate eta is a step along r with the rate eta / s**2. With eps inside the root the part
        of r along the row is (s**2 / eps)**2 times larger yet: gradient descent hardly moves the length of a row.

        Example:
            >>> x = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
            >>> manifold = Quotient(NormSpec(eps=0.0))
            >>> manifold.point(x)[0].backward()
            >>> manifold.gradient(x.detach(), x.grad) / x.grad  # s**2 = 14 / 3
            tensor([4.6667, 4.6667, 4.6667])
        """
        x, slope = _alike(x, slope)
        if self._is_sphere(x):
            return self.horizontal(x, slope) / row_derivative(x, self.spec).bulk.square()
        # J is symmetric on centred rows.
        return self._lifted(x, self._lifted(x, slope))

    def _lifted(self, x: Tensor, w: Tensor) -> Tensor:
        """With eps > 0, the horizontal velocity of x that moves the output by w: the inverse of J."""
        at = row_derivative(x, self.spec)
        moved = self._centred(w)
        across = project_out(moved, at.normalized)
        return (across + (moved - across) / at.remainder) / at.bulk

    def _centred(self, rows: Tensor) -> Tensor:
        return centre(rows) if self.spec.centring.numerator else require_floating(rows)

    def _is_sphere(self, x: Tensor) -> bool:
        return reference.machine_eps(x, self.spec) == 0


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in their broadcast shape, for products with a Jacobian that ask for one."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return tuple(tensor.expand(shape) for tensor in tensors)
