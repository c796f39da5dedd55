"""How normkit takes over a norm: the object stays, and its class becomes one that calls normkit.

`fully_shard` and `torch.nn.utils.parametrize` do the same. Parameters and their names, buffers, hooks, ties, dtype,
device and mode stay, and so does everything that holds the object or reads its attributes. To go back is to restore
the class; the object keeps the parameters, hooks and mode that it has then.
"""

from __future__ import annotations

from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit import functional, layers
from normkit.errors import UseError
from normkit.ops import calls
from normkit.spec import NormSpec

_EXACT: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: layers.LayerNorm, nn.RMSNorm: layers.RMSNorm}
_MARK = "_converted_from"


class Formula(NamedTuple):
    """The formula of a converted class, and the parameters that it reads."""

    spec: NormSpec
    weight: str | None
    """Dotted name of the parameter that is the gain."""
    bias: str | None
    """Dotted name of the parameter that is the bias."""
    input: str
    """Name of the argument of the class's own forward."""
    keeps_layout: bool = False
    """The output has the memory layout of the input. Set for features in axis 1; other norms keep the layout anyway."""
    own_under_autocast: bool = False
    """Under autocast the class's own forward computes, because autocast changes the dtypes of its operations."""

    def parameters_of(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of a module, as the spec takes them."""
        weight = None if self.weight is None else attrgetter(self.weight)(module)
        bias = None if self.bias is None else attrgetter(self.bias)(module)
        return (_flat(weight), _flat(bias)) if self.spec.rows.are_channels else (weight, bias)


class ConvertedNorm(nn.Module):
    """Base of converted classes: the forward of one tensor is normkit's, everything else is the class's own."""

    _formula: Formula

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Normalize the one argument; a call with more of them goes to the class's own forward."""
        formula = self._formula
        if len(inputs) + len(named) != 1 or (named and formula.input not in named):
            return super().forward(*inputs, **named)
        x = inputs[0] if inputs else named[formula.input]
        if calls.is_written_down(x) or (formula.own_under_autocast and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x)
        y = functional.normalize(x, formula.spec, *formula.parameters_of(self))
        return y.contiguous() if formula.keeps_layout and x.is_contiguous() else y

    def extra_repr(self) -> str:
        """The text of the class itself, and the formula."""
        return ", ".join(text for text in (super().extra_repr(), str(self._formula.spec)) if text)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the foreign class and the formula: no module holds the combined class."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (vars(self)[_MARK], *self._formula), *reduced[2:]


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.flatten()


def _blank(original: type[nn.Module], *formula: Any) -> nn.Module:
    cls = _combined(original, Formula(*formula))
    return cls.__new__(cls)


_classes: dict[tuple[type[nn.Module], Formula], type[nn.Module]] = {}


def _combined(original: type[nn.Module], formula: Formula) -> type[nn.Module]:
    """The class made from another, once for each formula."""
    key = original, formula
    if key not in _classes:
        # Code that looks for "RMSNorm" in the name of a class, or for the class itself, still finds it.
        # `torch.jit.script` and `torch.fx` ask for source and arguments of forward: they get those of the class.
        forward = wraps(original.forward)(lambda self, *inputs, **named: ConvertedNorm.forward(self, *inputs, **named))
        members = {"_formula": formula, "__doc__": original.__doc__, "forward": forward}
        _classes[key] = type(f"Normkit{original.__name__}", (ConvertedNorm, original), members)
    return _classes[key]


def swap(module: nn.Module, formula: Formula) -> None:
    """Let normkit compute a module: torch's becomes normkit's class of that name, another a class made from its own.

    Raises:
        UseError: If Python cannot change the class of this object.
    """
    original = type(module)
    try:
        module.__class__ = _EXACT.get(original) or _combined(original, formula)
    except TypeError as error:
        raise UseError(f"the class {original.__name__} cannot be changed ({error})") from error
    vars(module)[_MARK] = original


def is_torchs(module: nn.Module) -> bool:
    """Whether normkit has a class of that name for it."""
    return type(module) in _EXACT


def is_converted(module: nn.Module) -> bool:
    """Whether `swap` was applied to it."""
    return _MARK in vars(module)


def is_normkit(module: nn.Module) -> bool:
    """Whether normkit computes it, converted or made so."""
    return isinstance(module, (ConvertedNorm, layers.LayerNorm, layers.RMSNorm, layers.Norm))


def restore(module: nn.Module) -> None:
    """Give a converted module its class back; wrappers that were put around it since, as by FSDP2, stay."""
    module.__class__ = _unconverted(type(module), vars(module)[_MARK])
    del vars(module)[_MARK]


def _unconverted(cls: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """The class with the original in the place of the converted one that it is, or is derived from."""
    if cls is _EXACT.get(original) or ConvertedNorm in cls.__bases__:
        return original
    ours = (ConvertedNorm, layers.LayerNorm, layers.RMSNorm)
    bases = tuple(_unconverted(base, original) if issubclass(base, ours) else base for base in cls.__bases__)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace("Normkit", ""), bases, members)
