"""A norm that projects out another direction than all-ones, or subtracts a weighted mean: which one.

Far from eps such a norm is f(x) = A x / s(x), less its bias, with A = diag(gain) (I - direction weights^T). For rows
x and z, s(x + z) f(x + z) = s(x) f(x) + s(z) f(z). With z along one axis, two unknowns are left of these n equations,
and A z in units of s(x) is known: all columns of A up to one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen

_LONGEST = 768
"""Features of a row, at most: n rows of n features are held, and decomposed."""
_EXACT = 1e-4
_DENSE = 1e-3
_FRESH = 64
_SWEEPS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class _Projection:
    """A = diag(gain) (I - direction weights^T)."""

    gain: Tensor
    direction: Tensor
    weights: Tensor


def centring_readings(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Readings "centring" and "squares" of a norm over the last axis that no spec describes; none if not of this form.

    "centring" has the "direction" that is subtracted (all ones, or of length 1; None if nothing is), the "weights"
    of the mean that says how much of it, and their scalar product as "share": 1 for a projection. "squares" has
    the weights of the squares of what is left of the row, under the root, where they are not all the same.
    """
    n = shape[-1]
    if n > _LONGEST:
        reason = f"a direction is looked for in rows of up to {_LONGEST} features; these have {n}"
        return {"centring": Reading.open(reason)}
    if specimen.dtype not in (torch.float32, torch.float64):
        return {"centring": Reading.open("a direction is looked for in float32 and wider, not in 16 bits")}
    x = torch.randn(3 * n + _FRESH, n, generator=generator, dtype=torch.float64)
    plus, minus = (_called(specimen, shape, sign * x[:_FRESH]) for sign in (1, -1))
    even = plus + minus
    if float((even - even[:1]).norm()) > _EXACT * float((plus - minus).norm()):
        return {}
    matrix = _matrix(specimen, shape, generator)
    if matrix is None:
        return {}
    residual = _residual(specimen, shape, x[:_FRESH], matrix)
    found = _decomposed(matrix)
    if found is None:
        reason = "f(x) = A x / s(x) holds, but the matrix A is not seen to be a gain times a projection"
        return {"centring": Reading.open(reason)}
    centred = x - (x @ found.weights)[:, None] * found.direction
    words, squares = _divided_by(specimen, shape, x, centred, matrix)
    if bool(found.weights.any()):
        centring = _subtracted(found, residual, words)
    else:
        line = f"f(x) = gain * x / s(x) to {residual:.0e}: nothing is subtracted"
        centring = Reading(value={"direction": None}, evidence=(line, words))
    return {"centring": centring} if squares is None else {"centring": centring, "squares": squares}


def _subtracted(found: _Projection, residual: float, divided: str) -> Reading:
    direction, weights = found.direction, found.weights
    even = bool((direction - direction.mean()).abs().max() <= _DENSE * direction.abs().max())
    length = float(direction.mean()) if even else float(direction.norm())
    # A direction points to where its largest entry is positive.
    length = length if even or direction[direction.abs().argmax()] > 0 else -length
    direction, weights = direction / length, weights * length
    share = float(direction @ weights)
    mean = "the mean"
    if bool((weights - weights.mean()).abs().max() > _DENSE * weights.abs().max()):
        mean = "a weighted mean"
    along = mean if even else "a direction of its own, not the all-ones one"
    part = "" if abs(share - 1) < _DENSE else f"{share:.4g} of "
    formula = f"f(x) = A x / s(x) to {residual:.0e}, with A = diag(gain) (I - direction weights^T)"
    line = f"{formula}: it subtracts {part}{along}"
    value = {"direction": direction.tolist(), "weights": weights.tolist(), "share": share}
    return Reading(value=value, evidence=(line, divided))


