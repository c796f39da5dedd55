"""The gradient of an activation, counted on its way back; the activation and its gradient stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.identification.sharding import local
from normkit.watching.tallies import add_gradient


class _Tap(torch.autograd.Function):
    """The identity, which counts the gradient that passes: what a compiler traces where it cannot trace a hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        add_gradient(ctx.table, local(gradient))
        return gradient, None


def tapped(x: Tensor, table: Tensor, guarded: Callable[..., object]) -> Tensor | None:
    """Have the gradient of x counted into one line of a table.

    Args:
        x: An activation that requires a gradient.
        table: A line of the table "taps".
        guarded: Calls a function with arguments, and never raises.

    Returns:
        What to go on with in place of x where a compiler traces; None where x itself will do.
    """
    if torch.compiler.is_compiling():
        replaced: Tensor = _Tap.apply(x, table)  # type: ignore[no-untyped-call]
        return replaced

    # A hook would stay on a parameter, and count the next step's gradient too.
    if x.is_leaf:
        return None

    def count(gradient: Tensor) -> None:
        guarded(add_gradient, table, local(gradient))

    x.register_hook(count)  # type: ignore[no-untyped-call]
    return None
