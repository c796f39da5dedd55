"""Axes of LayerNorm's ellipsoid: eigenvalues and eigenvectors of the gain's rank-one downdate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry.rows import require_floating

# Entries of an (n, n) table that are worked on at a time: half a mebibyte in float64, which stays in the cache.
_CHUNK = 2**16
_MOST_STEPS = 200


def downdate_eigenvalues(gain: Tensor, places: Tensor | None = None) -> Tensor:
    """Eigenvalues of diag(g) (I - 11^T/n) diag(g) = diag(g**2) - g g^T / n, ascending.

    They are the squared semi-axes, over the squared radius, of {g * z : |z| = radius, sum(z) = 0}, and the roots t of

        sum_i g_i**2 / (g_i**2 - t) = n.

    t = 0 is one of them. With the sum's n taken off its left side, the others solve sum_i 1 / (g_i**2 - t) = 0: they
    are the critical points of the polynomial prod_i (t - g_i**2), one between each two neighbours of the sorted g**2
    and equal to both where these are equal. So the eigenvalues interlace g**2: with everything ascending,
    t_1 = 0 <= g_1**2 <= t_2 <= g_2**2 <= ... <= t_n <= g_n**2. With k >= 1 zero gains there are k zero eigenvalues.

    Each root is found as a distance from its nearest g_i**2 by Newton's method inside a bracket, so that tiny
    eigenvalues and those between almost equal gains keep their relative accuracy (about sqrt(n) machine epsilons, as
    long as no g**2 is below the smallest normal number times the largest). Time O(n**2), memory O(n).

    Args:
        gain: g, as it acts, shape (n,). Only g**2 counts, so signs do not.
        places: Which of them are wanted, as indices from 0 to n - 1, of shape (m,); all by default. A few take O(n).

    Returns:
        Tensor of shape (n,) or (m,), in the order of the places, computed in float64 and returned in the gain's dtype.
        A table of numbers: not for `vmap` or autograd.

    Raises:
        DtypeError: If the gain is not of a floating dtype.
        ShapeError: If the gain is not of shape (n,).
        InputError: If a gain is not finite.

    Example:
        >>> from normkit.geometry import downdate_eigenvalues
        >>> downdate_eigenvalues(torch.tensor([1.0, -1.0, 2.0]))
        tensor([0., 1., 3.])

    Source:
        Golub 1973, "Some modified matrix eigenvalue problems", SIAM Review 15, section 5, for the first equation; the
        second one, and its solution from the nearest pole as in Gu and Eisenstat 1994, derived here for this matrix.
    """
    table = _solve(gain, places)
    values = table.values if places is None else table.values[places]
    return (values * table.unit).mul(table.unit).to(gain.dtype)


def downdate_eigenvectors(gain: Tensor) -> Tensor:
    """Eigenvectors of diag(g**2) - g g^T / n, in the order of `downdate_eigenvalues`.

    v_i = g_i / (g_i**2 - t), normalized, for a root t that is no g_i**2; so v is proportional to 1/g for t = 0. m
    equal |g_i| give m - 1 eigenvectors that are zero elsewhere: each weighs one of these entries against the sum of
    those before it. Zero gains are such entries, and their sum is one more eigenvector of the eigenvalue 0.

    The differences g_i**2 - t are taken from the distances in which the roots are found, not from the rounded
    eigenvalues: so the vectors are orthogonal up to rounding, however close the gains.

    Args:
        gain: g, as it acts, shape (n,).

    Returns:
        Tensor of shape (n, n), one eigenvector a column, computed in float64 and returned in the gain's dtype. Not for
        `vmap` or autograd.

    Raises:
        DtypeError: If the gain is not of a floating dtype.
        ShapeError: If the gain is not of shape (n,).
        InputError: If a gain is not finite.

    Example:
        >>> from normkit.geometry import downdate_eigenvectors
        >>> downdate_eigenvectors(torch.tensor([1.0, -1.0, 2.0])).T.round(decimals=4)
        tensor([[ 0.6667, -0.6667,  0.3333],
                [ 0.7071,  0.7071,  0.0000],
                [-0.2357,  0.2357,  0.9428]])

    Source:
        Bunch, Nielsen and Sorensen 1978, "Rank-one modification of the symmetric eigenproblem", theorem 5.
    """
    table = _solve(gain)
    sizes = table.sizes
    signs = torch.where(gain.detach()[table.order] < 0, -1.0, 1.0).to(sizes)
    rows = sizes.new_zeros(len(sizes), len(sizes))
    # With a zero gain, 1/g is along that entry alone.
    rows[0] = (sizes == 0).to(sizes) if bool(sizes[0] == 0) else sizes[0] / sizes
    for part in (table.free[chosen] for chosen in _parts(len(table.free), len(sizes))):
        gaps = _gaps(sizes, sizes[table.poles[part], None]) - table.offsets[part, None]
        rows[part + 1] = sizes / gaps
    rows[table.ties + 1] = _contrasts(sizes, table.ties)
    # The largest entry first: a vector's squares could otherwise overflow.
    rows /= rows.abs().amax(1, keepdim=True)
    rows *= signs / rows.square().sum(1, keepdim=True).sqrt()
    return rows[:, table.order.argsort()].T.to(gain.dtype)


class _Table(NamedTuple):
    """The roots between neighbours of the sorted |g|, in float64."""

    unit: float
    """A power of two near the largest |g|, which is taken out of everything else."""
    order: Tensor
    """Indices that sort |g|, shape (n,)."""
    sizes: Tensor
    """|g| / unit, ascending, shape (n,)."""
    ties: Tensor
    """The intervals i, between sizes i and i + 1, that have no length."""
    free: Tensor
    """The other intervals."""
    poles: Tensor
    """The index of the size nearest to the root of each interval, shape (n - 1,)."""
    offsets: Tensor
    """That root less that size squared, shape (n - 1,)."""
    values: Tensor
    """The eigenvalues over unit**2, ascending, shape (n,); those not asked for are not solved."""


def _solve(gain: Tensor, places: Tensor | None = None) -> _Table:
    if require_floating(gain).dim() != 1:
        raise ShapeError(f"a gain of shape (n,) is needed, got shape {tuple(gain.shape)}")
    wide = gain.detach().double().abs()
    if not bool(wide.isfinite().all()):
        raise InputError("finite gains are needed for the axes of an ellipsoid, got NaN or infinities")
    unit = 2.0 ** (math.frexp(float(wide.amax()))[1] - 1)
    sizes, order = (wide / unit).sort(stable=True)
    widths = _gaps(sizes[1:], sizes[:-1])
    ties, free = (widths == 0).nonzero().flatten(), (widths > 0).nonzero().flatten()
    if places is not None:
        free = free[torch.isin(free + 1, places)]
    poles = torch.arange(len(widths), device=gain.device)
    offsets = torch.zeros_like(widths)
    if len(free):
        half = widths[free] / 2
        balance, _ = _balance(sizes, poles[free], half)
        # The sum grows from minus to plus infinity along the interval: its sign halfway tells the nearer end.
        is_low = balance > 0
        poles[free] += (~is_low).long()
        sides = torch.where(is_low, 1.0, -1.0).to(half)
        offsets[free] = sides * _distances(sizes, poles[free], sides, half)
    values = torch.cat([sizes.new_zeros(1), sizes[poles].square() + offsets])
    return _Table(unit, order, sizes, ties, free, poles, offsets, values)


def _distances(sizes: Tensor, poles: Tensor, sides: Tensor, half: Tensor) -> Tensor:
    """How far each root is from its pole, upwards or downwards, at most half an interval.

    Newton's method on distance * sum, which has no pole where the distance is 0; bisection where that leaves the
    bracket. Roots that are found drop out.
    """
    low, high, found = torch.zeros_like(half), half.clone(), half.clone()
    active = torch.arange(len(half), device=half.device)
    resolution = 16 * torch.finfo(half.dtype).eps
    for _ in range(_MOST_STEPS):
        distance = found[active]
        balance, slope = _balance(sizes, poles[active], sides[active] * distance)
        balance = sides[active] * balance
        low[active] = torch.where(balance < 0, distance, low[active])
        high[active] = torch.where(balance > 0, distance, high[active])
        step = -balance / (balance / distance + slope)
        newton = distance + step
        inside = (newton > low[active]) & (newton < high[active])
        is_found = step.abs() <= resolution * distance
        found[active] = torch.where(inside | is_found, newton, (low[active] + high[active]) / 2)
        active = active[~is_found]
        if not len(active):
            break
    return found


def _balance(sizes: Tensor, poles: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j 1 / (d_j - t) and its derivative sum_j 1 / (d_j - t)**2 at t = d[poles] + offsets, for d = sizes**2."""
    sums, slopes = torch.empty_like(offsets), torch.empty_like(offsets)
    for part in _parts(len(poles), len(sizes)):
        terms = (_gaps(sizes, sizes[poles[part], None]) - offsets[part, None]).reciprocal()
        sums[part], slopes[part] = terms.sum(1), terms.square().sum(1)
    return sums, slopes


def _gaps(sizes: Tensor, poles: Tensor) -> Tensor:
    """sizes**2 - poles**2, right to a few roundings however close they are."""
    return (sizes - poles) * (sizes + poles)


def _parts(rows: int, n: int) -> Iterator[slice]:
    """Slices of so many rows of n entries, each of bounded size."""
    step = max(1, _CHUNK // n)
    return (slice(start, start + step) for start in range(0, rows, step))


def _contrasts(sizes: Tensor, ties: Tensor) -> Tensor:
    """For each tie i, as rows: the sum of the entries of its size up to i, against entry i + 1."""
    places, ties = torch.arange(len(sizes), device=sizes.device), ties[:, None]
    starts = torch.searchsorted(sizes, sizes[ties])
    before = (places >= starts) & (places <= ties)
    itself = places == ties + 1
    return before.to(sizes) - itself.to(sizes) * (ties + 1 - starts)
