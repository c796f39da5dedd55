"""Library norms that many tests inspect alike: what they compute is found out once a process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.identification import finder
from normkit.identification.behaviour import Examination, examine
from normkit.measurement import intent
from normkit.measurement.patches import is_as_written

_LIBRARIES = (
    "torch.nn.modules.",
    "transformers.models.",
    "transformers.activations",
    "transformers.pytorch_utils",
    "normkit.layers",
    # What its modules compute follows from their settings and parameters too.
    "faulty_norms",
)
_KNOWN: dict[object, Examination | Exception] = {}
_STOCK: dict[object, nn.Module] = {}
_build_stock = intent._built


@contextmanager
def examined_once() -> Iterator[None]:
    """Inspections and conversions ask `examine` nothing of a library's module that it has answered of a like one.

    The stock model of a config, of which an inspection looks at the norms, is built once.
    """
    with pytest.MonkeyPatch.context() as patch:
        for asking in (finder, intent):
            patch.setattr(asking, "examine", _examined)
        patch.setattr(intent, "_built", _stock)
        yield


def _stock(stock_class: Any, config: Any) -> nn.Module | None:
    """`intent._built`; what it made of the same config and the same classes of the library is not made again."""
    library = vars(sys.modules[stock_class.__module__])
    key = (stock_class, config.to_json_string(use_diff=False), *map(id, library.values()))
    if key not in _STOCK or not all(map(is_as_written, {type(module) for module in _STOCK[key].modules()})):
        if (built := _build_stock(stock_class, config)) is None:
            return None
        _STOCK[key] = built
    return _STOCK[key]


def _examined(norm: nn.Module, shape: Sequence[int], **options: Any) -> Examination:
    """`examine`; what it said of a module of the same class, settings and numbers is not asked again."""
    if options not in ({}, {"dtype": torch.float32}) or not _is_untouched(norm):
        return examine(norm, shape, **options)
    key = (*_identity(norm), tuple(shape))
    if key not in _KNOWN:
        try:
            _KNOWN[key] = examine(norm, shape)
        except Exception as error:
            _KNOWN[key] = error
    known = _KNOWN[key]
    if isinstance(known, Exception):
        raise known
    return known


def fingerprint(model: nn.Module, own: Sequence[type[nn.Module]] = ()) -> object | None:
    """Equal for models that are alike in all that an inspection sees; None where a part was touched or written anew.

    Args:
        model: Any.
        own: Classes that count as a library's.
    """
    places: dict[int, int] = {}
    parts = []
    for path, module in model.named_modules():
        kind, settings = type(module), {**_settings(module), "config": None, "generation_config": None}
        is_known = (kind in own or kind.__module__.startswith(_LIBRARIES)) and is_as_written(kind)
        if not is_known or "forward" in settings or any(isinstance(value, Tensor) for value in settings.values()):
            return None
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
            return None
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        # Which of them are one tensor counts as well.
        tensors = tuple(
            (name, places.setdefault(id(value), len(places)), value.requires_grad, str(value.dtype), _numbers(value))
            for name, value in held
        )
        parts.append((path, kind, repr(settings), tensors))
    config = getattr(model, "config", None)
    return tuple(parts), None if config is None else (type(config), config.to_json_string(use_diff=False))


def _is_untouched(norm: Any) -> bool:
    """A library's own module without modules inside, with the forward of its file and no hooks."""
    return (
        isinstance(norm, nn.Module)
        and type(norm).__module__.startswith(_LIBRARIES)
        and is_as_written(type(norm))
        and not any(norm.children())
        and not any(callable(value) or isinstance(value, Tensor) for value in _settings(norm).values())
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    )


def _settings(norm: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(norm).items() if not name.startswith("_")}


def _identity(norm: nn.Module) -> tuple[object, ...]:
    """Equal for modules that compute the same: class, settings, parameters and buffers."""
    tensors = [*norm.named_parameters(), *norm.named_buffers()]
    numbers = tuple((name, str(value.dtype), str(value.device), _numbers(value)) for name, value in tensors)
    return type(norm), repr(norm), repr(_settings(norm)), numbers


def _numbers(value: Tensor) -> object:
    if value.is_meta:
        return tuple(value.shape)
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return tuple(value.shape), hashlib.blake2b(content).digest()
