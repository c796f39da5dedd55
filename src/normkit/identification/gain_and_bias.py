"""Gain and bias: the parameter that each one is, with the number that is added to it; or values, if none is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.conventions.rows import Rows
from normkit.reference import HALF
from normkit.text import dtype_name

_ABSENT = 1e-5
_MADE = 1e-3
_ROUNDED = 1e-5
"""A number that is not rounded as these leaves 1e-4."""
_GATHERED = 4096
"""Entries of a gain up to which each is compared with each entry of the parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """A weight whose entries are in several parameters, or in one along another axis than the features."""

    names: tuple[str, ...]
    """Names of the parameters."""
    index: Tensor
    """For each entry of the weight, its position among all entries of these parameters, in order."""

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The weight."""
        return torch.cat([parameters[name].flatten() for name in self.names])[self.index]

    def misread(self, role: str, parameters: Mapping[str, Tensor]) -> str | None:
        """In words, what is wrong where one number for each feature is read in another order, or not all are read.

        Args:
            role: "gain" or "bias".
            parameters: By name.
        """
        index = self.index.flatten()
        places = torch.arange(len(index))
        if len(self.names) > 1 or parameters[self.names[0]].shape != places.shape or torch.equal(index, places):
            return None
        wrong = int((index != places).sum())
        first = int((index != places).nonzero()[0])
        line = f"{wrong} of {len(places)} features have the {role} of another one: feature {first} has entry "
        line += f"{int(index[first])} of {self.names[0]}"
        unread = len(places) - len(set(index.tolist()))
        return line + (f"; {unread} of its entries are not read" if unread else "")

    def set(self, parameters: Mapping[str, Tensor], value: float) -> None:
        """Give every entry of the weight this value."""
        entries = torch.cat([parameters[name].flatten() for name in self.names])
        entries[self.index.flatten()] = value
        start = 0
        for name in self.names:
            parameter = parameters[name]
            parameter.copy_(entries[start : start + parameter.numel()].reshape(parameter.shape))
            start += parameter.numel()


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A gain or a bias as it acts: slope * parameter + intercept, or fixed values."""

    name: str | None = None
    """The parameter that it follows."""
    gathered: Gathered | None = None
    """The entries that it follows, where these are in several parameters."""
    slope: float = 1.0
    """Change of the acting value for a change of the parameter by 1."""
    intercept: float = 0.0
    """The acting value where the parameter is 0."""
    values: Tensor | None = None
    """The acting values in float64, where no parameter sets them."""
    fits: float = 1e-4
    """Values whose relative difference is smaller are the same."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it follows."""
        return self.gathered.names if self.gathered is not None else () if self.name is None else (self.name,)

    def set(self, parameters: Mapping[str, Tensor], value: float) -> None:
        """Give every entry that it follows this value, and no other entry of these parameters."""
        if self.name is not None:
            parameters[self.name].fill_(value)
        if self.gathered is not None:
            self.gathered.set(parameters, value)

    @property
    def constant(self) -> float | None:
        """The one value of a gain that is no parameter and the same for all features, else None."""
        if self.values is None or not _same(self.values, self.values.mean(), self.fits):
            return None
        return float(self.values.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine:
    """Gain and bias of a norm, as a spec's `weight` and `bias`: parameters, entries of them, or fixed values."""

    weight: str | Gathered | Tensor | None = None
    bias: str | Gathered | Tensor | None = None

    def of(self, module: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
        """The weight and bias to give to `reference.forward` for this module, as they are now."""
        parameters = {} if module is None else dict(module.named_parameters())
        return _taken(self.weight, parameters), _taken(self.bias, parameters)

    @property
    def names(self) -> set[str]:
        """The parameters that act."""
        names = {part for part in (self.weight, self.bias) if isinstance(part, str)}
        return names.union(*(part.names for part in (self.weight, self.bias) if isinstance(part, Gathered)))

    @property
    def parameters_reached(self) -> bool:
        """Whether a parameter sets everything that acts."""
        return not isinstance(self.weight, Tensor) and not isinstance(self.bias, Tensor)


def _taken(part: str | Gathered | Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor | None:
    if isinstance(part, Tensor):
        return part.float()
    if isinstance(part, Gathered):
        return part.of(parameters)
    return None if part is None else parameters[part]


def gain_of(
    gains: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], rows: Rows, fits: float = 1e-4
) -> Part | None:
    """The parameter or the values of a gain, from its acting values (of a sample's shape) under several draws.

    The parameter is the one that the acting values are a straight line of, over all features and draws.

    Args:
        gains: The acting gain under each draw.
        parameters: The parameters of each draw.
        rows: What a row is, which says along which axes a gain varies.
        fits: What a straight line may leave of the values, relatively.

    Returns:
        Its part, or None if nothing so aligned explains it.
    """
    if all(_same(gain, gains[0], fits) for gain in gains):
        return _fixed(gains[0], rows, fits)
    best, best_residual = None, fits
    measured = torch.cat([values.flatten() for values in gains])
    for name in parameters[0]:
        aligned = [_aligned(draw[name], values, rows) for draw, values in zip(parameters, gains, strict=True)]
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


def bias_of(
    biases: Sequence[Tensor],
    parameters: Sequence[Mapping[str, Tensor]],
    rows: Rows,
    scale: float,
    fits: float = 1e-4,
) -> Part | None:
    """The parameter or the values of a bias; a part with neither name nor values if there is none.

    Args:
        biases: The acting bias under each draw.
        parameters: The parameters of each draw.
        rows: What a row is, which says along which axes a bias varies.
        scale: Root mean square of the normalized part, against which a bias is zero or not.
        fits: What a straight line may leave of the values, relatively.
    """
    if all(float(bias.abs().max()) <= _ABSENT * scale for bias in biases):
        return Part()
    part = gain_of(biases, parameters, rows, fits)
    if part is not None and part.name is not None and max(abs(part.slope - 1.0), abs(part.intercept)) >= fits:
        return None
    return part


def rounded(role: str, acting: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], rows: Rows) -> str | None:
    """In words, which parameter a gain or bias is once that is rounded to 16 bits; None if it is none.

    Args:
        role: "gain" or "bias".
        acting: The acting values under each draw.
        parameters: The parameters of each draw, of a wider dtype.
        rows: What a row is.
    """
    for dtype, offset in itertools.product(HALF, (0.0, 1.0)):
        narrow = [
            {name: (value + offset).to(dtype).to(value.dtype) - offset for name, value in draw.items()}
            for draw in parameters
        ]
        part = gain_of(acting, narrow, rows, _ROUNDED)
        if part is not None and part.name is not None and parameters[0][part.name].dtype not in HALF:
            name = f"1 + {part.name}" if part.intercept / part.slope > 0.5 else part.name
            return f"the {role} acts as {name} rounded to {dtype_name(dtype)}"
    return None


def gathered_of(
    acting: Sequence[Tensor], parameters: Sequence[Mapping[str, Tensor]], slopes: Sequence[float], fits: float
) -> Part | None:
    """The part of a gain or bias whose every entry is slope * (entry of a parameter + offset), one slope and offset.

    Args:
        acting: The acting values under each draw, of a sample's shape.
        parameters: The parameters of each draw.
        slopes: Those that may be.
        fits: How near an entry must come.

    Returns:
        Its part, or None if there is none such, or more entries than can be compared.
    """
    names = tuple(name for name, parameter in parameters[0].items() if parameter.numel() <= acting[0].numel())
    for axis in range(acting[0].dim()):
        firsts = [values.narrow(axis, 0, 1) for values in acting]
        if all(_same(values, first, fits) for values, first in zip(acting, firsts, strict=True)):
            acting = [values.mean(axis, keepdim=True) for values in acting]
    if not names or acting[0].numel() > _GATHERED:
        return None
    sizes = acting[0].shape[next((axis for axis, size in enumerate(acting[0].shape) if size > 1), 0) :]
    entries = torch.stack([torch.cat([draw[name].flatten() for name in names]).double() for draw in parameters], -1)
    measured = torch.stack([values.flatten() for values in acting], -1)
    for slope in slopes:
        for offset in (0.0, 1.0, 2.0):
            distances = torch.cdist(measured / slope - offset, entries)
            nearest = distances.min(-1)
            if float(nearest.values.max()) < 10 * fits:
                gathered = _trimmed(names, parameters[0], nearest.indices.reshape(sizes))
                return Part(gathered=gathered, slope=slope, intercept=slope * offset)
    return None


def _trimmed(names: Sequence[str], parameters: Mapping[str, Tensor], index: Tensor) -> Gathered:
    """The entries at these positions, without the parameters that have none of them."""
    kept, start, shift = [], 0, index.clone()
    for name in names:
        size = parameters[name].numel()
        inside = (index >= start) & (index < start + size)
        if bool(inside.any()):
            kept.append(name)
        else:
            shift -= size * (index >= start + size)
        start += size
    return Gathered(names=tuple(kept), index=shift)


def _aligned(parameter: Tensor, sample: Tensor, rows: Rows) -> Tensor | None:
    """The parameter spread over a sample, or None if it does not fit."""
    if rows.channel_axis == 1:
        if parameter.numel() != sample.shape[0]:
            return None
        parameter = parameter.reshape(-1, *(1,) * (sample.dim() - 1))
    sizes = zip(reversed(parameter.shape), reversed(sample.shape), strict=False)
    if parameter.dim() > sample.dim() or any(size not in (1, wanted) for size, wanted in sizes):
        return None
    return parameter.expand(sample.shape)


def _fixed(values: Tensor, rows: Rows, fits: float) -> Part | None:
    """A gain that no parameter changes, without the axes along which it does not vary; None if that fails."""
    if rows.channel_axis == 1:
        along = values.flatten(1).mean(1)
        is_even = _same(values, along.reshape(-1, *(1,) * (values.dim() - 1)), fits)
        return Part(values=along, fits=fits) if is_even else None
    while values.dim() > 1 and _same(values, values[:1], fits):
        values = values.mean(0)
    return Part(values=values, fits=fits)


def _same(values: Tensor, other: Tensor, fits: float) -> bool:
    return _relative(values - other, values) < fits


def _relative(difference: Tensor, values: Tensor) -> float:
    return float(difference.square().mean().sqrt() / values.square().mean().sqrt())


def made_of(gain: Tensor | None, bias: Tensor | None, parameters: Mapping[str, Tensor]) -> str | None:
    """How a gain or bias that is no parameter is computed from the parameters; None where it is no known mistake.

    Args:
        gain: The acting gain, or None.
        bias: The acting bias, or None.
        parameters: By name.
    """
    flat = {name: value.detach().double().flatten() for name, value in parameters.items()}
    for name, value in flat.items():
        if _is_acting(gain, value.square()) and not _is_acting(gain, value):
            return f"the gain acts as the square of {name}: it is multiplied twice"
        if _is_acting(bias, 2 * value):
            return f"the bias acts as 2 * {name}: it is added twice"
    for name, value in flat.items():
        for other, factor in flat.items():
            product = factor * value if name != other and factor.shape == value.shape else None
            if product is not None and _is_acting(gain, factor) and _is_acting(bias, product):
                return f"the bias acts as {other} * {name}: it is added before the gain multiplies"
    return None


def _is_acting(acting: Tensor | None, values: Tensor) -> bool:
    return acting is not None and acting.numel() == values.numel() and _same(acting.flatten().double(), values, _MADE)
