"""The second and third map: onto a sphere, and along the axes. Lengths of rows, and what eps takes from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.eps import PLACEMENTS, EpsPlacement, Number, Placement
from normkit.errors import SpecError
from normkit.geometry.rows import require_floating
from normkit.spec import NormSpec


def unit(x: Tensor, dims: int | tuple[int, ...] | None = -1) -> Tensor:
    """The power of two next below the largest |entry| along `dims`, which are kept; 1 where that is 0 or not finite.

    In this unit squares neither overflow nor vanish, and no other bit changes. It is held constant under
    differentiation: what is scaled by it and back does not depend on it.
    """
    axes = tuple(range(x.dim())) if dims is None else dims
    held = require_floating(x).detach()
    largest = torch.maximum(held.amax(axes, keepdim=True), -held.amin(axes, keepdim=True))
    largest = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return largest / (2.0 * torch.frexp(largest).mantissa)


def length(x: Tensor, dims: int | tuple[int, ...] | None = -1, *, keepdim: bool = False) -> Tensor:
    """Euclidean length of each row, |x| = sqrt(sum(x**2)), with the gradient 0 where x = 0.

    Args:
        x: Rows of shape (..., n).
        dims: The axes that are one row; None for all.
        keepdim: Whether these axes stay, of size 1.

    Returns:
        Tensor of shape (...). It is right wherever |x| itself is a normal number.
    """
    size = unit(x, dims)
    square = (x / size).square().sum(dims, keepdim=True)
    is_zero = square == 0
    found = size * torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())
    if keepdim:
        return found
    return found.squeeze(tuple(range(x.dim())) if dims is None else dims)


def over(numerator: Tensor, size: Tensor) -> Tensor:
    """A quotient that is 0 where the divisor is 0: a zero row is no distance from anything."""
    is_zero = size == 0
    return torch.where(is_zero, 0.0, numerator / torch.where(is_zero, 1.0, size))


def row_scale(rows: Tensor, spec: NormSpec, eps: float) -> Tensor:
    """s of each row of shape (..., n), as `reference.statistics` has it, of shape (..., 1).

    It is right wherever s itself is a normal number.
    """
    floor = spec.placement.length(eps)
    wide = torch.promote_types(rows.dtype, torch.float32)
    # The unit is that of the row or of eps, whichever is larger, so that neither overflows in it. The inverse of a
    # subnormal unit would overflow too.
    least = max(torch.finfo(wide).tiny, math.ldexp(0.5, math.frexp(floor)[1]) if floor else 0.0)
    size = unit(rows).to(wide).clamp_min(least)
    scaled_eps = spec.placement.rescaled(eps, 1.0 / size)
    return (reference.statistics(rows / size, spec, scaled_eps).scale * size).to(rows.dtype)


def to_sphere(x: Tensor, *, eps: float = 0.0, eps_placement: EpsPlacement = "inside") -> Tensor:
    """Scale each row to length sqrt(n); with eps > 0, to a length below it. Nothing is centred.

    y = x / s with v = mean(x**2) and s = sqrt(v + eps) ("inside"), sqrt(v) + eps ("outside") or
    max(sqrt(v), eps) ("clamp"). |y| = sqrt(n) * shrink_factor(x), so at eps = 0 y lies on the sphere of radius
    sqrt(n) and with eps > 0 inside it (for the clamp only where sqrt(v) < eps).

    Args:
        x: Rows of shape (..., n). Their squares may overflow or vanish: any |x| that is a normal number will do.
        eps: In units of x squared ("inside") or of x ("outside", "clamp").
        eps_placement: Where eps enters.

    Returns:
        Tensor of x's shape and dtype. A zero row stays zero where eps > 0; at eps = 0 it has no direction and
        comes back as NaN, as do its gradients.

    Raises:
        DtypeError: If x is not of a floating dtype.
        SpecError: If the placement is none of the three.

    Example:
        >>> from normkit.geometry import to_sphere
        >>> to_sphere(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
        >>> to_sphere(torch.zeros(2), eps=1e-5)
        tensor([0., 0.])

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4, with eps.
    """
    return x / _placement(eps_placement).scale_of_root(_rms(x), eps).unsqueeze(-1)


def shrink_factor(x: Tensor, *, eps: float, eps_placement: EpsPlacement = "inside") -> Tensor:
    """How much eps shortens each scaled row: |to_sphere(x)| / sqrt(n), 1 where eps does nothing.

    With r = sqrt(mean(x**2)): r / sqrt(r**2 + eps) ("inside"), r / (r + eps) ("outside"), min(1, r / eps)
    ("clamp"). Good to a few units in the last place wherever r is a normal number.

    Args:
        x: Rows of shape (..., n).
        eps: As in `to_sphere`.
        eps_placement: Where eps enters.

    Returns:
        Tensor of shape (...), in x's dtype. 0 for a zero row where eps > 0 (a kink: its gradient is taken as 0);
        NaN for a zero row at eps = 0.

    Raises:
        DtypeError: If x is not of a floating dtype.
        SpecError: If the placement is none of the three.

    Example:
        >>> from normkit.geometry import shrink_factor
        >>> row = torch.tensor([0.003, -0.003])
        >>> shrink_factor(row, eps=1e-5), shrink_factor(row, eps=1e-5, eps_placement="outside")
        (tensor(0.6882), tensor(0.9967))

    Source:
        Derived here from the three definitions of the scale.
    """
    rms = _rms(x)
    return rms / _placement(eps_placement).scale_of_root(rms, eps)


def inside_equivalent(eps: float, scale: Number) -> Number:
    """The eps inside the root that shortens a row of this rms exactly as `eps` outside it does.

    eps * (2 * scale + eps), as (scale + eps)**2 = scale**2 + eps * (2 * scale + eps). It depends on the row: no one
    eps inside does what one outside does.

    Args:
        eps: Outside the root, in units of x.
        scale: The row's root mean square sqrt(v), a number or a tensor.

    Returns:
        In units of x squared; of the type of `scale`.

    Example:
        >>> from normkit.geometry import inside_equivalent
        >>> inside_equivalent(0.5, 2.0)
        2.25

    Source:
        Derived here.
    """
    return eps * (2.0 * scale + eps)


def agreement_scale(eps: float) -> float:
    """The rms of a row that one number eps shortens equally inside the root and outside it: (1 - eps) / 2.

    The one solution of r**2 + eps = (r + eps)**2 for eps > 0. Shorter rows are shortened more by eps inside, longer
    rows by eps outside. For eps >= 1 there is none: the value is not positive, and outside always shortens more.

    Args:
        eps: The number that is used in both places.

    Example:
        >>> from normkit.geometry import agreement_scale
        >>> agreement_scale(0.5)
        0.25

    Source:
        Derived here: `inside_equivalent(eps, r)` = eps.
    """
    return (1.0 - eps) / 2.0


def affine(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Stretch each row along the axes and move it: weight * x + bias.

    The sphere of radius sqrt(n) becomes the ellipsoid with centre bias and semi-axes sqrt(n) * |weight|; the plane
    sum(x) = 0 becomes sum((y - bias) / weight) = 0, whose normal is 1 / weight.

    Args:
        x: Rows of shape (..., n).
        weight: Gain as it acts (an offset is already added), broadcast against x; None for none.
        bias: Bias, likewise.

    Returns:
        Tensor of x's dtype, in which it is computed.

    Raises:
        DtypeError: If x is not of a floating dtype.

    Example:
        >>> from normkit.geometry import affine
        >>> affine(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
        tensor([ 2., -2.])

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 4 (gain and bias).
    """
    y = require_floating(x) if weight is None else weight.to(x.dtype) * require_floating(x)
    return y if bias is None else y + bias.to(x.dtype)


def _rms(x: Tensor) -> Tensor:
    return length(x) / math.sqrt(x.shape[-1])


def _placement(name: EpsPlacement) -> Placement:
    if name not in PLACEMENTS:
        raise SpecError(f"eps_placement must be one of {', '.join(map(repr, PLACEMENTS))}, got {name!r}")
    return PLACEMENTS[name]
