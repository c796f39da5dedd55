"""Which keys a query can prefer to all others, and the query that prefers none.

Softmax attention gives a key the largest weight if some query has the largest product with it. That is geometry of the
keys alone: such a key is an exposed point of their convex hull. The rows of a norm lie on a sphere or an ellipsoid,
where every point is one; a projection to a head's few features can hide keys again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import unit

# The limits above which a number counts as positive, in machine epsilons: a margin or spread in float64, and a distance
# of keys in their own dtype.
_UNITS, _REPEAT = 16, 4
# For keys of trained heads, 1 to 5 steps are enough; a linear program takes as long as a thousand.
_STEPS = 50


def selecting_query(keys: Tensor, index: int) -> Tensor | None:
    """A query that prefers one key strictly to all others, if there is one.

    It has q . k_i >= q . k_j + 1 for every j != i, with equality for the next best. The closed candidates q = k_i,
    q = k_i - mean(k) and q = S^-1 (k_i - mean(k)), S the keys' covariance, are tried first; where none holds, a few
    steps of the perceptron or else a linear program decide. A key that occurs at two positions is preferred at neither.
    An invertible affine map of all keys changes no answer: rows of a norm may be taken before or after gain and bias.

    Args:
        keys: Shape (T, d), one key per row; they are looked at in float64.
        index: i, from 0 to T - 1.

    Returns:
        The query, shape (d,), in the keys' dtype; None where there is none. For a single key it is zero.

    Raises:
        ShapeError: If keys is no matrix, or has no such row.
        DtypeError: If keys is not of a floating dtype.
        InputError: If a key is not finite, or the linear program is needed and SciPy is not installed.

    Example:
        >>> from normkit.geometry import selecting_query
        >>> square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0], [0.5, 0.5]])
        >>> selecting_query(square, 0), selecting_query(square, 4)
        (tensor([1., 1.]), None)

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582; the closed candidates are derived here.
    """
    points, centred = _coordinates(keys)
    if not 0 <= index < len(keys):
        raise ShapeError(f"an index from 0 to {len(keys) - 1} is needed for {len(keys)} keys, got {index}")
    if len(keys) == 1:
        return torch.zeros_like(keys[0])
    chosen = torch.tensor([index])
    if bool(_repeated(points, chosen, keys.dtype)):
        return None
    size = unit(keys.detach().to(points), None).squeeze()
    whitened, back = _whitened(points, centred)
    same = torch.eye(centred.shape[1], dtype=torch.float64)
    for candidates, places, to_query in ((whitened, whitened, back), (centred, centred, same), (points, centred, same)):
        if bool(_prefers(candidates, places, chosen)):
            return (_unit_margin(candidates[index], places, index) @ to_query / size).to(keys)
    direction = _program(whitened, index)
    return None if direction is None else (_unit_margin(direction, whitened, index) @ back / size).to(keys)


def selectable(keys: Tensor, indices: Tensor | None = None) -> Tensor:
    """Which keys some query prefers strictly to all others.

    Key i is selectable if a q exists with q . (k_i - k_j) > 0 for every j != i: if k_i is an exposed point of the
    convex hull of all keys. Repeated keys are not, as no query tells them apart; keys count as repeated up to
    |k_i - k_j| <= 4 * eps * |k_i|, eps the machine epsilon of their dtype. The closed candidates of `selecting_query`
    settle most keys in a few matrix products; what they leave costs a few steps of the perceptron each, at most a
    linear program. Returns plain answers: not for `vmap` or autograd.

    Args:
        keys: Shape (T, d), one key per row; they are looked at in float64.
        indices: The keys to judge, whole numbers of shape (m,), each among all T; None for all.

    Returns:
        Tensor of bools, shape (m,) or (T,), on the CPU.

    Raises:
        ShapeError: If keys is no matrix, or has not all these rows.
        DtypeError: If keys is not of a floating dtype.
        InputError: If a key is not finite, or a linear program is needed and SciPy is not installed.

    Example:
        >>> from normkit.geometry import selectable
        >>> selectable(torch.tensor([[0.0], [1.0], [2.0], [3.0], [3.0]]))
        tensor([ True, False, False, False, False])

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582.
    """
    points, centred = _coordinates(keys)
    count = len(keys)
    chosen = torch.arange(count) if indices is None else indices.to("cpu", torch.long)
    if chosen.dim() != 1 or not bool(((chosen >= 0) & (chosen < count)).all()):
        raise ShapeError(f"indices of shape (m,) from 0 to {count - 1} are needed, got {chosen.tolist()}")
    repeated = _repeated(points, chosen, keys.dtype)
    found = repeated | _prefers(points, centred, chosen) | _prefers(centred, centred, chosen)
    if not bool(found.all()):
        # Whitening takes longer than all of this.
        whitened, _ = _whitened(points, centred)
        found |= _prefers(whitened, whitened, chosen)
        for place in (~found).nonzero().flatten().tolist():
            found[place] = _program(whitened, int(chosen[place])) is not None
    return found & ~repeated


def uniform_query(key_weight: Tensor, gain: Tensor | None = None) -> Tensor | None:
    """The query that attends equally to all outputs of a centred norm, if there is one.

    Outputs y = g * z + b with sum(z) = 0 have keys W y, and q . W y = sum(z * g * W^T q) + q . W b is the same for all
    of them if g * W^T q is constant, that is, if W^T q is parallel to 1 / g. With the gain folded into W this asks
    whether 1 is in the row space of W. If entries of g are 0, a W^T q that is 0 everywhere else will do as well. A q
    with W^T q = 0, which ignores all keys, is not counted. The bias adds the same number to all products. For a norm
    that does not centre, such as RMSNorm, there is no such query unless a gain is 0.

    Args:
        key_weight: W, shape (d, n): keys of d features are read from rows of n.
        gain: g, the gain as it acts, shape (n,); None for ones.

    Returns:
        A query of unit length, shape (d,), in the dtype of `key_weight`, with sum(g * W^T q) >= 0; or None. Whether
        g * W^T q is constant is judged to the rounding of that dtype.

    Raises:
        ShapeError: If the shapes do not fit.
        DtypeError: If `key_weight` is not of a floating dtype.

    Example:
        >>> from normkit.geometry import uniform_query
        >>> uniform_query(torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]))
        tensor([0.7071, 0.7071])
        >>> uniform_query(torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]])) is None
        True

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, for g = 1; with a gain derived here.
    """
    if key_weight.dim() != 2 or (gain is not None and gain.shape != key_weight.shape[1:]):
        given = tuple(key_weight.shape), None if gain is None else tuple(gain.shape)
        raise ShapeError(
            f"a key weight of shape (d, n) and a gain of shape (n,) are needed, got {given[0]} and {given[1]}"
        )
    weight = require_floating(key_weight).detach().double()
    weighted = weight if gain is None else weight * gain.detach().to(weight)
    tolerance = max(weight.shape) * torch.finfo(key_weight.dtype).eps
    queries, sizes, _ = torch.linalg.svd(
        weighted - weighted.mean(1, keepdim=True), full_matrices=weight.shape[0] > weight.shape[1]
    )
    rank = int((sizes > tolerance * torch.linalg.matrix_norm(weighted, 2)).sum())
    # The queries that see nothing of the centred part: to them all keys are the same.
    uniform = queries[:, rank:].T
    if not len(uniform):
        return None
    reading = torch.linalg.svd(uniform @ weight, full_matrices=False)
    if float(reading.S[0]) <= tolerance * float(torch.linalg.matrix_norm(weight, 2)):
        return None
    query: Tensor = reading.U[:, 0] @ uniform
    return (-query if float((query @ weighted).sum()) < 0 else query).to(key_weight)


def _coordinates(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The keys in their `unit`, and about their mean."""
    if keys.dim() != 2 or not keys.numel():
        raise ShapeError(f"keys of shape (T, d) are needed, one per row, got shape {tuple(keys.shape)}")
    points = require_floating(keys).detach().to("cpu", torch.float64)
    if not bool(points.isfinite().all()):
        raise InputError("finite keys are needed, got NaN or infinities; leave these positions out")
    points = points / unit(points, None)
    return points, points - points.mean(0)


