"""What is tested: a module or a function, copied into any dtype, with parameters of known values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.errors import InputError, KindError, NormkitError, ShapeError
from normkit.identification.adapters import Parameterised
from normkit.identification.behaviour import identify
from normkit.identification.passport import Passport
from normkit.spec import NormSpec

_CHANNELS = ((1,), "all_but_batch")


class RefusedError(Exception):
    """The norm raised, or returned something that is no tensor of the input's shape: what it was."""


class Subject:
    """A norm under test. What was passed in is never called: copies are.

    Args:
        norm: A module, or a function f(x), f(x, weight), f(x, bias) or f(x, weight, bias).
        spec: What it should compute; it says whether there are weight and bias.
        shape: Of an input, the batch first; n means (2, 3, n); None takes it from the parameters.
        weight: The name of a module's parameter, or a function's tensor.
        bias: Likewise.
        call: call(norm, x), or call(function, x, weight, bias), in place of calling it.
        device: Where it runs; None is where it is.
        dtype: In which it is identified, where that is needed.

    Attributes:
        shape: Of an input, the batch first.
        weight_name: The parameter that is the spec's weight, or None.
        bias_name: Likewise.
    """

    def __init__(
        self,
        norm: Callable[..., Any],
        spec: NormSpec,
        shape: int | Sequence[int] | None,
        weight: str | Tensor | None,
        bias: str | Tensor | None,
        call: Callable[..., Any] | None,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        if isinstance(norm, nn.Module):
            own, prefix = _copy(norm), ""
            if call is not None:
                own, prefix = Parameterised(own, {}, call).train(norm.training), "norm."
            self._module = own
            given = {
                kind: None if part is None else prefix + _kind(kind, part, str, "the name of a parameter")
                for kind, part in (("weight", weight), ("bias", bias))
            }
        else:
            tensors = _tensors(spec, weight, bias)
            self._module = Parameterised(norm, tensors, call)
            given = {name: name if name in tensors else None for name in ("weight", "bias")}
        for parameter in self._parameters().values():
            parameter.requires_grad_()
        tensor = next(iter(self._module.state_dict().values()), torch.empty(0))
        self.device = tensor.device if device is None else _device(device)
        self._dtype = dtype
        self._passport: Passport | NormkitError | None = None
        self.shape = _sizes(shape, spec, self._parameters())
        self.weight_name = self._name_of("weight", given["weight"]) if spec.has_weight else None
        self.bias_name = self._name_of("bias", given["bias"]) if spec.has_bias else None
        self._check_sizes(spec)

    def passport(self) -> Passport | None:
        """What it is found to compute; None where that cannot be found out."""
        if self._passport is None:
            try:
                self._passport = identify(self._module, self.shape, dtype=self._dtype, device=self.device)
            except NormkitError as error:
                self._passport = error
        return self._passport if isinstance(self._passport, Passport) else None

    def draw(self, offset: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Random values for all parameters: gains of 0.5 to 1.5 or (a quarter) negative; biases of -1 to 1.

        The offset is taken off. Parameters that the spec does not know of get values as well: a gain of 1 would hide.
        """
        values = {}
        for name, parameter in self._parameters().items():
            uniform = torch.rand(parameter.shape, generator=generator, device="cpu")
            if name == self.bias_name:
                values[name] = 2 * uniform - 1
            elif name == self.weight_name:
                values[name] = (0.5 + uniform) * torch.where(uniform * 64 % 4 < 1, -1, 1) - offset
            else:
                values[name] = 0.5 + uniform
        return values

    def copy(self, dtype: torch.dtype, values: dict[str, Tensor]) -> nn.Module:
        """A copy in a dtype, its parameters set."""
        module = copy.deepcopy(self._module).to(self.device, dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        return module

    def _parameters(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._module.named_parameters() if value.is_floating_point()}

    def _check_sizes(self, spec: NormSpec) -> None:
        """Weight and bias lie along the axes of an input."""
        for kind, name in (("weight", self.weight_name), ("bias", self.bias_name)):
            if name is None:
                continue
            sizes = tuple(self._parameters()[name].shape)
            wanted = self.shape[1:2] if spec.axes in _CHANNELS else self.shape[1:]
            try:
                fits = torch.empty(0, device="cpu").new_empty(sizes).expand(wanted).shape == wanted
            except RuntimeError:
                fits = False
            if not fits:
                raise ShapeError(f"{kind}: {name} of shape {sizes} does not broadcast against a sample of {wanted}")

    def _name_of(self, kind: str, given: str | None) -> str | None:
        names = list(self._parameters())
        if given is not None:
            if given not in names:
                raise InputError(f"{kind}: the norm has no parameter {given!r}; it has {', '.join(names) or 'none'}")
            return given
        plain = [name for name in names if name.split(".")[-1] == kind]
        if len(plain) == 1:
            return plain[0]
        passport = self.passport()
        found = None if passport is None else passport.weight_name if kind == "weight" else passport.bias_name
        if found is not None and found not in names:
            raise InputError(f"{kind}: several parameters act as one ({found}); test one part of the norm at a time")
        return found


def call(module: nn.Module, x: Tensor) -> Tensor:
    """The output for x itself, which the module may write to.

    Raises:
        RefusedError: If it raises, or returns anything but a tensor of x's shape.
    """
    try:
        y = module(x)
    except Exception as error:  # a foreign module may refuse in any way
        raise RefusedError(f"{type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(y, Tensor):
        raise RefusedError(f"a {type(y).__name__}; call=lambda norm, x: norm(x)[0] would take one tensor out of it")
    if y.shape != x.shape:
        raise RefusedError(f"shape {tuple(y.shape)}")
    return y


def gradients(module: nn.Module, x: Tensor, dy: Tensor, uses: int = 1) -> dict[str, Tensor | None]:
    """The gradients of sum(y * dy): "" is that of x, the others are those of parameters by name.

    Args:
        module: The norm.
        x: Its input.
        dy: The gradient of its output.
        uses: How often it is called before it is differentiated, for one part of the batch after the other.

    Raises:
        RefusedError: If there are none to be had.
    """
    leaf = x.detach().view_as(x).requires_grad_()
    parameters = dict(module.named_parameters())
    with torch.enable_grad():
        # A norm may write to what it is given; a leaf would not let it. But a copy would be contiguous.
        outputs = [call(module, part.clone() if x.is_contiguous() else part) for part in leaf.chunk(uses)]
        y = torch.cat(outputs) if uses > 1 else outputs[0]
        try:
            found = torch.autograd.grad(y, [leaf, *parameters.values()], dy.to(y.dtype), allow_unused=True)
        except Exception as error:  # likewise
            raise RefusedError(f"{type(error).__name__}: {_first_line(error)}") from error
    return dict(zip(["", *parameters], found, strict=True))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _copy(norm: nn.Module) -> nn.Module:
    if any(tensor.is_meta for tensor in norm.state_dict().values()):
        raise InputError(f"the {type(norm).__name__} is on the meta device; test one that has memory")
    try:
        return copy.deepcopy(norm)
    except Exception as error:  # a foreign module may refuse in any way
        raise InputError(
            f"a {type(norm).__name__} cannot be copied ({_first_line(error)}); test a function that calls it"
        ) from error


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(1, device=device).tolist()
    except Exception as error:  # each kind of device refuses in its own way
        raise InputError(f"device: {given!r} cannot be used here ({_first_line(error)})") from error
    return device


def _kind(kind: str, part: object, wanted: type, words: str) -> Any:
    if not isinstance(part, wanted):
        raise KindError(f"{kind} must be {words}, got {part!r}")
    return part


def _tensors(spec: NormSpec, weight: str | Tensor | None, bias: str | Tensor | None) -> dict[str, Tensor]:
    """A function's parameters."""
    tensors = {}
    for kind, part, needed in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if (part is not None) != needed:
            has = "has one" if needed else "has none"
            raise InputError(f"a function takes {kind}= if and only if its spec has one, and {spec} {has}")
        if part is not None:
            tensor: Tensor = _kind(kind, part, Tensor, "a tensor for a function")
            if not tensor.is_floating_point():
                raise KindError(f"{kind} must be of floating point, got {tensor.dtype}")
            tensors[kind] = tensor
    return tensors


def _sizes(shape: int | Sequence[int] | None, spec: NormSpec, parameters: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape of an input; a batch of at least four, so that samples can be told apart."""
    if shape is None:
        known = [tuple(value.shape) for value in parameters.values() if value.numel() > 1]
        if not known:
            raise ShapeError("no parameter tells the shape of an input; give shape=, such as (2, 3, 64)")
        widest = max(known, key=len)
        shape = (2, *widest, 4, 3) if spec.axes in _CHANNELS else (2, 3, *widest)
    sizes = (2, 3, shape) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) < 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ShapeError(f"shape must be a number of features or at least a batch and a row, got {shape!r}")
    sizes = (max(sizes[0], 4), *sizes[1:])
    try:
        reference.to_rows(torch.empty(sizes, device="cpu"), spec)
    except (NormkitError, RuntimeError) as error:
        raise ShapeError(f"rows of {spec} do not fit into an input of shape {sizes} ({_first_line(error)})") from error
    return sizes
