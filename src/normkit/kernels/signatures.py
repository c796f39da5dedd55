"""The contract of the Python files and the library: the operators, and conventions as one number.

ops/schemas.py defines these operators with torch, csrc/operators.cpp and csrc/counting.cpp implement them. `version` is
a checksum of the contract; the library states the one for which it was written. `supports_spec` and `supports_sizes`
say which norms any kernel computes.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.spec import NormSpec


class Conventions(NamedTuple):
    """The conventions of a spec as small whole numbers, which an operator takes packed into one."""

    centre: int
    """1 if the mean is subtracted."""
    placement: int
    """0 inside, 1 outside, 2 as a clamp."""
    divisor: int
    """0 n, 1 n - 1, 2 one."""
    sqrt_n: int
    """1 if the row is multiplied by sqrt(n)."""
    cast: int
    """0 late, 1 early, 2 to the weight's dtype, 3 early with gain and bias."""
    round_rstd: int
    """1 if 1/s is rounded to the input's dtype."""
    offset_in_parameter_dtype: int
    """1 if the gain's offset is added in the parameter's dtype."""
    machine_eps: int
    """1 if eps is the machine epsilon of the arithmetic, whatever the operator's eps."""
    output: int
    """The dtype of y: 0 the input's, 1 promoted with the parameters', 2 the weight's."""
    axes: int
    """How many trailing axes form a row."""

    def packed(self) -> int:
        """All of them in one number, the first in the lowest bits."""
        number, shift = 0, 0
        for value, bits in zip(self, BITS, strict=True):
            number |= value << shift
            shift += bits
        return number


BITS = Conventions(1, 2, 2, 1, 2, 1, 1, 1, 2, 4)
"""The number of bits of each."""


def unpacked(number: int) -> Conventions:
    """The inverse of `Conventions.packed`."""
    values = []
    for bits in BITS:
        values.append(number & ((1 << bits) - 1))
        number >>= bits
    return Conventions(*values)


_FORWARD = "Tensor? weight, Tensor? bias, int conventions, float eps, float weight_offset"
SIGNATURES = {
    "normalize_rows": f"(Tensor x, {_FORWARD}) -> Tensor",
    "normalize_rows_out": f"(Tensor x, {_FORWARD}, Tensor(a!) out) -> ()",
    "normalize_forward": f"(Tensor x, {_FORWARD}) -> (Tensor y, Tensor statistics)",
    "add_normalize_forward": f"(Tensor x, Tensor residual, {_FORWARD})"
    " -> (Tensor y, Tensor new_residual, Tensor statistics)",
    "add_normalize_rows_out": f"(Tensor x, Tensor residual, {_FORWARD}, Tensor(a!) out, Tensor(b!) new_residual) -> ()",
    "normalize_backward": f"(Tensor dy, Tensor x, Tensor statistics, {_FORWARD}, Tensor? addend,"
    " bool needs_x, bool needs_weight, bool needs_bias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "count_rows": "(Tensor x, Tensor? counted, bool enters_norm, bool is_centred, int placement, float divisor,"
    " float unit, float limit_99, float limit_90, int place, Tensor(a!) sums, Tensor(b!) bins, Tensor(c!) peaks) -> ()",
    "mark_seen": "(Tensor x, int place, Tensor(a!) sentinel) -> ()",
}
"""The operators by name. `statistics` have one line for each row, in the kernels' own format; `addend` is added to dx
before dx is rounded. Gradients have the shape and dtype of their tensor; one that is not needed is empty. The last two
operators write to line `place` of the tables of a watch."""

HADAMARD: tuple[tuple[str, str], ...] = (("size", "int64"), ("order", "int64"), ("blocks", "int64"), ("tail", "int64"))
HADAMARD += (("signs", "pointer"), ("columns", "pointer"))
TURNING: tuple[tuple[str, str], ...] = (("x_type", "int32"), ("y_type", "int32"), ("x", "pointer"), ("y", "pointer"))
TURNING += tuple((name, "int64") for name in ("x_stride", "y_stride", "rows", "columns"))
TURNING += (("row_factors", "pointer"), ("column_factors", "pointer"), ("length", "int64"), ("strip", "int64"))
TURNING += (("down", "HADAMARD"), ("across", "HADAMARD"), ("largest", "double"), ("error", "double"))
"""The fields of two structures of kernels.h; `normkit_turn` takes the address of the second."""


def version() -> int:
    """The checksum of the signatures and of how conventions are packed."""
    layout = [f"{name}:{bits}" for name, bits in zip(Conventions._fields, BITS, strict=True)]
    return zlib.crc32(repr((SIGNATURES, layout, HADAMARD, TURNING)).encode()) & 0x7FFFFFFF


_MOST_AXES = 2**BITS.axes - 1


def supports_spec(spec: NormSpec) -> str | None:
    """Why no kernel computes norms of these conventions; None if a kernel does."""
    if spec.rows.no_kernel is None and len(spec.axes) > _MOST_AXES:
        return f"rows of more than {_MOST_AXES} axes"
    reasons = (each.no_kernel for each in (spec.rows, spec.centring, spec.placement, spec.gain, spec.casts))
    return next((reason for reason in reasons if reason is not None), None)


def supports_sizes(axes: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Why no kernel computes rows of the last `axes` axes of x with these parameters; None if a kernel does."""
    size = math.prod(x.shape[-axes:])
    if size == 0:
        return "empty rows"
    for parameter in (weight, bias):
        if parameter is None:
            continue
        if parameter.numel() != size or parameter.shape[-axes:] != x.shape[-axes:]:
            return "parameters that are not one number a feature"
    return None


def output_dtype(output: int, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> torch.dtype:
    """The dtype of y for an input of `dtype`; `output` as in `Conventions`."""
    if output == 2 and weight is not None:
        return weight
    if output == 1:
        for parameter in (weight, bias):
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter)
    return dtype
