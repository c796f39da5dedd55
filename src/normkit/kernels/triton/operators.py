"""The operators of `normkit.kernels.signatures` on a GPU, run eagerly or traced by a compiler.

A call whose tensors have the shapes, strides and dtypes of an earlier one finds its launches ready: with few rows, a
kernel takes less time than Python takes to call it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.errors import DtypeError, ShapeError
from normkit.kernels.triton import loading
from normkit.kernels.triton.delegation import delegated, is_delegated
from normkit.kernels.triton.launching import Launch, Run, Tensors, capture, compile_launch
from normkit.kernels.triton.planning import (
    Backward,
    Norm,
    backward_launches,
    empty_statistics,
    forward_launch,
    lay_out,
    program_of,
)
from normkit.kernels.triton.program import Program


class _Plan(NamedTuple):
    """How a call is computed."""

    program: Program
    """Its arithmetic."""
    copies: tuple[bool, ...]
    """Which inputs are copied first."""
    rows: int
    launches: Any
    """The launch of forward, or those of backward; None where torch's own kernel computes."""
    runs: dict[int, Run]
    """The same compiled, each when it first ran."""


_MOST_PLANS = 4096
_plans: dict[Any, _Plan] = {}


def normalize_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, *norm: Any, captures: bool = False) -> Tensor:
    """y alone; `norm` are the conventions, eps and offset, here and below."""
    y: Tensor = _forward(x, None, weight, bias, Norm(*norm), keeps=False, captures=captures)[0]
    return y


def normalize_rows_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *norm_and_out: Any, captures: bool = False
) -> None:
    """y, written to `out`, the last argument."""
    *norm, out = norm_and_out
    _forward(x, None, weight, bias, Norm(*norm), keeps=False, captures=captures, y=out)


def normalize_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *norm: Any, captures: bool = False
) -> tuple[Tensor, Tensor]:
    """y, and the numbers of each row that backward needs."""
    y, _, statistics = _forward(x, None, weight, bias, Norm(*norm), keeps=True, captures=captures)
    return y, statistics


def add_normalize_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *norm: Any, captures: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the new residual, and the numbers of each row that backward needs."""
    found: tuple[Tensor, Tensor, Tensor] = _forward(
        x, residual, weight, bias, Norm(*norm), keeps=True, captures=captures
    )
    return found


def add_normalize_rows_out(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *norm_and_out: Any, captures: bool = False
) -> None:
    """y and the new residual, written to the last two arguments."""
    *norm, out, new_residual = norm_and_out
    _forward(x, residual, weight, bias, Norm(*norm), keeps=False, captures=captures, y=out, new_residual=new_residual)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    *,
    keeps: bool,
    captures: bool,
    y: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Any:
    """y, the new residual and the statistics; None for those neither needed nor given."""
    weight, bias = _in_place(weight, captures), _in_place(bias, captures)
    key = plan = None
    if not captures:
        key = (norm, keeps, *map(_kind, (x, residual, weight, bias, y, new_residual)), x.device)
        plan = _plans.get(key)
    of = plan.program if plan else program_of(norm, x, x if residual is None else residual, weight, bias)
    if plan is None and not captures and y is None and residual is None and is_delegated(of, x, weight, bias):
        plan = _remember(key, _Plan(of, (), x.numel() // of.n, None, {}))
    if plan and plan.launches is None:
        return delegated(of, x, weight)
    if y is None:
        y = x.new_empty(x.shape, dtype=of.output)
    if residual is not None and new_residual is None:
        new_residual = x.new_empty(x.shape, dtype=residual.dtype)
    if plan is None:
        found = _forward_plan(of, x, residual, weight, bias, y, new_residual, norm.axes, has_data=not captures)
        if found is None:
            # The rows of the outputs cannot be written in place.
            fresh = _forward(x, residual, weight, bias, norm, keeps=keeps, captures=captures)
            return y.copy_(fresh[0]), None if new_residual is None else new_residual.copy_(fresh[1]), fresh[2]
        plan = _remember(key, found)
    statistics = empty_statistics(of, plan.rows, x) if keeps else None
    if plan.rows:
        x, residual = _copied(plan, (x, residual))
        tensors = (x, residual, weight, bias, y, new_residual, statistics)
        _start(plan, 0, plan.launches, tensors, captures)
    return y, new_residual, statistics


def _forward_plan(
    of: Program,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    new_residual: Tensor | None,
    axes: int,
    *,
    has_data: bool,
) -> _Plan | None:
    _check(of.n, (x, residual), (weight, bias))
    inputs = (x,) if residual is None else (x, residual)
    outputs = (y,) if new_residual is None else (y, new_residual)
    laid_out = lay_out(inputs, outputs, axes, of.aligned, has_data=has_data)
    if laid_out is None:
        return None
    copies, laid = laid_out
    itemsizes = sum(tensor.itemsize for tensor in (x, residual, weight, bias) if tensor is not None)
    return _Plan(of, copies, laid.rows, forward_launch(of, laid, residual is not None, itemsizes), {})


def normalize_backward(
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    conventions: int,
    eps: float,
    offset: float,
    addend: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    *,
    captures: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gain and bias; empty where not needed."""
    norm = Norm(conventions, eps, offset)
    weight = _in_place(weight, captures)
    needs = (needs_x, needs_weight and weight is not None, needs_bias and bias is not None)
    key = plan = None
    if not captures:
        key = (norm, needs, *map(_kind, (dy, x, weight, bias, addend)), x.device)
        plan = _plans.get(key)
    if plan is None:
        of = program_of(norm, x, x, weight, bias)
        plan = _remember(key, _backward_plan(of, dy, x, addend, norm.axes, needs, has_data=not captures))
    dx = x.new_empty(x.shape if needs[0] else 0)
    dweight = _gradient_of(weight, x, is_needed=needs[1], is_empty=not plan.rows)
    dbias = _gradient_of(bias, x, is_needed=needs[2], is_empty=not plan.rows)
    if not plan.rows or not any(needs):
        return dx, dweight, dbias
    dy, x, addend = _copied(plan, (dy, x, addend))
    launches: Backward = plan.launches
    sums = row_sums = None
    if launches.add is not None:
        dtype = torch.float64 if plan.program.wide else torch.float32
        sums = x.new_empty((needs[1] + needs[2], launches.blocks, plan.program.n), dtype=dtype)
    if launches.row_sums is not None:
        row_sums = x.new_empty((2, plan.rows), dtype=torch.float32)
        _start(plan, 0, launches.row_sums, (dy, x, statistics, weight, row_sums), captures)
    tensors = (dy, x, statistics, row_sums, weight, addend, dx if needs[0] else None, sums)
    _start(plan, 1, launches.differentiate, tensors, captures)
    if launches.add is not None:
        parameters = (dweight if needs[1] else None, dbias if needs[2] else None)
        _start(plan, 2, launches.add, (sums, *parameters), captures)
    return dx, dweight, dbias


