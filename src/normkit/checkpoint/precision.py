"""A model's logits in float64 throughout: nothing on the way is rounded to less.

Many classes of transformers compute norms, routers and softmax in float32 whatever they are given, so that two float64
models which are equal differ by 1e-7.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.errors import InputError
from normkit.identification.state import in_mode
from normkit.text import dtype_name

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)
# `Tensor.type` also takes the name of a class of tensors, or the class.
_LEGACY = {f"torch.{name}Tensor" for name in ("Float", "Half", "BFloat16")}


class TrueFloat64(TorchFunctionMode):
    """Inside it, whatever asks for a narrower floating-point dtype gets float64.

    So `x.float()`, `x.to(torch.float32)`, `x.type_as(y)`, `softmax(x, dim=-1, dtype=torch.float32)` and
    `torch.zeros(3, dtype=torch.float32)` give float64. A tensor that is narrower already stays so where nothing asks
    for a dtype, and what is written into it is rounded.

    Example:
        >>> with TrueFloat64():
        ...     torch.tensor([0.1], dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the dtypes that it is given made float64."""
        given = [_widened(value) for value in args]
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func in _NARROWING:
            func = Tensor.double
        elif func in (Tensor.to, Tensor.type_as) and len(given) > 1 and _is_narrow(given[1]):
            # Another tensor stands for its dtype and its device.
            func, given = Tensor.to, [given[0], given[1].device, torch.float64, *given[2:]]
        return func(*given, **named)


def true_logits(model: nn.Module, **inputs: Any) -> Tensor:
    """The logits of a float64 model of transformers, in evaluation mode and without a cache, in true float64.

    Experts are computed one by one, as the quicker ways know no float64. The model is left as it was found.

    Args:
        model: All its parameters are float64.
        inputs: Of its forward; those of floating point are made float64.

    Returns:
        The logits; of a class without a head, its last hidden state.

    Raises:
        InputError: If a parameter is not float64.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            given = dtype_name(parameter.dtype)
            raise InputError(f"expected a float64 model, {name} is {given}; load it with dtype='float64'")
    call = {name: value.double() if _is_float(value) else value for name, value in inputs.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        call.setdefault("use_cache", False)
    with torch.no_grad(), in_mode(model, training=False), _plain_experts(model), TrueFloat64():
        output = model(**call)
    found = getattr(output, "logits", None)
    logits: Tensor = output.last_hidden_state if found is None else found
    return logits


def _widened(value: Any) -> Any:
    """Float64 in place of a narrower dtype."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    name = (
        value if isinstance(value, str) else f"{value.__module__}.{value.__name__}" if isinstance(value, type) else ""
    )
    return torch.float64 if name in _LEGACY else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _NARROW


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def _plain_experts(model: Any) -> Iterator[None]:
    """Have transformers compute experts in plain matrix products, where the model has any."""
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if set(before.values()) <= {None, "eager"}:
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
