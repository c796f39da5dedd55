"""Modules whose parameters accelerate reads, from disk or memory, for each call: between calls they hold no values.

accelerate replaces the forward of such a module. Before a call it sets the parameters, afterwards it moves them to the
meta device again. The hook that does so, and the mapping that it reads from, lie at the module as `_hf_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Stored(NamedTuple):
    """A parameter that lies elsewhere between calls."""

    place: Hashable
    """Where: tied parameters have one place."""
    read: Callable[[], Tensor]
    """Returns its values."""


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks of accelerate that read the module's own parameters for each call, if it is not in a call now."""
    hook: Any = vars(module).get("_hf_hook")
    return [each for each in getattr(hook, "hooks", (hook,)) if getattr(each, "offload", False) and each.weights_map]


def stored(model: nn.Module) -> dict[str, Stored]:
    """The parameters of a model that have no values now, by the names of its state dict."""
    found = {}
    for path, part in model.named_modules():
        for hook in offload_hooks(part):
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    place = _place(hook.weights_map, name)
                    found[f"{path}.{name}" if path else name] = Stored(place, partial(_read, hook, name, parameter))
    return found


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]:
    """Each parameter once: name, the parameter, which may be on the meta device, and a function that gives values."""
    elsewhere, seen = stored(model), set[Hashable]()
    for name, parameter in model.named_parameters():
        if name not in elsewhere:
            yield name, parameter, parameter.detach
        elif elsewhere[name].place not in seen:
            seen.add(elsewhere[name].place)
            yield name, parameter, elsewhere[name].read


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters, without those that have no values now; the CPU without one."""
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """While this lasts, a module and its parts have the values of their parameters, and calls of them read nothing.

    Other modules are left as they are.
    """
    held = [(part, hook, dict(part._parameters)) for part in module.modules() for hook in offload_hooks(part)]
    try:
        for part, hook, parameters in held:
            for name, parameter in parameters.items():
                if parameter is not None and parameter.is_meta:
                    value = _read(hook, name, parameter)
                    part._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            hook.offload = False
        yield
    finally:
        for part, hook, parameters in held:
            hook.offload = True
            part._parameters.update(parameters)


def _read(hook: Any, name: str, parameter: Tensor) -> Tensor:
    values: Tensor = hook.weights_map[name]
    return values.detach().to(parameter.dtype)


def _place(weights: Any, name: str) -> Hashable:
    """File and name where the values are read, as far as accelerate's mappings tell."""
    name = getattr(weights, "prefix", "") + name
    weights = getattr(weights, "dataset", weights)
    known = getattr(weights, "index", {}).get(name, {})
    if "safetensors_file" in known:
        return known["safetensors_file"], known.get("weight_name", name)
    return id(weights), name
