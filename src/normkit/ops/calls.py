"""Which implementation computes a call, and its gradient.

The kernels compute what they support; `reference.py` computes the rest, and everything that is differentiated by a
transform, in forward mode, or twice. `normalize_plain` is the short way for nearly all calls: for one row of 4096, the
code between the caller and the kernel takes longer than the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.nn import Parameter

from normkit import reference
from normkit.kernels import cpu
from normkit.kernels.triton import loading
from normkit.ops import checking, devices, schemas
from normkit.ops.plans import KernelPlan

# Why there are no kernels, or None. Loaded here, once: torch.compile cannot trace the loading of a library.
_kernels_missing = cpu.load()
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class _Operators(NamedTuple):
    """The operators that compute norms."""

    normalize_rows: Any
    normalize_rows_out: Any
    normalize_forward: Any
    add_normalize_forward: Any
    add_normalize_rows_out: Any
    normalize_backward: Any


# The operators' own __call__ takes a third of a microsecond to pass its arguments on to `_op`. The compiler knows only
# the operators.
_on_cpu = _Operators(*(getattr(schemas, name)._op for name in _Operators._fields))


@functools.cache
def _on_gpu() -> _Operators:
    return _Operators(*(getattr(devices.operators(), name) for name in _Operators._fields))


def _operators(x: Tensor) -> Any:
    """The operators for tensors like x."""
    if torch.compiler.is_compiling():
        return schemas
    return _on_cpu if x.is_cpu else _on_gpu()


def is_written_down(x: Tensor) -> bool:
    """Whether `torch.jit.trace` or `torch.fx` records the operations on x, to run them without normkit."""
    return _is_tracing() or isinstance(x, fx.Proxy)


def _is_transformed() -> bool:
    """Whether torch.func, forward-mode differentiation, an export or `torch.jit.trace` sees the calls."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_exporting()
        or _is_tracing()
    )


class Route(NamedTuple):
    """How a call is computed: by the kernels or the reference, inside an autograd node of ours or not."""

    uses_kernel: bool
    is_node: bool


_PLAIN_REFERENCE = Route(uses_kernel=False, is_node=False)


