"""How rows are divided among programs: frozen data, chosen by the shape and the sizes of the numbers alone.

The gradients of gain and bias are summed in an order that follows from this, so nothing here depends on the GPU.
Registers, spills and shared memory of these choices, and of others: docs/explanation/gpu-kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

# Columns of a row that one program can hold in registers. Backward also holds one sum per column for gain and bias.
_MOST_FORWARD = 16384
_MOST_BACKWARD = 8192
# Rows of this length are loaded while the last one is computed; for shorter ones programs share a multiprocessor.
_LEAST_AHEAD = 16384
# Numbers of a row for one thread: with half as many, the work of a warp once per row is a third of all instructions;
# with twice as many, registers run short.
_FORWARD_OF_THREAD = 32
_BACKWARD_OF_THREAD = 16
# The second reading of a long row finds it in the cache only if all current rows fit there: from so many bytes on, a
# multiprocessor takes one row at a time.
_MANY_BYTES = 512 * 1024
# Shared memory for one program on every GPU from compute capability 8.0 on; loads ahead take most of it.
_MOST_BYTES_AHEAD = 96 * 1024
# Bytes that a multiprocessor must load ahead to use its share of the memory bandwidth.
_BYTES_AHEAD = 48 * 1024


@dataclass(frozen=True)
class Tiling:
    """The work of one program."""

    rows: int
    """Rows of a tile."""
    columns: int
    """Columns of a tile, a power of two."""
    tiles: int
    """Tiles that the program takes, one after the other."""
    warps: int
    """Warps of 32 threads that share a tile."""
    stages: int
    """Tiles in flight: 1 loads each when its turn comes."""
    is_whole: bool
    """A tile holds whole rows; otherwise rows are taken in pieces of `columns`."""

    @property
    def rows_per_block(self) -> int:
        """Rows of one program, all tiles together."""
        return self.rows * self.tiles

    def blocks(self, rows: int) -> int:
        """Programs needed for all rows, for one piece of columns."""
        return _quotient(rows, self.rows_per_block)

    def pieces(self, n: int) -> int:
        """Pieces of columns."""
        return 1 if self.is_whole else _quotient(n, self.columns)


def forward_tiling(rows: int, n: int, row_bytes: int) -> Tiling:
    """The tiling of a forward pass over rows of n features; `row_bytes` counts the inputs, gain and bias of one row."""
    rows, columns = rows or 1, _power_of_two(n)
    if columns > _MOST_FORWARD or (n >= _LEAST_AHEAD and row_bytes > _MOST_BYTES_AHEAD):
        size = 2 if row_bytes >= _MANY_BYTES else 1
        return Tiling(rows=1, columns=8192 * size, tiles=1, warps=16 * size, stages=1, is_whole=False)
    at_once = _rows_of_tile(columns, 2048)
    # By n, not by columns: lanes beyond the row take instructions too, and more numbers for fewer lanes cost less.
    warps = _power_below(max(2, at_once * n // (32 * _FORWARD_OF_THREAD)))
    if n >= _LEAST_AHEAD:
        return Tiling(rows=1, columns=columns, tiles=_quotient(rows, 1024), warps=warps, stages=2, is_whole=True)
    return Tiling(rows=at_once, columns=columns, tiles=1, warps=warps, stages=1, is_whole=True)


def backward_tiling(rows: int, n: int, row_bytes: int, sums: int, *, wide: bool) -> Tiling:
    """The tiling of a backward pass; `sums` is how many gradients are summed over rows, `wide` if in float64.

    There are enough programs to fill a GPU, but at most one for 32 rows, as each leaves a line of sums to be added.
    """
    rows, columns = rows or 1, _power_of_two(n)
    # Wider numbers come with wider sums, and leave room for half as many of each.
    of_thread = _BACKWARD_OF_THREAD if row_bytes <= 4 * n else _BACKWARD_OF_THREAD // 2
    # One sum per column fits twice the width, but for 14 registers of a thread; that beats a second reading.
    holds_twice = sums == 0 or (sums == 1 and not wide)
    if columns > _MOST_BACKWARD * (2 if holds_twice else 1):
        at_once, columns, is_whole = 2, 1024, False
        row_bytes = row_bytes * columns // n
    else:
        at_once, is_whole = _rows_of_tile(columns, 1024), True
    warps = min(16 if columns <= _MOST_BACKWARD else 32, max(2, at_once * columns // (32 * of_thread)))
    blocks = _quotient(rows, at_once)
    if sums:
        most = min(1024, max(256, 2**21 // columns)) if is_whole else max(1, 1024 // _quotient(n, columns))
        blocks = min(blocks, max(min(256, most), min(most, rows // 32)))
    tiles = _quotient(rows, at_once * blocks)
    stages = 1
    if tiles > 1:
        ahead = _quotient(_BYTES_AHEAD, row_bytes * at_once)
        stages = 1 + min(3, max(1, min(ahead, _MOST_BYTES_AHEAD // (row_bytes * at_once))))
    return Tiling(rows=at_once, columns=columns, tiles=tiles, warps=warps, stages=stages, is_whole=is_whole)


def _rows_of_tile(columns: int, elements: int) -> int:
    """How many rows make up a tile of so many elements."""
    return min(max(1, elements // columns), 64)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def _power_below(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


def _quotient(a: int, b: int) -> int:
    return -(-a // b)
