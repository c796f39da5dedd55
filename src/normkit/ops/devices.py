"""The operators on a GPU: how they run eagerly, and what torch.compile sees of them.

Triton and the kernels written in it are imported with the first tensor that needs them.
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


def eager(name: str) -> Any:
    """The implementation of an operator for tensors on a GPU, outside of a compiler."""

    def implementation(*arguments: Any) -> Any:
        return getattr(operators(), name)(*arguments)

    return implementation


def traced(name: str) -> Any:
    """The rule by which a compiler traces an operator: on a GPU as its launches, elsewhere as the call.

    `torch.library.triton_op` does the same, but would define a second operator beside the existing one.
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
