"""The operators of normkit: definitions and fakes. No other file uses `torch.library`.

The compiled library registers their implementations for the CPU; devices.py has those for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from normkit.kernels import signatures
from normkit.kernels.signatures import SIGNATURES, unpacked
from normkit.kernels.triton import program
from normkit.ops import devices

_library = torch.library.Library("normkit", "DEF")  # type: ignore[no-untyped-call]
for _name, _signature in SIGNATURES.items():
    _library.define(_name + _signature, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    # ops/calls.py holds the gradient. Without this, torch would search the arguments of each call for one to warn of.
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]

normalize_rows = torch.ops.normkit.normalize_rows.default
normalize_rows_out = torch.ops.normkit.normalize_rows_out.default
normalize_forward = torch.ops.normkit.normalize_forward.default
add_normalize_forward = torch.ops.normkit.add_normalize_forward.default
add_normalize_rows_out = torch.ops.normkit.add_normalize_rows_out.default
normalize_backward = torch.ops.normkit.normalize_backward.default
count_rows = torch.ops.normkit.count_rows.default
mark_seen = torch.ops.normkit.mark_seen.default


def _output(x: Tensor, weight: Tensor | None, bias: Tensor | None, conventions: int) -> Tensor:
    """An empty y."""
    dtypes = (None if parameter is None else parameter.dtype for parameter in (weight, bias))
    return x.new_empty(x.shape, dtype=signatures.output_dtype(unpacked(conventions).output, x.dtype, *dtypes))


def _statistics(x: Tensor, weight: Tensor | None, bias: Tensor | None, conventions: int) -> Tensor:
    of = unpacked(conventions)
    rows = math.prod(x.shape[: -of.axes])
    if x.is_cuda:
        wide = program.is_wide(*(given.dtype for given in (x, weight, bias) if given is not None))
        lines = program.statistics_lines(bool(of.centre), of.placement, wide)
        return x.new_empty((lines, rows), dtype=torch.float32)
    return x.new_empty((rows, 3 if x.dtype == torch.float64 else 2), dtype=torch.float64)


def _fake_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, conventions: int, *_: float) -> Tensor:
    return _output(x, weight, bias, conventions)


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, conventions: int, *_: float
) -> tuple[Tensor, Tensor]:
    return _output(x, weight, bias, conventions), _statistics(x, weight, bias, conventions)


def _fake_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, conventions: int, *_: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = _output(x, weight, bias, conventions)
    return y, residual.new_empty(residual.shape), _statistics(residual, weight, bias, conventions)


def _fake_out(*arguments: Any) -> None:
    """Nothing is returned, and the output given keeps its shape."""


def _fake_backward(
    _dy: Tensor, x: Tensor, _statistics: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    needed = zip((x, weight, bias), rest[-3:], strict=True)
    return tuple(
        given.new_empty(given.shape) if is_needed and given is not None else x.new_empty(0)
        for given, is_needed in needed
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "normalize_rows": _fake_rows,
    "normalize_rows_out": _fake_out,
    "normalize_forward": _fake_forward,
    "add_normalize_forward": _fake_add_forward,
    "add_normalize_rows_out": _fake_out,
    "normalize_backward": _fake_backward,
    "count_rows": _fake_out,
    "mark_seen": _fake_out,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"normkit::{_name}", _fake, lib=_library)

# A watch counts rows on a GPU in plain torch.
for _name in _FAKES.keys() - {"count_rows", "mark_seen"}:
    _library.impl(_name, devices.eager(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_torch_dispatch(
        f"normkit::{_name}", FunctionalTensorMode, devices.traced(_name), lib=_library
    )
