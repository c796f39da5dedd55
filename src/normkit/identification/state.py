"""Identification leaves as they were: random generators, torch's settings, modes, buffers and attributes of a model."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_DEEPEST = 4
"""How many functions, containers and objects deep a function is searched for modules and tensors."""


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Afterwards the generators of Python, numpy and torch, on the CPU and on GPUs in use, are as they were."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    devices = range(torch.cuda.device_count() if is_initialized() else 0)
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without gradients, autocast and warnings, in float32; random generators and torch's settings come back."""
    default = torch.get_default_dtype()
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        random_numbers_kept(),
        warnings.catch_warnings(action="ignore"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode inside; afterwards every module has the mode that it had before.

    The flags are set directly for evaluation: a class may do more in `eval()` than can be undone, such as merging an
    adapter into its weights. For training `train()` is called, as a class may keep some of its parts in evaluation.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if training:
            model.train()
        else:
            for module, _ in modes:
                module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Afterwards the hooks of these handles are taken out."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers are the same tensors with the same values."""
    registered = [module._buffers for module in model.modules()]
    with _contents_kept(registered, [held for own in registered for held in own.values() if held is not None]):
        yield


@contextmanager
def function_state_kept(norm: object) -> Iterator[None]:
    """Keep the modules and tensors that a function reaches: by cells, globals, defaults, its object, or as a partial.

    Identification copies a module; the state of a function cannot be copied, so it is put back: parameters and
    buffers (the same tensors with the same bits), other attributes, and which modules are in training mode.
    """
    modules, tensors = _reached(norm)
    parts = [part for module in modules for part in module.modules()]
    attributes = [each for part in parts for each in (vars(part), part._parameters, part._buffers)]
    held = [each for part in parts for own in (part._parameters, part._buffers) for each in own.values()]
    with _contents_kept(attributes, [*(each for each in held if each is not None), *tensors]):
        yield


@contextmanager
def _contents_kept(dictionaries: Iterable[dict[str, Any]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards dictionaries hold the objects that they hold now, and tensors have the bits that they have now."""
    stored = [(each, dict(each)) for each in dictionaries]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for dictionary, content in stored:
            if {name: id(each) for name, each in dictionary.items()} != {n: id(each) for n, each in content.items()}:
                dictionary.clear()
                dictionary.update(content)
        for tensor, value in values:
            # A tensor that did not change is not written to, so that its version counter stays too.
            if not tensor.is_meta and not same(tensor.detach(), value):
                with torch.no_grad():
                    tensor.copy_(value)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype and the same elements, NaN counting as equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _reached(norm: object) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and tensors that a function holds on to; none for a module or its method, as these are copied."""
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > _DEEPEST:
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.append(thing)
        elif isinstance(thing, Tensor):
            tensors.append(thing)
        else:
            for inner in _held_by(thing):
                look(inner, depth + 1)

    if not isinstance(norm, nn.Module) and not isinstance(getattr(norm, "__self__", None), nn.Module):
        look(norm, 0)
    return modules, tensors


def _held_by(thing: Any) -> Iterator[Any]:
    """The parts of a container or a partial; cells, globals and defaults of a function; attributes of an object."""
    if isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
        return
    if isinstance(thing, (list, tuple, dict)):
        yield from thing.values() if isinstance(thing, dict) else thing
        return
    for cell in getattr(thing, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    code = getattr(thing, "__code__", None)
    scope = getattr(thing, "__globals__", {})
    for name in () if code is None else code.co_names:
        if isinstance(scope.get(name), nn.Module | Tensor):
            yield scope[name]
    for inner in (getattr(thing, "__self__", None), getattr(thing, "__wrapped__", None)):
        if inner is not None:
            yield inner
    yield getattr(thing, "__defaults__", None) or ()
    if callable(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
        yield vars(thing)
