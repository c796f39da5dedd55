"""Device functions that all kernels share: where rows lie, what is measured of one, how its numbers are rounded.

A row is measured in units of `power`, a power of two that is 1 unless squares would leave float32's range; so a row of
1e30 or 1e-40 takes the same steps as any other. The mean is two float32 numbers: where it dwarfs the deviations, what
its own rounding leaves counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Mean squares outside of these are not to be trusted: squares of smaller deviations are lost, sums of larger ones
# overflow.
LEAST_SQUARE = tl.constexpr(2.0**-90)
MOST_SQUARE = tl.constexpr(2.0**100)

# How eps enters, as in `normkit.kernels.signatures.Conventions`.
INSIDE = tl.constexpr(0)
OUTSIDE = tl.constexpr(1)


@triton.jit
def row_offsets(row, inner, outer_stride, stride, NESTED: tl.constexpr):
    """Where rows begin, in elements: row = i * inner + j lies at i * outer_stride + j * stride."""
    if NESTED:
        return (row // inner) * outer_stride + (row % inner) * stride
    return row * stride


@triton.jit
def moments(value, is_column, N: tl.constexpr, CENTRE: tl.constexpr):
    """Mean in two parts, and the sum of squared deviations, of the rows of a tile."""
    if CENTRE:
        mean = tl.sum(value, 1) / N
        deviation = tl.where(is_column, value - mean[:, None], 0.0)
        remainder = tl.sum(deviation, 1) / N
        deviation = tl.where(is_column, deviation - remainder[:, None], 0.0)
    else:
        mean = tl.zeros([value.shape[0]], tl.float32)
        remainder = mean
        deviation = value
    return mean, remainder, tl.sum(deviation * deviation, 1)


@triton.jit
def is_untrusted(square, N: tl.constexpr):
    """Whether a sum of squared deviations may have lost or overflowed what it is made of; NaN is not trusted."""
    mean_square = square / N
    return ((mean_square >= LEAST_SQUARE) & (mean_square <= MOST_SQUARE)) == 0


@triton.jit
def power_for(largest, MOST_POWER: tl.constexpr):
    """The power of two, at most MOST_POWER, that brings the largest size of a row near 1; 1 for 0, Inf and NaN."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    opposite = tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23
    power = tl.minimum(opposite.to(tl.float32, bitcast=True), MOST_POWER)
    return tl.where((largest > 0.0) & (exponent < 255), power, 1.0)


@triton.jit
def inverse_scale(square, power, EPS: tl.constexpr, EPS_PLACEMENT: tl.constexpr, DIVISOR: tl.constexpr):
    """1 / s, and how much more than the root under it s moves with the row (s / root; 0 where a clamp holds it)."""
    variance = tl.div_rn(square, tl.zeros_like(square) + DIVISOR)
    one = tl.zeros_like(square) + 1.0
    if EPS_PLACEMENT == INSIDE:
        scale = tl.sqrt_rn(variance + EPS * power * power)
        ratio = one
    else:
        root = tl.sqrt_rn(variance)
        shift = EPS * power
        if EPS_PLACEMENT == OUTSIDE:
            scale = root + shift
            ratio = tl.where(root == 0.0, 0.0, tl.div_rn(scale, tl.where(root == 0.0, 1.0, root)))
        else:
            # Written so that a NaN stays one.
            scale = tl.where(root < shift, shift, root)
            ratio = tl.where(root < shift, 0.0, one)
    return tl.div_rn(one, scale), ratio


@triton.jit
def measure(
    value,
    is_row,
    is_column,
    N: tl.constexpr,
    CENTRE: tl.constexpr,
    EPS: tl.constexpr,
    EPS_PLACEMENT: tl.constexpr,
    DIVISOR: tl.constexpr,
    MOST_POWER: tl.constexpr,
):
    """power, mean and its remainder, 1 / s and s / root of the rows of a tile that holds them whole."""
    mean, remainder, square = moments(value, is_column, N, CENTRE)
    power = tl.zeros_like(square) + 1.0
    untrusted = is_untrusted(square, N) & is_row
    if tl.max(untrusted.to(tl.int32), 0) > 0:
        power = tl.where(untrusted, power_for(tl.max(tl.abs(value), 1), MOST_POWER), 1.0)
        mean, remainder, square = moments(value * power[:, None], is_column, N, CENTRE)
    inverse, ratio = inverse_scale(square, power, EPS, EPS_PLACEMENT, DIVISOR)
    return power, mean, remainder, inverse, ratio


@triton.jit
def effective_gain(weight, at, is_column, WEIGHT_OFFSET: tl.constexpr, OFFSET_IN_PARAMETER: tl.constexpr):
    """The gain of some columns with its offset, in float32."""
    gain = tl.load(weight + at, mask=is_column, other=0.0).to(tl.float32)
    if WEIGHT_OFFSET != 0.0:
        gain += WEIGHT_OFFSET
        if OFFSET_IN_PARAMETER:
            gain = gain.to(weight.dtype.element_ty).to(tl.float32)
    return gain


@triton.jit
def normalized(
    value,
    power,
    mean,
    remainder,
    inverse,
    input_dtype: tl.constexpr,
    CENTRE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    ROUND_RSTD: tl.constexpr,
):
    """multiplier * (x - m) / s of rows that are measured, each of which has one line of power, mean and the rest."""
    if ROUND_RSTD:
        # Both factors and their product are numbers of the input's dtype, so in units of 1.
        if CENTRE:
            value = (value - (mean / power)[:, None]) - (remainder / power)[:, None]
        rounded = (inverse * power).to(input_dtype).to(tl.float32)
        product = value.to(input_dtype).to(tl.float32) * rounded[:, None]
        return product.to(input_dtype).to(tl.float32) * MULTIPLIER
    value = value * power[:, None]
    if CENTRE:
        value = (value - mean[:, None]) - remainder[:, None]
    return value * (inverse * MULTIPLIER)[:, None]


@triton.jit
def scaled_and_shifted(
    row,
    weight,
    bias,
    column,
    is_column,
    cast_dtype: tl.constexpr,
    ROUNDS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OFFSET_IN_PARAMETER: tl.constexpr,
):
    """row * gain + bias, rounded to the cast's dtype after as many of the three steps as the spec's program rounds."""
    if ROUNDS >= 1:
        row = row.to(cast_dtype).to(tl.float32)
    if weight is not None:
        row = row * effective_gain(weight, column, is_column, WEIGHT_OFFSET, OFFSET_IN_PARAMETER)[None, :]
        if ROUNDS >= 2:
            row = row.to(cast_dtype).to(tl.float32)
    if bias is not None:
        row = row + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ROUNDS >= 3:
            row = row.to(cast_dtype).to(tl.float32)
    return row
