"""How a norm answers to small changes: its Jacobian in closed form, and products with it in O(n).

One formula serves every spec: y = k * c / s with k = 1 or sqrt(n), c = x - m, and s built from d, the deviation under
the root. So dy = k / s * (C dx - z (t . dx)) with z = c / s and t the gradient of s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import ShapeError
from normkit.geometry.centring import centre, split
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length, row_scale
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDerivative:
    """The parts of the Jacobian of a row: k / s * (C - z t^T), where C is I - 11^T/n or I."""

    factor: float
    """k: 1 or sqrt(n)."""
    scale: Tensor
    """s of shape (..., 1)."""
    normalized: Tensor
    """z = c / s of shape (..., n), without the factor."""
    scale_gradient: Tensor
    """t = ds/dx of shape (..., n)."""
    remainder: Tensor
    """r of shape (..., 1), the share of a scaling of x that eps lets through: J x = k * r * z."""

    @property
    def bulk(self) -> Tensor:
        """k / s of shape (..., 1): the stretch of every direction that moves neither mean nor scale."""
        return self.factor / self.scale


def row_derivative(rows: Tensor, spec: NormSpec) -> RowDerivative:
    """The parts of the Jacobian of each row, without gain, in O(n).

    t = d / (q * (n - correction)), or d / q for a sum of squares, with q = s (eps inside) or sqrt(v) (outside, clamp),
    and 0 where sqrt(v) < eps for a clamp. r = 1 - v / (s q) = eps / s**2 (inside), eps / s (outside), 1 where
    sqrt(v) < eps and else 0 (clamp). At v = 0 the root alone has a kink: with eps outside t is 0 there.

    Args:
        rows: Rows of shape (..., n), as `spec.rows.split` gives them; their last axis is one row whatever the spec's.
        spec: The conventions; axes, groups and the gain are left aside.

    Raises:
        DtypeError: If the rows are not of a floating dtype.
        ShapeError: If they have no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry.differential import row_derivative
        >>> row_derivative(torch.tensor([1.0, 3.0]), NormSpec(eps=3.0)).remainder  # eps / s**2 with s = 2
        tensor([0.7500])

    Source:
        Derived here.
    """
    numerator, deviation = split(require_floating(rows), spec.centring)
    n, eps, placement = rows.shape[-1], reference.machine_eps(rows, spec), spec.placement
    scale = row_scale(rows, spec, eps)
    # The root by itself is the scale of the same norm without eps; an eps that is added to v needs no root.
    root = scale if placement.power == 2 else row_scale(rows, spec, 0.0)
    quotient, is_flat = placement.slope(root, scale, eps)
    slope = deviation / torch.where(is_flat, 1.0, quotient) / spec.divisor.count(n)
    return RowDerivative(
        factor=spec.divisor.factor(n),
        scale=scale,
        normalized=numerator / scale,
        scale_gradient=torch.where(is_flat, 0.0, slope),
        remainder=placement.remainder(root, scale, eps),
    )


def jacobian(x: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """The matrix dy/dx of each row, in closed form.

    J = k * diag(g) (C - z t^T) / s, with k = 1 or sqrt(n), g the effective gain, z = (x - m) / s, t = ds/dx, and
    C = I - 11^T/n if the numerator is centred, else I; `row_derivative` has t for each placement of eps. LayerNorm:
    diag(g) (C - z z^T / n) / s; RMSNorm: diag(g) (I - z z^T / n) / s. A gain before: J = J_N(g * x) diag(g), with J_N
    the same without gain.

    At a row of zero deviation the result is finite for eps > 0 and NaN at eps = 0. A norm that centres only its
    statistics has a kink there if eps is outside; t is 0 at it, as in `reference.backward`. This takes n**2 numbers a
    row; `jvp` and `vjp` do without.

    Args:
        x: Rows of shape (..., n); any shape that fits the spec's axes.
        spec: Any spec. Casts count as the identity.
        weight: Stored gain, as in `reference.forward`; None for a gain of 1.

    Returns:
        Tensor of shape (..., n, n) in x's dtype. With groups, or axes other than (-1,): one block for each row that
        shares statistics, of shape (..., groups, m, m), the leading sizes those of `spec.rows.split(x)`.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no feature.

    Example:
        >>> from normkit import specs
        >>> from normkit.geometry import jacobian
        >>> jacobian(torch.tensor([3.0, 4.0]), specs.LLAMA.replace(eps=0.0)) * 5**3 / 2**0.5
        tensor([[ 16.0000, -12.0000],
                [-12.0000,   9.0000]])

    Source:
        Derived here.
    """
    before, after, at = _linearise(x, spec, weight)
    direct, _ = split(torch.eye(at.normalized.shape[-1], dtype=x.dtype, device=x.device), spec.centring)
    block = at.bulk[..., None] * (direct - at.normalized[..., :, None] * at.scale_gradient[..., None, :])
    left, right = (spec.rows.split(gain.expand(x.shape)) for gain in (after, before))
    block = left[..., :, None] * block * right[..., None, :]
    return block.squeeze(-3) if spec.rows.are_last else block


def jvp(x: Tensor, v: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """J v: how the output moves when x moves along v, in O(n).

    J v = k * g * (C v - z (t . v)) / s in the notation of `jacobian`; a gain before multiplies v instead.

    Args:
        x: The point; rows of shape (..., n), or any shape that fits the spec's axes.
        v: The direction, of x's shape.
        spec: Any spec.
        weight: Stored gain, as in `reference.forward`; None for a gain of 1.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If v is not of x's shape, or x has no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import jvp
        >>> x = torch.tensor([1.0, 2.0, 6.0])
        >>> jvp(x, torch.ones(3), NormSpec())  # LayerNorm does not see a shift
        tensor([0., 0., 0.])

    Source:
        Derived here.
    """
    before, after, at = _linearise(x, spec, weight)
    numerator, deviation = split(spec.rows.split(before * _like(v, x, "v")), spec.centring)
    along = (at.scale_gradient * deviation).sum(-1, keepdim=True)
    return after * spec.rows.joined(at.bulk * (numerator - at.normalized * along), x)


def vjp(x: Tensor, u: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """J^T u: the gradient of the input when u is the gradient of the output, in O(n).

    J^T u = k * (C h - t (z . h)) / s with h = g * u in the notation of `jacobian`. For LayerNorm and RMSNorm
    at eps = 0 this is `tangent_projection(g * u, x) / s`; with eps > 0 the share eps / s**2 of the radial part stays.
    It is the dx of `reference.backward`, in x's own dtype.

    Args:
        x: The point; rows of shape (..., n), or any shape that fits the spec's axes.
        u: Gradient of the output, of x's shape.
        spec: Any spec.
        weight: Stored gain, as in `reference.forward`; None for a gain of 1.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If u is not of x's shape, or x has no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import vjp
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> vjp(x, torch.tensor([1.0, 0.0, 0.0]), NormSpec(eps=0.0))  # orthogonal to 1 and to x
        tensor([ 0.2041, -0.4082,  0.2041])

    Source:
        Derived here.
    """
    before, after, at = _linearise(x, spec, weight)
    direct, _ = split(spec.rows.split(after * _like(u, x, "u")), spec.centring)
    along = (at.normalized * direct).sum(-1, keepdim=True)
    return before * spec.rows.joined(at.bulk * (direct - at.scale_gradient * along), x)


def tangent_projection(v: Tensor, x: Tensor, *, is_centred: bool = True) -> Tensor:
    """The part of v tangent to the sphere through the normalized x.

    C v - c (c . C v) / |c|^2 with c = centre(x), C v = centre(v); v - x (x . v) / |x|^2 if not `is_centred` (RMSNorm).
    An orthogonal projection of rank n - 2 (n - 1). If c = 0 there is no radial direction, and only the mean is
    removed.

    Args:
        v: Vectors of shape (..., n).
        x: Points of shape (..., n), broadcast against v.
        is_centred: The sphere lies in the hyperplane of zero mean, as LayerNorm's does.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        DtypeError: If x or v is not of a floating dtype.
        ShapeError: If x or v has no feature.

    Example:
        >>> from normkit.geometry import tangent_projection
        >>> tangent_projection(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0]))
        tensor([ 0.1667, -0.3333,  0.1667])

    Source:
        Derived here.
    """
    require_floating(x)
    require_floating(v)
    radial, moved = (centre(x), centre(v)) if is_centred else (x, v)
    size = length(radial).unsqueeze(-1)
    unit = radial / torch.where(size == 0, 1.0, size)
    return moved - unit * (unit * moved).sum(-1, keepdim=True)


def euler_defect(x: Tensor, spec: NormSpec, weight: Tensor | None = None) -> Tensor:
    """J x: how far the norm is from ignoring the scale of x, in O(n).

    By Euler's theorem J x = 0 for a function of degree 0, which a norm is but for its eps. J x = r * y with y the
    normalized row before the bias and r = eps / s**2 (eps inside), eps / s (outside), or 1 below a clamp and 0 above.
    LayerNorm: g * (eps / s**3) * centre(x).

    Args:
        x: Rows of shape (..., n), or any shape that fits the spec's axes.
        spec: Any spec.
        weight: Stored gain, as in `reference.forward`; None for a gain of 1.

    Returns:
        Tensor of x's shape and dtype; NaN at eps = 0 where the deviation is zero.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no feature.

    Example:
        >>> from normkit import NormSpec
        >>> from normkit.geometry import euler_defect
        >>> euler_defect(torch.tensor([1.0, 3.0]), NormSpec(eps=3.0))  # (eps / s**3) * centre(x) = 3 / 8 * (-1, 1)
        tensor([-0.3750,  0.3750])

    Source:
        Derived here.
    """
    _, after, at = _linearise(x, spec, weight)
    return after * spec.rows.joined(at.factor * at.remainder * at.normalized, x)


def _linearise(x: Tensor, spec: NormSpec, weight: Tensor | None) -> tuple[Tensor, Tensor, RowDerivative]:
    """The gain before the norm, the gain after it, and the derivative of the rows between them."""
    gain = require_floating(x).new_ones(())
    if weight is not None:
        gain = spec.rows.aligned(spec.gain.effective(weight, x.dtype).to(x.dtype), x)
    before, after = spec.gain.sides(gain)
    return before, after, row_derivative(spec.rows.split(before * x), spec)


def _like(v: Tensor, x: Tensor, name: str) -> Tensor:
    """v in x's dtype, if it has x's shape."""
    if v.shape != x.shape:
        raise ShapeError(f"{name} must have x's shape {tuple(x.shape)}, got {tuple(v.shape)}; use torch.vmap for many")
    return v.to(x.dtype)
