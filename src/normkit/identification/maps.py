"""Maps that are no norms, as they do not divide by a length: identity, affine, linear, elementwise, and the softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.identification.elementwise import called_wide, elementwise_reading, least_and_most, without_repetition
from normkit.identification.passport import Passport, Reading, Verdict
from normkit.identification.specimen import Specimen

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
        """A kind with this evidence, and further readings."""
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
