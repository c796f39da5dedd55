"""Hadamard matrices times rows and columns by the compiled library: the bits of normkit/checkpoint/hadamard.py."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import cpu, signatures

# In the order of their numbers in the library.
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KINDS: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "double": ctypes.c_double,
    "pointer": ctypes.c_void_p,
}


class _Hadamard(ctypes.Structure):
    _fields_ = [(name, _KINDS[kind]) for name, kind in signatures.HADAMARD]


class _Turning(ctypes.Structure):
    _fields_ = [(name, _Hadamard if kind == "HADAMARD" else _KINDS[kind]) for name, kind in signatures.TURNING]


class Hadamard(NamedTuple):
    """H D / sqrt(n) of runs of n numbers along an axis, of each of so many equal blocks the last `tail`."""

    signs: Tensor
    """D: float64, of shape (n,)."""
    columns: Tensor | None
    """The columns, as rows, of the factor of H that butterflies do not make: float64, of shape (m, m)."""
    blocks: int = 1
    """Number of blocks."""
    tail: int = 0
    """Numbers taken of each block, a multiple of n; 0 for all."""

    def structure(self) -> _Hadamard:
        """The same as the library takes it; valid as long as the tensors are."""
        order = 1 if self.columns is None else len(self.columns)
        columns = None if self.columns is None else self.columns.data_ptr()
        return _Hadamard(len(self.signs), order, self.blocks, self.tail, self.signs.data_ptr(), columns)


def turn(
    x: Tensor, out: Tensor, *, factors: Tensor | None, length: int, down: Hadamard | None, across: Hadamard | None
) -> tuple[float, float]:
    """Write rows times their factors, turned along columns and then along rows, in float64 and rounded once.

    Call it only where `cpu.load()` is None.

    Args:
        x: Of shape (r, c), of a floating dtype, with contiguous rows.
        out: Likewise, of any floating dtype; it may be x.
        factors: float64 of shape (c,), or (r, 1), or None.
        length: Rows that `down` takes together; it divides r.
        down: Along columns, or None.
        across: Along rows, or None.

    Returns:
        The largest |number| and the largest |error of rounding|.
    """
    rows, columns = x.shape
    by_row = factors is not None and factors.dim() == 2
    factors = None if factors is None else factors.contiguous()
    pointer = None if factors is None else factors.data_ptr()
    strip = columns
    if across is not None and not across.tail:
        # Whole runs, and sixteen columns or more.
        size = len(across.signs)
        strip = min(columns, size * -(-16 // size))
    task = _Turning(
        _TYPES.index(x.dtype),
        _TYPES.index(out.dtype),
        x.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        out.stride(0),
        rows,
        columns,
        pointer if by_row else None,
        None if by_row else pointer,
        length,
        strip,
        _Hadamard(0, 1, 1, 0) if down is None else down.structure(),
        _Hadamard(0, 1, 1, 0) if across is None else across.structure(),
    )
    if cpu.handle().normkit_turn(ctypes.byref(task)):
        raise MemoryError(f"no memory to turn {rows} x {columns} numbers")
    return float(task.largest), float(task.error)
