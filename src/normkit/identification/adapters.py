"""Other callables as modules and functions of tensors: f(x, weight, bias), and functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import InputError, KindError


class Parameterised(nn.Module):
    """A function with its parameters, or a module behind a `call`, as one module of one tensor.

    Args:
        norm: A function f(x, *parameters), or a module.
        parameters: What a function is given after x, by name and in this order; copied.
        call: call(norm, x, *parameters) in place of norm(x, *parameters).
    """

    def __init__(
        self, norm: Callable[..., Any], parameters: Mapping[str, Tensor], call: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.norm = norm
        self._call = call
        self._given = tuple(parameters)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, x: Tensor) -> Any:
        """The result of the function for x and its parameters."""
        given = [getattr(self, name) for name in self._given]
        return self.norm(x, *given) if self._call is None else self._call(self.norm, x, *given)


def parameters_of(norm: Callable[..., Any], weight: object, bias: object) -> dict[str, Tensor]:
    """The parameters that a function was given, by name.

    Raises:
        InputError: If there are some, and the norm is a module.
        KindError: If one is no tensor of floating point, and no array of such numbers.
    """
    given = {name: part for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    if given and isinstance(norm, nn.Module):
        raise InputError(f"{' and '.join(given)}: for the parameters of a function; a module has its own, leave it out")
    tensors = {}
    for name, part in given.items():
        tensor = as_tensor(part)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise KindError(f"{name} must be a tensor or an array of floating point, got {part!r}")
        tensors[name] = tensor
    return tensors


def as_tensor(thing: object) -> object:
    """An array of numpy, or of a library that hands over its memory, as a tensor of its dtype; else itself."""
    if isinstance(thing, Tensor):
        return thing
    if hasattr(thing, "__array__"):
        import numpy

        try:
            # Copied: an array may be read-only, or lie in memory that the next call writes to.
            return torch.tensor(numpy.asarray(thing))
        except TypeError:  # a dtype that numpy does not have itself, as bfloat16
            pass
    if hasattr(thing, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(thing).clone()
    return thing


def on_tensors(
    norm: Callable[..., Any], call: Callable[..., Any] | None, x: Tensor, parameters: Mapping[str, Tensor]
) -> Callable[..., Any]:
    """The function itself if it takes tensors; a function of tensors that calls it, if it takes numpy arrays.

    Args:
        norm: A function.
        call: How it is called, or None.
        x: An input.
        parameters: What it is given after x.
    """

    def of_arrays(*tensors: Tensor) -> object:
        return norm(*(tensor.detach().cpu().numpy() for tensor in tensors))

    for candidate in (norm, of_arrays):
        try:
            Parameterised(candidate, parameters, call)(x.clone())
        except Exception:  # a foreign function may refuse in any way
            continue
        return candidate
    return norm
