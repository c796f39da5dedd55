"""From the tensors of a call to launches: where the rows are, how they are divided, which kernel computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.kernels.signatures import unpacked
from normkit.kernels.triton import backward, forward
from normkit.kernels.triton.configuration import backward_tiling, forward_tiling
from normkit.kernels.triton.launching import Launch
from normkit.kernels.triton.program import Program, program

_COLUMNS_OF_SUMS = 64
_LINES_OF_SUMS = 32


class Layout(NamedTuple):
    """The places of rows of tensors of one shape in memory, with one stride or two, so that views are not copied.

    x of shape (a, b, n), strides (s, t, 1)  ->  row i * b + j begins at i * s + j * t
    """

    rows: int
    inner: int
    """Row number i * inner + j has the indices i and j; 1 where one stride is enough."""
    strides: tuple[tuple[int, int], ...]
    """For each tensor the strides of i and of j, in elements; only the second is used where inner is 1."""

    @property
    def is_nested(self) -> bool:
        """Whether rows have two strides."""
        return self.inner != 1


def has_whole_rows(x: Tensor, axes: int) -> bool:
    """Whether each row of x (its last `axes` axes) is contiguous."""
    expected = 1
    for size, stride in zip(reversed(x.shape[-axes:]), reversed(x.stride()[-axes:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_aligned(x: Tensor, axes: int, aligned: int) -> bool:
    """Whether the strides keep rows of x at multiples of so many numbers."""
    leading = zip(x.shape[: x.dim() - axes], x.stride(), strict=False)
    return all(size == 1 or stride % aligned == 0 for size, stride in leading)


def layout(tensors: Sequence[Tensor], axes: int) -> Layout | None:
    """The layout of tensors of one shape that have whole rows; None if one needs more than two strides."""
    sizes = tensors[0].shape[: tensors[0].dim() - axes]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        strides = tuple(tensor.stride(axis) for tensor in tensors)
        if merged and all(outer == size * own for outer, own in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = merged[-1][0] * size, strides
        else:
            merged.append((size, strides))
    rows = math.prod(sizes)
    if len(merged) > 2:
        return None
    if len(merged) < 2:
        single = merged[0][1] if merged else (0,) * len(tensors)
        return Layout(rows, 1, tuple((0, stride) for stride in single))
    (_, outer), (inner, own) = merged
    return Layout(rows, inner, tuple(zip(outer, own, strict=True)))


class Norm(NamedTuple):
    """The arguments of an operator that are no tensors: see `normkit.kernels.signatures`."""

    conventions: int
    eps: float
    offset: float

    @property
    def axes(self) -> int:
        """How many trailing axes form a row."""
        return unpacked(self.conventions).axes


def features(x: Tensor, norm: Norm) -> int:
    """How many numbers a row of x has."""
    return math.prod(int(size) for size in x.shape[x.dim() - norm.axes :])


def program_of(norm: Norm, x: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Program:
    """The program of a norm of `rows`: x, or the sum of it and a residual."""
    dtypes = (None if parameter is None else parameter.dtype for parameter in (weight, bias))
    return program(*norm, features(x, norm), x.dtype, rows.dtype, *dtypes)


def lay_out(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], axes: int, aligned: int, *, has_data: bool
) -> tuple[tuple[bool, ...], Layout] | None:
    """Which inputs must be copied because their rows cannot be read in place, and where all rows are then.

    A kernel is compiled for rows that begin at multiples of `aligned` numbers, and of 16 bytes if aligned is not 1; for
    other rows it would be another kernel, with other bits. Without data, the tensors belong to a compiler that traces,
    which aligns them itself. None if the rows of an output cannot be written in place; never without outputs.
    """

    def fits(x: Tensor) -> bool:
        lies_right = aligned == 1 or not has_data or x.data_ptr() % 16 == 0
        return lies_right and has_whole_rows(x, axes) and is_aligned(x, axes, aligned)

    if not all(map(fits, outputs)):
        return None
    copies = tuple(not fits(x) for x in inputs)
    for tried in (copies, tuple(not x.is_contiguous() or copy for x, copy in zip(inputs, copies, strict=True))):
        # A copy is contiguous: a tensor of its shape without data stands for it.
        given = tuple(
            torch.empty(x.shape, dtype=x.dtype, device="meta") if copy else x
            for x, copy in zip(inputs, tried, strict=True)
        )
        found = layout((*given, *outputs), axes)
        if found is not None:
            return tried, found
    return None


def forward_launch(of: Program, laid: Layout, has_residual: bool, itemsizes: int) -> Launch:
    """The launch of a forward pass.

    Args:
        of: The program.
        laid: The layout of x, the residual if there is one, y, and the new residual.
        has_residual: x is added to a residual first.
        itemsizes: Bytes of one number of every tensor that is read, added up.
    """
    tiling = forward_tiling(laid.rows, of.n, of.n * itemsizes)
    strides = [_in_units(pair, of.aligned) for pair in laid.strides]
    if not has_residual:
        strides = [strides[0], (0, 0), strides[1], (0, 0)]
    constants = {
        "N": of.n,
        "CENTRE": of.centre,
        "EPS": of.eps,
        "EPS_PLACEMENT": of.placement,
        "DIVISOR": of.divisor,
        "MULTIPLIER": of.factor,
        "MOST_POWER": of.most_power,
        "WEIGHT_OFFSET": of.offset,
        "OFFSET_IN_PARAMETER": of.offset_in_parameter,
        "ROUND_RSTD": of.round_rstd,
        "ROUNDS": of.rounds,
        "CAST_TO_WEIGHT": of.cast_to_weight,
        "ALIGNED": of.aligned,
        "NESTED": laid.is_nested,
        "WIDE": of.wide,
    }
    own = (laid.inner, *(number for pair in strides for number in pair))
    if not tiling.is_whole:
        numbers = (laid.rows, *own)
        constants |= {"BLOCK_N": tiling.columns}
        return Launch(forward.normalize_long_rows, laid.rows, numbers, constants, tiling.warps)
    numbers = (laid.rows, tiling.tiles, *own)
    constants |= {"BLOCK_ROWS": tiling.rows, "BLOCK_N": tiling.columns, "STAGES": tiling.stages}
    return Launch(forward.normalize_rows, tiling.blocks(laid.rows), numbers, constants, tiling.warps)


class Backward(NamedTuple):
    """The launches of a backward pass."""

    row_sums: Launch | None
    """Computes the two sums of each row, where rows are taken in pieces and dx is needed."""
    differentiate: Launch
    """Computes dx, and the sums of each block."""
    add: Launch | None
    """Adds these sums, where a gradient of gain or bias is needed."""
    blocks: int
    """Lines of sums."""


def backward_launches(
    of: Program, laid: Layout, itemsizes: int, needs: tuple[bool, bool, bool], has_addend: bool
) -> Backward:
    """The launches of a backward pass.

    Args:
        of: The program.
        laid: The layout of dy, x, and the addend if there is one.
        itemsizes: Bytes of one number of each of these, added up.
        needs: Whether the gradients of x, gain and bias are needed.
        has_addend: An addend is added to dx.
    """
    needs_x, needs_weight, needs_bias = needs
    tiling = backward_tiling(laid.rows, of.n, of.n * itemsizes, needs_weight + needs_bias, wide=of.wide)
    blocks = tiling.blocks(laid.rows)
    shared = {"N": of.n, "CENTRE": of.centre, "EPS_PLACEMENT": of.placement, "DIVISOR": of.divisor}
    lying = {"ALIGNED": of.aligned, "NESTED": laid.is_nested, "WIDE": of.wide}
    gain = {"WEIGHT_OFFSET": of.offset, "OFFSET_IN_PARAMETER": of.offset_in_parameter}
    strides = [number for pair in laid.strides for number in _in_units(pair, of.aligned)]
    constants = {
        **shared,
        "MULTIPLIER": of.factor,
        **gain,
        "NEEDS_WEIGHT": needs_weight,
        "NEEDS_BIAS": needs_bias,
        **lying,
        "BLOCK_ROWS": tiling.rows,
        "BLOCK_N": tiling.columns,
        "STAGES": tiling.stages,
    }
    numbers = (laid.rows, laid.inner, *strides, *(() if has_addend else (0, 0)), tiling.tiles, blocks)
    programs = blocks * tiling.pieces(of.n)
    return Backward(
        row_sums=_row_sums(laid, strides, {**shared, **gain, **lying}) if needs_x and not tiling.is_whole else None,
        differentiate=Launch(backward.differentiate, programs, numbers, constants, tiling.warps),
        add=_add(of, blocks) if needs_weight or needs_bias else None,
        blocks=blocks,
    )


def _row_sums(laid: Layout, strides: list[int], constants: dict[str, object]) -> Launch:
    numbers = (laid.rows, laid.inner, *strides[:4])
    constants = {**constants, "BLOCK_N": 4096}
    return Launch(backward.sum_gradient_rows, laid.rows, numbers, constants, 8)


def _in_units(strides: tuple[int, int], aligned: int) -> tuple[int, int]:
    return strides[0] // aligned, strides[1] // aligned


def _add(of: Program, blocks: int) -> Launch:
    constants = {"N": of.n, "MULTIPLIER": of.factor, "BLOCK_ROWS": _LINES_OF_SUMS, "BLOCK_N": _COLUMNS_OF_SUMS}
    return Launch(backward.add_partial_sums, -(-of.n // _COLUMNS_OF_SUMS), (blocks,), constants, 4)


def empty_statistics(of: Program, rows: int, x: Tensor) -> Tensor:
    """An empty tensor for the numbers that forward keeps for each row."""
    return x.new_empty((of.statistics_lines, rows), dtype=torch.float32)
