"""Which modules are norms and what each computes, by behaviour and never by class: the only finder.

`normkit.identification.sites` asks it about the modules that one forward pass called, `normkit.conversion` also about
modules that no pass has shown, and `normkit.measurement.intent` about the modules of a stock model.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from normkit.errors import NormkitError, ShapeError
from normkit.identification.behaviour import Examination, agrees, as_like, examine, grows
from normkit.identification.offloading import HOOKS, own_attributes
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed
from normkit.identification.tracing import ModuleCall

PARAMETERS_PER_FEATURE = 4
"""A gain and a bias make two; a module with more than twice that is a block, a projection or an attention."""
_WIDEST = 2**20
_WIDEST_TABLE = 2**16
"""Features that a gain may have where no call shows their number; a gain that spans two axes may be a matrix."""
_WEIGHTLESS = 64
"""Features of the input for a module that has no parameters and names no number of features."""
_SPACES = ((5, 13), (13,), (2, 5, 13), ())
"""Lengths of the axes behind the channels. () comes last: in two dimensions both layouts are the same."""


class Finder:
    """Examines the modules of one model; a module like one that is known is only checked against it."""

    def __init__(self) -> None:
        self._known: dict[object, list[tuple[str, Examination]]] = defaultdict(list)
        self._no_norms: dict[object, Examination] = {}

    def examined(
        self, module: nn.Module, path: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Examination | None:
        """The passport of a module on inputs of a shape; None if it takes no such input.

        Args:
            module: The module, which is left as it is.
            path: Where it is in the model.
            shape: Of an input, as it was called. A call without rows, as for a modality that a batch lacks, still
                tells the features.
            dtype: In which it is examined.
        """
        # A model has an activation, a map of channels and a batch norm in each block.
        alike, has_numbers = (
            (likeness(module), shape, dtype),
            any(True for _ in (*module.parameters(), *module.buffers())),
        )
        if (twin := self._no_norms.get(alike)) is not None:
            again = as_like(module, twin) if has_numbers else twin
            if again is not None:
                return again
        sizes = tuple((name, value.shape, value.dtype) for name, value in module.named_parameters())
        known = self._known[type(module), shape[1:], sizes]
        for first, like in known:
            if agrees(module, like):
                # The result for a like module, with the weight and bias of this one.
                line = f"found on {first}, a like module; on this one the formula and its casts were verified"
                passport, kind = like.passport, like.passport.readings["kind"]
                weight, bias = (None if part is None else part.detach().clone() for part in like.affine.of(module))
                readings = {**passport.readings, "kind": replace(kind, evidence=(*kind.evidence, line))}
                return replace(like, passport=replace(passport, readings=readings, weight=weight, bias=bias))
        try:
            found = examine(module, _with_rows(shape), dtype=dtype)
        except (NormkitError, RuntimeError):
            # The module takes only the inputs that its model gives it. No norm is like that.
            return None
        if found.passport.spec is not None:
            known.append((path, found))
        elif not has_numbers or grows(module, found):
            self._no_norms[alike] = found
        return found

    def uncalled(self, module: nn.Module, path: str) -> list[Examination | None]:
        """The passports of a module that no call has shown: one for each layout of inputs that it takes."""
        features = list(_features(module))
        features_last = [(2, 3, *sizes) for sizes in features]
        channels_first = [(2, *sizes, *space) for sizes in features if len(sizes) == 1 for space in _SPACES]
        tried: list[Examination | None] = []
        for layout in (features_last, channels_first):
            for shape in layout:
                if not (tried and len(shape) == 2) and _takes(module, shape):
                    tried.append(self.examined(module, path, shape))
                    break
        return tried


def is_called_like_a_norm(call: ModuleCall, module: nn.Module) -> bool:
    """Whether a call gave one tensor of the shape that it took, by a module with no more parameters than a norm has."""
    if not call.bare or not call.input_shape or call.output_shape != call.input_shape:
        return False
    counts = [parameter.numel() for parameter in module.parameters()]
    # A gain may have a row for each head, or span two axes.
    widest = call.input_shape[-1] * max((1, *call.input_shape[1:-1]))
    if sum(counts) <= PARAMETERS_PER_FEATURE * widest:
        return True
    # Or it spans more axes. Other modules with so many parameters have them of different sizes.
    return len(set(counts)) == 1 and sum(counts) <= PARAMETERS_PER_FEATURE * math.prod(call.input_shape[1:])


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has few parameters, each with one number for every feature or with one number in all."""
    if type(module).forward is nn.Module.forward or not forward_arguments(module):
        return False
    parameters = list(module.parameters())
    largest = max((parameter.numel() for parameter in parameters), default=0)
    is_table = any(sum(size > 1 for size in parameter.shape) > 1 for parameter in parameters)
    return (
        len(parameters) <= PARAMETERS_PER_FEATURE
        and largest <= (_WIDEST_TABLE if is_table else _WIDEST)
        and all(parameter.numel() in (1, largest) for parameter in parameters)
    )


def likeness(module: nn.Module) -> object:
    """A key of modules that run one code with other numbers: classes, attributes, sizes and hooks, inside too."""

    def is_own(name: str) -> bool:
        return name not in _OF_ANY_MODULE and name != "training"

    return tuple(
        (
            type(part),
            tuple(sorted((name, _key(value)) for name, value in own.items() if is_own(name))),
            tuple((name, value.shape, value.dtype) for name, value in part.named_parameters(recurse=False)),
            tuple((name, value.shape, value.dtype) for name, value in part.named_buffers(recurse=False)),
            tuple(part._modules),
            tuple(id(hook) for name in HOOKS for hook in own[name].values()),
        )
        for part, own in ((part, own_attributes(part)) for part in module.modules())
    )


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _key(value: object) -> str:
    """Numbers and words by their values, any other object, such as a forward of its own, by its identity."""
    is_plain = isinstance(value, (bool, int, float, str, tuple, list, type(None), torch.dtype, torch.Size))
    return repr(value) if is_plain else str(id(value))


def forward_arguments(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of the module's forward; none where they cannot be seen."""
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _features(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """How many features a module may want: the size of its tensors, else of an attribute, else any number."""
    tensors = [*module.parameters(), *module.buffers()]
    largest = max((tuple(size for size in tensor.shape if size > 1) for tensor in tensors), key=math.prod, default=())
    if largest:
        yield largest
        return
    for value in vars(module).values():
        sizes = value if isinstance(value, tuple) else (value,)
        if sizes and all(type(size) is int and 1 < size <= _WIDEST for size in sizes):
            yield sizes
    yield (_WEIGHTLESS,)


def _takes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a module can be called with one tensor of a shape, or asks for a second, which `examine` looks into."""
    with undisturbed():
        try:
            specimen = Specimen(module)
            specimen(torch.ones(_with_rows(shape), device=specimen.device))
        except ShapeError:
            return False
        except UnrecognisedError as seen:
            return seen.verdict == "gated"
        except NormkitError:
            return False
    return True


def _with_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in (shape if len(shape) > 1 else (2, *shape)))
