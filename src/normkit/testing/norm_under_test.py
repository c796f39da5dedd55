"""The norm under test: which of its parameters are weight and bias, and copies of it in any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference, units
from normkit.conventions.eps import eps_in
from normkit.errors import InputError, KindError, NormkitError, ShapeError
from normkit.identification.behaviour import example_sizes, identify
from normkit.identification.calling import Parameterised
from normkit.identification.passport import Passport
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec
from normkit.text import dtype_name, first_line, typed_line
from normkit.units import Exact

_SEED = 0


class RefusedError(Exception):
    """The norm raised an error, or returned something other than a tensor of the input's shape."""


class Subject:
    """The norm that was given. It is never called: `in_dtype` makes the copies that are tested.

    Args:
        norm: A module, or a function f(x), f(x, weight), f(x, bias) or f(x, weight, bias).
        spec: What it should compute; it says whether there are weight and bias.
        shape: Of an input, the batch first; n means (2, 3, n); None takes it from the parameters.
        weight: The name of a module's parameter, or a function's tensor.
        bias: Likewise.
        call: call(norm, x), or call(function, x, weight, bias), in place of calling it.
        device: Where it runs; None is where it is.
        dtype: In which it is identified, where that is needed.
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
            if any(tensor.is_meta for tensor in norm.state_dict().values()):
                raise InputError(f"the {type(norm).__name__} is on the meta device; test one that has memory")
            self._module, prefix = norm, ""
            if call is not None:
                self._module, prefix = Parameterised(norm, {}, call), "norm."
                self._module.training = norm.training
            given = {
                kind: None if part is None else prefix + _kind(kind, part, str, "the name of a parameter")
                for kind, part in (("weight", weight), ("bias", bias))
            }
        else:
            tensors = _tensors(spec, weight, bias)
            self._module = Parameterised(norm, tensors, call)
            given = {name: name if name in tensors else None for name in ("weight", "bias")}
        tensor = next(iter(self._module.state_dict().values()), torch.empty(0))
        self.device = tensor.device
        if device is not None:
            try:
                self.device = torch.device(device)
                torch.empty(1, device=self.device).tolist()
            except Exception as error:  # each kind of device refuses in its own way
                raise InputError(f"device: {device!r} cannot be used here ({first_line(error)})") from error
        self._dtype = dtype
        self._passport: Passport | NormkitError | None = None
        self._parameters = {name: value for name, value in self._module.named_parameters() if value.is_floating_point()}
        self.shape = _sizes(shape, spec, self._parameters)
        self.weight_name = self._name_of("weight", given["weight"]) if spec.has_weight else None
        self.bias_name = self._name_of("bias", given["bias"]) if spec.has_bias else None
        for kind, name in (("weight", self.weight_name), ("bias", self.bias_name)):
            sizes = None if name is None else tuple(self._parameters[name].shape)
            wanted = spec.rows.parameter_sizes(self.shape) if spec.rows.are_channels else self.shape[1:]
            try:
                torch.empty(sizes or (), device="cpu").expand(wanted)
            except RuntimeError:
                message = f"{kind}: {name} of shape {sizes} does not broadcast against a sample of {wanted}"
                raise ShapeError(message) from None

    def passport(self) -> Passport | None:
        """The passport of the norm; None if it cannot be identified."""
        if self._passport is None:
            try:
                self._passport = identify(self._module, self.shape, dtype=self._dtype, device=self.device)
            except NormkitError as error:
                self._passport = error
        return self._passport if isinstance(self._passport, Passport) else None

    def in_dtype(self, spec: NormSpec, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> NormUnderTest:
        """A copy with random parameters, to hold against a spec.

        Args:
            spec: What it should compute.
            dtype: Of inputs.
            parameter_dtype: Of parameters; by default that of inputs.

        Raises:
            ModelError: If the module cannot be copied.
        """
        generator = torch.Generator().manual_seed(_SEED)
        values = self.draw(spec.gain.offset, generator)
        names = (self.weight_name, self.bias_name)
        parameter_dtype = parameter_dtype or dtype
        specimen = Specimen(self._module, dtype=parameter_dtype, device=self.device, as_given=True)
        specimen.set(values)
        weight, bias = (None if name is None else values[name].to(parameter_dtype) for name in names)
        return NormUnderTest(
            specimen=specimen,
            spec=spec,
            dtype=dtype,
            shape=self.shape,
            weight=weight,
            bias=bias,
            names=names,
            generator=generator,
        )

    def draw(self, offset: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Random values for all parameters: gains of 0.5 to 1.5, a quarter of them negative; biases of -1 to 1.

        The offset is taken off. Parameters that the spec does not know of get values as well: a gain of 1 would hide.
        """
        values = {}
        for name, parameter in self._parameters.items():
            uniform = torch.rand(parameter.shape, generator=generator, device="cpu")
            if name == self.bias_name:
                values[name] = 2 * uniform - 1
            elif name == self.weight_name:
                values[name] = (0.5 + uniform) * torch.where(uniform * 64 % 4 < 1, -1, 1) - offset
            else:
                values[name] = 0.5 + uniform
        return values

    def _name_of(self, kind: str, given: str | None) -> str | None:
        names = list(self._parameters)
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


