"""Rows counted into the tables of a watch by the kernels, where these support it.

Elsewhere - no compiler, another device, an empty tensor, a transform - the caller counts in plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from normkit.ops import calls, schemas

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Counted(NamedTuple):
    """The quantities counted for each row, as the operator takes them."""

    enters_norm: bool
    """Count deviations from the mean too, and the effect of eps."""
    is_centred: bool = False
    """The norm divides by the deviation, else by the root mean square."""
    placement: int = 0
    """0 inside, 1 outside, 2 as a clamp."""
    divisor: float = 0.0
    """The norm divides a sum of squares by it; at most 0 where it has none."""
    unit: float = 0.0
    """eps, or its root where it is inside."""
    limit_99: float = 0.0
    """The norm's divisor, without eps, over `unit`, for a row that eps shortens to 0.99."""
    limit_90: float = 0.0
    """The same for 0.9."""


def can_count(x: Tensor, table: Tensor) -> bool:
    """Whether the kernels can count the rows of x (its last axis) into a table."""
    kind = type(x)
    return (
        calls._kernels_missing is None
        and (kind is Tensor or kind is Parameter)
        and x.is_cpu
        and table.is_cpu
        and x.dtype in _FLOATING
        and x.dim() > 0
        and x.numel() > 0
        and not calls._is_transformed()
    )


def count_rows(
    x: Tensor, counted: Tensor | None, what: Counted, place: int, sums: Tensor, bins: Tensor, peaks: Tensor
) -> None:
    """Add the rows of x to one line of three tables, where `can_count`.

    Args:
        x: Shape (..., n), without a gradient.
        counted: True for each row that counts, flat; None for all.
        what: What is counted.
        place: The line.
        sums: The table "rows" of a watch.
        bins: Its table "bins".
        peaks: Its table "row peaks".
    """
    operator: Any = schemas.count_rows if torch.compiler.is_compiling() else schemas.count_rows._op
    operator(x, counted, *what, place, sums, bins, peaks)


def mark_seen(x: Tensor, place: int, sentinel: Tensor) -> None:
    """Add one call to a line (0, calls) of a sentinel where `can_count`, NaN to both if an element is not finite."""
    operator: Any = schemas.mark_seen if torch.compiler.is_compiling() else schemas.mark_seen._op
    operator(x, place, sentinel)
