"""The truth in float64, and the size of the terms that each element of it is added up from.

An error is measured in units of the machine epsilon times that size, so that a tolerance is a number of roundings
and does not depend on what cancels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normkit import reference
from normkit.spec import NormSpec


class Truth(NamedTuple):
    """Right values in float64, and the size of their terms."""

    value: Tensor
    size: Tensor

    def units(self, actual: Tensor) -> Tensor:
        """The error of each element, in machine epsilons of actual's dtype times its size; NaN is infinitely wrong."""
        information = torch.finfo(actual.dtype)
        # No error can be asked to be smaller than the spacing of subnormal numbers.
        unit = information.eps * self.size + information.smallest_normal * information.eps
        error = (actual.detach().cpu().double() - self.value).abs() / unit
        # Beyond the largest number of the dtype an infinity is right.
        error = torch.where(self.value.abs() > information.max, 0.0, error)
        return torch.where(self.value.isnan(), 0.0, error.nan_to_num(nan=math.inf))


class _Parts(NamedTuple):
    """A norm taken apart, all of x's shape and in float64."""

    spec: NormSpec
    x: Tensor
    gain: Tensor | None
    bias: Tensor | None
    row: Tensor
    scale: Tensor
    centre: Tensor


def output(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Truth:
    """y, nothing rounded; to its size belong what a mean leaves of the row it is subtracted from, and the bias."""
    parts = _taken_apart(x, spec, weight, bias)
    value = reference.forward(parts.x, parts.spec, parts.gain, parts.bias)
    length = _row_mean(parts.row.square(), x, spec).sqrt()
    size = parts.row.abs() + length + parts.centre
    if parts.gain is not None and spec.weight_placement == "after":
        size = size * _aligned(parts.gain, x, spec).abs()
    return Truth(value, size if parts.bias is None else size + _aligned(parts.bias, x, spec).abs())


def gradients(
    x: Tensor, dy: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> tuple[Truth, Truth | None, Truth | None]:
    """dx, dweight and dbias, nothing rounded; the size of a sum: the root sum of its squares, or itself if larger."""
    parts = _taken_apart(x, spec, weight, bias)
    dy = dy.cpu().double()
    found = reference.backward(dy, parts.x, parts.spec, parts.gain, parts.bias)
    factor = math.sqrt(_row_length(x, spec)) if spec.multiplier == "sqrt_n" else 1.0
    direct = dy.abs() * factor / parts.scale
    if parts.gain is not None:
        direct = direct * _aligned(parts.gain, x, spec).abs()
    level = _row_mean(direct.square(), x, spec).sqrt()
    unit_row = parts.row.abs() / factor
    # A large mean leaves its rounding in every normalized element.
    dx = Truth(found.x, direct + level * (1.0 + unit_row) * (1.0 + parts.centre / factor))
    # To a normalized element belongs what the mean, a sum of n terms, leaves in it.
    row = parts.row.abs() + (_row_mean(parts.row.square(), x, spec) / _row_length(x, spec)).sqrt()
    dweight = None if found.weight is None else _summed(found.weight, dy * row, x, spec)
    return dx, dweight, None if found.bias is None else _summed(found.bias, dy, x, spec)


def row_numbers(x: Tensor, spec: NormSpec) -> Tensor:
    """For every element of x the number of the row that it belongs to."""
    rows = reference.to_rows(x, spec)
    numbers = torch.arange(rows[..., 0].numel()).reshape(*rows.shape[:-1], 1)
    return reference.from_rows(numbers.expand(rows.shape), x, spec)


def _taken_apart(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> _Parts:
    x = x.detach().cpu()
    exact = reference.unrounded(spec, x)
    x = x.double()
    gain = None
    if weight is not None:
        gain = reference.effective_weight(weight.detach().cpu(), spec, torch.float64).double()
    inner = x
    if gain is not None and spec.weight_placement == "before":
        inner = x * _aligned(gain, x, spec)
    rows = reference.to_rows(inner, spec)
    mean, scale = reference.statistics(rows, exact, reference.machine_eps(x, exact))
    factor = math.sqrt(rows.shape[-1]) if spec.multiplier == "sqrt_n" else 1.0
    centre = mean.abs() / scale if spec.centre_numerator or spec.centre_statistics else torch.zeros_like(mean)
    bare = exact.replace(has_weight=False, has_bias=False, weight_placement="after")
    return _Parts(
        exact,
        x,
        gain,
        None if bias is None else bias.detach().cpu().double(),
        reference.forward(inner, bare),
        reference.from_rows(scale.expand(rows.shape), x, spec),
        reference.from_rows((factor * centre).expand(rows.shape), x, spec),
    )


def _row_length(x: Tensor, spec: NormSpec) -> int:
    return reference.to_rows(x, spec).shape[-1]


def _row_mean(values: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """The mean over each row, in every place of the row."""
    rows = reference.to_rows(values, spec)
    return reference.from_rows(rows.mean(-1, keepdim=True).expand(rows.shape), x, spec)


def _aligned(parameter: Tensor, x: Tensor, spec: NormSpec) -> Tensor:
    """A parameter in the shape that broadcasts against x."""
    return parameter.reshape(-1, *(1,) * (x.dim() - 2)) if spec.axes in ((1,), "all_but_batch") else parameter


def _summed(value: Tensor, terms: Tensor, x: Tensor, spec: NormSpec) -> Truth:
    squares = terms.square().sum_to_size(_aligned(value, x, spec).shape).reshape(value.shape)
    return Truth(value, torch.maximum(squares.sqrt(), value.abs()))