@dataclass(kw_only=True, eq=False)
class NormUnderTest:
    """A copy of a norm in one dtype, with parameters of known values, and what it should give there."""

    specimen: Specimen
    spec: NormSpec
    """The spec that it is compared with."""
    dtype: torch.dtype
    """Dtype of inputs; parameters may have another."""
    shape: tuple[int, ...]
    """Shape of an input, the batch first."""
    weight: Tensor | None
    """The spec's weight on the CPU."""
    bias: Tensor | None
    """The spec's bias on the CPU."""
    names: tuple[str | None, str | None]
    """The parameters that are weight and bias."""
    generator: torch.Generator
    """Source of inputs."""

    @property
    def module(self) -> nn.Module:
        """The copy."""
        assert self.specimen.module is not None
        return self.specimen.module

    @property
    def device(self) -> torch.device:
        """The device of the copy."""
        return self.specimen.device

    @property
    def is_half(self) -> bool:
        """Inputs have 16 bits."""
        return self.dtype in reference.HALF

    @property
    def stays_narrow(self) -> bool:
        """The spec itself computes in 16 bits here: every step rounds, in an order that no spec fixes."""
        return self.is_half and self.spec.casts.has_narrow_statistics

    def normal(self, samples: int, *, mean: float = 0.0) -> Tensor:
        """Random samples about a mean, on the CPU."""
        return self.cast(torch.randn(samples, *self.shape[1:], generator=self.generator) + mean)

    def cast(self, x: Tensor) -> Tensor:
        """x in the dtype of inputs."""
        return x.to(self.dtype)

    def overwriting(self, x: Tensor) -> Tensor:
        """The output for x itself, which the norm may write to.

        Raises:
            RefusedError: If it raises an error, or returns anything but a tensor of x's shape.
        """
        try:
            y = self.module(x)
        except Exception as error:  # a foreign module may refuse in any way
            raise RefusedError(typed_line(error)) from error
        if not isinstance(y, Tensor):
            raise RefusedError(f"a {type(y).__name__}; call=lambda norm, x: norm(x)[0] would take one tensor out of it")
        if y.shape != x.shape:
            raise RefusedError(f"shape {tuple(y.shape)}")
        return y

    def y(self, x: Tensor) -> Tensor:
        """The output for x, which stays as it is; on the CPU. Errors as for `overwriting`."""
        with torch.no_grad():
            return self.overwriting(x.to(self.device, copy=True)).cpu()

    def all_gradients(self, x: Tensor, dy: Tensor, *, uses: int = 1) -> dict[str, Tensor | None]:
        """The gradients of sum(y * dy): "" is that of x, the others are those of all parameters by name.

        Args:
            x: The input, where the norm is.
            dy: The gradient of the output, likewise.
            uses: How often it is called before it is differentiated, for one part of the batch after the other.

        Raises:
            RefusedError: If it cannot be differentiated.
        """
        return self._all_of(*self.differentiable(x, uses=uses), dy)

    def differentiable(self, x: Tensor, *, uses: int = 1) -> tuple[Tensor, Tensor]:
        """x as a leaf, and the output for it with its graph; arguments and errors as for `all_gradients`."""
        leaf = x.detach().view_as(x).requires_grad_()
        with torch.enable_grad():
            # A norm may write to its input, which a leaf would not allow; but a copy of a view would be contiguous.
            outputs = [self.overwriting(part.clone() if x.is_contiguous() else part) for part in leaf.chunk(uses)]
            return leaf, torch.cat(outputs) if uses > 1 else outputs[0]

    def _all_of(self, leaf: Tensor, y: Tensor, dy: Tensor) -> dict[str, Tensor | None]:
        parameters = dict(self.module.named_parameters())
        try:
            found = torch.autograd.grad(y, [leaf, *parameters.values()], dy.to(y.dtype), allow_unused=True)
        except Exception as error:  # a foreign module may refuse in any way
            raise RefusedError(typed_line(error)) from error
        return dict(zip(["", *parameters], found, strict=True))

    def gradients(self, x: Tensor, dy: Tensor, *, uses: int = 1) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Its gradients by x, weight and bias, on the CPU; None where there is none. Otherwise as `all_gradients`."""
        return self.gradients_of(*self.differentiable(x.to(self.device), uses=uses), dy)

    def gradients_of(self, leaf: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The same of what `differentiable` returns."""
        found = self._all_of(leaf, y, dy.to(self.device))
        chosen = (None if name is None else found[name] for name in ("", *self.names))
        by_x, by_weight, by_bias = (None if each is None else each.detach().cpu() for each in chosen)
        return by_x, by_weight, by_bias

    def parameters_of(self, spec: NormSpec) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as far as the spec has them."""
        return self.weight if spec.has_weight else None, self.bias if spec.has_bias else None

    def truth(self, x: Tensor) -> Exact:
        """y by the spec's formula, nothing rounded."""
        return units.output(x, self.spec, *self.parameters_of(self.spec), plain=True)

    def program(self, x: Tensor) -> Tensor:
        """y as the spec's casts round it."""
        return reference.forward(x, self.spec, *self.parameters_of(self.spec))

    def expected(self, x: Tensor) -> Exact:
        """y as it should be in this dtype, with the size of its terms."""
        exact = self.truth(x)
        return Exact(self.program(x).double(), exact.size) if self.is_half else exact

    def samples(self, rows: int, elements: int) -> int:
        """How many samples hold about so many rows, and no more than so many elements."""
        return max(1, min(rows * self.row_length, elements) // math.prod(self.shape[1:]))

    @property
    def row_length(self) -> int:
        """Elements that share statistics."""
        return reference.to_rows(torch.empty(1, *self.shape[1:]), self.spec).shape[-1]

    @property
    def free_axes(self) -> int:
        """Leading axes along which neither statistics nor parameters vary."""
        if (trailing := self.spec.rows.num_trailing) is None:
            return 1
        taken = [part.dim() for part in (self.weight, self.bias) if part is not None]
        return len(self.shape) - max(trailing, *taken, 1)

    def felt(self) -> float:
        """The root mean square of rows that feel the spec's eps most; 0.0 if it has none."""
        size = self.spec.placement.length(eps_in(self.dtype, self.spec.eps))
        return size / self.row_length**0.5 if self.spec.divisor.is_sum else size

    @property
    def words(self) -> str:
        """The dtype's name."""
        return dtype_name(self.dtype)


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


def _sizes(shape: int | Sequence[int] | None, spec: NormSpec, parameters: dict[str, nn.Parameter]) -> tuple[int, ...]:
    """The shape of an input; a batch of at least four, so that samples can be told apart."""
    if shape is None:
        known = [tuple(value.shape) for value in parameters.values() if value.numel() > 1]
        if not known:
            raise ShapeError("no parameter tells the shape of an input; give shape=, such as (2, 3, 64)")
        widest = max(known, key=len)
        shape = (2, *widest, 4, 3) if spec.rows.channel_axis == 1 else (2, 3, *widest)
    sizes = example_sizes(shape, (2, 3))
    sizes = (max(sizes[0], 4), *sizes[1:])
    try:
        reference.to_rows(torch.empty(sizes, device="cpu"), spec)
    except (NormkitError, RuntimeError) as error:
        raise ShapeError(f"rows of {spec} do not fit into an input of shape {sizes} ({first_line(error)})") from error
    return sizes
