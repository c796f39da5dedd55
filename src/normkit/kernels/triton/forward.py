"""Forward: rows are measured and normalized while one program holds them, or in pieces if they are too long.

    s = sqrt(v + eps), sqrt(v) + eps or max(sqrt(v), eps);  v = sum(d * d) / divisor,  d = x - mean or x
    y = factor * (x - mean) / s * gain + bias

With a residual, x + residual is normalized, rounded to the residual's dtype. `statistics` has one line for each number
that `keep_statistics` lists and one column for each row; rows.py says what the numbers are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.kernels.triton.rows import (
    INSIDE,
    inverse_scale,
    is_untrusted,
    measure,
    normalized,
    power_for,
    row_offsets,
    scaled_and_shifted,
    sum_of_rows,
)

# A kernel is compiled for its constants and dtypes alone: otherwise the order of its sums, and so the bits, would
# depend on the strides and the number of rows.
NUMBERS = [
    "rows",
    "tiles",
    "inner",
    *(f"{tensor}_{stride}" for tensor in ("x", "residual", "y", "new") for stride in ("outer", "stride")),
]


@triton.jit
def keep_statistics(
    statistics,
    row,
    is_row,
    rows,
    power,
    mean,
    remainder,
    inverse,
    rest,
    ratio,
    CENTRE: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the numbers of each row that backward needs, one line for each number."""
    at = statistics + row
    tl.store(at, inverse, mask=is_row)
    at += rows
    tl.store(at, power, mask=is_row)
    if CENTRE:
        at += rows
        tl.store(at, mean, mask=is_row)
        at += rows
        tl.store(at, remainder, mask=is_row)
    if EPS_PLACEMENT != INSIDE:
        at += rows
        tl.store(at, ratio, mask=is_row)
    if WIDE:
        at += rows
        tl.store(at, rest, mask=is_row)


