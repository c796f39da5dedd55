"""Gain and bias: which parameter each one is, and what is added to it; or its values where no parameter is it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FITS = 1e-4
_ABSENT = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A gain or a bias as it acts: slope * parameter + intercept, or fixed values.

    Attributes:
        name: The parameter that it follows, or None.
        slope: Of the acting value over the parameter.
        intercept: The acting value where the parameter is 0.
        values: What acts where no parameter does, in float64; None if `name` is given.
    """

    name: str | None = None
    slope: float = 1.0
    intercept: float = 0.0
    values: Tensor | None = None

    @property
    def constant(self) -> float | None:
        """The one value of a gain that is no parameter and the same for all features, else None."""
        if self.values is None or not _same(self.values, self.values.mean()):
            return None
        return float(self.values.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine:
    """Gain and bias of a norm, as a spec's `weight` and `bias` arguments: parameter names or fixed values."""

    weight: str | Tensor | None = None
    bias: str | Tensor | None = None

    def of(self, module: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
        """The weight and bias to give to `reference.forward` for this module, as they are now."""
        parameters = {} if module is None else dict(module.named_parameters())
        weight, bias = (
            parameters[part] if isinstance(part, str) else None if part is None else part.float()
            for part in (self.weight, self.bias)
        )
        return weight, bias

    @property
    def names(self) -> set[str]:
        """The parameters that act."""
        return {part for part in (self.weight, self.bias) if isinstance(part, str)}

    @property
    def parameters_reached(self) -> bool:
        """Whatever acts is a parameter."""
        return not isinstance(self.weight, Tensor) and not isinstance(self.bias, Tensor)


def gain_of(gains: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], channels: bool) -> Part | None:
    """What a gain is, from its acting values (of a sample's shape) under several draws of the parameters.

    Args:
        gains: The acting gain under each draw.
        parameters: The parameters of each draw.
        channels: Parameters lie along axis 1 of the input, not along its trailing axes.

    Returns:
        Its part, or None if nothing so aligned explains it.
    """
    if all(_same(gain, gains[0]) for gain in gains):
        values = _compressed(gains[0], channels)
        return None if values is None else Part(values=values)
    return _followed(gains, parameters, channels)


def bias_of(
    biases: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], channels: bool, scale: float
) -> Part | None:
    """What a bias is, likewise; a part with neither name nor values if there is none.

    Args:
        biases: The acting bias under each draw.
        parameters: The parameters of each draw.
        channels: Parameters lie along axis 1 of the input, not along its trailing axes.
        scale: Root mean square of the normalized part, against which a bias is zero or not.
    """
    if all(float(bias.abs().max()) <= _ABSENT * scale for bias in biases):
        return Part()
    part = gain_of(biases, parameters, channels)
    if part is not None and part.name is not None and not (_near(part.slope, 1.0) and abs(part.intercept) < _FITS):
        return None
    return part


def _followed(acting: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], channels: bool) -> Part | None:
    """The parameter that the acting values are a straight line of, over all features and draws."""
    best, best_residual = None, _FITS
    measured = torch.cat([values.flatten() for values in acting])
    for name in parameters[0]:
        aligned = [_aligned(draw[name], values, channels) for draw, values in zip(parameters, acting, strict=True)]
        if any(values is None for values in aligned):
            continue
        stored = torch.cat([values.double().flatten() for values in aligned if values is not None])
        spread = stored - stored.mean()
        slope = float((spread * measured).sum() / spread.square().sum())
        intercept = float(measured.mean()) - slope * float(stored.mean())
        residual = _relative(measured - slope * stored - intercept, measured)
        if residual < best_residual:
            best, best_residual = Part(name=name, slope=slope, intercept=intercept), residual
    return best


def _aligned(parameter: Tensor, sample: Tensor, channels: bool) -> Tensor | None:
    """The parameter spread over a sample, or None if it does not fit."""
    if channels:
        if parameter.numel() != sample.shape[0]:
            return None
        parameter = parameter.reshape(-1, *(1,) * (sample.dim() - 1))
    sizes = zip(reversed(parameter.shape), reversed(sample.shape), strict=False)
    if parameter.dim() > sample.dim() or any(size not in (1, wanted) for size, wanted in sizes):
        return None
    return parameter.expand(sample.shape)


def _compressed(values: Tensor, channels: bool) -> Tensor | None:
    """Values of a sample's shape without the axes along which they do not change; None if that fails."""
    if channels:
        along = values.flatten(1).mean(1)
        return along if _same(values, along.reshape(-1, *(1,) * (values.dim() - 1))) else None
    while values.dim() > 1 and _same(values, values[:1]):
        values = values.mean(0)
    return values


def _same(values: Tensor, other: Tensor) -> bool:
    return _relative(values - other, values) < _FITS


def _near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=_FITS)


def _relative(difference: Tensor, values: Tensor) -> float:
    return float(difference.square().mean().sqrt() / values.square().mean().sqrt())
