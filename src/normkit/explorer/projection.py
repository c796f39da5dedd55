"""Rows of many features in three dimensions: along all-ones, and along the two directions that hold most of the rest.

The three coordinates of a row, and what is left of its length, are enough to normalize it exactly: mean, variance and
length of the whole row follow from them. So the page computes with true values, though it has only a shadow.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.explorer.conventions import Convention
from normkit.geometry.centring import centre, helmert

# A direction of which less than this share is left consists of rounding errors.
_NOTHING = 1e-6
# A constant row of ones, centred in float64, is shorter than this.
_ROUNDING = 1e-14


@dataclass(frozen=True, eq=False, kw_only=True)
class Basis:
    """Three orthonormal directions."""

    rows: Tensor
    """Shape (3, n): 1/sqrt(n), then two directions orthogonal to it. With n below 3 there are fewer, and the last rows
    are 0."""
    explained: tuple[float, float]
    """The share of all squared lengths of the centred rows along each of the two."""


def principal_basis(rows: Tensor) -> Basis:
    """The basis of some rows: all-ones, and the two principal directions of the rows centred and scaled to one length.

    Of u = (x - mean(x)) / |x - mean(x)| they are the eigenvectors of sum(u u^T), measured from the origin, where the
    spheres have their centre; every row counts the same, however long it is. Each has its sign from its largest
    entry, which is positive. Where the rows have fewer directions, Helmert's (1, -1, 0, ...), (1, 1, -2, 0, ...)
    fill up.

    Args:
        rows: Shape (N, n), finite, in float64.
    """
    n = rows.shape[1]
    centred = _directions(rows)
    directions: list[Tensor] = []
    few = min(n, 5)
    for candidate in [*_principal(centred), *F.pad(helmert(few).T, (0, n - few))]:
        if len(directions) == 2:
            break
        direction = candidate - candidate.mean()
        # Orthogonalising twice removes the rounding errors of the first time.
        for other in [*directions, *directions]:
            direction = direction - (other @ direction) * other
        length = float(torch.linalg.vector_norm(direction))
        if length > _NOTHING:
            direction = centre(direction / length)
            directions.append(direction if direction[direction.abs().argmax()] > 0 else -direction)
    # Divided by one number, so that no square overflows.
    whole = centre(rows / (float(rows.abs().max()) or 1.0)) if len(rows) else rows
    whole = whole.masked_fill((centred == 0).all(1, keepdim=True), 0.0)
    energy = float(whole.square().sum())
    directions += [torch.zeros(n, dtype=torch.float64)] * (2 - len(directions))
    first, second = ((whole @ direction).square().sum() / (energy or 1.0) for direction in directions)
    ones = torch.full((n,), 1 / math.sqrt(n), dtype=torch.float64)
    return Basis(rows=torch.stack([ones, *directions]), explained=(float(first), float(second)))


def site_record(
    *,
    path: str,
    formula: str,
    convention: Convention,
    layer: int,
    rows: Tensor,
    tokens: Sequence[int],
    basis: Basis,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
) -> dict[str, Any]:
    """One norm and the rows that enter it, as the page reads them.

    Of a row x with the mean m: c = B x; r, the length of what of x - m lies in none of the directions; and
    d = B (g * (x - m)). With v = x - m (or x, where the norm does not centre) and s what v is multiplied by, the
    page shows B v, s B v, then B (g * s v) = s d (or s (d + m B g)), then that plus B b, as if nothing were left out.
    The ellipsoid that the sphere becomes has the shadow B diag(g^2) B^T. `longest` is of the longest row: its largest
    feature, from 0, and the share of the row's squared length that it holds.

    Args:
        path: Of the norm.
        formula: Its formula as text.
        convention: What it computes.
        layer: The block it stands in, from 0; -1 for rows of several.
        rows: Shape (N, n), finite, in float64.
        tokens: For each row an index into the tokens of the model.
        basis: B.
        gain: g, of shape (n,); None is 1.
        bias: b, likewise; None is 0.
    """
    n = rows.shape[1]
    g = torch.ones(n, dtype=torch.float64) if gain is None else gain
    b = torch.zeros(n, dtype=torch.float64) if bias is None else bias
    directions = basis.rows
    centred = centre(rows)
    coordinates = torch.cat([rows @ directions[:1].T, centred @ directions[1:].T], 1)
    rest = torch.linalg.vector_norm(centred - coordinates[:, 1:] @ directions[1:], dim=-1, keepdim=True)
    stretched = (g * centred) @ directions.T
    square = (directions * g.square()) @ directions.T
    upper = torch.triu_indices(3, 3)
    squares = rows[torch.linalg.vector_norm(rows, dim=-1).argmax()].square()
    largest = int(squares.argmax())
    floats = torch.cat([coordinates, rest, stretched], 1).to(torch.float32)
    return {
        "path": path,
        "formula": formula,
        **convention.to_json(),
        "n": n,
        "layer": layer,
        "explained": list(basis.explained),
        "count": len(rows),
        "longest": {"feature": largest, "share": float(squares[largest] / (squares.sum() or 1.0))},
        "floats": base64.b64encode(floats.numpy().astype("<f4").tobytes()).decode(),
        "token": list(tokens),
        "gain": (directions @ g).tolist(),
        "bias": (directions @ b).tolist(),
        "square": square[upper[0], upper[1]].tolist(),
    }


def _directions(rows: Tensor) -> Tensor:
    """The centred rows, each of length 1; 0 if a row is constant up to rounding."""
    # Scaled first, so that no square overflows.
    largest = rows.abs().amax(1, keepdim=True)
    centred = centre(rows / largest.where(largest > 0, 1.0))
    lengths: Tensor = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    is_constant = lengths <= _ROUNDING * math.sqrt(rows.shape[1])
    return centred.div(lengths).masked_fill(is_constant, 0.0)


def _principal(centred: Tensor) -> list[Tensor]:
    """Unit vectors along up to two principal directions, the greater first."""
    count, n = centred.shape
    tall = count > n
    energies, vectors = torch.linalg.eigh(centred.T @ centred if tall else centred @ centred.T)
    found = []
    for index in range(len(energies) - 1, max(len(energies) - 3, -1), -1):
        if energies[index] > _NOTHING**2 * energies[-1]:
            direction = vectors[:, index] if tall else vectors[:, index] @ centred
            found.append(direction / torch.linalg.vector_norm(direction))
    return found
