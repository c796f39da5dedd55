"""The operators on a GPU: what runs them at once, and what torch.compile sees of them.

Triton and what is written in it are imported with the first tensor that needs them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

_TRACED = (Tensor, FakeTensor, FunctionalTensor)


@functools.cache
def operators() -> ModuleType:
    """The module whose functions have the operators' names."""
    from normkit.kernels.triton import operators

    return operators


def at_once(name: str) -> Any:
    """The implementation of an operator for tensors on a GPU."""

    def implementation(*arguments: Any) -> Any:
        return getattr(operators(), name)(*arguments)

    return implementation


def seen_through(name: str) -> Any:
    """What a compiler takes for a call of an operator: on a GPU the launches themselves, elsewhere the call.

    So does `torch.library.triton_op`, which would define a second operator beside the one there is.
    """

    def rule(mode: FunctionalTensorMode, operator: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        from torch.export import _trace

        # An exported program keeps the operator: launches cannot be written to a file.
        is_exported: Any = getattr(_trace, "custom_triton_ops_decomposition_disabled", lambda: False)
        is_traced = all(issubclass(kind, _TRACED) for kind in types)
        if not arguments[0].is_cuda or not is_traced or is_exported():
            return mode.__torch_dispatch__(operator, types, arguments, keywords)
        with mode:
            return getattr(operators(), name)(*arguments, **keywords, captures=True)

    return rule
