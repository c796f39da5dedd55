"""Products and casts are the exact value rounded once, sums depend on nothing but values and shape."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normkit.checkpoint import arithmetic
from normkit.checkpoint.arithmetic import (
    add_rows,
    all_finite,
    factor,
    partition,
    quotient,
    rounded,
    row_sums,
    scaled,
)
from tensor_files import same_bits

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Significant bits, and the exponent of the smallest number.
FORMATS = {BF16: (8, -133), F16: (11, -24), F32: (24, -149), F64: (53, -1074)}


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """The definition: the multiple of the unit in the last place that is nearest, the even one of two."""
    if exact == 0:
        return 0.0
    precision, smallest = FORMATS[dtype]
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    value = round(exact / unit) * unit
    if abs(value) > Fraction(torch.finfo(dtype).max):
        return math.inf if value > 0 else -math.inf
    return float(value)


def all_of(dtype: torch.dtype) -> Tensor:
    """Every number of 16 bits that is not negative, in order, the infinity last."""
    infinity = int(torch.tensor(math.inf, dtype=dtype).view(torch.int16))
    return torch.arange(infinity + 1, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_middle_of_sixteen_bits_and_what_lies_beside_it(dtype, sign):
    numbers = all_of(dtype)
    below, above = numbers[:-1], numbers[1:]
    # Beyond the largest, the next number would be one unit further.
    values = numbers.to(F64)
    values[-1] = 2 * values[-2] - values[-3]
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(below.view(torch.int16) % 2 == 0, below, above)
    assert same_bits(rounded(sign * middle, dtype), sign * even)
    towards = torch.full_like(middle, math.inf)
    assert same_bits(rounded(sign * torch.nextafter(middle, towards), dtype), sign * above)
    assert same_bits(rounded(sign * torch.nextafter(middle, -towards), dtype), sign * below)
    assert same_bits(rounded(sign * numbers.to(F64), dtype), sign * numbers)


def test_torch_rounds_twice():
    # What all this is for: a value just above a middle, lost on the way through float32.
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=F64)
    assert value.to(BF16).item() == 1
    assert rounded(value, BF16).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_what_is_no_number(dtype):
    values = torch.tensor([math.inf, -math.inf, -0.0, 0.0, 1e-320, -1e-320], dtype=F64)
    assert same_bits(rounded(values, dtype), values.to(dtype))
    assert rounded(torch.full((9,), math.nan, dtype=F64), dtype).isnan().all()


@pytest.mark.slow
@given(st.floats(allow_nan=False, allow_infinity=False, width=64), st.sampled_from(list(FORMATS)))
def test_rounding_is_the_definition(value, dtype):
    assert rounded(torch.tensor([value], dtype=F64), dtype).item() == nearest(Fraction(value), dtype)


def sampled(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Numbers of every size that the dtype has, some with few bits, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(bits)
    drawn = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=bits).view(dtype)
    drawn = torch.where(drawn.isfinite(), drawn, 0.0)
    usual = torch.randn(count, generator=generator, dtype=F64).to(dtype)
    few = torch.randint(-9, 9, (count,), generator=generator).to(dtype)
    choice = torch.randint(0, 3, (count,), generator=generator)
    return torch.where(choice == 0, drawn, torch.where(choice == 1, usual, few))


@pytest.mark.parametrize("output", [BF16, F16, F32, F64])
@pytest.mark.parametrize("gain_dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("source", [BF16, F16, F32, F64])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_products_are_rounded_once(source, gain_dtype, output, offset):
    rows, gain = sampled(source, 300, 1).view(15, 20), sampled(gain_dtype, 20, 2).to(F64) + offset
    by_column = scaled(rows, factor(gain, source, output))
    column = factor(gain, source, output).part(slice(None))
    by_row = scaled(rows.t().contiguous(), column).t()
    # A factor for each row takes the same way as one for each column.
    assert same_bits(by_column, by_row)
    exact = [[Fraction(x) * Fraction(g) for x, g in zip(row, gain.tolist(), strict=True)] for row in rows.tolist()]
    expected = [[nearest(value, output) for value in row] for row in exact]
    assert by_column.dtype is output
    assert by_column.tolist() == expected


@pytest.mark.parametrize("source", [BF16, F16, F32])
def test_products_at_the_end_of_the_range(source):
    # Where float32 has no more bits than the 16, or none at all.
    tiny = sampled(source, 400, 3).to(F64) * 2.0**-60
    rows, gain = rounded(tiny, source).view(20, 20), sampled(source, 20, 4).to(F64) * 2.0**-66
    gain = rounded(gain, source).to(F64)
    result = scaled(rows, factor(gain, source, source))
    exact = [[Fraction(x) * Fraction(g) for x, g in zip(row, gain.tolist(), strict=True)] for row in rows.tolist()]
    assert result.tolist() == [[nearest(value, source) for value in row] for row in exact]


def test_a_product_that_float64_rounds_to_a_middle():
    # In float64 the product is 1 + 2^-24, a middle of float32; exactly it is a little less.
    row, gain = 1 + 2.0**-23, (1 + 2.0**-24) / (1 + 2.0**-23)
    assert row * gain == 1 + 2.0**-24
    exact = Fraction(row) * Fraction(gain)
    assert exact != 1 + Fraction(1, 2**24)
    rows = torch.tensor([[row, -row]], dtype=F32)
    result = scaled(rows, factor(torch.tensor([gain, gain], dtype=F64), F32, F32))
    assert result.tolist() == [[nearest(exact, F32), -nearest(exact, F32)]]
    # From both sides, for many such gains.
    generator = np.random.default_rng(0)
    for _ in range(200):
        number = float(np.float32(1 + generator.random()))
        middle = float(np.float32(1 + generator.random())) + 2.0**-24
        gain = middle / number
        value = scaled(torch.tensor([[number]], dtype=F32), factor(torch.tensor([gain], dtype=F64), F32, F32))
        assert value.item() == nearest(Fraction(number) * Fraction(gain), F32)


def test_quick_ways_are_taken():
    gain = torch.randn(8).to(BF16).to(F64)
    assert factor(gain, BF16, BF16).values.dtype is BF16
    assert factor(gain, BF16, F32).values.dtype is F32
    assert factor(gain, F16, F16).values.dtype is F16
    assert factor(gain + 1, BF16, BF16).values.dtype is F64
    assert factor(gain + 1, BF16, BF16).is_exact
    assert not factor(gain + 1e-9, F32, F32).is_exact


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_quotients_are_rounded_once(dtype):
    above, below = sampled(dtype, 900, 5), sampled(dtype, 900, 6)
    kept = below != 0
    above, below = torch.cat([above[kept], torch.zeros(2, dtype=dtype)]).to(F64), below[kept].to(F64)
    below = torch.cat([below, torch.tensor([0.0, -2.0], dtype=F64)])
    result = quotient(above, below, dtype)
    assert result[-2:].tolist() == [0, 0]
    expected = [
        nearest(Fraction(a) / Fraction(b), dtype) for a, b in zip(above[:-2].tolist(), below.tolist(), strict=False)
    ]
    assert result[:-2].tolist() == expected


@pytest.mark.slow
@given(rows=st.integers(0, 50), columns=st.integers(0, 40), chunk=st.integers(1, 200))
def test_chunks_cover_all_rows_once(rows, columns, chunk):
    kept, arithmetic.CHUNK = arithmetic.CHUNK, chunk
    try:
        found = list(partition(rows, columns))
    finally:
        arithmetic.CHUNK = kept
    assert [row for start, stop in found for row in range(start, stop)] == list(range(rows))
    assert all(stop - start == 1 or (stop - start) * columns <= chunk for start, stop in found)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 129, 1000])
def test_a_row_sums_to_the_same_whatever_lies_beside_it(columns):
    values = torch.randn(37, columns, dtype=F64, generator=torch.Generator().manual_seed(0)) * 1e5
    sums = row_sums(values)
    for row in range(37):
        assert row_sums(values[row : row + 1].clone()).item() == sums[row].item()
        assert sums[row].item() == pytest.approx(math.fsum(values[row].tolist()), rel=1e-9, abs=columns * 1e-11)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 129, 1000])
@pytest.mark.parametrize("step", [1, 2, 5, 8, 300])
def test_rows_are_added_one_after_the_other_in_chunks_of_any_size(columns, step):
    values = torch.randn(300, columns, dtype=F64, generator=torch.Generator().manual_seed(0)) * 1e5
    total = torch.zeros(columns, dtype=F64)
    for start in range(0, 300, step):
        block = torch.cat([torch.full((1, columns), math.nan, dtype=F64), values[start : start + step]])
        add_rows(total, block)
    expected = torch.zeros(columns, dtype=F64)
    for row in values:
        expected += row
    assert same_bits(total, expected)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_what_is_finite(dtype):
    assert all_finite(torch.empty(0, dtype=dtype))
    largest = torch.finfo(dtype).max
    for size in (1, 7, 1000):
        values = torch.full((size,), largest, dtype=dtype)
        values[0] = -largest
        assert all_finite(values)
        for bad in (math.inf, -math.inf, math.nan, -math.nan):
            values[-1] = bad
            assert not all_finite(values)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_many_threads_give_the_bits_of_one(seed):
    values = torch.randn(600, 700, dtype=F64, generator=torch.Generator().manual_seed(seed))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            gain = values[0].clone()
            results.append([rounded(values, BF16), scaled(values.to(BF16), factor(gain, BF16, BF16)), row_sums(values)])
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(one, many) for one, many in zip(*results, strict=True))
