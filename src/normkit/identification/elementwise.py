"""Elementwise maps that are no straight lines: known functions by their curve, and those that saturate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.identification.passport import Reading
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

_FITS = 1e-5
_STEP = 1e-3
_LARGE = 2.0**20


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
    low, high, lower, higher = _curves(
        specimen, shape, _LARGE * torch.tensor([-1.0, 1.0, -64.0, 64.0], dtype=torch.float64)
    )
    span = (high - low).abs()
    saturates = bool(((low - lower).abs() <= 1e-3 * span).all() and ((high - higher).abs() <= 1e-3 * span).all())
    if not (saturates and bool((span > 0).any())):
        same = without_repetition(curves[0]).numel() == 1
        name = activation_of(curves.flatten(1)[:, 0].cpu(), at) if same else None
        evidence = (line,) if name is None else (line, f"its curve is that of {name}")
        return Reading(value={"saturates": False, "function": name}, evidence=evidence)
    slope = _slope_at_zero(specimen, shape, span)
    gain, bias = (high - low) / 2, (high + low) / 2
    name = None if slope is None else _sigmoidal(curves, at, slope, gain, bias)
    limits = [_plain(without_repetition(low)), _plain(without_repetition(high))]
    value: dict[str, Any] = {
        "saturates": True,
        "function": name,
        "slope": None if slope is None else _plain(without_repetition(slope)),
        "limits": limits,
    }
    formula = "" if name is None else f": gain * {name}(alpha * x) + bias"
    slopes = "it jumps at 0" if slope is None else f"its slope at 0 is {least_and_most(slope)}"
    return Reading(
        value=value,
        evidence=(
            line,
            f"DyT-like: a saturating elementwise map with gain and bias{formula}",
            f"{slopes}; its limits are {least_and_most(low)} and {least_and_most(high)}",
        ),
    )


def _slope_at_zero(specimen: Specimen, shape: Sequence[int], span: Tensor) -> Tensor | None:
    """The slope, or None where the map jumps at 0."""
    near = torch.tensor([-_STEP, _STEP, -_STEP / 10, _STEP / 10], dtype=torch.float64)
    one, two, three, four = _curves(specimen, shape, near)
    slope, nearer = (two - one) / (2 * _STEP), (four - three) / (0.2 * _STEP)
    jumps = (slope - nearer).abs() > 0.05 * slope.abs() + 1e-6 * span
    # The cubic terms of both slopes cancel.
    return None if bool(jumps.any()) else (100 * nearer - slope) / 99


def _sigmoidal(curves: Tensor, at: Tensor, slope: Tensor, gain: Tensor, bias: Tensor) -> str | None:
    """tanh or erf, if gain * it(alpha * x) + bias is the curve, alpha being what the slope at 0 says."""
    if bool((gain == 0).any()):
        return None
    inputs = at.to(curves.device).reshape(-1, *(1,) * gain.dim())
    for name, function, steepness in (("tanh", torch.tanh, 1.0), ("erf", torch.erf, 2 / torch.pi**0.5)):
        expected = gain * function(slope / (gain * steepness) * inputs) + bias
        if bool(((curves - expected).abs() <= 1e-4 * gain.abs()).all()):
            return name
    return None


def _curves(specimen: Specimen, shape: Sequence[int], at: Tensor) -> Tensor:
    """The outputs of samples whose elements are all one number, one for each of these numbers, in float64."""
    column = at.to(specimen.device).reshape(-1, *(1,) * (len(shape) - 1))
    return called_wide(specimen, column.expand(-1, *shape[1:]).contiguous())


def called_wide(specimen: Specimen, x: Tensor) -> Tensor:
    """The output in float64, computed there where the specimen can."""
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