def _backward_plan(
    of: Program,
    dy: Tensor,
    x: Tensor,
    addend: Tensor | None,
    axes: int,
    needs: tuple[bool, bool, bool],
    *,
    has_data: bool,
) -> _Plan:
    _check(of.n, (dy, x, addend), ())
    inputs = (dy, x) if addend is None else (dy, x, addend)
    laid_out = lay_out(inputs, (), axes, of.aligned, has_data=has_data)
    assert laid_out is not None
    copies, laid = laid_out
    itemsizes = sum(tensor.itemsize for tensor in inputs)
    return _Plan(of, copies, laid.rows, backward_launches(of, laid, itemsizes, needs, addend is not None), {})


def _check(n: int, rows: tuple[Tensor, *Tensors], parameters: Tensors) -> None:
    """Refuse tensors that the kernels would read wrongly; they are also called without the checks of `loading`."""
    for tensor in (*rows, *parameters):
        if tensor is not None and tensor.dtype not in loading.FLOATING:
            raise DtypeError(f"the Triton kernels compute float32, bfloat16 and float16, got {tensor.dtype}")
    if n == 0:
        raise ShapeError("the Triton kernels compute rows of at least one number, got empty ones")
    for tensor in rows[1:]:
        if tensor is not None and tensor.shape != rows[0].shape:
            raise ShapeError(
                f"tensors with rows must have one shape, got {tuple(rows[0].shape)} and {tuple(tensor.shape)}"
            )
    for parameter in parameters:
        if parameter is not None and parameter.numel() != n:
            raise ShapeError(f"a gain or bias must have {n} numbers, one for each feature, got {parameter.numel()}")


def _copied(plan: _Plan, inputs: Tensors) -> Any:
    """The inputs, with copies of those that the kernels cannot read in place."""
    if not any(plan.copies):
        return inputs
    copies = (*plan.copies, False)
    return tuple(
        x if x is None or not copy else x.clone(memory_format=torch.contiguous_format)
        for x, copy in zip(inputs, copies, strict=False)
    )


def _start(plan: _Plan, place: int, launch: Launch, tensors: Tensors, captures: bool) -> None:
    if captures:
        capture(launch, tensors)
        return None
    x = tensors[0]
    if x is not None and x.is_cuda and x.device.index != torch.cuda.current_device():
        # Triton compiles for the current device, and launches on it.
        with torch.cuda.device(x.device):
            return _start(plan, place, launch, tensors, captures)
    run = plan.runs.get(place)
    if run is None:
        run = plan.runs[place] = compile_launch(launch, tensors)
    run(tensors)
    return None


def _remember(key: Any, plan: _Plan) -> _Plan:
    """Keep the plan for calls with this key, and return it; traced calls have no key."""
    if key is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _kind(tensor: Tensor | None) -> Any:
    """The properties of a tensor on which a plan depends."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() & 15 == 0)


def _in_place(parameter: Tensor | None, captures: bool) -> Tensor | None:
    """A gain or bias that is contiguous and begins at a multiple of 16 bytes, which a compiler ensures itself."""
    if parameter is None or (parameter.is_contiguous() and (captures or parameter.data_ptr() & 15 == 0)):
        return parameter
    return parameter.clone(memory_format=torch.contiguous_format)


def _gradient_of(parameter: Tensor | None, x: Tensor, *, is_needed: bool, is_empty: bool) -> Tensor:
    if parameter is None or not is_needed:
        return x.new_empty(0)
    return parameter.new_zeros(parameter.shape) if is_empty else parameter.new_empty(parameter.shape)
