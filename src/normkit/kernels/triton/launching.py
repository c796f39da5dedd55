"""Launches: the arguments of a kernel, and how it is called, eagerly or traced by a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.library import wrap_triton

Tensors = tuple[Tensor | None, ...]
Run = Callable[[Tensors], None]


class Launch(NamedTuple):
    """A kernel and all its arguments but the tensors."""

    kernel: Any
    """The Triton function."""
    programs: int
    numbers: tuple[int, ...]
    """Its arguments after the tensors."""
    constants: dict[str, Any]
    """Its compile-time arguments, by name."""
    warps: int
    """Warps of each program."""


def capture(launch: Launch, tensors: Tensors) -> None:
    """Launch as an operation that torch.compile traces, and compiles with its surroundings."""
    kernel = wrap_triton(launch.kernel)
    kernel[(launch.programs,)](*tensors, *launch.numbers, **launch.constants, num_warps=launch.warps)


def compile_launch(launch: Launch, tensors: Tensors) -> Run:
    """The launch for these tensors, and for others of their dtypes and alignment.

    Triton's own call checks the type and the alignment of each argument every time; this checks once.
    """
    grid, arguments = (launch.programs, 1, 1), (*tensors, *launch.numbers)
    if not hasattr(launch.kernel, "device_caches"):
        # Triton's interpreter, which compiles nothing.
        interpreted = launch.kernel[grid]
        return lambda given: interpreted(*given, *launch.numbers, **launch.constants)
    # Explicit, as Triton's default will change: products are fused with the sums that they enter.
    options = {"num_warps": launch.warps, "enable_fp_fusion": True}
    compiled = launch.kernel.warmup(*arguments, **launch.constants, **options, grid=grid)
    # The launcher takes compile-time arguments too, in their place, and ignores them.
    tail = (*launch.numbers, *(launch.constants[name] for name in launch.kernel.arg_names[len(arguments) :]))
    run = compiled[grid]
    return lambda given: run(*given, *tail)