def _whitened(points: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    """The keys with covariance 1 / T, and the map from a query there to one among the centred keys."""
    left, sizes, right = torch.linalg.svd(centred, full_matrices=False)
    # Directions along which the keys differ by no more than their rounding tell nothing. The largest singular value of
    # the points is at most this, and at least this over sqrt(2), as the centred keys are orthogonal to all-ones.
    largest = torch.hypot(sizes[0], math.sqrt(len(points)) * points.mean(0).norm())
    kept = sizes > _UNITS * torch.finfo(torch.float64).eps * largest
    return left[:, kept], right[kept] / sizes[kept, None]


def _repeated(points: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Which of these keys occur at more than one position, up to the rounding of their dtype."""
    # Through products, near keys would be as far apart as their rounding.
    distances = torch.cdist(points[indices], points, compute_mode="donot_use_mm_for_euclid_dist")
    distances.scatter_(1, indices[:, None], torch.inf)
    is_near: Tensor = distances.amin(1) <= _REPEAT * torch.finfo(dtype).eps * points[indices].norm(dim=1)
    return is_near


def _prefers(candidates: Tensor, points: Tensor, indices: Tensor) -> Tensor:
    """Whether candidate i of (T, d) has a strictly larger product with point i than with every other, for these i."""
    candidates = candidates[indices]
    products = candidates @ points.T
    own = products.gather(1, indices[:, None])
    others = products.scatter(1, indices[:, None], -torch.inf).amax(1, keepdim=True)
    rounding = torch.finfo(torch.float64).eps * candidates.norm(dim=1, keepdim=True) * points.norm(dim=1).max()
    is_larger: Tensor = own - others > _UNITS * rounding
    return is_larger.squeeze(1)


def _unit_margin(query: Tensor, points: Tensor, index: int) -> Tensor:
    """The query as long as prefers its key by 1 to the next best."""
    margins = (points[index] - points) @ query
    margins[index] = torch.inf
    longer: Tensor = query / margins.min()
    return longer


def _program(points: Tensor, index: int) -> Tensor | None:
    """A p with p . (u_i - u_j) > 0 for every j != i; None where there is none.

    Most often a few steps of the perceptron find it. Else a linear program decides. If its solver gives up, or its
    result fails the check, the point of the convex hull of the differences that is nearest to 0 decides: it is such a
    p, unless it is 0.
    """
    others = torch.cat([points[:index], points[index + 1 :]])
    differences = points[index] - others
    lengths = differences.norm(dim=1, keepdim=True)
    # Keys that differ only along directions without spread.
    if not bool(lengths.all()):
        return None
    # At unit length, so that the solver's absolute tolerance means the same for near and far keys.
    differences = differences / lengths
    direction = points[index]
    for _ in range(_STEPS):
        margins = differences @ direction
        worst = int(margins.argmin())
        if margins[worst] > 0 and _separates(direction, differences):
            return direction
        direction = direction + points[index].norm() * differences[worst]
    linprog, nnls = _solvers()
    bound = -torch.ones(len(others), dtype=torch.float64)
    solution = linprog(
        torch.zeros(points.shape[1]).numpy(),
        A_ub=-differences.numpy(),
        b_ub=bound.numpy(),
        bounds=(None, None),
        method="highs",
    )
    if solution.status == 2:
        return None
    if solution.status == 0 and _separates(torch.from_numpy(solution.x), differences):
        return torch.from_numpy(solution.x)
    # Least squares for weights that sum to 1 and whose mean of the differences is 0; what is left over is that mean.
    wanted = torch.zeros(points.shape[1] + 1, dtype=torch.float64)
    wanted[-1] = 1.0
    mean_and_sum = torch.cat([differences.T, torch.ones_like(bound)[None]])
    weights, _ = nnls(mean_and_sum.numpy(), wanted.numpy(), maxiter=100 * len(others))
    nearest: Tensor = torch.from_numpy(weights) @ differences
    return nearest if _separates(nearest, differences) else None


def _separates(direction: Tensor, differences: Tensor) -> bool:
    """Whether all products with differences of unit length are above 0 by more than rounding."""
    rounding = torch.finfo(torch.float64).eps * direction.norm()
    return bool((differences @ direction > _UNITS * rounding).all())


def _solvers() -> tuple[Any, Any]:
    """SciPy's linear program and least squares of numbers above 0, where it is installed."""
    try:
        from scipy.optimize import linprog, nnls
    except ImportError:
        raise InputError('selectable keys need SciPy, which is not installed: pip install "normkit[study]"') from None
    return linprog, nnls
