"""The points that a user passes: checked once, thinned to what a page can show, with a note on each change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.errors import DtypeError, InputError, KindError, ShapeError
from normkit.measurement.sampling import evenly
from normkit.text import first_line

BUDGET = 2000
"""Points of a page, over all that it shows."""

_LONGEST_LABEL = 80
_COLOURS = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Points:
    """Points with a name and a group each."""

    rows: Tensor
    """Shape (N, n), finite, in float64."""
    dtype: torch.dtype
    """The floating-point dtype in which the points were given."""
    labels: tuple[str, ...]
    """One per point; points without a label are numbered from "1"."""
    groups: tuple[int, ...] | None
    """One number from 0 to 7 per point; None if no groups were given."""
    notes: tuple[str, ...]
    """Points that were left out, one line each."""


def checked(points: Any, labels: Sequence[object] | None, groups: Any) -> Points:
    """The points that a page can show.

    Args:
        points: Shape (N, n): a tensor, an array or lists of numbers.
        labels: N texts, or None.
        groups: N whole numbers from 0, or None.

    Raises:
        KindError: If the points or the groups are no numbers.
        DtypeError: If the points are complex or of truth values.
        ShapeError: If they are not of shape (N, n), or labels or groups are not one for each.
        InputError: If there is no point that is finite.
    """
    given = _tensor(points)
    if given.dim() != 2 or not given.shape[1]:
        raise ShapeError(f"points must be of shape (N, n), one row a point, got {tuple(given.shape)}; reshape them")
    count = len(given)
    names = _labels(labels, count)
    numbers = None if groups is None else _groups(groups, count)
    rows = given.detach().to("cpu", torch.float64)
    kept = drawable_rows(rows).nonzero().flatten()
    notes = []
    if count == 0:
        raise InputError("explore needs at least one point, got none")
    lost = count - len(kept)
    if lost == count:
        raise InputError(
            f"explore needs a finite point, got {count:,} with NaN, infinity or more than float32 holds; mend them"
        )
    if lost:
        holds, are = ("holds", "is") if lost == 1 else ("hold", "are")
        notes.append(
            f"{lost:,} of {count:,} points {holds} NaN, infinity or more than float32 can, and {are} left out."
        )
    if len(kept) > BUDGET:
        notes.append(f"{BUDGET:,} of {len(kept):,} points are shown, evenly spread over them all.")
        kept = kept[evenly(len(kept), BUDGET)]
    chosen = kept.tolist()
    return Points(
        rows=rows[kept],
        dtype=given.dtype if given.is_floating_point() else torch.get_default_dtype(),
        labels=tuple(names[index] for index in chosen),
        groups=None if numbers is None else tuple(numbers[index] for index in chosen),
        notes=tuple(notes),
    )


def drawable_rows(rows: Tensor) -> Tensor:
    """For each row of shape (N, n), whether it is finite and its length fits float32."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return lengths.le(torch.finfo(torch.float32).max)


def label_text(label: object) -> str:
    """A label as text that fits a line, and that can be written as UTF-8."""
    text = str(label).encode(errors="replace").decode()
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…"


def vector(name: str, values: Any, n: int) -> Tensor:
    """A gain or bias of n features, in float64.

    Args:
        name: What to call it.
        values: n numbers, or one for all.
        n: Features of a point.

    Raises:
        KindError: If it holds no numbers.
        DtypeError: If it is complex or of truth values.
        ShapeError: If it has neither one number nor n.
        InputError: If a number is not finite.
    """
    given = _tensor(values, name).detach().to("cpu", torch.float64)
    if given.numel() not in (1, n) or given.dim() > 1:
        raise ShapeError(f"{name} must have one number for each of the {n} features, got shape {tuple(given.shape)}")
    if not bool((given.abs() <= torch.finfo(torch.float32).max).all()):
        raise InputError(f"{name} must be finite numbers of float32, and it holds NaN, infinity or more")
    return given.expand(n) if given.numel() == 1 else given


def _tensor(values: Any, name: str = "points") -> Tensor:
    try:
        given = values if isinstance(values, Tensor) else _made_tensor(values)
        given = given.to_dense() if given.layout != torch.strided else given
        if given.is_meta:
            raise ValueError("it has a shape and no values")
    except (TypeError, ValueError, RuntimeError) as error:
        raise KindError(
            f"{name} must be a tensor, an array or lists of numbers of one length ({first_line(error)})"
        ) from None
    if given.is_complex() or given.dtype == torch.bool:
        raise DtypeError(f"{name} must be real numbers, got {given.dtype}")
    return given


def _made_tensor(values: Any) -> Tensor:
    """A tensor made from an array or from lists, with memory of its own."""
    if isinstance(values, (list, tuple)) and values and all(isinstance(row, Tensor) for row in values):
        return torch.stack([row.detach() for row in values])
    if not hasattr(values, "__array__"):
        return torch.as_tensor(values)
    array = np.array(values)
    # PyTorch takes only the machine's byte order, and no Python objects.
    return torch.from_numpy(array.astype(np.float64 if array.dtype == object else array.dtype.newbyteorder("=")))


def _labels(labels: Sequence[object] | None, count: int) -> list[str]:
    if labels is None:
        return [str(number) for number in range(1, count + 1)]
    if isinstance(labels, str):
        raise KindError(f"labels must be a sequence of texts, one for each point, got the text {labels!r}")
    texts = list(labels)
    if len(texts) != count:
        raise ShapeError(f"labels must be one for each of the {count} points, got {len(texts)}")
    return [label_text(text) for text in texts]


def _groups(groups: Any, count: int) -> list[int]:
    given = _tensor(groups, "groups").flatten()
    if len(given) != count:
        raise ShapeError(f"groups must be one for each of the {count} points, got {len(given)}")
    if given.is_floating_point() or bool((given < 0).any()):
        raise KindError(f"groups must be whole numbers from 0, got {given.dtype} from {float(given.min()):g}")
    return [int(number) % _COLOURS for number in given]
