"""Which elements share statistics: one element is changed, and the outputs that move must be those of its row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.identification.coupling import moved_outputs
from normkit.testing.norm_under_test import NormUnderTest
from normkit.testing.violation import Violation

_ENOUGH = 0.8
"""Share of a row that must move: an output that is nearly zero may stay where it is by chance."""


def rows(norm: NormUnderTest) -> Violation | None:
    """The statistics are those of the spec's rows, and of nothing else."""
    x = norm.normal(norm.shape[0])
    # In the middle along each axis, so that movement before it and behind it is seen.
    index = tuple(size // 2 for size in x.shape)
    if not bool(norm.y(x).isfinite().all()):
        return Violation(
            check="formula",
            expected=str(norm.spec),
            found="outputs that are NaN or infinite for ordinary rows",
            confirm=f"norm(torch.randn{tuple(x.shape)})",
        )
    numbers = norm.spec.rows.numbers(x)
    own = numbers == numbers[index]
    tolerance = 0.05 if norm.is_half else 1e-4
    moved = moved_outputs(
        lambda given: norm.y(given).double(),
        x,
        index,
        8 * math.sqrt(int(own.sum())),
        # An output that is NaN has moved.
        lambda change, rest: ~(change <= tolerance * (rest.square().mean().sqrt() + rest.abs())),
    )
    leaked, reached = moved & ~own, moved & own
    # In 16 bits a small change can drown in the rounding of a bias.
    enough = 0.0 if norm.is_half else _ENOUGH
    if not bool(leaked.any()) and int(reached.sum()) >= enough * int(own.sum()):
        return None
    return Violation(
        check="rows",
        expected=f"only its own row, {int(own.sum())} outputs along {_axes(own, index)}, to move with one element",
        found=f"{int(moved.sum())} outputs along {_axes(moved, index)} move{_meaning(leaked, index)}",
        confirm=f"change x[{', '.join(map(str, index))}] of x = torch.randn{tuple(x.shape)} and see which outputs move",
    )


def _axes(moved: Tensor, index: tuple[int, ...]) -> str:
    """The axes along which something but the element itself moved."""
    away = (moved.nonzero() != torch.tensor(index)).any(0).nonzero().flatten().tolist()
    return f"ax{'i' if len(away) == 1 else 'e'}s {', '.join(map(str, away))}" if away else "no axis"


def _meaning(leaked: Tensor, index: tuple[int, ...]) -> str:
    places = leaked.nonzero()
    if not len(places):
        return ": too few share statistics"
    if bool((places[:, 0] != index[0]).any()):
        return ": samples are coupled"
    if len(index) > 2 and bool((places[:, 1] < index[1]).any()):
        return ": earlier positions feel later ones"
    return ""
