"""Orthogonal matrices H D / sqrt(n): a Hadamard matrix and random signs, applied without a BLAS's order of sums.

n = 2^k m: H is Sylvester's matrix of order 2^k times one of order m, after Paley or Williamson. The signs are bits of
SHA-256. The compiled kernels, where they are in use, give the bits of the functions here.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from normkit.checkpoint.orthogonal import times_transposed
from normkit.checkpoint.plan import Rotation
from normkit.kernels.hadamard import Hadamard

Array = npt.NDArray[np.float64]

ROWS: dict[int, tuple[int, int, int, int]] = {
    52: (6, 21, 13, 33),
    92: (458, 1176, 279, 954),
    100: (697, 3324, 2295, 2381),
    116: (2948, 5195, 4519, 12695),
}
"""Order 4 n -> entries 1 to (n - 1) / 2 of the first rows of A to D, as bits, the highest first and set for -1. Entry 0
is 1, and the others mirror these. They were found by search."""


class Construction(NamedTuple):
    """A Hadamard matrix of order `sylvester * order`."""

    sylvester: int
    """A power of two."""
    order: int
    """Order of the other factor; 1 if there is none."""
    kind: str
    """The kind of that factor: "paley-1", "paley-2", "williamson", or "" if there is none."""

    def __str__(self) -> str:
        """Both factors in words."""
        return f"sylvester {self.sylvester}" + (f" x {self.kind} {self.order}" if self.kind else "")


def construction(size: int) -> Construction | None:
    """How a Hadamard matrix of an order is made, with the smallest other factor; None if no way is known here."""
    odd = size // (size & -size) if size > 0 else 0
    if odd == 1:
        return Construction(size, 1, "")
    order = 4 * odd
    while odd and order <= size:
        if _is_prime(order - 1):
            return Construction(size // order, order, "paley-1")
        if _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
            return Construction(size // order, order, "paley-2")
        if order in ROWS:
            return Construction(size // order, order, "williamson")
        order *= 2
    return None


@cache
def paley(order: int, kind: int) -> Array:
    """Paley's Hadamard matrix: kind 1 from the squares modulo order - 1, kind 2 from those modulo order / 2 - 1.

    H H^T = order I is checked, in integers.

    Source:
        Paley 1933, On orthogonal matrices, Journal of Mathematics and Physics 12.
    """
    prime = order // kind - 1
    residues = np.full(prime, -1)
    residues[np.arange(1, prime) ** 2 % prime] = 1
    residues[0] = 0
    jacobsthal = residues[(np.arange(prime)[:, None] - np.arange(prime)[None, :]) % prime]
    bordered = np.ones((prime + 1, prime + 1), dtype=np.int64)
    bordered[0, 0] = 0
    bordered[1:, 1:] = jacobsthal
    if kind == 1:
        bordered[1:, 0] = -1
        found = bordered + np.eye(prime + 1, dtype=np.int64)
    else:
        found = np.kron(bordered, [[1, 1], [1, -1]]) + np.kron(np.eye(prime + 1, dtype=np.int64), [[1, -1], [-1, -1]])
    assert (found @ found.T == order * np.eye(order, dtype=np.int64)).all(), f"no Hadamard matrix of order {order}"
    return found.astype(np.float64)


@cache
def williamson(order: int) -> Array:
    """Williamson's Hadamard matrix of an order of `ROWS`. H H^T = order I is checked, in integers.

        H = [[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]]

    A, B, C, D are symmetric circulant matrices of n signs with A^2 + B^2 + C^2 + D^2 = 4 n, so that H H^T = 4 n. Its
    orders are small ones that neither Sylvester nor Paley reaches.

    Source:
        Williamson 1944, Hadamard's determinant theorem and the sum of four squares, Duke Mathematical Journal 11.
    """
    size = order // 4
    half = (size - 1) // 2
    places = (np.arange(size)[:, None] - np.arange(size)[None, :]) % size
    parts = []
    for bits in ROWS[order]:
        signs = [1 - 2 * (bits >> (half - 1 - place) & 1) for place in range(half)]
        parts.append(np.array([1, *signs, *signs[::-1]])[places])
    a, b, c, d = parts
    found = np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])
    assert (found @ found.T == order * np.eye(order, dtype=np.int64)).all(), f"no Hadamard matrix of order {order}"
    return found.astype(np.float64)


@cache
def signs(seed: str, size: int) -> Array:
    """Random signs: the bits of SHA-256 of the seed and a counter, -1 for a set bit."""
    blocks = (hashlib.sha256(f"{seed}/{block}".encode()).digest() for block in range(-(-size // 256)))
    bits = np.unpackbits(np.frombuffer(b"".join(blocks), dtype=np.uint8))[:size]
    return 1.0 - 2.0 * bits.astype(np.float64)


def rotate_runs(values: Array, rotation: Rotation) -> None:
    """Apply a rotation along the second of three axes of a contiguous array; in place."""
    outer, length, inner = values.shape
    blocks = rotation.rows.blocks if rotation.rows else 1
    taken = (rotation.rows.tail if rotation.rows else length) // rotation.size
    runs = torch.from_numpy(values).view(outer, blocks, -1, rotation.size, inner)[:, :, -taken:]
    first = runs.movedim(3, 0)
    columns = first.contiguous().view(rotation.size, -1)
    if rotation.matrix is None:
        columns = _rotated(columns, rotation.seed)
    else:
        columns = times_transposed(rotation.matrix.values, columns)
    if columns.data_ptr() != first.data_ptr():
        first.copy_(columns.view(first.shape))


def compiled(rotation: Rotation) -> Hadamard:
    """A rotation by a seed as the compiled kernels take it."""
    made = construction(rotation.size)
    assert made is not None, f"no Hadamard matrix of order {rotation.size}"
    matrix = _matrix(made)
    return Hadamard(
        torch.from_numpy(signs(rotation.seed, rotation.size)),
        None if matrix is None else torch.from_numpy(np.ascontiguousarray(matrix.T)),
        *((rotation.rows.blocks, rotation.rows.tail) if rotation.rows else ()),
    )


def rotate_columns(columns: Array, seed: str) -> Array:
    """H D / sqrt(n) times each column, in float64.

    Args:
        columns: Of shape (n, c), contiguous; overwritten.
        seed: Of the signs.
    """
    return _rotated(torch.from_numpy(columns), seed).numpy()


def _rotated(columns: Tensor, seed: str) -> Tensor:
    """`rotate_columns`, by torch: it adds and transposes blocks of this size quicker than numpy."""
    size, count = columns.shape
    made = construction(size)
    assert made is not None, f"no Hadamard matrix of order {size}"
    columns *= torch.from_numpy(signs(seed, size))[:, None]
    spare = torch.empty_like(columns)
    step = made.order
    while step < size:
        taken, given = columns.view(-1, 2, step, count), spare.view(-1, 2, step, count)
        torch.add(taken[:, 0], taken[:, 1], out=given[:, 0])
        torch.sub(taken[:, 0], taken[:, 1], out=given[:, 1])
        columns, spare = spare, columns
        step *= 2
    if (matrix := _matrix(made)) is not None:
        columns = _times(torch.from_numpy(matrix), columns.view(-1, made.order, count))
    return columns.view(size, count).mul_(1.0 / math.sqrt(size))


def _matrix(made: Construction) -> Array | None:
    """The factor of a Hadamard matrix that butterflies do not make."""
    if not made.kind:
        return None
    return williamson(made.order) if made.kind == "williamson" else paley(made.order, int(made.kind[-1]))


def _times(matrix: Tensor, columns: Tensor) -> Tensor:
    """A matrix of signs times columns, the sums so exact that no order of them matters.

    Each number is cut in two that are multiples of units so large that float64 holds every partial sum.
    """
    bits = 51 - math.ceil(math.log2(len(matrix)))
    # Adding and subtracting 1.5 * 2^52 units rounds to a multiple of the unit, here of 2^-bits of the largest.
    exponents = torch.frexp(columns.abs().amax(1, keepdim=True)).exponent + (52 - bits)
    shift = torch.ldexp(torch.full(exponents.shape, 1.5, dtype=torch.float64), exponents)
    upper = (columns + shift).sub_(shift)
    lower = columns.sub_(upper)
    shift *= 2.0**-bits
    lower = lower.add_(shift).sub_(shift)
    return torch.matmul(matrix, upper).add_(torch.matmul(matrix, lower))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