def _matrix(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Tensor | None:
    """A up to a factor, or None if f(x) = A x / s(x) does not hold."""
    n = shape[-1]
    base = torch.randn(1, n, generator=generator, dtype=torch.float64)
    step = float(base.norm())
    axes = step * torch.eye(n, dtype=torch.float64)
    at_base, at_axes, at_sums = (_odd(specimen, shape, rows) for rows in (base, axes, base + axes))
    # a * f(base + z) - b * f(z) = f(base), in the least squares of n equations for each z.
    aa, ab, bb = at_sums.square().sum(1), -(at_sums * at_axes).sum(1), at_axes.square().sum(1)
    right_a, right_b = (at_sums * at_base).sum(1), -(at_axes * at_base).sum(1)
    determinant = aa * bb - ab.square()
    gone = bb <= _EXACT**2 * at_base.square().sum()
    if bool((determinant <= 1e-8 * aa * bb)[~gone].any()):
        return None
    safe = torch.where(gone, 1.0, determinant)
    a = torch.where(gone, right_a / aa, (right_a * bb - right_b * ab) / safe)
    b = torch.where(gone, 0.0, (aa * right_b - ab * right_a) / safe)
    left = a[:, None] * at_sums - b[:, None] * at_axes - at_base
    if not bool(torch.isfinite(left).all()) or float(left.norm(dim=1).max() / at_base.norm()) > _EXACT:
        return None
    matrix = (b[:, None] * at_axes / step).T.contiguous()
    fresh = torch.randn(_FRESH, n, generator=generator, dtype=torch.float64)
    return matrix if _residual(specimen, shape, fresh, matrix) < 10 * _EXACT else None


def _decomposed(matrix: Tensor) -> _Projection | None:
    """Gain, direction and weights of A, by a rank-one fit to the entries off its diagonal."""
    outside = matrix - torch.diag(matrix.diagonal())
    if float(outside.norm()) <= _DENSE * float(matrix.norm()):
        nothing = torch.zeros(len(matrix), dtype=torch.float64)
        return _Projection(gain=matrix.diagonal().clone(), direction=nothing, weights=nothing)
    right = torch.linalg.svd(outside)[2][0]
    left = torch.zeros_like(right)
    for _ in range(_SWEEPS):
        # The diagonal is unknown: each entry is fitted to the others of its row, or column.
        left = -(outside @ right) / (right.square().sum() - right.square()).clamp_min(1e-300)
        right, before = -(outside.T @ left) / (left.square().sum() - left.square()).clamp_min(1e-300), right
        if float((right - before).norm()) <= 1e-12 * float(right.norm()):
            break
    product = torch.outer(left, right)
    if float((outside + product - torch.diag(product.diagonal())).norm()) > _DENSE * float(outside.norm()):
        return None
    gain = matrix.diagonal() + left * right
    if bool((gain.abs() <= _DENSE * gain.abs().max()).any()):
        return None
    return _Projection(gain=gain, direction=left / gain, weights=right)


def _divided_by(
    specimen: Specimen, shape: Sequence[int], x: Tensor, centred: Tensor, matrix: Tensor
) -> tuple[str, Reading | None]:
    """Which length of the row divides it; and the weights of its squares, where they are uneven."""
    y, mapped = _odd(specimen, shape, x), x @ matrix.T
    squares = ((mapped * y).sum(1) / y.square().sum(1)).square()
    squares = squares / squares.mean()
    for length, words in ((centred, "what is left of the row"), (x, "the whole row")):
        ratio = squares / length.square().sum(1)
        if float(ratio.std() / ratio.mean()) < _DENSE:
            return f"it divides by the length of {words}", None
    for length, words in ((centred, "what is left of the row"), (x, "the whole row")):
        weights = torch.linalg.lstsq(length.square(), squares[:, None]).solution[:, 0]
        if float((length.square() @ weights - squares).norm() / squares.norm()) < _DENSE:
            weights = weights / weights.mean()
            line = f"the squares of {words} are weighted unevenly: by {float(weights.min()):.4g} to "
            line += f"{float(weights.max()):.4g} of their mean"
            return "it divides by a weighted length", Reading(value={"weights": weights.tolist()}, evidence=(line,))
    return "it divides by no root of a weighted sum of squares", None


def _residual(specimen: Specimen, shape: Sequence[int], x: Tensor, matrix: Tensor) -> float:
    """How far outputs are from the direction of A x, relative."""
    y, mapped = _odd(specimen, shape, x), x @ matrix.T
    factor = (y * mapped).sum(1, keepdim=True) / mapped.square().sum(1, keepdim=True)
    return float(((y - factor * mapped).norm(dim=1) / y.norm(dim=1)).max())


def _odd(specimen: Specimen, shape: Sequence[int], rows: Tensor) -> Tensor:
    """(f(x) - f(-x)) / 2."""
    return (_called(specimen, shape, rows) - _called(specimen, shape, -rows)) / 2


def _called(specimen: Specimen, shape: Sequence[int], rows: Tensor) -> Tensor:
    """The outputs of rows of shape (rows, n), each repeated along the axes between batch and features."""
    between = (1,) * (len(shape) - 2)
    spread = rows.reshape(len(rows), *between, shape[-1]).expand(len(rows), *shape[1:])
    y = specimen((specimen.precision.far * spread).to(specimen.device, specimen.dtype).contiguous())
    return y.double().cpu().reshape(len(rows), -1, shape[-1])[:, 0]