@triton.jit
def read_and_add(x, residual, new_residual, x_at, residual_at, new_at, mask):
    """The rows to normalize, in float32: x, or its sum with the residual, rounded to that dtype and stored."""
    value = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + residual_at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(new_residual + new_at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    return value


@triton.jit(do_not_specialize=NUMBERS)
def normalize_rows(
    x,
    residual,
    weight,
    bias,
    y,
    new_residual,
    statistics,
    rows,
    tiles,
    inner,
    x_outer,
    x_stride,
    residual_outer,
    residual_stride,
    y_outer,
    y_stride,
    new_outer,
    new_stride,
    N: tl.constexpr,
    CENTRE: tl.constexpr,
    EPS: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    DIVISOR: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    MOST_POWER: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OFFSET_IN_PARAMETER: tl.constexpr,
    ROUND_RSTD: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAST_TO_WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NESTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`tiles` times BLOCK_ROWS whole rows for each program."""
    column = tl.arange(0, BLOCK_N)
    line = column[None, :]
    is_column = column < N
    begin = tl.program_id(0).to(tl.int64) * tiles * BLOCK_ROWS
    cast_dtype: tl.constexpr = weight.dtype.element_ty if CAST_TO_WEIGHT else x.dtype.element_ty
    for tile in tl.range(0, tiles if STAGES > 1 else 1, num_stages=STAGES):
        row = begin + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = row < rows
        mask = is_row[:, None] & is_column[None, :]
        x_at = row_offsets(row, inner, x_outer, x_stride, ALIGNED, NESTED)[:, None] + line
        residual_at = (
            row_offsets(row, inner, residual_outer, residual_stride, ALIGNED, NESTED)[:, None] + column[None, :]
        )
        new_at = row_offsets(row, inner, new_outer, new_stride, ALIGNED, NESTED)[:, None] + line
        value = read_and_add(x, residual, new_residual, x_at, residual_at, new_at, mask)
        power, mean, remainder, inverse, rest, ratio = measure(
            value, is_row, is_column[None, :], N, CENTRE, EPS, EPS_PLACEMENT, DIVISOR, MOST_POWER, WIDE
        )
        if statistics is not None:
            keep_statistics(
                statistics, row, is_row, rows, power, mean, remainder, inverse, rest, ratio, CENTRE, EPS_PLACEMENT, WIDE
            )
        result = normalized(value, power, mean, remainder, inverse, x.dtype.element_ty, CENTRE, MULTIPLIER, ROUND_RSTD)
        result = scaled_and_shifted(
            result, weight, bias, column, is_column, cast_dtype, ROUNDS, WEIGHT_OFFSET, OFFSET_IN_PARAMETER
        )
        y_at = row_offsets(row, inner, y_outer, y_stride, ALIGNED, NESTED)[:, None] + line
        tl.store(y + y_at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def long_moments(
    source, start, pivot, power, N: tl.constexpr, CENTRE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sums of the deviations of one long row from `pivot`, and of their squares, in units of power."""
    sums = tl.zeros([1, BLOCK_N], tl.float32)
    squares = sums
    for first in range(0, N, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)[None, :]
        value = tl.load(source + start[:, None] + column, mask=column < N, other=0.0, eviction_policy="evict_last")
        value = value.to(tl.float32) * power[:, None]
        if CENTRE:
            value = tl.where(column < N, value - pivot[:, None], 0.0)
            sums += value
        squares += value * value
    return sum_of_rows(sums, WIDE), sum_of_rows(squares, WIDE)


@triton.jit
def long_mean_and_square(
    source, start, power, N: tl.constexpr, CENTRE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`moments` of one long row.

    Deviations are taken from the mean of its first piece, and where that lies far from the mean, once more from this.
    """
    pivot = tl.zeros_like(power)
    if CENTRE:
        column = tl.arange(0, BLOCK_N)[None, :]
        piece = tl.load(source + start[:, None] + column, mask=column < N, other=0.0).to(tl.float32)
        pivot = tl.sum(piece * power[:, None], 1) / (N if N < BLOCK_N else BLOCK_N)
    total, square = long_moments(source, start, pivot, power, N, CENTRE, WIDE, BLOCK_N)
    remainder = total / N
    if CENTRE:
        is_near = 4.0 * (square / N - remainder * remainder) >= remainder * remainder
        if tl.min(is_near.to(tl.int32), 0) == 0:
            pivot += remainder.to(tl.float32)
            total, square = long_moments(source, start, pivot, power, N, CENTRE, WIDE, BLOCK_N)
            remainder = total / N
        square = tl.maximum(square - total * remainder, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return pivot, remainder.to(tl.float32), square


@triton.jit(do_not_specialize=NUMBERS)
def normalize_long_rows(
    x,
    residual,
    weight,
    bias,
    y,
    new_residual,
    statistics,
    rows,
    inner,
    x_outer,
    x_stride,
    residual_outer,
    residual_stride,
    y_outer,
    y_stride,
    new_outer,
    new_stride,
    N: tl.constexpr,
    CENTRE: tl.constexpr,
    EPS: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    DIVISOR: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    MOST_POWER: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OFFSET_IN_PARAMETER: tl.constexpr,
    ROUND_RSTD: tl.constexpr,
    ROUNDS: tl.constexpr,
    CAST_TO_WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NESTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row of any length for each program: read once to be measured, and again, from a cache, to be normalized."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK_N)
    x_start = row_offsets(row, inner, x_outer, x_stride, ALIGNED, NESTED)
    source, start = x, x_start
    if residual is not None:
        residual_start = row_offsets(row, inner, residual_outer, residual_stride, ALIGNED, NESTED)
        new_start = row_offsets(row, inner, new_outer, new_stride, ALIGNED, NESTED)
        for first in range(0, N, BLOCK_N):
            at = first + column
            read_and_add(x, residual, new_residual, x_start + at, residual_start + at, new_start + at, at < N)
        # Wait for the numbers that the other threads of this program write.
        tl.debug_barrier()
        source, start = new_residual, new_start
    power = tl.full([1], 1.0, tl.float32)
    mean, remainder, square = long_mean_and_square(source, start, power, N, CENTRE, WIDE, BLOCK_N)
    if tl.max(is_untrusted(square, N).to(tl.int32), 0) > 0:
        largest = tl.zeros([1, BLOCK_N], tl.float32)
        for first in range(0, N, BLOCK_N):
            at = (first + column)[None, :]
            value = tl.load(source + start[:, None] + at, mask=at < N, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        power = power_for(tl.max(largest, 1), MOST_POWER)
        mean, remainder, square = long_mean_and_square(source, start, power, N, CENTRE, WIDE, BLOCK_N)
    inverse, rest, ratio = inverse_scale(square, power, EPS, EPS_PLACEMENT, DIVISOR, WIDE)
    if statistics is not None:
        keep_statistics(
            statistics, row, row < rows, rows, power, mean, remainder, inverse, rest, ratio, CENTRE, EPS_PLACEMENT, WIDE
        )
    cast_dtype: tl.constexpr = weight.dtype.element_ty if CAST_TO_WEIGHT else x.dtype.element_ty
    y_start = row_offsets(row, inner, y_outer, y_stride, ALIGNED, NESTED)
    # Backwards: the pieces that were read last are the likeliest to be in the cache still.
    LAST: tl.constexpr = (N - 1) // BLOCK_N * BLOCK_N
    for done in range(0, N, BLOCK_N):
        at = (LAST - done) + column
        value = tl.load(source + start + at, mask=at < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        result = normalized(
            value[None, :], power, mean, remainder, inverse, x.dtype.element_ty, CENTRE, MULTIPLIER, ROUND_RSTD
        )
        result = scaled_and_shifted(
            result, weight, bias, at, at < N, cast_dtype, ROUNDS, WEIGHT_OFFSET, OFFSET_IN_PARAMETER
        )
        tl.store(y + (y_start + at)[None, :], result.to(y.dtype.element_ty), mask=(at < N)[None, :])
