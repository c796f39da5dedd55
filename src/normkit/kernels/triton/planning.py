"""From the tensors of a call to launches: which rows, cut how, by which kernel."""

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
from normkit.kernels.triton.layout import Layout, has_whole_rows, layout
from normkit.kernels.triton.program import Program, program

_COLUMNS_OF_SUMS = 64
_LINES_OF_SUMS = 32


class Norm(NamedTuple):
    """What an operator takes beside tensors: see `normkit.kernels.signatures`."""

    conventions: int
    eps: float
    weight_offset: float

    @property
    def axes(self) -> int:
        """How many trailing axes are a row."""
        return unpacked(self.conventions).axes


def features(x: Tensor, norm: Norm) -> int:
    """How many numbers a row of x has."""
    return math.prod(int(size) for size in x.shape[x.dim() - norm.axes :])


def program_of(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Program:
    """The program of a norm of x."""
    dtypes = (None if parameter is None else parameter.dtype for parameter in (weight, bias))
    return program(*norm, features(x, norm), x.dtype, *dtypes)


def lay_out(inputs: Sequence[Tensor], outputs: Sequence[Tensor], axes: int) -> tuple[tuple[Tensor, ...], Layout] | None:
    """The inputs, copied where their rows cannot be read where they are, and where all rows then lie.

    None if the rows of an output cannot be written where they are.
    """
    given = tuple(x if has_whole_rows(x, axes) else x.contiguous() for x in inputs)
    if not all(has_whole_rows(x, axes) for x in outputs):
        return None
    found = layout((*given, *outputs), axes)
    if found is None:
        given = tuple(x.contiguous() for x in given)
        found = layout((*given, *outputs), axes)
    return None if found is None else (given, found)


def forward_launch(of: Program, laid: Layout, has_residual: bool, itemsizes: int) -> Launch:
    """The launch of a forward pass.

    Args:
        of: The program.
        laid: Of x, of the residual if there is one, of y, and of the new residual.
        has_residual: x is added to something first.
        itemsizes: Bytes of one number each of all that is read.
    """
    tiling = forward_tiling(laid.rows, of.n, of.n * itemsizes)
    strides = list(laid.strides)
    if not has_residual:
        strides = [strides[0], (0, 0), strides[1], (0, 0)]
    constants = {
        "N": of.n,
        "CENTRE": of.centre,
        "EPS": of.eps,
        "EPS_PLACEMENT": of.eps_placement,
        "DIVISOR": of.divisor,
        "MULTIPLIER": of.multiplier,
        "MOST_POWER": of.most_power,
        "WEIGHT_OFFSET": of.weight_offset,
        "OFFSET_IN_PARAMETER": of.offset_in_parameter,
        "ROUND_RSTD": of.round_rstd,
        "ROUNDS": of.rounds,
        "CAST_TO_WEIGHT": of.cast_to_weight,
        "NESTED": laid.is_nested,
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
    """The launches of a backward pass.

    Attributes:
        row_sums: Of the two sums of each row, where rows are taken in pieces and dx is wanted.
        differentiate: Of dx, and of the sums of each block.
        add: Of these sums, where a gradient of gain or bias is wanted.
        blocks: How many lines of sums there are.
    """

    row_sums: Launch | None
    differentiate: Launch
    add: Launch | None
    blocks: int


def backward_launches(
    of: Program, laid: Layout, itemsizes: int, needs: tuple[bool, bool, bool], has_addend: bool
) -> Backward:
    """The launches of a backward pass.

    Args:
        of: The program.
        laid: Of dy, of x, and of the addend if there is one.
        itemsizes: Bytes of one number each of all these.
        needs: Whether the gradients of x, gain and bias are wanted.
        has_addend: Something is added to dx.
    """
    needs_x, needs_weight, needs_bias = needs
    tiling = backward_tiling(laid.rows, of.n, of.n * itemsizes, needs_weight + needs_bias)
    blocks = tiling.blocks(laid.rows)
    shared = {"N": of.n, "CENTRE": of.centre, "EPS_PLACEMENT": of.eps_placement, "DIVISOR": of.divisor}
    gain = {"WEIGHT_OFFSET": of.weight_offset, "OFFSET_IN_PARAMETER": of.offset_in_parameter}
    strides = [number for pair in laid.strides for number in pair]
    constants = {
        **shared,
        "MULTIPLIER": of.multiplier,
        **gain,
        "NEEDS_WEIGHT": needs_weight,
        "NEEDS_BIAS": needs_bias,
        "NESTED": laid.is_nested,
        "BLOCK_ROWS": tiling.rows,
        "BLOCK_N": tiling.columns,
        "STAGES": tiling.stages,
    }
    numbers = (laid.rows, laid.inner, *strides, *(() if has_addend else (0, 0)), tiling.tiles, blocks)
    programs = blocks * tiling.pieces(of.n)
    return Backward(
        row_sums=_row_sums(laid, strides, {**shared, **gain}) if needs_x and not tiling.is_whole else None,
        differentiate=Launch(backward.differentiate, programs, numbers, constants, tiling.warps),
        add=_add(of, blocks) if needs_weight or needs_bias else None,
        blocks=blocks,
    )


def _row_sums(laid: Layout, strides: list[int], constants: dict[str, object]) -> Launch:
    numbers = (laid.rows, laid.inner, *strides[:4])
    constants = {**constants, "NESTED": laid.is_nested, "BLOCK_N": 4096}
    return Launch(backward.sum_gradient_rows, laid.rows, numbers, constants, 8)


def _add(of: Program, blocks: int) -> Launch:
    constants = {
        "N": of.n,
        "MULTIPLIER": of.multiplier,
        "BLOCK_ROWS": _LINES_OF_SUMS,
        "BLOCK_N": _COLUMNS_OF_SUMS,
    }
    return Launch(backward.add_partial_sums, -(-of.n // _COLUMNS_OF_SUMS), (blocks,), constants, 4)


def empty_statistics(of: Program, rows: int, x: Tensor) -> Tensor:
    """Room for what forward keeps of each row."""
    return torch.empty((of.statistics_lines, rows), dtype=torch.float32, device=x.device)
