"""The first map: onto the hyperplane orthogonal to the all-ones vector, or to any other; and angles between rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.conventions.rows import CENTRINGS, Centring
from normkit.errors import ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length


def centre(x: Tensor) -> Tensor:
    """Subtract each row's mean: project it onto the hyperplane through 0 whose normal is the all-ones vector 1.

    x - mean(x) = x - (x . u) u with u = 1 / sqrt(n), which is `centring_matrix(n)` times x. The mean is taken twice,
    because the first is rounded in proportion to itself; 16-bit rows are centred in float32 and rounded once.

    Args:
        x: Rows of shape (..., n), with sum(x) below the largest number.

    Returns:
        Tensor of x's shape and dtype. A constant row gives 0, up to the rounding of a mean of its mean's rounding.

    Raises:
        DtypeError: If x is not of a floating dtype.

    Example:
        >>> from normkit.geometry import centre
        >>> centre(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3; as a projection: Brody, Alon and Yahav 2023,
        arXiv:2305.02582.
    """
    numerator, _ = split(require_floating(x), CENTRINGS[True, True])
    return numerator


def split(rows: Tensor, centring: Centring) -> tuple[Tensor, Tensor]:
    """`Centring.split` in float32 or wider, rounded to the dtype of the rows."""
    numerator, deviation = centring.split(rows.to(torch.promote_types(rows.dtype, torch.float32)))
    return numerator.to(rows.dtype), deviation.to(rows.dtype)


def project_out(x: Tensor, normal: Tensor) -> Tensor:
    """Project each row onto the hyperplane through 0 with a given normal.

    x - (x . u) u with u = normal / |normal|, taken twice for the same reason as in `centre`, which is the case
    normal = 1.

    Args:
        x: Rows of shape (..., n).
        normal: Shape (n,), or (..., n) for one hyperplane per row; of any length. If it is 0, x comes back unchanged.

    Returns:
        Tensor of the broadcast shape, in x's dtype.

    Raises:
        DtypeError: If x or the normal is not of a floating dtype.
        ShapeError: If the normal is not as long as a row.

    Example:
        >>> from normkit.geometry import project_out
        >>> project_out(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 0.0, 7.0]))
        tensor([1., 2., 0.])

    Source:
        Orthogonal projection onto a hyperplane; stated here.
    """
    if require_floating(normal).shape[-1] != require_floating(x).shape[-1]:
        raise ShapeError(
            f"a normal as long as a row is needed, got a normal of {normal.shape[-1]} entries for rows of "
            f"{x.shape[-1]}; give one of shape ({x.shape[-1]},)"
        )
    normal = normal.to(x.dtype)
    size = length(normal).unsqueeze(-1)
    unit = normal / torch.where(size == 0, 1.0, size)
    once = x - (x * unit).sum(-1, keepdim=True) * unit
    return once - (once * unit).sum(-1, keepdim=True) * unit


def centring_matrix(n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """The matrix I - 1 1^T / n, which centres: `centring_matrix(n) @ x` is `centre(x)`.

    Symmetric and idempotent. Its eigenvalues are 0, once, with null space span(1), and 1, n - 1 times.

    Args:
        n: Features of a row, at least 1.
        dtype: A floating dtype.
        device: The device of the matrix.

    Returns:
        Tensor of shape (n, n).

    Raises:
        ShapeError: If n is below 1.

    Example:
        >>> from normkit.geometry import centring_matrix
        >>> centring_matrix(2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]], dtype=torch.float64)

    Source:
        The centring matrix of multivariate statistics; stated here.
    """
    if n < 1:
        raise ShapeError(f"a centring matrix needs at least 1 feature, got n = {n}")
    return torch.eye(n, dtype=dtype, device=device) - torch.full((n, n), 1.0 / n, dtype=dtype, device=device)


def energy_along_ones(x: Tensor) -> Tensor:
    """Share of each row's energy |x|**2 that lies along the all-ones direction.

    n * mean(x)**2 / |x|**2 = cos(angle_to_ones(x))**2: what centring removes. Computed as (a / |(a, b)|)**2 with
    a = sqrt(n) * mean(x) and b = |centre(x)|, so that it is never above 1.

    Args:
        x: Rows of shape (..., n).

    Returns:
        Tensor of shape (...), in x's dtype, from 0 to 1. NaN for a zero row, which has no direction.

    Raises:
        DtypeError: If x is not of a floating dtype.

    Example:
        >>> from normkit.geometry import energy_along_ones
        >>> energy_along_ones(torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, -1.0]]))
        tensor([1.0000, 0.5000, 0.0000])

    Source:
        Gupta et al. 2024, arXiv:2409.12951, who measure hidden vectors along the uniform vector.
    """
    along, _ = cosine_and_sine_to_ones(x)
    return along.square()


def angle_to_ones(x: Tensor) -> Tensor:
    """Angle between each row and the all-ones vector.

    atan2(|centre(x)|, sqrt(n) * mean(x)): it keeps its digits near 0 and pi, where an arc cosine loses half of them.

    Args:
        x: Rows of shape (..., n).

    Returns:
        Tensor of shape (...), in x's dtype, in radians from 0 to pi. NaN for a zero row. Constant rows lie at a kink
        (0 or pi): their gradient is taken as 0.

    Raises:
        DtypeError: If x is not of a floating dtype.

    Example:
        >>> from normkit.geometry import angle_to_ones
        >>> torch.rad2deg(angle_to_ones(torch.tensor([[2.0, 2.0], [1.0, 0.0], [1.0, -1.0]])))
        tensor([ 0., 45., 90.])

    Source:
        Derived here.
    """
    along, across = cosine_and_sine_to_ones(x)
    return torch.atan2(across, along)


def angle_between(x: Tensor, y: Tensor) -> Tensor:
    """Angle between rows of x and rows of y.

    2 * atan2(|u - v|, |u + v|) with u = x / |x| and v = y / |y|: good to a few machine epsilons of a radian, near 0 and
    pi too, where an arc cosine loses half its digits.

    Args:
        x: Rows of shape (..., n).
        y: Rows that broadcast against them.

    Returns:
        Tensor of shape (...), in radians from 0 to pi. NaN where a row is 0. For parallel rows (0 or pi) the
        angle has a kink: the gradient is taken as 0.

    Raises:
        DtypeError: If x or y is not of a floating dtype.

    Example:
        >>> from normkit.geometry import angle_between
        >>> angle_between(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0]))
        tensor(1.5708)

    Source:
        Kahan 2006, "How Futile are Mindless Assessments of Roundoff in Floating-Point Computation?", on mangled angles.
    """
    u = x / length(x).unsqueeze(-1)
    v = y / length(y).unsqueeze(-1)
    return 2.0 * torch.atan2(length(u - v), length(u + v))


def cosine_and_sine_to_ones(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two coordinates of `angle_to_ones`: along 1 / sqrt(n), and the length of the rest, over their hypotenuse."""
    along, across = require_floating(x).mean(-1) * math.sqrt(x.shape[-1]), length(centre(x))
    size = torch.hypot(along, across)
    return along / size, across / size


def helmert(n: int) -> Tensor:
    """An orthonormal basis of the hyperplane of rows with mean 0, one vector per column: (n, n - 1), in float64.

    Column k has k equal entries, one that outweighs them, and zeros: (1, -1, 0, ...) / sqrt(2),
    (1, 1, -2, 0, ...) / sqrt(6), and so on.
    """
    basis = torch.zeros(n, n - 1, dtype=torch.float64)
    for k in range(1, n):
        basis[:k, k - 1] = 1.0
        basis[k, k - 1] = -float(k)
        basis[:, k - 1] /= math.sqrt(k * (k + 1))
    return basis
