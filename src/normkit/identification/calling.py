"""How a norm can be called: its arguments, parameters, arrays of numpy and shapes; one clear line if it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import DtypeError, IdentificationError, InputError, KindError, NormkitError, ShapeError
from normkit.identification.gating import second_that_works
from normkit.identification.specimen import Call, NormLike, Specimen, UnrecognisedError, as_tensor
from normkit.text import first_line

_LARGER = (16, 64)
"""Lengths of the axes between batch and features that are tried where the given ones are refused."""


class Parameterised(nn.Module):
    """A function with its parameters, or a module behind a `call`, as one module of one tensor.

    Args:
        norm: A function f(x, *parameters), or a module.
        parameters: What a function is given after x, by name and in this order; copied.
        call: call(norm, x, *parameters) in place of norm(x, *parameters).
    """

    def __init__(
        self, norm: Callable[..., Any], parameters: Mapping[str, Tensor], call: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.norm = norm
        self._call = call
        self._given = tuple(parameters)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, x: Tensor) -> Any:
        """The result of the function for x and its parameters."""
        given = [getattr(self, name) for name in self._given]
        return self.norm(x, *given) if self._call is None else self._call(self.norm, x, *given)


def parameters_of(norm: Callable[..., Any], weight: object, bias: object) -> dict[str, Tensor]:
    """The parameters that a function was given, by name.

    Raises:
        InputError: If there are some, and the norm is a module.
        KindError: If one is no tensor of floating point, and no array of such numbers.
    """
    given = {name: part for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    if given and isinstance(norm, nn.Module):
        raise InputError(f"{' and '.join(given)}: for the parameters of a function; a module has its own, leave it out")
    tensors = {}
    for name, part in given.items():
        tensor = as_tensor(part)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise KindError(f"{name} must be a tensor or an array of floating point, got {part!r}")
        tensors[name] = tensor
    return tensors


def on_tensors(
    norm: Callable[..., Any], call: Callable[..., Any] | None, x: Tensor, parameters: Mapping[str, Tensor]
) -> Callable[..., Any]:
    """The function itself if it takes tensors; a function of tensors that calls it, if it takes numpy arrays.

    Args:
        norm: A function.
        call: How it is called, or None.
        x: An input.
        parameters: What it is given after x.
    """

    def of_arrays(*tensors: Tensor) -> object:
        return norm(*(tensor.detach().cpu().numpy() for tensor in tensors))

    for candidate in (norm, of_arrays):
        try:
            Parameterised(candidate, parameters, call)(x.clone())
        except Exception:  # a foreign function may refuse in any way
            continue
        return candidate
    return norm


def check_arguments(norm: NormLike, dtype: torch.dtype, device: torch.device | str | None) -> None:
    """Refuse what can never be called.

    Raises:
        KindError: If the norm is a class, or not callable.
        DtypeError: If the dtype is not one of floating point.
        IdentificationError: If the device is not there, or holds no values.
    """
    if isinstance(norm, type):
        raise KindError(f"norm must be a module or a function, got the class {norm.__name__}; give an instance")
    if not callable(norm):
        raise KindError(f"norm must be a module or a function of a tensor, got {type(norm).__name__}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(f"dtype must be one of floating point, got {dtype}")
    if device is None:
        return
    try:
        where = torch.empty(0, device=device).device
    except Exception as error:  # a backend that is not there may refuse in any way
        raise IdentificationError(f"device {str(device)!r} cannot be used ({first_line(error)})") from error
    if where.type == "meta":
        raise IdentificationError("tensors on the meta device have no values; leave device out, or give a real one")


def convenient(specimen: Specimen, shape: tuple[int, ...], call: Call | None) -> tuple[tuple[int, ...], int | None]:
    """The shape with 2 samples and 2 to 4 steps along each axis between batch and features, if the norm takes it.

    One step along an axis would hide that rows are coupled along it; many steps only take time. An axis stays
    as it is if a parameter spans it. If the norm refuses these shapes, longer axes are tried.

    Returns:
        The shape, and how many samples the norm takes at once; None if that may be any number.

    Raises:
        UnrecognisedError: If it takes no single tensor, but a second one beside it.
        IdentificationError: If it wants other arguments, or raises whatever it is given.
        ShapeError: If it refuses this shape.
    """
    refusal: UnrecognisedError | ShapeError | None = None
    returned: tuple[int, ...] | None = None
    for sizes in _shapes(specimen, shape):
        try:
            specimen(torch.ones(sizes, device=specimen.device, dtype=specimen.dtype))
        except UnrecognisedError as error:
            # It ran, but returned no tensor like its input.
            returned = returned or (sizes if error.verdict != "gated" else None)
            refusal = error
        except ShapeError as error:
            refusal = error
        else:
            samples = None
            try:
                specimen(torch.ones(sizes[0] + 1, *sizes[1:], device=specimen.device, dtype=specimen.dtype))
            except ShapeError:
                # It was exported or compiled for one shape.
                samples = sizes[0]
            except UnrecognisedError:
                pass
            return (max(sizes[0], 2), *sizes[1:]), samples
    if returned is not None:
        return returned, None
    assert refusal is not None
    raise _explained(specimen, shape, call, refusal) from refusal.__cause__


def _shapes(specimen: Specimen, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    spanned = {size for parameter in specimen.parameters.values() for size in parameter.shape}
    fixed = [axis for axis in range(1, len(shape) - 1) if shape[axis] in spanned]
    kept_axes = list(dict.fromkeys([(), *((axis,) for axis in fixed), tuple(fixed)]))
    for kept in kept_axes:
        between = (size if axis in kept else min(max(size, 2), 4) for axis, size in enumerate(shape[1:-1], start=1))
        yield (2, *between, max(shape[-1], 2))
    yield (max(shape[0], 2), *shape[1:])
    if shape[0] == 1:
        yield shape
    for larger in _LARGER:
        for kept in kept_axes if len(shape) > 2 else ():
            between = (size if axis in kept else max(size, larger) for axis, size in enumerate(shape[1:-1], start=1))
            yield (2, *between, max(shape[-1], 2))


def _explained(
    specimen: Specimen, shape: tuple[int, ...], call: Call | None, refusal: UnrecognisedError | ShapeError
) -> UnrecognisedError | NormkitError:
    """The error to raise for a norm that refuses all shapes."""
    cause = refusal.__cause__
    said = first_line(cause) if isinstance(cause, Exception) else str(refusal)
    kind = type(cause).__name__
    if call is not None and isinstance(cause, TypeError):
        return IdentificationError(f"call raises {kind} ({said}); it is called with the norm and x")
    if call is None and specimen.further and second_that_works(specimen, shape) is not None:
        return UnrecognisedError("gated", f"it cannot be called with one tensor ({said})")
    required = [each.name for each in specimen.further if each.default is inspect.Parameter.empty]
    if call is None and (required or isinstance(cause, TypeError)):
        wants = f"it wants {', '.join(required)} beside x" if required else "one tensor is not what it takes"
        return IdentificationError(f"the norm cannot be called with one tensor: {wants} ({said}); pass call=")
    if "device" in said or "CUDA" in said:
        return IdentificationError(
            f"the norm refuses an input on {specimen.device} ({said}); pass device=, or move the norm"
        )
    n = shape[-1]
    for sizes in ((2, n), (2, 3, n), (2, n, 3, 5), (2, n + 1), (7,)):
        try:
            specimen(torch.ones(sizes, device=specimen.device, dtype=specimen.dtype))
        except (UnrecognisedError, NormkitError) as error:
            if isinstance(error.__cause__, Exception) and first_line(error.__cause__) == said:
                continue
        return ShapeError(f"the norm refuses an input of shape {shape} ({said}); give a shape that it takes")
    return IdentificationError(f"the norm raises {kind} whatever it is given ({said})")
