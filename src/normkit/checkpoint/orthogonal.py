"""Orthogonal matrices of a file, for `rotate`: read, checked, and applied so that no order of sums matters.

A row x becomes x R, as in SpinQuant: R1 turns the residual stream, NAME.R2 the values of each head of an attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.checkpoint.given import Given
from normkit.checkpoint.given_files import GivenTensors, tensors_given
from normkit.errors import InputError
from normkit.models.graph import Graph
from normkit.text import quoted, significant

STREAM, VALUES = "R1", ".R2"
"""The name of the matrix of the stream, and the end of the names of those of values."""
# Significant bits, by dtype: 16 bits hold no orthogonal matrix well.
_PRECISION = {torch.float32: 24, torch.float64: 53}
BLOCK = 256
"""Rows of a matrix that are taken at a time."""
TOGETHER = 2**20
"""Numbers that a matrix is applied to at a time, more than other steps take: each time it is cut anew."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrices:
    """The orthogonal matrices of a file."""

    stream: Given | None
    """The matrix of the residual stream, or None."""
    values: Mapping[str, Given]
    """Path of an attention -> of the values of each of its heads."""
    sha256: str
    """Hash of the file."""
    deviation: float
    """Largest |R^T R - 1| of all of them."""

    @property
    def remark(self) -> str:
        """How far the fold is exact, for the user."""
        return (
            f"the rotations of the file are orthogonal to {significant(self.deviation)} (the largest entry of "
            "R^T R - 1), and what the model computes is the same as far as they are"
        )


def asked_matrices(given: GivenTensors | Tensor | None) -> Matrices | None:
    """The matrices of a safetensors file, or of tensors in memory; None if none are given.

    Args:
        given: Square float32 or float64 matrices by name: "R1", and "model.layers.0.self_attn.R2" for an attention;
            or one matrix alone, of any name, for the stream.

    Raises:
        InputError: If a matrix is not square, or not orthogonal: an entry of R^T R - 1 is larger than n u, the most
            that sums of n products err by whose factors are known to u, the unit roundoff of the dtype.
    """
    if given is None:
        return None
    named = {STREAM: given} if isinstance(given, Tensor) else given
    found, digest = tensors_given(named, "rotations", axes=2, dtypes=("F32", "F64"))
    if len(found) == 1 and not next(iter(found)).endswith(VALUES):
        found = {STREAM: next(iter(found.values()))}
    deviations = [0.0]
    for name, matrix in found.items():
        if name != STREAM and not name.endswith(VALUES):
            raise InputError(
                f"expected rotations called {STREAM}, or PATH{VALUES} for an attention, got {quoted(name)}"
            )
        rows, columns = matrix.shape
        if rows != columns or not rows:
            raise InputError(f"expected a square matrix in {quoted(name)} of the rotations, got {rows} x {columns}")
        deviations.append(_deviation(matrix))
        bound = rows * 2.0 ** -_PRECISION[matrix.dtype]
        if deviations[-1] > bound:
            raise InputError(
                f"{quoted(name)} of the rotations is not orthogonal: R^T R - 1 reaches {significant(deviations[-1])}, "
                f"{significant(bound)} may be left by rounding"
            )
    return Matrices(
        stream=Given(found[STREAM]) if STREAM in found else None,
        values={name.removesuffix(VALUES): Given(matrix) for name, matrix in found.items() if name != STREAM},
        sha256=digest,
        deviation=max(deviations),
    )


def check_sizes(matrices: Matrices, graph: Graph, heads: Mapping[str, int]) -> None:
    """Check that the matrices fit a checkpoint; `heads` are the widths of the heads of each attention, by path.

    Raises:
        InputError: If one has another size, or is for an attention that is not there.
    """
    due = {STREAM: graph.width} if matrices.stream else {}
    found = {STREAM: matrices.stream} if matrices.stream else {}
    for name, matrix in matrices.values.items():
        if name not in heads:
            expected = ", such as " + next(iter(heads)) if heads else ""
            raise InputError(f"{quoted(name + VALUES)} of the rotations is for no attention of the model{expected}")
        due[name + VALUES], found[name + VALUES] = heads[name], matrix
    for name, matrix in found.items():
        size = len(matrix.values)
        if size != due[name]:
            raise InputError(f"expected {name} of {due[name]} x {due[name]} in the rotations, got {size} x {size}")


def times_transposed(matrix: Tensor, columns: Tensor) -> Tensor:
    """R^T times columns, in float64, with the same bits whatever the order of sums and the number of columns.

    Each number is cut in three that are multiples of units so large that float64 holds every partial sum. What is cut
    off is below 2^-57 of the largest in its row of R^T, or its column.

    Args:
        matrix: R, of shape (n, n).
        columns: float64, of shape (n, c); not changed.
    """
    size = len(matrix)
    # Sums of n products of two numbers of this many bits and a sign have 53 at most.
    bits = (53 - math.ceil(math.log2(size))) // 2 if size > 1 else 26
    right = _slices(columns, 0, bits)
    result = torch.empty_like(columns)
    for start in range(0, size, BLOCK):
        left = _slices(matrix[:, start : start + BLOCK].T.to(torch.float64), 1, bits)
        total = torch.zeros_like(result[start : start + BLOCK])
        # The smallest first; products below 2^-3 bits of the largest are left out.
        for order in (2, 1, 0):
            for place in range(order + 1):
                if bool(left[place].any()) and bool(right[order - place].any()):
                    total += left[place] @ right[order - place]
        result[start : start + BLOCK] = total
    return result


def _slices(values: Tensor, axis: int, bits: int) -> list[Tensor]:
    """Three parts that add up to float64 values, each a multiple of 2^-bits of the one before along an axis."""
    exponents = torch.frexp(values.abs().amax(axis, keepdim=True)).exponent + (52 - bits)
    # Adding and subtracting 1.5 * 2^52 units rounds to a multiple of the unit.
    shift = torch.ldexp(torch.full(exponents.shape, 1.5, dtype=torch.float64), exponents)
    parts, rest = [], values
    for _ in range(3):
        parts.append((rest + shift).sub_(shift))
        rest = rest - parts[-1]
        shift = shift * 2.0**-bits
    return parts


def _deviation(matrix: Tensor) -> float:
    """Largest |R^T R - 1|, in float64."""
    wide, most = matrix.to(torch.float64), 0.0
    for start in range(0, len(wide), BLOCK):
        product = wide[:, start : start + BLOCK].T @ wide
        product.diagonal(start).sub_(1.0)
        most = max(most, float(product.abs().max()))
    return most
