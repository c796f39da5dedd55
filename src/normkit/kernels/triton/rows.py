"""Device functions that all kernels share: where rows are, how they are measured, how their numbers are rounded.

A row is measured in units of `power`, a power of two that is 1 unless squares would leave float32's range; so a row of
1e30 or 1e-40 takes the same steps as any other. The mean is two float32 numbers: where it is far larger than the
deviations, its own rounding error counts. Where a number or parameter is float32 ("WIDE"), sums are float64 and 1 / s
is two numbers too: gradients of gain and bias must be right to a float32 unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Mean squares outside of these are not trusted: squares of smaller deviations are lost, sums of larger ones overflow.
LEAST_SQUARE = tl.constexpr(2.0**-90)
MOST_SQUARE = tl.constexpr(2.0**100)

# How eps enters, as in `normkit.kernels.signatures.Conventions`.
INSIDE = tl.constexpr(0)
OUTSIDE = tl.constexpr(1)


@triton.jit
def row_offsets(row, inner, outer_stride, stride, ALIGNED: tl.constexpr, NESTED: tl.constexpr):
    """The first element of each row: row = i * inner + j is at i * outer_stride + j * stride, in units of ALIGNED."""
    if NESTED:
        return ((row // inner) * outer_stride + (row % inner) * stride) * ALIGNED
    return row * stride * ALIGNED


@triton.jit
def split(wide):
    """A float64 number as two of float32."""
    high = wide.to(tl.float32)
    return high, (wide - high.to(tl.float64)).to(tl.float32)


@triton.jit
def sum_of_rows(value, WIDE: tl.constexpr):
    """Sums of the rows of a tile; WIDE in float64, by fours, whose own rounding is negligible among so many."""
    if WIDE and value.shape[1] >= 4:
        value = tl.sum(tl.reshape(value, [value.shape[0], value.shape[1] // 4, 4]), 2)
    return tl.sum(value.to(tl.float64) if WIDE else value, 1)


@triton.jit
def moments(value, is_column, N: tl.constexpr, CENTRE: tl.constexpr, WIDE: tl.constexpr):
    """Mean in two parts, and the sum of squared deviations, of the rows of a tile."""
    if CENTRE:
        if WIDE:
            # Not by fours: beside a large mean, their rounding is no longer negligible.
            mean, remainder = split(tl.sum(value.to(tl.float64), 1) * (1.0 / N))
            deviation = tl.where(is_column, (value - mean[:, None]) - remainder[:, None], 0.0)
        else:
            mean = tl.sum(value, 1) / N
            deviation = tl.where(is_column, value - mean[:, None], 0.0)
            remainder = tl.sum(deviation, 1) / N
            deviation = tl.where(is_column, deviation - remainder[:, None], 0.0)
    else:
        mean = tl.zeros([value.shape[0]], tl.float32)
        remainder = mean
        deviation = value
    return mean, remainder, sum_of_rows(deviation * deviation, WIDE)


@triton.jit
def is_untrusted(square, N: tl.constexpr):
    """Whether terms of a sum of squared deviations may have been lost or have overflowed; NaN is not trusted."""
    mean_square = square.to(tl.float32) / N
    return ((mean_square >= LEAST_SQUARE) & (mean_square <= MOST_SQUARE)) == 0


@triton.jit
def power_for(largest, MOST_POWER: tl.constexpr):
    """The power of two, at most MOST_POWER, that brings the largest size of a row near 1; 1 for 0, Inf and NaN."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    opposite = tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23
    power = tl.minimum(opposite.to(tl.float32, bitcast=True), MOST_POWER)
    return tl.where((largest > 0.0) & (exponent < 255), power, 1.0)


@triton.jit
def root_of(square, more):
    """The root of square + more, and its rounding error; `more` is small beside square."""
    root = tl.sqrt_rn(square)
    rest = tl.fma(-root, root, square) + more
    return root, tl.where(root > 0.0, rest / (2.0 * root), 0.0)


@triton.jit
def inverse_scale(
    square, power, EPS: tl.constexpr, EPS_PLACEMENT: tl.constexpr, DIVISOR: tl.constexpr, WIDE: tl.constexpr
):
    """1 / s, its rounding error (0 unless WIDE), and s / root, which is 0 where a clamp holds s.

    The last is how much more than the root s moves with the row.
    """
    if WIDE:
        scaled = power.to(tl.float64)
        divided = square * (1.0 / DIVISOR) if DIVISOR != 0 else square / tl.zeros_like(square)
        variance, more = split(divided + EPS * scaled * scaled if EPS_PLACEMENT == INSIDE else divided)
    else:
        variance = tl.div_rn(square, tl.zeros_like(square) + DIVISOR)
        if EPS_PLACEMENT == INSIDE:
            variance += EPS * power * power
        more = tl.zeros_like(variance)
    one = tl.zeros_like(power) + 1.0
    root, below = root_of(variance, more)
    scale = root
    ratio = one
    if EPS_PLACEMENT != INSIDE:
        shift = EPS * power
        if EPS_PLACEMENT == OUTSIDE:
            scale = root + shift
            # The rounding error of this addition by Knuth's two-sum, as either may be the larger.
            kept = scale - root
            below += (root - (scale - kept)) + (shift - kept)
            ratio = tl.where(root == 0.0, 0.0, tl.div_rn(scale, tl.where(root == 0.0, 1.0, root)))
        else:
            # Written so that a NaN stays one.
            scale = tl.where(root < shift, shift, root)
            below = tl.where(root < shift, 0.0, below)
            ratio = tl.where(root < shift, 0.0, one)
    inverse = tl.div_rn(one, scale)
    rest = tl.zeros_like(inverse)
    if WIDE:
        rest = inverse * (tl.fma(-inverse, scale, 1.0) - inverse * below)
        rest = tl.where((scale > 0.0) & (tl.abs(rest) < inverse), rest, 0.0)
    return inverse, rest, ratio


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
    WIDE: tl.constexpr,
):
    """power, mean and remainder, 1 / s and its rest, and s / root of the rows of a tile that holds them whole."""
    mean, remainder, square = moments(value, is_column, N, CENTRE, WIDE)
    power = tl.zeros([value.shape[0]], tl.float32) + 1.0
    untrusted = is_untrusted(square, N) & is_row
    if tl.max(untrusted.to(tl.int32), 0) > 0:
        power = tl.where(untrusted, power_for(tl.max(tl.abs(value), 1), MOST_POWER), 1.0)
        mean, remainder, square = moments(value * power[:, None], is_column, N, CENTRE, WIDE)
    inverse, rest, ratio = inverse_scale(square, power, EPS, EPS_PLACEMENT, DIVISOR, WIDE)
    return power, mean, remainder, inverse, rest, ratio


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
    """factor * (x - m) / s of measured rows, each with its power, mean and the other numbers."""
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
    """row * gain + bias, rounded to the cast's dtype after the first ROUNDS of the three steps.

    ROUNDS = 4: after all three, and gain and bias are rounded first.
    """
    if ROUNDS >= 1:
        row = row.to(cast_dtype).to(tl.float32)
    if weight is not None:
        gain = effective_gain(weight, column, is_column, WEIGHT_OFFSET, OFFSET_IN_PARAMETER)
        if ROUNDS == 4:
            gain = gain.to(cast_dtype).to(tl.float32)
        row = row * gain[None, :]
        if ROUNDS >= 2:
            row = row.to(cast_dtype).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        if ROUNDS == 4:
            shift = shift.to(cast_dtype).to(tl.float32)
        row = row + shift[None, :]
        if ROUNDS >= 3:
            row = row.to(cast_dtype).to(tl.float32)
    return row
