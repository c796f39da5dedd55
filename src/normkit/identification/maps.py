"""Maps that divide by no length, so they are no norms: identity, affine, linear, elementwise, and the softmax.

An elementwise map that is no straight line is recognised by its curve, or by its limits if it saturates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.identification.passport import Passport, Reading, without_spec
from normkit.identification.specimen import Specimen

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "sign": torch.sign,
    "erf": torch.erf,
}
"""Elementwise functions that are known by name; "gelu_tanh" is GELU in its tanh approximation."""

_STEP = 1e-3
_LARGE = 2.0**20
_FITS = 1e-5
_SUPERPOSED = 1e-4
"""A linear map adds up to about 1e-6 in float32; a bent one leaves more than 1e-2."""
_HALVES = 6
_FAR = 2.0**40
"""An input scale at which a divisor of 1e9 is not constant any more; squares stay finite."""


@contextmanager
def drawn(specimen: Specimen, generator: torch.Generator) -> Iterator[None]:
    """Inside, parameters have random values; afterwards they have those of before."""
    stored = {name: value.clone() for name, value in specimen.parameters.items()}
    specimen.draw(generator)
    try:
        yield
    finally:
        for name, value in stored.items():
            specimen.parameters[name].copy_(value)


def plain_map(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Passport | None:
    """The passport of a map that divides by nothing computed from its input; None if it is none of these maps.

    Parameters are drawn, so that a gain of 1 is not taken for none; they are as they were when this returns.
    """
    with drawn(specimen, generator):
        x = _normal(specimen, shape, generator)
        y = specimen(x)
        if not bool(torch.isfinite(y).all()):
            return without_spec("not a norm", "its output is not finite for ordinary inputs")
        kind = _kind(specimen, x, y, generator)
    match kind:
        case "identity":
            return without_spec("identity", "its outputs are its inputs, bit for bit")
        case "constant":
            return without_spec("not a norm", "its output does not depend on its input")
        case "affine":
            return affine_map(specimen, shape)
        case "elementwise":
            reading = elementwise_reading(specimen, shape)
            return without_spec("elementwise", *reading.evidence, elementwise=reading)
        case "linear":
            line = "f(x + y) = f(x) + f(y) - f(0), and an output depends on inputs beside its own: it mixes features"
            return without_spec("linear", line)
    return _softmax(x, y, specimen)


def affine_map(specimen: Specimen, shape: Sequence[int]) -> Passport:
    """The slope and constant of an elementwise map that is a straight line, with the parameters as they are."""
    ones = torch.ones(tuple(shape), device=specimen.device, dtype=torch.float64)
    plus, minus = called_wide(specimen, ones), called_wide(specimen, -ones)
    slope, constant = without_repetition((plus - minus) / 2), without_repetition((plus + minus) / 2)
    sizes = " x ".join(map(str, slope.shape)) or "one"
    line = f"each output is a straight line of its own input: slopes ({sizes}) from {least_and_most(slope)}"
    if not bool((constant != 0).any()):
        return replace(without_spec("affine", f"{line}, no constant"), weight=slope)
    line = f"{line}, constants from {least_and_most(constant)}"
    return replace(without_spec("affine", line), weight=slope, bias=constant)


def _kind(specimen: Specimen, x: Tensor, y: Tensor, generator: torch.Generator) -> str | None:
    """Which map sends x to y, from further calls: with other inputs, with half of them exchanged, and with sums."""
    wide = x * torch.logspace(-6, 6, x.numel(), device=x.device).to(x.dtype).reshape(x.shape)
    if torch.equal(specimen(wide), wide) and torch.equal(y, x):
        return "affine" if _buffers_act(specimen, x, generator) else "identity"
    other = _normal(specimen, x.shape, generator)
    if torch.equal(specimen(other), y) and torch.equal(specimen(64 * other), y):
        return "constant"
    constant = specimen(torch.zeros_like(x)).double()
    if not _is_local(specimen, x, y, other, generator):
        return "linear" if _is_linear(specimen, x, other, constant) else None
    # In float32, a constant of 3 hides a slope of 1e-6.
    ones = torch.ones_like(x, dtype=torch.float64)
    slope = (called_wide(specimen, ones) - called_wide(specimen, -ones)) / 2
    rounding = 8 * torch.finfo(specimen.dtype).eps
    # A constant may be the difference of two numbers as large as the slope or as other constants.
    cancelled = rounding * torch.maximum(constant.abs().max(), slope.abs().max())
    for inputs in (x, 1e3 * x, -1e-3 * x):
        expected = slope * inputs.double()
        error = (specimen(inputs).double() - expected - constant).abs()
        if not bool((error <= max(_FITS, rounding) * (expected.abs() + constant.abs()) + cancelled).all()):
            return "elementwise"
    return "affine"


def _buffers_act(specimen: Specimen, x: Tensor, generator: torch.Generator) -> bool:
    """Whether other numbers in its buffers make an identity another map."""
    buffers = [] if specimen.module is None else list(filter(torch.is_floating_point, specimen.module.buffers()))
    stored = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    acts = bool(buffers) and not torch.equal(specimen(x), x)
    for buffer, value in zip(buffers, stored, strict=True):
        buffer.copy_(value)
    return acts


def _is_local(specimen: Specimen, x: Tensor, y: Tensor, other: Tensor, generator: torch.Generator) -> bool:
    """Whether each output depends on its own input alone: half of the inputs change, the other outputs stay."""
    for scale, rest in ((1.0, y), (_FAR, specimen(_FAR * x))):
        for _ in range(_HALVES):
            half = (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
            mixed = specimen(scale * torch.where(half, other, x))
            stays = ((mixed - rest).abs() <= 1e-6 * rest.abs()) | (mixed == rest) | (mixed.isnan() & rest.isnan())
            if not bool(stays[~half].all()):
                return False
    return True


def _is_linear(specimen: Specimen, x: Tensor, other: Tensor, constant: Tensor) -> bool:
    """Whether f(x - z) = f(x) - f(z), less the constant, at four scales."""
    tolerance = max(_SUPERPOSED, 16 * torch.finfo(specimen.dtype).eps)
    # In float16, the far inputs are infinite.
    for scale in (1e-3, 1.0, 1e3) if specimen.dtype == torch.float16 else (1e-3, 1.0, 1e3, _FAR):
        one, two = (specimen(scale * each).double() - constant for each in (x, other))
        both = specimen(scale * x - scale * other).double() - constant
        size = float((one.square() + two.square() + constant.square()).mean().sqrt())
        # Written so that a difference that is not a number is one.
        if not float((both - one + two).square().mean().sqrt()) <= tolerance * size:
            return False
    return True


def _softmax(x: Tensor, y: Tensor, specimen: Specimen) -> Passport | None:
    """The softmax over one axis or all trailing ones: rows positive, of sum 1, and log y = x / T - constant."""
    if not bool((y > 0).all()):
        return None
    rounding = max(1e-4, 16 * torch.finfo(specimen.dtype).eps)
    for axis in range(y.dim()):
        if bool(((y.double().sum(axis) - 1).abs() > rounding).any()):
            continue
        logs, inputs = (part - part.mean(axis, keepdim=True) for part in (y.double().log(), x.double()))
        slope = float((logs * inputs).sum() / inputs.square().sum())
        if slope != 0 and bool(((logs - slope * inputs).abs() <= rounding * logs.abs().max()).all()):
            temperature = 1.0 if abs(slope - 1) < rounding else 1 / slope
            return without_spec(
                "softmax",
                f"outputs are positive, sum to 1 along axis {axis}, and do not change when a constant is added there",
                f"their logarithms are the inputs over {temperature:.6g}, less a constant",
                softmax=Reading(value={"axis": axis, "temperature": temperature}),
            )
    return None


def _normal(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(specimen.device, specimen.dtype)


def activation_of(curve: Tensor, at: Tensor) -> str | None:
    """The name of the function that has this curve over these inputs, both in float64; or None."""
    for name, function in ACTIVATIONS.items():
        expected = function(at)
        if float((curve - expected).abs().max()) <= _FITS * float(expected.abs().max()):
            return name
    return None


def elementwise_reading(specimen: Specimen, shape: Sequence[int]) -> Reading:
    """Reading "elementwise" of a map whose outputs depend on their own inputs alone.

    Its value says whether the map "saturates", and its "function": one of `ACTIVATIONS`; "tanh" or "erf" for a map
    gain * function(alpha * x) + bias, which saturates; else None. For a map that saturates it also has the "slope" at 0
    (None if it jumps there) and the "limits": each one number, or [least, most] if features differ.
    """
    at = torch.cat([torch.linspace(-6, 6, 49, dtype=torch.float64), torch.tensor([0.013, -0.013], dtype=torch.float64)])
    curves = _curves(specimen, shape, at)
    line = "each output depends on its own input alone, and is no straight line of it"
    far = _LARGE * torch.tensor([-1.0, 1.0, -64.0, 64.0], dtype=torch.float64)
    low, high, lower, higher = _curves(specimen, shape, far)
    span = (high - low).abs()
    saturates = bool(((low - lower).abs() <= 1e-3 * span).all() and ((high - higher).abs() <= 1e-3 * span).all())
    if not (saturates and bool((span > 0).any())):
        same = without_repetition(curves[0]).numel() == 1
        name = activation_of(curves.flatten(1)[:, 0].cpu(), at) if same else None
        evidence = (line,) if name is None else (line, f"its curve is that of {name}")
        return Reading(value={"saturates": False, "function": name}, evidence=evidence)
    near = torch.tensor([-_STEP, _STEP, -_STEP / 10, _STEP / 10], dtype=torch.float64)
    one, two, three, four = _curves(specimen, shape, near)
    wider, nearer = (two - one) / (2 * _STEP), (four - three) / (0.2 * _STEP)
    jumps = bool(((wider - nearer).abs() > 0.05 * wider.abs() + 1e-6 * span).any())
    # The cubic terms of both slopes cancel.
    slope = None if jumps else (100 * nearer - wider) / 99
    gain, bias = (high - low) / 2, (high + low) / 2
    name = None if slope is None else _sigmoidal(curves, at, slope, gain, bias)
    value: dict[str, Any] = {
        "saturates": True,
        "function": name,
        "slope": None if slope is None else _plain(slope),
        "limits": [_plain(low), _plain(high)],
    }
    formula = "" if name is None else f": gain * {name}(alpha * x) + bias"
    slopes = "it jumps at 0" if slope is None else f"its slope at 0 is {least_and_most(slope)}"
    limits = f"its limits are {least_and_most(low)} and {least_and_most(high)}"
    like = f"DyT-like: a saturating elementwise map with gain and bias{formula}"
    return Reading(value=value, evidence=(line, like, f"{slopes}; {limits}"))


def _sigmoidal(curves: Tensor, at: Tensor, slope: Tensor, gain: Tensor, bias: Tensor) -> str | None:
    """Name of the function, tanh or erf, for which gain * function(alpha * x) + bias is the curve; or None.

    The slope at 0 gives alpha.
    """
    if bool((gain == 0).any()):
        return None
    inputs = at.to(curves.device).reshape(-1, *(1,) * gain.dim())
    for name, function, steepness in (("tanh", torch.tanh, 1.0), ("erf", torch.erf, 2 / torch.pi**0.5)):
        expected = gain * function(slope / (gain * steepness) * inputs) + bias
        if bool(((curves - expected).abs() <= 1e-4 * gain.abs()).all()):
            return name
    return None


def _curves(specimen: Specimen, shape: Sequence[int], at: Tensor) -> Tensor:
    """The outputs in float64 of one sample for each of these numbers, which fills it."""
    column = at.to(specimen.device).reshape(-1, *(1,) * (len(shape) - 1))
    return called_wide(specimen, column.expand(-1, *shape[1:]).contiguous())


def called_wide(specimen: Specimen, x: Tensor) -> Tensor:
    """The output in float64, computed in float64 if the specimen runs in it."""
    wide = specimen.call_in(torch.float64, x)
    return (specimen(x.to(specimen.dtype)) if wide is None else wide).double()


def without_repetition(values: Tensor) -> Tensor:
    """Values with one entry along each axis along which they do not change, and without leading axes of one."""
    for axis in range(values.dim()):
        first = values.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(values), values):
            values = first
    while values.dim() and values.shape[0] == 1:
        values = values[0]
    return values.clone()


def least_and_most(values: Tensor) -> str:
    """One number in words, or "least to most"."""
    least, most = float(values.min()), float(values.max())
    return f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"


def _plain(values: Tensor) -> Any:
    """A number, or [least, most] of several."""
    least, most = float(values.min()), float(values.max())
    return least if least == most else [least, most]
