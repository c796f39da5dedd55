"""Great circles on the sphere about 0 through a row: lengths, and moving along them."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.geometry.centring import project_out
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length, unit

# Below these squares the power series are exact to rounding.
_SMALL_ANGLE = 1e-2
_SMALL_SINE = 1e-3
_ROUNDINGS = 8


def geodesic_distance(x: Tensor, y: Tensor) -> Tensor:
    """Length of the shorter great-circle arc from x to y: |x| times the angle between them.

    angle = atan2(|c|, y . x / |x|) for c the part of y across x, y scaled by the power of two that brings it nearest
    to the length of x. c is taken of y - x, or of y + x where that is shorter, before anything is rounded: so tiny
    angles, and angles near pi, keep all their digits when |x| = |y|.

    Args:
        x: Rows of shape (..., n), none of them 0.
        y: Rows that broadcast against them. Only their direction counts.

    Returns:
        Tensor of shape (...), from 0 to pi |x|. Equal and antipodal rows lie at a kink: the gradient through the angle
        is taken as 0. NaN for x = 0.

    Raises:
        DtypeError: If x or y is not of a floating dtype.

    Example:
        >>> from normkit.geometry import geodesic_distance
        >>> geodesic_distance(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]))
        tensor(3.1416)

    Source:
        The spherical distance; this form of it derived here.
    """
    across, along, _ = _parts(x, y)
    return length(x) * torch.atan2(length(across), along.squeeze(-1))


def chordal_distance(x: Tensor, y: Tensor) -> Tensor:
    """Straight distance |x - y|, through the sphere: 2 |x| sin(angle / 2) for |x| = |y|.

    Args:
        x: Rows of shape (..., n).
        y: Rows that broadcast against them.

    Returns:
        Tensor of shape (...). Equal rows lie at a kink: their gradient is taken as 0.

    Raises:
        DtypeError: If x or y is not of a floating dtype.

    Example:
        >>> from normkit.geometry import chordal_distance
        >>> chordal_distance(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]))
        tensor(2.8284)

    Source:
        The chord of a great-circle arc; stated here.
    """
    return length(require_floating(x) - require_floating(y))


def exponential(x: Tensor, v: Tensor) -> Tensor:
    """The end of the arc of length |v| that starts at x along v and follows the great circle.

    x cos(a) + v sin(a) / a with a = |v| / |x|. Both factors are power series in a**2, and are computed so for small
    a: value and all derivatives are right at v = 0.

    Args:
        x: Rows of shape (..., n), none of them 0.
        v: Rows that broadcast against them. They should be orthogonal to x: a part along x is taken away.

    Returns:
        Tensor of the broadcast shape: rows as long as x. NaN for x = 0.

    Raises:
        DtypeError: If x or v is not of a floating dtype.

    Example:
        >>> from normkit.geometry import exponential
        >>> exponential(torch.tensor([2.0, 0.0]), torch.tensor([0.0, torch.pi / 2]))
        tensor([1.4142, 1.4142])

    Source:
        Absil, Mahony and Sepulchre 2008, "Optimization Algorithms on Matrix Manifolds", example 5.4.1.
    """
    tangent = project_out(v, x)
    radius = length(x).unsqueeze(-1)
    cosine, sine_ratio = _cosine_and_sine_ratio((tangent / radius).square().sum(-1, keepdim=True))
    return x * cosine + tangent * sine_ratio


def logarithm(x: Tensor, y: Tensor) -> Tensor:
    """The tangent at x that `exponential` follows to y by the shorter arc.

    (|x| / |y|) (angle / sin(angle)) times the part of y across x. angle / sin(angle) is a power series in sin**2, and
    is computed so for small angles: value and gradient are right at y = x.

    Args:
        x: Rows of shape (..., n), none of them 0.
        y: Rows that broadcast against them. Only their direction counts.

    Returns:
        Tensor v of the broadcast shape, orthogonal to x, as long as `geodesic_distance(x, y)`. Opposite rows, y = -c x,
        are joined by every half circle: the one towards the axis of the smallest |x_i| (the first such) is taken, and
        the gradient is that of this choice. NaN for x = 0, and at n = 1 for opposite rows, which no arc joins.

    Raises:
        DtypeError: If x or y is not of a floating dtype.

    Example:
        >>> from normkit.geometry import logarithm
        >>> x = torch.tensor([2.0, 0.0])
        >>> logarithm(x, torch.tensor([0.0, 2.0])), logarithm(x, -x), logarithm(x, x)
        (tensor([0.0000, 3.1416]), tensor([0.0000, 6.2832]), tensor([0., 0.]))

    Source:
        Absil, Mahony and Sepulchre 2008, as the inverse of `exponential`; opposite rows derived here.
    """
    across, along, size = _parts(x, y)
    across, along = across / size, along / size
    radius = length(x, keepdim=True)
    square = across.square().sum(-1, keepdim=True)
    is_opposite = (square == 0) & (along < 0)
    towards = project_out(_smallest_axis(x), x)
    half_circle = torch.pi * towards / length(towards).unsqueeze(-1)
    return radius * torch.where(is_opposite, half_circle, across * _angle_ratio(square, along))


def interpolate(x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
    """The point at the share t of the shorter great-circle arc from x to y.

    exponential(x, t * logarithm(x, y)): x at t = 0, y (at the length of x) at t = 1, the midpoint at t = 1/2; t outside
    0 to 1 goes on along the circle. Opposite rows take the arc that `logarithm` takes.

    Args:
        x: Rows of shape (..., n), none of them 0.
        y: Rows that broadcast against them. Only their direction counts.
        t: A number, or one for each row, of shape (...).

    Returns:
        Tensor of the broadcast shape: rows as long as x.

    Raises:
        DtypeError: If x or y is not of a floating dtype.

    Example:
        >>> from normkit.geometry import interpolate
        >>> interpolate(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]), 0.5)
        tensor([1.4142, 1.4142])

    Source:
        Shoemake 1985, "Animating Rotation with Quaternion Curves" (slerp), written with the two maps above.
    """
    share = t.unsqueeze(-1) if isinstance(t, Tensor) else t
    return exponential(x, share * logarithm(x, y))


def parallel_transport(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """A tangent at x carried along the shorter arc to y, without turning: a tangent at y of the same length.

    With p = x / |x|, w the tangent `logarithm(p, y)` and a = |w|: v - (v . w) (p sin(a) / a + w (1 - cos(a)) / a**2).
    The part of v along the arc turns with it, the rest stays. Both factors are power series in a**2.

    Args:
        x: Rows of shape (..., n), none of them 0.
        y: Rows that broadcast against them. Only their direction counts.
        v: Rows that broadcast against them. They should be orthogonal to x: a part along x is taken away.

    Returns:
        Tensor of the broadcast shape, orthogonal to y. Between opposite rows it depends on the arc, which is the one
        that `logarithm` takes. NaN for x = 0.

    Raises:
        DtypeError: If x, y or v is not of a floating dtype.

    Example:
        >>> from normkit.geometry import parallel_transport
        >>> parallel_transport(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]))
        tensor([-1.4142,  1.4142])

    Source:
        Absil, Mahony and Sepulchre 2008, section 8.1.2.
    """
    tangent = project_out(v, x)
    start = x / length(x, keepdim=True)
    way = logarithm(start, y)
    square = way.square().sum(-1, keepdim=True)
    _, sine_ratio = _cosine_and_sine_ratio(square)
    # (1 - cos(a)) / a**2 = (sin(a / 2) / (a / 2))**2 / 2 keeps its digits for small a.
    _, half = _cosine_and_sine_ratio(square / 4)
    along = (tangent * way).sum(-1, keepdim=True)
    return tangent - along * (start * sine_ratio + way * half.square() / 2)


def _parts(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of y across x, y's coordinate along x, and |y|, for y brought near the length of x."""
    radius = length(require_floating(x), keepdim=True)
    # By powers of two, so that no digit is lost, one after the other, as their quotient may be no number.
    y = require_floating(y) / unit(length(y, keepdim=True)) * unit(radius)
    along = (y * (x / radius)).sum(-1, keepdim=True)
    shorter = torch.where(along < 0, y + x, y - x)
    across = project_out(shorter, x)
    # The difference of parallel rows is rounding, whose direction means nothing; its derivative is kept.
    rounding = _ROUNDINGS * torch.finfo(across.dtype).eps * length(shorter)
    is_parallel = (length(across) < rounding).unsqueeze(-1)
    across = across - torch.where(is_parallel, across, 0.0).detach()
    return across, along, length(y, keepdim=True)


