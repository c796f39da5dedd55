"""Rows and columns are all taken, each once, by blocks that the shape and the sizes of numbers alone decide."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit.kernels.triton import configuration
from normkit.kernels.triton.configuration import Tiling, backward_tiling, forward_tiling

ROWS = st.integers(0, 5000) | st.integers(0, 2**33)
LENGTHS = st.integers(1, 5000) | st.integers(1, 2**21) | st.integers(0, 20).map(lambda power: 2**power)
# Bytes that are read for one feature: a 16-bit input alone up to float32 x, residual, gain and bias.
BYTES = st.sampled_from([2, 4, 6, 8, 10, 12, 16])


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


def check(tiling: Tiling, rows: int, n: int, row_bytes: int):
    assert is_power_of_two(tiling.rows)
    assert is_power_of_two(tiling.columns)
    assert is_power_of_two(tiling.warps)
    assert tiling.warps <= 32
    assert tiling.tiles >= 1
    assert tiling.stages >= 1
    # Every column in one piece, none in two.
    assert tiling.columns * tiling.pieces(n) >= n > tiling.columns * (tiling.pieces(n) - 1)
    # Every row in one block; no block without rows.
    blocks = tiling.blocks(rows)
    assert blocks * tiling.rows_per_block >= rows
    assert rows > (blocks - 1) * tiling.rows_per_block or rows == 0
    # A grid has less than 2 ** 31 programs for any tensor that fits a GPU.
    if rows * n < 2**38:
        assert blocks * tiling.pieces(n) < 2**31 or n < 16
    # Loads ahead lie in shared memory, which has 99 KiB for a program on the smallest of these GPUs.
    if tiling.stages > 1:
        each = row_bytes // n
        assert (tiling.stages - 1) * tiling.columns * each * tiling.rows <= 99 * 1024


@pytest.mark.slow
@given(ROWS, LENGTHS, BYTES)
def test_forward_takes_every_row_and_column_once(rows, n, each):
    check(forward_tiling(rows, n, n * each), rows, n, n * each)


# dy, x and what is added to dx.
@pytest.mark.slow
@given(ROWS, LENGTHS, st.sampled_from([4, 6, 8, 10, 12]), st.integers(0, 2))
def test_backward_takes_every_row_and_column_once(rows, n, each, sums):
    tiling = backward_tiling(rows, n, n * each, sums, wide=each > 4)
    check(tiling, rows, n, n * each)
    if sums:
        # Lines of sums are few beside the rows, or at most what fills a GPU.
        assert tiling.blocks(rows) <= max(1024, rows // 32)
        assert tiling.blocks(rows) * n * 8 <= 2**27 or tiling.blocks(rows) <= 256


@pytest.mark.slow
@given(st.tuples(ROWS, ROWS), LENGTHS, BYTES)
def test_how_a_row_is_measured_does_not_depend_on_how_many_there_are(rows, n, each):
    """But for how many tiles follow each other, which touches no row."""
    one, other = (forward_tiling(number, n, n * each) for number in rows)
    assert one.__class__(**{**vars(one), "tiles": 1}) == one.__class__(**{**vars(other), "tiles": 1})
    one, other = (backward_tiling(number, n, n * each, 2, wide=False) for number in rows)
    assert (one.rows, one.columns, one.warps, one.is_whole) == (other.rows, other.columns, other.warps, other.is_whole)


@pytest.mark.parametrize("sums", [0, 1, 2])
def test_a_whole_row_is_held_where_it_can_be(sums):
    assert all(forward_tiling(3, n, 4 * n).is_whole for n in (1, 768, 4096, 8192))
    assert not forward_tiling(3, 100_000, 400_000).is_whole
    assert all(backward_tiling(3, n, 4 * n, sums, wide=False).is_whole for n in (1, 768, 4096, 8192))
    assert not backward_tiling(3, 100_000, 400_000, sums, wide=False).is_whole


def test_one_sum_that_is_not_wide_holds_twice_the_width():
    given = [(0, False), (0, True), (1, False), (1, True), (2, False)]
    whole = [backward_tiling(3, 16384, 65536, sums, wide=wide).is_whole for sums, wide in given]
    assert whole == [True, True, True, False, False]


def test_short_rows_share_a_program():
    assert forward_tiling(1000, 64, 128).rows >= 16
    assert backward_tiling(1000, 64, 128, 2, wide=False).rows >= 8
    assert forward_tiling(1000, 4096, 8192).rows == 1


def test_which_gpu_it_is_is_not_asked():
    assert "import torch" not in inspect.getsource(configuration)
