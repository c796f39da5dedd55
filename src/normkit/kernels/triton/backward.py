"""Backward, and the gradients of gain and bias in two stages whose order depends on the shape alone.

    z = (x - mean) / s, h = dy * gain
    dx = factor / s * (h - mean(h) - z * q * sum(h * z) / divisor) + addend,  q = s / root
    dgain = factor * sum over rows of dy * z,  dbias = sum over rows of dy

A program takes a block of rows and writes one line of sums, in float64 where a number or parameter is float32; float32
is precise enough for 16-bit tensors. `add_partial_sums` adds the lines in float64. Rows too long for registers are read
twice: `sum_gradient_rows` writes the two sums of each row, and with these `differentiate` takes the rows in pieces.
h is taken in units of the row's power, as x is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.triton.rows import INSIDE, effective_gain, row_offsets

# As in forward.py.
NUMBERS = [
    "rows",
    "tiles",
    "inner",
    "blocks",
    *(f"{tensor}_{stride}" for tensor in ("dy", "x", "addend") for stride in ("outer", "stride")),
]


@triton.jit
def kept_statistics(
    statistics, row, is_row, rows, CENTRE: tl.constexpr, EPS_PLACEMENT: tl.constexpr, WIDE: tl.constexpr
):
    """The values that forward kept for each row: 1 / s, power, mean and remainder, s / root, and the error of 1 / s."""
    at = statistics + row
    inverse = tl.load(at, mask=is_row, other=0.0)
    at += rows
    power = tl.load(at, mask=is_row, other=0.0)
    mean = tl.zeros_like(inverse)
    remainder = mean
    ratio = mean + 1.0
    rest = mean
    if CENTRE:
        at += rows
        mean = tl.load(at, mask=is_row, other=0.0)
        at += rows
        remainder = tl.load(at, mask=is_row, other=0.0)
    if EPS_PLACEMENT != INSIDE:
        at += rows
        ratio = tl.load(at, mask=is_row, other=0.0)
    if WIDE:
        at += rows
        rest = tl.load(at, mask=is_row, other=0.0)
    return inverse, power, mean, remainder, ratio, rest


@triton.jit
def normalized_rows(value, inverse, power, mean, remainder, CENTRE: tl.constexpr):
    """z of a tile; any number where there is no element, as h is 0 there."""
    value = value * power[:, None]
    if CENTRE:
        value = (value - mean[:, None]) - remainder[:, None]
    return value * inverse[:, None]


@triton.jit
def wide_rows(value, inverse, rest, power, mean, remainder, CENTRE: tl.constexpr):
    """z of a tile in float64, from all statistics of its rows."""
    value = value.to(tl.float64) * power.to(tl.float64)[:, None]
    if CENTRE:
        value = value - (mean.to(tl.float64) + remainder.to(tl.float64))[:, None]
    return value * (inverse.to(tl.float64) + rest.to(tl.float64))[:, None]


@triton.jit
def store_sums(sums, block, blocks, line, total, column, is_column, N: tl.constexpr):
    """Write one line of sums over a block's rows: for the gain's gradient (line 0) or the bias's (1)."""
    # By halves: a sum of two numbers has one order, wherever a tile is in registers.
    for _ in tl.static_range(6):
        if total.shape[0] > 1:
            total = tl.sum(tl.reshape(total, [2, total.shape[0] // 2, total.shape[1]]), 0)
    at = (line * blocks + block).to(tl.int64) * N + column
    tl.store(sums + at, tl.reshape(total, [total.shape[1]]), mask=is_column)


@triton.jit(do_not_specialize=NUMBERS)
def sum_gradient_rows(
    dy,
    x,
    statistics,
    weight,
    row_sums,
    rows,
    inner,
    dy_outer,
    dy_stride,
    x_outer,
    x_stride,
    N: tl.constexpr,
    CENTRE: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    DIVISOR: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OFFSET_IN_PARAMETER: tl.constexpr,
    ALIGNED: tl.constexpr,
    NESTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One long row for each program: q * sum(h * z) / divisor and mean(h)."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    inverse, power, mean, remainder, ratio, _ = kept_statistics(
        statistics, row, row < rows, rows, CENTRE, EPS_PLACEMENT, WIDE
    )
    dy_start = row_offsets(row, inner, dy_outer, dy_stride, ALIGNED, NESTED)
    x_start = row_offsets(row, inner, x_outer, x_stride, ALIGNED, NESTED)
    column = tl.arange(0, BLOCK_N)
    products = tl.zeros([1, BLOCK_N], tl.float32)
    heights = products
    for first in range(0, N, BLOCK_N):
        at = first + column
        mask = (at < N)[None, :]
        upstream = tl.load(dy + (dy_start + at)[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + (x_start + at)[None, :], mask=mask, other=0.0).to(tl.float32)
        h = upstream * power[:, None]
        if weight is not None:
            h = h * effective_gain(weight, at, at < N, WEIGHT_OFFSET, OFFSET_IN_PARAMETER)[None, :]
        products += h * normalized_rows(value, inverse, power, mean, remainder, CENTRE)
        heights += h
    tl.store(row_sums + row, tl.div_rn(tl.sum(products, 1) * ratio, tl.zeros_like(ratio) + DIVISOR))
    if CENTRE:
        tl.store(row_sums + rows.to(tl.int64) + row, tl.sum(heights, 1) / N)


@triton.jit(do_not_specialize=NUMBERS)
def differentiate(
    dy,
    x,
    statistics,
    row_sums,
    weight,
    addend,
    dx,
    sums,
    rows,
    inner,
    dy_outer,
    dy_stride,
    x_outer,
    x_stride,
    addend_outer,
    addend_stride,
    tiles,
    blocks,
    N: tl.constexpr,
    CENTRE: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    DIVISOR: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OFFSET_IN_PARAMETER: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    NESTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`tiles` times BLOCK_ROWS rows for each program: whole, or BLOCK_N of their columns if `row_sums` is given."""
    column = tl.arange(0, BLOCK_N)
    block = tl.program_id(0)
    if row_sums is not None:
        pieces: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        column = (block % pieces).to(tl.int64) * BLOCK_N + column
        block = block // pieces
    is_column = column < N
    gain = tl.zeros([BLOCK_N], tl.float32) + 1.0
    if weight is not None and dx is not None:
        gain = effective_gain(weight, column, is_column, WEIGHT_OFFSET, OFFSET_IN_PARAMETER)
    of_weight = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float64 if WIDE else tl.float32)
    of_bias = of_weight
    begin = block.to(tl.int64) * tiles * BLOCK_ROWS
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = begin + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = row < rows
        mask = is_row[:, None] & is_column[None, :]
        dy_at = row_offsets(row, inner, dy_outer, dy_stride, ALIGNED, NESTED)[:, None] + column[None, :]
        x_at = row_offsets(row, inner, x_outer, x_stride, ALIGNED, NESTED)[:, None] + column[None, :]
        upstream = tl.load(dy + dy_at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
        inverse, power, mean, remainder, ratio, rest = kept_statistics(
            statistics, row, is_row, rows, CENTRE, EPS_PLACEMENT, WIDE
        )
        z = normalized_rows(value, inverse, power, mean, remainder, CENTRE)
        if NEEDS_WEIGHT:
            of_weight += upstream * (wide_rows(value, inverse, rest, power, mean, remainder, CENTRE) if WIDE else z)
        if NEEDS_BIAS:
            of_bias += upstream
        if dx is not None:
            h = (upstream * power[:, None]) * gain[None, :]
            if row_sums is None:
                slope = tl.div_rn(tl.sum(h * z, 1) * ratio, tl.zeros_like(ratio) + DIVISOR)
                centre = tl.sum(h, 1) / N if CENTRE else slope
            else:
                slope = tl.load(row_sums + row, mask=is_row, other=0.0)
                centre = tl.load(row_sums + rows.to(tl.int64) + row, mask=is_row, other=0.0) if CENTRE else slope
            if CENTRE:
                h = h - centre[:, None]
            result = (h - z * slope[:, None]) * (inverse * MULTIPLIER)[:, None]
            if addend is not None:
                at = row_offsets(row, inner, addend_outer, addend_stride, ALIGNED, NESTED)[:, None] + column[None, :]
                result += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + (row * N)[:, None] + column[None, :], result.to(dx.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        store_sums(sums, block, blocks, 0, of_weight, column, is_column, N)
    if NEEDS_BIAS:
        store_sums(sums, block, blocks, 1 if NEEDS_WEIGHT else 0, of_bias, column, is_column, N)


@triton.jit
def add_lines(sums, line, blocks, column, is_column, N: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The sum of the lines of all blocks, in float64."""
    total = tl.zeros([BLOCK_ROWS, column.shape[0]], tl.float64)
    for first in range(0, blocks, BLOCK_ROWS):
        block = first + tl.arange(0, BLOCK_ROWS)
        mask = (block < blocks)[:, None] & is_column[None, :]
        at = (line * blocks + block).to(tl.int64)[:, None] * N + column[None, :]
        total += tl.load(sums + at, mask=mask, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=NUMBERS)
def add_partial_sums(
    sums,
    dweight,
    dbias,
    blocks,
    N: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients of gain and bias: the sums of all blocks, each rounded once to its parameter's dtype."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    if dweight is not None:
        total = add_lines(sums, 0, blocks, column, is_column, N, BLOCK_ROWS) * MULTIPLIER
        tl.store(dweight + column, total.to(tl.float32).to(dweight.dtype.element_ty), mask=is_column)
    if dbias is not None:
        total = add_lines(sums, 1 if dweight is not None else 0, blocks, column, is_column, N, BLOCK_ROWS)
        tl.store(dbias + column, total.to(tl.float32).to(dbias.dtype.element_ty), mask=is_column)
