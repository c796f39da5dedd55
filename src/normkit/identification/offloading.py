"""Modules whose parameters are set for each call: between calls they hold no values.

accelerate reads them from disk or memory. It replaces the forward of such a module; the hook that does so, and the
mapping that it reads from, lie at the module as `_hf_hook`. Parameters that are spread over processes are gathered in
the same way, by `gathered`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.identification.sharding import fully_sharded, is_distributed, unwrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The tables of a module's hooks around its forward."""

_GATHERING = "_normkit_gathering"
_DISTRIBUTED = "torch.distributed."


class Stored(NamedTuple):
    """A parameter that lies elsewhere between calls."""

    place: Hashable
    """The place in memory: tied parameters have one."""
    read: Callable[[], Tensor]
    """Returns its values."""


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks that set the module's own parameters for each call, but for those of modules in memory."""
    hook: Any = vars(module).get(_GATHERING) or vars(module).get("_hf_hook")
    return [each for each in getattr(hook, "hooks", (hook,)) if getattr(each, "offload", False) and each.weights_map]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without those that set its parameters for each call."""
    held = {name: value for name, value in vars(module).items() if name not in (_GATHERING, "_hf_hook")}
    if "_old_forward" in held:
        # accelerate puts its own in place of it.
        forward = held["forward"] = held.pop("_old_forward")
        if getattr(forward, "__func__", None) is type(module).forward:
            del held["forward"]
    for table in HOOKS:
        hooks = vars(module)[table].items()
        held[table] = {key: hook for key, hook in hooks if not isinstance(getattr(hook, "__self__", None), _Gathering)}
    return held


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
def in_memory(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """While this lasts, a module and its parts have the values of their parameters, and calls of them read nothing.

    Other modules are left as they are, without `recurse` the module's parts, too.
    """
    parts = module.modules() if recurse else [module]
    held = [(part, hook, dict(part._parameters)) for part in parts for hook in offload_hooks(part)]
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


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """While this lasts, a model whose parameters are spread over processes computes in each what it does in one.

    In place of `fully_shard` and tensor parallelism, the parameters of each module are gathered for each call of it.
    All processes must make the same calls, in the same order. Other models are left as they are.
    """
    for wrapped in fully_sharded(model):
        wrapped.reshard()
    spread = [part for part in model.modules() if any(map(is_distributed, part._parameters.values()))]
    if not spread:
        yield
        return
    held = [(part, dict(part._parameters)) for part in spread]
    hooks = [(part, name, getattr(part, name)) for part in model.modules() for name in HOOKS]
    with unwrapped(model):
        try:
            for part, name, table in hooks:
                others = {key: hook for key, hook in table.items() if not str(hook.__module__).startswith(_DISTRIBUTED)}
                setattr(part, name, type(table)(others))
            for part, parameters in held:
                gathering = _Gathering(parameters)
                vars(part)[_GATHERING] = gathering
                gathering.drop(part)
                part.register_forward_pre_hook(gathering.fill)
                part.register_forward_hook(gathering.drop, always_call=True)
            yield
        finally:
            for part, parameters in held:
                vars(part).pop(_GATHERING, None)
                part._parameters.update(parameters)
            for part, name, table in hooks:
                setattr(part, name, table)


class _Gathering(dict[str, nn.Parameter]):
    """The distributed parameters of one module by name; reading one gathers it."""

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        super().__init__({name: each for name, each in parameters.items() if each is not None and is_distributed(each)})
        self.offload, self.weights_map = True, self

    def __getitem__(self, name: str) -> Any:
        whole: Any = super().__getitem__(name)
        return whole.full_tensor()

    def __deepcopy__(self, _memo: object) -> None:
        """A copy of the module has parameters of its own."""

    def fill(self, module: nn.Module, _args: object) -> None:
        """Give the module its parameters."""
        for name in self if self.offload else ():
            module._parameters[name] = nn.Parameter(self[name], requires_grad=False)

    def drop(self, module: nn.Module, *_of_call: object) -> None:
        """Take them away again."""
        for name, each in self.items() if self.offload else ():
            empty = torch.empty(each.shape, dtype=each.dtype, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=each.requires_grad)


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
