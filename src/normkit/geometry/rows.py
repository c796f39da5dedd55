"""Which norms have a geometry of single rows, and how long a normalized row is."""

from __future__ import annotations

from torch import Tensor

from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.spec import NormSpec


def require_row(spec: NormSpec) -> None:
    """Refuse a spec whose row is not the last axis.

    Raises:
        SpecError: If axes is not (-1,), or groups is not 1.
    """
    rows = spec.rows
    if not rows.are_last:
        raise SpecError(
            f"the geometry looks at one row along the last axis, got axes {rows.axes!r} and {rows.groups} groups; "
            "bring the row last with spec.rows.split"
        )


def require_floating(x: Tensor) -> Tensor:
    """x itself.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no axis, or no feature along the last one.
    """
    if not x.is_floating_point():
        raise DtypeError(f"the geometry needs a floating dtype, got {x.dtype}; use x.double()")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"rows of shape (..., n) with n >= 1 are needed, got shape {tuple(x.shape)}")
    return x


def require_features(x: Tensor, n: int) -> Tensor:
    """x itself.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If its rows are not n features long.
    """
    if require_floating(x).shape[-1] != n:
        raise ShapeError(f"rows of {n} features are needed, got shape {tuple(x.shape)}")
    return x


def sphere_radius(spec: NormSpec, n: int) -> float:
    """The length of every normalized row of n features at eps = 0, before gain and bias.

    `Divisor.radius`: sqrt(n) for LayerNorm and RMSNorm.

    Raises:
        SpecError: If the mean counts above the fraction bar or below it but not in both: there is no sphere then.

    Example:
        >>> sphere_radius(NormSpec(), 4)
        2.0
    """
    if spec.centring.is_half:
        raise SpecError(
            f"the rows of this norm lie on no sphere: the mean is {spec.centring.words}; "
            "give a spec that centres numerator and statistics, or neither"
        )
    return spec.divisor.radius(n)
