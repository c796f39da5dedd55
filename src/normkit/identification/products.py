"""Products of 16-bit matrices on a CPU that has no instructions for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Numbers of a weight that are float32 at a time: 8 MiB, which stay in the cache and which the allocator reuses.
_AT_ONCE = 2**21
_PRODUCTS = {
    F.linear,
    torch.mm,
    Tensor.mm,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    F.conv1d,
    F.conv2d,
    F.conv3d,
}


@functools.cache
def software_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes whose products this CPU computes without instructions of its own."""
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    answers = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in asked.items()}
    return frozenset(dtype for dtype, is_supported in answers.items() if is_supported and not is_supported())


def quick_products(model: nn.Module) -> AbstractContextManager[object]:
    """`ProductsInFloat32` where a model has parameters of `software_dtypes`; else nothing, as it slows each call."""
    slow = software_dtypes()
    return ProductsInFloat32() if any(each.dtype in slow for each in model.parameters()) else nullcontext()


class ProductsInFloat32(TorchFunctionMode):
    """Products of matrices and convolutions of `software_dtypes` run in float32, and are rounded once to their dtype.

    torch's own code for such a CPU adds in float32 and rounds once too, one number after another: a linear layer of
    1,024 rows takes it 9 times as long, a convolution 37 times. The terms are the same, the order of the sum is not,
    which moves about one output in 10,000 by one rounding. Gradients are computed in the same way.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _PRODUCTS:
            return function(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        dtypes = {each.dtype for each in given}
        is_plain = all(type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" for each in given)
        if not is_plain or len(dtypes) != 1 or not dtypes <= software_dtypes() or "out" in kwargs:
            return function(*args, **kwargs)
        # A weight of one axis makes a sum of the last axis.
        if function is F.linear and given[1].dim() == 2:
            return _linear(*args, **kwargs)
        wide = {key: value.float() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        y = function(*(each.float() if isinstance(each, Tensor) else each for each in args), **wide)
        return y.to(dtypes.pop())


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (input, weight, bias)):
        y: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return _in_parts(input, weight, bias)


def _in_parts(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a part of the weight in float32 at a time."""
    wide = input.float()
    y = input.new_empty(*input.shape[:-1], len(weight))
    for rows in _parts(weight):
        y[..., rows] = F.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return y


class _Linear(torch.autograd.Function):
    """The same with gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _in_parts(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        input, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        flat = dy.reshape(-1, dy.shape[-1])
        dx = flat.new_zeros(len(flat), weight.shape[1], dtype=torch.float32) if needs_dx else None
        dw = torch.empty_like(weight) if needs_dw else None
        x = input.reshape(-1, input.shape[-1]).float() if needs_dw else input
        for rows in _parts(weight):
            part = flat[:, rows].float()
            if dx is not None:
                dx += part @ weight[rows].float()
            if dw is not None:
                dw[rows] = part.T @ x
        db = flat.float().sum(0).to(weight.dtype) if needs_db else None
        return None if dx is None else dx.reshape(input.shape).to(input.dtype), dw, db


def _parts(weight: Tensor) -> Iterator[slice]:
    """Rows of a weight that are float32 at a time."""
    step = max(1, _AT_ONCE // max(1, weight.shape[1]))
    return (slice(first, first + step) for first in range(0, len(weight), step))