def _smallest_axis(x: Tensor) -> Tensor:
    """The unit vector along the feature where each row is nearest to 0."""
    features = torch.arange(x.shape[-1], device=x.device)
    return (features == x.abs().argmin(-1, keepdim=True)).to(x.dtype)


def _cosine_and_sine_ratio(square: Tensor) -> tuple[Tensor, Tensor]:
    """cos(a) and sin(a) / a for a**2."""
    is_small = square < _SMALL_ANGLE
    q = torch.where(is_small, square, 0.0)
    cosine = 1 - q / 2 * (1 - q / 12 * (1 - q / 30 * (1 - q / 56 * (1 - q / 90))))
    ratio = 1 - q / 6 * (1 - q / 20 * (1 - q / 42 * (1 - q / 72 * (1 - q / 110))))
    angle = torch.where(is_small, 1.0, square).sqrt()
    return torch.where(is_small, cosine, angle.cos()), torch.where(is_small, ratio, angle.sin() / angle)


def _angle_ratio(square: Tensor, cosine: Tensor) -> Tensor:
    """a / sin(a) for sin(a)**2 and cos(a); 1 where the sine is 0."""
    is_small = (square < _SMALL_SINE) & (cosine > 0)
    q = torch.where(is_small, square, 0.0)
    series = 1 + q * (1 / 6 + q * (3 / 40 + q * (5 / 112 + q * (35 / 1152 + q * (63 / 2816)))))
    sine = torch.where(is_small | (square == 0), 1.0, square).sqrt()
    return torch.where(is_small, series, torch.atan2(sine, cosine) / sine)
