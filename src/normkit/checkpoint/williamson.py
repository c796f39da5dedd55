"""Hadamard matrices after Williamson, of small orders that neither Sylvester nor Paley reaches.

    H = [[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]]

A, B, C, D are symmetric circulant matrices of n signs with A^2 + B^2 + C^2 + D^2 = 4 n, so that H H^T = 4 n.

Source:
    Williamson 1944, Hadamard's determinant theorem and the sum of four squares, Duke Mathematical Journal 11.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

ROWS: dict[int, tuple[int, int, int, int]] = {
    52: (6, 21, 13, 33),
    92: (458, 1176, 279, 954),
    100: (697, 3324, 2295, 2381),
    116: (2948, 5195, 4519, 12695),
}
"""Order 4 n -> entries 1 to (n - 1) / 2 of the first rows of A to D, as bits, the highest first and set for -1. Entry 0
is 1, and the others mirror these. They were found by search."""


@cache
def williamson(order: int) -> npt.NDArray[np.float64]:
    """Williamson's Hadamard matrix of an order of `ROWS`. H H^T = order I is checked, in integers."""
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
