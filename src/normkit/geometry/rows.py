"""Which norms have a geometry of single rows, and how long a normalized row is."""

from __future__ import annotations

import math

from torch import Tensor

from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.spec import NormSpec


def require_row(spec: NormSpec) -> None:
    """Refuse a spec whose row is not the last axis.

    Raises:
        SpecError: If axes is not (-1,), or groups is not 1.
    """
    if spec.axes != (-1,) or spec.groups != 1:
        raise SpecError(
            f"the geometry looks at one row along the last axis, got axes {spec.axes!r} and {spec.groups} groups; "
            "bring the row last with normkit.reference.to_rows"
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

    multiplier * sqrt(n - correction) for a mean of squares, multiplier for their sum, where multiplier is
    1 or sqrt(n).

    Raises:
        SpecError: If the mean counts above the fraction bar or below it but not in both: there is no sphere then.

    Example:
        >>> sphere_radius(NormSpec(), 4)
        2.0
    """
    if spec.centre_numerator != spec.centre_statistics:
        above, below = ("centred", "not") if spec.centre_numerator else ("not centred", "is")
        raise SpecError(
            f"the rows of this norm lie on no sphere: its numerator is {above}, its statistics {below}; "
            "give a spec that centres both or neither"
        )
    multiplier = math.sqrt(n) if spec.multiplier == "sqrt_n" else 1.0
    return multiplier * (math.sqrt(n - spec.correction) if spec.reduction == "mean" else 1.0)
