"""Launches: what a kernel is called with, and how it is called: at once, or for a compiler to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.library import wrap_triton

Tensors = tuple[Tensor | None, ...]
Run = Callable[[Tensors], None]


class Launch(NamedTuple):
    """A kernel and all it is called with but the tensors."""

    kernel: Any
    """The Triton function."""
    programs: int
    """How many run."""
    numbers: tuple[int, ...]
    """Its arguments after the tensors."""
    constants: dict[str, Any]
    """Its compile-time arguments, by name."""
    warps: int
    """Warps a program."""


def capture(launch: Launch, tensors: Tensors) -> None:
    """Launch as an operation that torch.compile sees, and compiles with what is around it."""
    kernel = wrap_triton(launch.kernel)
    kernel[(launch.programs,)](*tensors, *launch.numbers, **launch.constants, num_warps=launch.warps)


def compile_launch(launch: Launch, tensors: Tensors) -> Run:
    """The launch for these tensors, and for others of their dtypes and alignment.

    Triton's own way to a kernel asks for the type and the alignment of each argument at each call; this asks once.
    """
    grid, arguments = (launch.programs, 1, 1), (*tensors, *launch.numbers)
    if not hasattr(launch.kernel, "device_caches"):
        # Triton's interpreter, which compiles nothing.
        interpreted = launch.kernel[grid]
        return lambda given: interpreted(*given, *launch.numbers, **launch.constants)
    # Said, as what Triton takes for granted is to change: products are fused with the sums that they enter.
    options = {"num_warps": launch.warps, "enable_fp_fusion": True}
    compiled = launch.kernel.warmup(*arguments, **launch.constants, **options, grid=grid)
    # The launcher takes compile-time arguments too, in their place, and passes over them.
    tail = (*launch.numbers, *(launch.constants[name] for name in launch.kernel.arg_names[len(arguments) :]))
    run = compiled[grid]
    return lambda given: run(*given, *tail)
