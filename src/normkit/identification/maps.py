"""Maps that are no norms, as they do not divide by a length: identity, affine, linear, elementwise, and the softmax.

Elementwise maps that are no straight lines are recognised by their curve, or by their limits if they saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.identification.passport import Passport, Reading, Verdict
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


@dataclass(frozen=True, kw_only=True, eq=False)
class FallbackVerdict:
    """What a module or function is instead of a norm of one input."""

    verdict: Verdict
    readings: dict[str, Reading] = field(default_factory=dict)
    """Under "kind", and whatever else was found."""
    weight: Tensor | None = None
    """Slope of an elementwise map; broadcasts against a sample."""
    bias: Tensor | None = None
    """Constant of an elementwise map; broadcasts against a sample."""
    norm: Passport | None = None
    """For a norm of the sum of two inputs: the norm."""

    @classmethod
    def of(cls, verdict: Verdict, *evidence: str, **readings: Reading) -> FallbackVerdict:
        """A verdict with this evidence, and further readings."""
        return cls(verdict=verdict, readings={"kind": Reading(value=verdict, evidence=evidence), **readings})


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


def plain_map(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> FallbackVerdict | None:
    """Which map it is that divides by nothing it sees; None if it is none of these.

    Parameters are drawn, so that a gain of 1 is not taken for none; they are as they were when this returns.
    """
    with drawn(specimen, generator):
        x = _normal(specimen, shape, generator)
        y = specimen(x)
        if not bool(torch.isfinite(y).all()):
            return FallbackVerdict.of("not a norm", "its output is not finite for ordinary inputs")
        verdict = _verdict(specimen, x, y, generator)
        if verdict == "identity" and _buffers_act(specimen, x, generator):
            verdict = "affine"
    match verdict:
        case "identity":
            return FallbackVerdict.of("identity", "its outputs are its inputs, bit for bit")
        case "constant":
            return FallbackVerdict.of("not a norm", "its output does not depend on its input")
        case "affine":
            return affine_map(specimen, shape)
        case "elementwise":
            reading = elementwise_reading(specimen, shape)
            return FallbackVerdict.of("elementwise", *reading.evidence, elementwise=reading)
        case "linear":
            return FallbackVerdict.of(
                "linear",
                "f(x + y) = f(x) + f(y) - f(0), and outputs depend on other inputs than their own: it mixes features",
            )
    return _softmax(x, y, specimen)


def affine_map(specimen: Specimen, shape: Sequence[int]) -> FallbackVerdict:
    """The slope and constant of an elementwise map that is a straight line, with the parameters as they are."""
    ones = torch.ones(tuple(shape), device=specimen.device, dtype=torch.float64)
    plus, minus = called_wide(specimen, ones), called_wide(specimen, -ones)
    slope, constant = without_repetition((plus - minus) / 2), without_repetition((plus + minus) / 2)
    has_constant = bool((constant != 0).any())
    sizes = " x ".join(map(str, slope.shape)) or "one"
    return FallbackVerdict(
        verdict="affine",
        readings={
            "kind": Reading(
                value="affine",
                evidence=(
                    f"each output is a straight line of its own input: slopes ({sizes}) from {least_and_most(slope)}, "
                    + (f"constants from {least_and_most(constant)}" if has_constant else "no constant"),
                ),
            )
        },
        weight=slope,
        bias=constant if has_constant else None,
    )


def _verdict(specimen: Specimen, x: Tensor, y: Tensor, generator: torch.Generator) -> str | None:
    wide = x * torch.logspace(-6, 6, x.numel(), device=x.device).to(x.dtype).reshape(x.shape)
    if torch.equal(specimen(wide), wide) and torch.equal(y, x):
        return "identity"
    other = _normal(specimen, x.shape, generator)
    if torch.equal(specimen(other), y) and torch.equal(specimen(64 * other), y):
        return "constant"
    zero = specimen(torch.zeros_like(x)).double()
    if _is_local(specimen, x, y, other, generator):
        # In float32, a constant of 3 hides a slope of 1e-6.
        ones = torch.ones_like(x, dtype=torch.float64)
        slope = (called_wide(specimen, ones) - called_wide(specimen, -ones)) / 2
        scales = (x, 1e3 * x, -1e-3 * x)
        return "affine" if all(_on_line(specimen, each, slope, zero) for each in scales) else "elementwise"
    return "linear" if _is_linear(specimen, x, other, zero) else None


def _buffers_act(specimen: Specimen, x: Tensor, generator: torch.Generator) -> bool:
    """Whether other numbers in its buffers make an identity another map."""
    buffers = (
        [] if specimen.module is None else [each for each in specimen.module.buffers() if each.is_floating_point()]
    )
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


def _on_line(specimen: Specimen, x: Tensor, slope: Tensor, constant: Tensor) -> bool:
    expected = slope * x.double()
    error = (specimen(x).double() - expected - constant).abs()
    rounding = 8 * torch.finfo(specimen.dtype).eps
    # A constant may be what two larger numbers, of the size of the slope or of other constants, left.
    cancelled = rounding * torch.maximum(constant.abs().max(), slope.abs().max())
    return bool((error <= max(_FITS, rounding) * (expected.abs() + constant.abs()) + cancelled).all())


def _is_linear(specimen: Specimen, x: Tensor, other: Tensor, zero: Tensor) -> bool:
    tolerance = max(_SUPERPOSED, 16 * torch.finfo(specimen.dtype).eps)
    # In float16, the far inputs are infinite.
    for scale in (1e-3, 1.0, 1e3) if specimen.dtype == torch.float16 else (1e-3, 1.0, 1e3, _FAR):
        one, two = (specimen(scale * each).double() - zero for each in (x, other))
        both = specimen(scale * x - scale * other).double() - zero
        size = float((one.square() + two.square() + zero.square()).mean().sqrt())
        # Written so that a difference that is not a number is one.
        if not float((both - one + two).square().mean().sqrt()) <= tolerance * size:
            return False
    return True


def _softmax(x: Tensor, y: Tensor, specimen: Specimen) -> FallbackVerdict | None:
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
            return FallbackVerdict.of(
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