def choose(
    plan: KernelPlan, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> Route:
    """Which implementation computes a call.

    A transform, forward-mode differentiation or an export sees the reference's own operations: an autograd node there
    fails, or is silently wrong. Else the kernels compute what they support, and one node holds the gradient where one
    is wanted; the node around the reference has the same gradient, every cast taken as the identity.
    """
    if _is_transformed():
        return _PLAIN_REFERENCE
    given = (x, weight, bias, residual)
    is_node = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    uses_kernel = plan.unsupported is None and _has_kernels(plan, x, weight, bias, residual)
    if uses_kernel and x.is_cuda:
        uses_kernel = checking.passes(plan, x, weight, bias, residual, has_gradient=is_node)
    return Route(uses_kernel, is_node)


def _has_kernels(
    plan: KernelPlan, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Whether there are kernels for these tensors where they are."""
    if x.is_cuda:
        is_there = loading.device_reason(x.device.index) is None
        return is_there and loading.supports_tensors(plan.spec, x, weight, bias, residual) is None
    return _kernels_missing is None and cpu.supports_tensors(plan.spec, x, weight, bias, residual) is None


def is_plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `normalize_plain` may be tried: eager, no transform, only torch's own tensors, on one device."""
    # Each attribute of a tensor takes a tenth of a microsecond.
    return (
        ((kind := type(x)) is Tensor or kind is Parameter)
        and (weight is None or (kind := type(weight)) is Parameter or kind is Tensor)
        and (bias is None or (kind := type(bias)) is Parameter or kind is Tensor)
        and (
            _kernels_missing is None and (weight is None or weight.is_cpu) and (bias is None or bias.is_cpu)
            if x.is_cpu
            else _is_on_gpu(x, weight, bias)
        )
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
    )


def _is_on_gpu(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether there are kernels on the GPU that holds all these."""
    return (
        x.is_cuda
        and loading.device_reason(x.device.index) is None
        and all(parameter is None or parameter.device == x.device for parameter in parameters)
    )


def normalize_plain(x: Tensor, plan: KernelPlan, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`normalize` where `is_plain`, for a plan that is supported, with statistics in float32.

    Raises:
        RuntimeError: If the kernels do not support the dtypes, sizes do not fit, or a GPU failed the self-check:
            `normalize` handles these.
    """
    y: Tensor
    has_gradient = torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    )
    if x.is_cuda and not checking.passes(plan, x, weight, bias, None, has_gradient=has_gradient):
        raise RuntimeError("the kernels of this GPU failed their self-check")
    if has_gradient:
        y = _apply_eagerly(x, weight, bias, plan, True)
    else:
        operators = _on_cpu if x.is_cpu else _on_gpu()
        y = operators.normalize_rows(x, weight, bias, plan.conventions, plan.eps, plan.offset)
    return y


def normalize(x: Tensor, plan: KernelPlan, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`reference.forward` by the best implementation there is."""
    if plan.features_last is not None:
        return normalize(x.movedim(1, -1), plan.features_last, weight, bias).movedim(-1, 1)
    route = choose(plan, x, weight, bias)
    if route.is_node:
        node: Any = _Normalize
        y: Tensor = node.apply(x, weight, bias, plan, route.uses_kernel)
        return y
    if not route.uses_kernel:
        return reference.forward(x, plan.spec, weight, bias)
    rows: Tensor = _operators(x).normalize_rows(x, weight, bias, plan.conventions, plan.eps, plan.offset)
    return rows


def normalize_into(out: Tensor, x: Tensor, plan: KernelPlan, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`normalize`, written to `out`, which has the result's shape and dtype."""
    route = choose(plan, x, weight, bias)
    if route.is_node or not route.uses_kernel or not _has_whole_rows(out, plan):
        return out.copy_(normalize(x, plan, weight, bias))
    _operators(x).normalize_rows_out(x, weight, bias, plan.conventions, plan.eps, plan.offset, out)
    return out


def add_normalize(
    x: Tensor, residual: Tensor, plan: KernelPlan, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`reference.add_forward` by the best implementation: the normalized sum, and the sum."""
    if plan.features_last is not None:
        moved = x.movedim(1, -1), residual.movedim(1, -1)
        y, new_residual = add_normalize(*moved, plan.features_last, weight, bias)
        return y.movedim(-1, 1), new_residual.movedim(-1, 1)
    route = choose(plan, x, weight, bias, residual)
    if route.is_node:
        node: Any = _AddNormalize
        pair: tuple[Tensor, Tensor] = node.apply(x, residual, weight, bias, plan, route.uses_kernel)
        return pair
    if not route.uses_kernel:
        return reference.add_forward(x, residual, plan.spec, weight, bias)
    y, new_residual, _ = _operators(x).add_normalize_forward(
        x, residual, weight, bias, plan.conventions, plan.eps, plan.offset
    )
    return y, new_residual


def add_normalize_into(
    out: tuple[Tensor, Tensor],
    x: Tensor,
    residual: Tensor,
    plan: KernelPlan,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_normalize`, written to the two tensors of `out`."""
    route = choose(plan, x, weight, bias, residual)
    if route.is_node or not route.uses_kernel or not all(_has_whole_rows(target, plan) for target in out):
        for target, value in zip(out, add_normalize(x, residual, plan, weight, bias), strict=True):
            target.copy_(value)
        return out
    _operators(x).add_normalize_rows_out(x, residual, weight, bias, plan.conventions, plan.eps, plan.offset, *out)
    return out


def _has_whole_rows(out: Tensor, plan: KernelPlan) -> bool:
    """Whether the kernels can write to it: each row is contiguous."""
    return out.is_contiguous() or (len(plan.spec.axes) == 1 and out.stride(-1) == 1)


def _backward(ctx: Any, needs: tuple[bool, bool, bool], dy: Tensor, addend: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of what was normalized (plus `addend`), of the gain and of the bias."""
    x, weight, bias, statistics = ctx.saved_tensors
    plan: KernelPlan = ctx.plan
    if statistics is None or torch.is_grad_enabled() or _is_transformed():
        # Plain operations can be differentiated once more.
        return reference.backward(dy, x, plan.spec, weight, bias, addend=addend)
    dx, dweight, dbias = _operators(x).normalize_backward(
        dy, x, statistics, weight, bias, plan.conventions, plan.eps, plan.offset, addend, *needs
    )
    return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None


class _Normalize(torch.autograd.Function):
    """`normalize` where a gradient is wanted. Keeps the input and, of each row, its statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: KernelPlan, uses_kernel: bool
    ) -> Tensor:
        y: Tensor
        statistics = None
        if uses_kernel:
            y, statistics = _operators(x).normalize_forward(x, weight, bias, plan.conventions, plan.eps, plan.offset)
        else:
            y = reference.forward(x, plan.spec, weight, bias)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, ctx.needs_input_grad[:3], dy, None), None, None


# torch's C++ `apply`. Python's looks for transforms first, which are known to be absent where this is used.
_apply_eagerly: Any = super(torch.autograd.Function, _Normalize).apply


class _AddNormalize(torch.autograd.Function):
    """`add_normalize` where a gradient is wanted. Keeps the new residual and, of each row, its statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: KernelPlan,
        uses_kernel: bool,
    ) -> tuple[Tensor, Tensor]:
        statistics = None
        if uses_kernel:
            y, new_residual, statistics = _operators(x).add_normalize_forward(
                x, residual, weight, bias, plan.conventions, plan.eps, plan.offset
            )
        else:
            y, new_residual = reference.add_forward(x, residual, plan.spec, weight, bias)
        ctx.save_for_backward(new_residual, weight, bias, statistics)
        ctx.plan = plan
        ctx.dtypes = x.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        return y, new_residual

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_new_residual: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        if dy is None:
            d_sum, dweight, dbias = d_new_residual, None, None
        else:
            needs = needs_x or needs_residual, needs_weight, needs_bias
            d_sum, dweight, dbias = _backward(ctx, needs, dy, d_new_residual)
        x_dtype, residual_dtype = ctx.dtypes
        return (
            d_sum.to(x_dtype) if needs_x and d_sum is not None else None,
            d_sum.to(residual_dtype) if needs_residual and d_sum is not None else None,
            dweight,
            dbias,
            None,
            None,
        )
