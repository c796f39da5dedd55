"""Modules whose parameters are spread over processes, as the modules they would be in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_STATE = "__composable_api_state_key"


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def local(x: Tensor) -> Tensor:
    """The part of a distributed tensor that this process holds; any other tensor as it is.

    A sum that is not yet taken over the processes gives nothing: no rows, or NaN where there are no axes.
    """
    to_local = getattr(x, "to_local", None)
    if to_local is None:
        return x
    held: Tensor = to_local()
    if not any(placement.is_partial() for placement in getattr(x, "placements", ())):
        return held
    return held[:0] if held.dim() else torch.full_like(held, math.nan)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether this process cannot read a tensor alone: it is distributed, or freed after the call it was made for."""
    return is_distributed(tensor) or (tensor.numel() > 0 and tensor.untyped_storage().size() == 0)


def part_of(module: nn.Module) -> tuple[int, int]:
    """Which part of a split parameter of its own a module has in this process, and how many parts there are; 0 of 1.

    While it runs: `fully_shard` gathers parameters for that time, tensor parallelism does not.
    """
    for parameter in module._parameters.values():
        place, count = 0, 1
        if is_distributed(parameter):
            split: Any = parameter
            mesh = split.device_mesh
            for placement, size, at in zip(split.placements, mesh.shape, mesh.get_coordinate() or (), strict=False):
                if placement.is_shard():
                    place, count = place * size + at, count * size
        if count > 1:
            return place, count
    return 0, 1


@contextmanager
def whole(
    module: nn.Module, value: Callable[[Any], Tensor] = lambda parameter: parameter.full_tensor()
) -> Iterator[None]:
    """While this lasts, a module has plain parameters in place of distributed ones, and the class that it was built as.

    All processes must come here, in the same order: a parameter's parts are gathered.

    Args:
        module: A small one; it is left as it was.
        value: What a parameter is, all parts together; where this needs no gathering, one process may come alone.
    """
    held = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if is_distributed(parameter)
    ]
    with unwrapped(module):
        try:
            for part, name, parameter in held:
                part._parameters[name] = nn.Parameter(value(parameter).detach(), requires_grad=False)
            yield
        finally:
            for part, name, parameter in held:
                part._parameters[name] = parameter


@contextmanager
def unwrapped(module: nn.Module) -> Iterator[None]:
    """While this lasts, a module and its parts have the classes that they had before `fully_shard`, and can be copied.

    Hooks of `fully_shard` stay.
    """
    wrapped = [(part, type(part), dict(vars(part))) for part in fully_sharded(module)]
    try:
        for part, wrapper, attributes in wrapped:
            for name in attributes:
                if name.startswith(_STATE):
                    del vars(part)[name]
            # Its class is itself, its mark, then the original.
            part.__class__ = wrapper.__mro__[2]
        yield
    finally:
        for part, wrapper, attributes in wrapped:
            part.__class__ = wrapper
            vars(part).update({name: value for name, value in attributes.items() if name.startswith(_STATE)})


def fully_sharded(model: nn.Module) -> Iterator[Any]:
    """The modules on which `fully_shard` was called."""
    for module in model.modules():
        if any(each.__name__ == "FSDPModule" for each in type(module).__mro__):
            yield module
