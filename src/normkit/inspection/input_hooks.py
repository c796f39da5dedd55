"""Forward pre-hooks on norms that change what enters: the norm computes its formula, of something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.identification.tracing import first_tensor


@dataclass(frozen=True, kw_only=True)
class InputHook:
    """A norm whose input is changed before it comes in."""

    path: str
    """Path of the norm."""
    hooks: tuple[str, ...]
    """Names of its pre-hooks, with the file and line of each."""
    change: float
    """Largest difference of what enters from what was given, over the largest magnitude given."""


def changed_inputs(model: nn.Module, paths: Collection[str], run: Callable[[], object]) -> tuple[InputHook, ...]:
    """Norms with pre-hooks after which other numbers enter than the caller gave; a conversion of dtype is no change.

    Args:
        model: Is left as it is.
        paths: Of its norms.
        run: Calls it on a small input; it is not run where no norm has a hook.
    """
    modules = dict(model.named_modules())
    hooked = {path: modules[path] for path in paths if path in modules and modules[path]._forward_pre_hooks}
    names = {path: tuple(map(_named, module._forward_pre_hooks.values())) for path, module in hooked.items()}
    given: dict[str, Tensor] = {}
    changes: dict[str, float] = {}

    def before(path: str) -> Callable[..., None]:
        def note(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if (x := first_tensor(args, kwargs)) is not None:
                given[path] = local(x.detach()).clone()

        return note

    def after(path: str) -> Callable[..., None]:
        def compare(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            x, meant = first_tensor(args, kwargs), given.pop(path, None)
            if x is None or meant is None:
                return
            entered = local(x.detach())
            meant = meant.to(entered.dtype).to(entered.device)
            if entered.shape == meant.shape and not torch.equal(entered, meant):
                difference = (entered.double() - meant.double()).abs().max() / meant.double().abs().max()
                changes[path] = max(changes.get(path, 0.0), float(difference))

        return compare

    if hooked:
        with ExitStack() as hooks, torch.no_grad():
            for path, module in hooked.items():
                hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True).remove)
                hooks.callback(module.register_forward_pre_hook(after(path), with_kwargs=True).remove)
            run()
    return tuple(InputHook(path=path, hooks=names[path], change=change) for path, change in changes.items())


def _named(hook: Callable[..., object]) -> str:
    """What a hook is called, and where it was written."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return name if code is None else f"{name} of {hook.__module__}, line {code.co_firstlineno}"
