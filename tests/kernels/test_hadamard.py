"""Rotations by the compiled kernels: the bits of plain torch, for every dtype, axis, order and instruction set."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.hadamard import compiled, rotate_runs
from normkit.checkpoint.plan import Rotation, Rows
from normkit.errors import InputError
from normkit.kernels import cpu
from normkit.kernels.hadamard import turn

pytestmark = pytest.mark.skipif(cpu.load() is not None, reason="no compiled kernels")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCKS = Rows(blocks=2, tail=64)


def along(axis: int, size: int, rows: Rows | None = None) -> Rotation:
    return Rotation(axis=axis, size=size, seed=f"{axis}/x", construction="", rows=rows)


def numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes, with zeros, a row and a column of zeros among them."""
    draw = torch.Generator().manual_seed(rows + columns)
    values = torch.randn(rows, columns, generator=draw) * torch.exp2(torch.randint(-9, 2, (rows, 1), generator=draw))
    values *= torch.rand(rows, columns, generator=draw) > 0.1
    values[:, 0] = values[-1] = 0
    return values.to(dtype)


def by_torch(x, out, factors, length, down, across):
    """(result, largest, error) in float64 and rounded once, as where there is no compiler."""
    wide = x.double() if factors is None else x.double() * factors
    wide = wide.contiguous().clone()
    for rotation, shape in ((down, (-1, length, x.shape[1])), (across, (*x.shape, 1))):
        if rotation is not None:
            rotate_runs(wide.numpy().reshape(shape), rotation)
    result = rounded(wide, out)
    return result, float(wide.abs().max()), float((wide - result.double()).abs().max())


def compare(x, out, *, factors=None, length=None, down=None, across=None):
    length = length or len(x)
    expected, largest, error = by_torch(x, out, factors, length, down, across)
    made = {"down": down and compiled(down), "across": across and compiled(across)}
    found = torch.empty(x.shape, dtype=out)
    assert turn(x, found, factors=factors, length=length, **made) == (largest, error)
    # Signs of zeros, too.
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


SIZES = (1, 2, 4, 8, 12, 16, 20, 52, 64, 96, 192, 284, 576, 1024, 4096, 5120)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_order_has_the_bits_of_torch(size, dtype, axis):
    other = 3 if size > 1000 else 37
    made = along(axis, size)
    if axis:
        compare(numbers(other, 2 * size, dtype), dtype, across=made)
    else:
        compare(numbers(2 * size, other, dtype), dtype, length=2 * size, down=made)


@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.bfloat16,) * 2, (torch.float16, torch.float32), (torch.float64,) * 2]
)
def test_both_axes_parts_of_them_and_factors(dtype, out):
    by_column, by_row = torch.rand(192, dtype=torch.float64) + 0.5, torch.rand(256, 1, dtype=torch.float64) + 0.5
    x = numbers(256, 192, dtype)
    compare(x, out, factors=by_column, down=along(0, 256), across=along(1, 64))
    compare(x, out, factors=by_row, length=64, down=along(0, 64), across=along(1, 192))
    compare(x, out, factors=by_row[:, :1], length=128, down=along(0, 32, Rows(blocks=1, tail=96)))
    compare(x, out, down=along(0, 32, BLOCKS), across=along(1, 16, Rows(blocks=2, tail=32)))
    compare(x, out, factors=by_column)
    compare(x[:64, 3:190], out, factors=by_column[3:190], down=along(0, 64))


def test_a_result_may_take_the_place_of_its_source():
    x = numbers(128, 200, torch.bfloat16)
    expected, *_ = by_torch(x, x.dtype, None, 128, along(0, 128), along(1, 8))
    turn(x, x, factors=None, length=128, down=compiled(along(0, 128)), across=compiled(along(1, 8)))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
def test_a_number_is_rounded_once_in_the_middle_and_below_the_normal_ones(out):
    # Halfway between two neighbours, and beside it by less than float32 sees; and the smallest numbers there are.
    middle, least = 1 + torch.finfo(out).eps / 2, torch.finfo(out).smallest_normal
    smallest = least * torch.finfo(out).eps
    values = [middle, middle + 2**-40, middle - 2**-40, middle + 2**-23, 3 * middle, 3 * middle - 2**-40]
    values += [
        smallest / 2,
        smallest / 2 * (1 + 2**-50),
        1.5 * smallest,
        1.5 * smallest * (1 - 2**-50),
        least - smallest,
    ]
    values += [torch.finfo(out).max, torch.finfo(out).max * (1 + 2**-14), -0.0, math.inf, 1e300]
    x = torch.tensor([values, [-value for value in values]], dtype=torch.float64)
    found, expected = torch.empty(x.shape, dtype=out), rounded(x, out)
    turn(x, found, factors=None, length=2, down=None, across=None)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("size", [64, 576])
def test_what_is_not_finite_reaches_its_whole_run_and_nothing_else(fault, size):
    x = numbers(5, 2 * size, torch.bfloat16)
    x[1, 3] = fault
    expected, *_ = by_torch(x, x.dtype, None, 5, None, along(1, size))
    found = torch.empty_like(x)
    turn(x, found, factors=None, length=5, down=None, across=compiled(along(1, size)))
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert int((~found.isfinite()).sum()) == size
    assert torch.equal(found[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.slow
@pytest.mark.parametrize("path", ["portable", "avx2", "avx512"])
def test_every_instruction_set_has_them(path):
    before = cpu.instructions()
    try:
        cpu.select(path)
    except InputError as error:
        pytest.skip(str(error))
    try:
        for dtype in DTYPES:
            for size in (8, 64, 96, 1024, 3072):
                test_every_order_has_the_bits_of_torch(size, dtype, 0)
                test_every_order_has_the_bits_of_torch(size, dtype, 1)
        test_both_axes_parts_of_them_and_factors(torch.bfloat16, torch.bfloat16)
        test_a_number_is_rounded_once_in_the_middle_and_below_the_normal_ones(torch.float16)
    finally:
        cpu.select(before)


def test_another_seed_has_other_bits():
    x, found = numbers(2, 64, torch.float32), [torch.empty(2, 64) for _ in range(2)]
    for seed, out in zip("ab", found, strict=True):
        across = compiled(replace(along(1, 64), seed=seed))
        turn(x, out, factors=None, length=2, down=None, across=across)
    assert not torch.equal(*found)
