"""The unit of error: what "one rounding" is here.

An error is counted in units u = machine epsilon of the dtype times the size of the element's terms, their root sum of
squares. The terms are the numbers that are added to form the element: for an output the normalized row times its gain,
and the bias; for an input gradient the direct part dy * gain / s, its mean, and the part that comes through the scale;
for a parameter gradient one product for each row. Where a term is itself a sum (the mean of the deviations, the two
sums inside an input gradient), that sum's own terms belong to it: a row of n standard deviations leaves 1 / sqrt(n) of
one in its mean. Where the terms have one sign their sum is larger than this size, and then |element| takes its place.
So one unit is one rounding whatever cancels: what cancels is neither an excuse nor an alarm.

Sums are taken to be exact here, as normkit's kernels keep them (in float64, or as two float32 numbers), the mean too,
however large. Other code rounds the mean once and adds n terms one after another in its own dtype, which leaves
sqrt(n) times the root sum of squares of those terms. Whoever judges other code says `plain=True`: then a sum within a
row counts so much more, and the mean over the scale is one more term. Both are the same without a mean and sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normkit import reference
from normkit.spec import NormSpec

PLAIN_UNITS = {"y": 16.0, "dx": 32.0}
"""Units that plain code may err by in float32 and float64. Any order of the sum over a row stays below 16 in an output;
the wrong divisor at n = 65,536 makes 64. Backward rounds about twice as often as forward."""
PLAIN_HALF_UNITS = {"y": 4.0, "dx": 8.0, "sum": 4.0}
"""The same in 16 bits: each cast of forward rounds by half a unit, and the gradient passes each once more. A sum over
the rows whose products are rounded before they are added in float32 stays well under two."""


def plain_limit(of: Literal["y", "dx", "sum"], dtype: torch.dtype, rows: int = 1) -> float:
    """How many units plain code may err by: in an output, an input gradient, or a sum over so many rows."""
    if dtype.itemsize == 2:
        return PLAIN_HALF_UNITS[of]
    # Terms added one after another in float32 leave about the root of their number in roundings.
    return PLAIN_UNITS["dx"] + 4 * math.sqrt(rows) if of == "sum" else PLAIN_UNITS[of]


class Exact(NamedTuple):
    """The exact values of a tensor in float64, and the size of the terms of each."""

    value: Tensor
    size: Tensor

    def units(self, actual: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The error of each element, in units.

        An element whose exact value is NaN or beyond the largest number of the dtype has no error; NaN and infinity in
        place of a number are infinitely wrong.

        Args:
            actual: What was computed, of the values' shape.
            dtype: The dtype whose machine epsilon counts; actual's own unless given.
        """
        dtype = dtype or actual.dtype
        error = (actual.detach().to(self.value.device, torch.float64) - self.value).abs() / unit(self.size, dtype)
        error = torch.where(self.value.abs() > torch.finfo(dtype).max, 0.0, error)
        return torch.where(self.value.isnan(), 0.0, error.nan_to_num(nan=math.inf))

    def largest(self, actual: Tensor) -> float:
        """The largest error of an element, in units; 0.0 for an empty tensor."""
        return float(self.units(actual).max()) if actual.numel() else 0.0

    def relative(self, actual: Tensor) -> float:
        """|actual - value| / |value| of the tensors as vectors."""
        difference = actual.detach().to(self.value.device, torch.float64) - self.value
        return float(difference.norm() / self.value.norm())


def unit(size: Tensor, dtype: torch.dtype) -> Tensor:
    """u of elements whose terms have this size; no less than the spacing of the dtype's subnormal numbers."""
    return torch.finfo(dtype).eps * size + spacing(dtype)


def spacing(dtype: torch.dtype) -> float:
    """The distance between subnormal numbers of a dtype: no error can be asked to be smaller."""
    information = torch.finfo(dtype)
    return information.smallest_normal * information.eps


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the largest machine epsilon."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def output(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None, *, plain: bool = False
) -> Exact:
    """y in float64, every cast taken as the identity, and the size of its terms.

    With z = (x - m) / s: size**2 = (multiplier * gain)**2 * (z**2 + e**2) + bias**2, where e**2 = mean(z**2) / n if the
    mean is subtracted; plain, e**2 = mean(z**2) + (m / s)**2.

    Args:
        x: Input of shape (..., n), or (N, C, ...) if the spec's axes are the channels; of any floating dtype.
        spec: The conventions.
        weight: Gain, as `reference.forward` takes it.
        bias: Bias, likewise.
        plain: The sums are plain ones, as the module says.

    Example:
        >>> from normkit import specs
        >>> x, ones = torch.tensor([[1.0, -1.0]]), torch.ones(2)
        >>> exact = output(x, specs.TORCH_LAYER_NORM, ones, -ones)
        >>> exact.value.round(decimals=4), exact.size.round(decimals=4)
        (tensor([[-0., -2.]], dtype=torch.float64), tensor([[1.5811, 2.0000]], dtype=torch.float64))
        >>> exact.largest(exact.value.float()) < 0.5
        True
    """
    norm = _Norm(x, spec, weight, bias, plain)
    value = reference.forward(norm.x, norm.spec, norm.gain, norm.bias)
    squares = spec.rows.joined(norm.gain_rows.square() * norm.row_squares, norm.x)
    if norm.bias is not None:
        squares = squares + spec.rows.aligned(norm.bias, norm.x).square()
    return _exact(value, squares)


def gradients(
    x: Tensor,
    dy: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    plain: bool = False,
) -> tuple[Exact, Exact | None, Exact | None]:
    """dx, dweight and dbias in float64, every cast taken as the identity, and the sizes of their terms.

    With h = multiplier * gain * dy, z and s as in `output`, and k and the divisor of `reference.backward`:
    dx = h / s - mean(h / s) - t * sum(h * z / s), t = 2 * k * d / divisor, without the mean if none is subtracted.
    Its terms are these three, and those of the two sums.

    Args:
        x: Input, as in `output`.
        dy: Gradient of the output, of x's shape.
        spec: The conventions.
        weight: Gain, or None.
        bias: Bias, or None; only its shape matters.
        plain: The sums within a row are plain ones. Sums over the rows are not: who judges them knows their number.
    """
    norm = _Norm(x, spec, weight, bias, plain)
    dy = dy.detach().double()
    found = reference.backward(dy, norm.x, norm.spec, norm.gain, norm.bias)
    dx_squares = spec.rows.joined(norm.gradient_squares(spec.rows.split(dy)), norm.x)
    if spec.gain.is_before and norm.gain is not None:
        # The row is the input times the gain: its gradient is multiplied by one and summed times the other.
        products = dx_squares * norm.x.square()
        dx_squares = dx_squares * spec.rows.aligned(norm.gain, norm.x).square()
    else:
        products = dy.square() * spec.rows.joined(norm.factor**2 * norm.row_squares, norm.x)
    dweight = dbias = None
    if found.weight is not None:
        dweight = _exact(found.weight, norm.summed(products, found.weight))
    if found.bias is not None:
        dbias = _exact(found.bias, norm.summed(dy.square(), found.bias))
    return _exact(found.x, dx_squares), dweight, dbias


def _exact(value: Tensor, squares: Tensor) -> Exact:
    return Exact(value, torch.maximum(squares.sqrt(), value.abs()))


class _Norm:
    """A norm of one input in float64, nothing rounded; what ends in `rows` or `squares` is laid out in rows."""

    def __init__(self, x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, plain: bool) -> None:
        self.spec = reference.unrounded(spec, x)
        self.x = x.detach().double()
        self.gain = None
        if weight is not None:
            self.gain = spec.gain.effective(weight.detach(), torch.float64).double()
        self.bias = None if bias is None else bias.detach().double()
        inner, along = self.x, torch.ones_like(self.x)
        if self.gain is not None:
            gain = spec.rows.aligned(self.gain, self.x)
            if spec.gain.is_before:
                inner = self.x * gain
            else:
                along = gain.expand(self.x.shape)
        rows = spec.rows.split(inner)
        self.length = rows.shape[-1]
        self.factor = spec.divisor.factor(self.length)
        self.gain_rows = self.factor * spec.rows.split(along)
        eps = reference.machine_eps(self.x, self.spec)
        mean, self.scale = reference.statistics(rows, self.spec, eps)
        numerator, self.deviation = spec.centring.split(rows)
        self.row = numerator / self.scale
        root = reference.statistics(rows, self.spec, 0.0).scale
        quotient, is_flat = spec.placement.slope(root, self.scale, eps)
        self.slope = torch.where(is_flat, 0.0, 1.0 / quotient) / spec.divisor.count(self.length)
        # A sum's own terms: n times as much where they are added one after another.
        self.weight_of_sums = self.length if plain else 1
        self.centre_squares = torch.zeros_like(mean)
        if plain and (spec.centring.numerator or spec.centring.statistics):
            self.centre_squares = (mean / self.scale).square()
        self.row_squares = self.row.square() + self.centre_squares
        if spec.centring.numerator:
            in_mean = self.row.square().mean(-1, keepdim=True) / self.length
            self.row_squares = self.row_squares + self.weight_of_sums * in_mean

    def summed(self, squares: Tensor, parameter: Tensor) -> Tensor:
        """Squares of x's shape, summed over all that a parameter is broadcast along."""
        return squares.sum_to_size(self.spec.rows.aligned(parameter, self.x).shape).reshape(parameter.shape)

    def gradient_squares(self, dy: Tensor) -> Tensor:
        """The squares of the terms of a gradient by the row, for a gradient dy of the output, in rows."""
        direct = self.gain_rows * dy / self.scale
        through = self.deviation * self.slope
        products = direct * self.row
        squares = direct.square() + (through * products.sum(-1, keepdim=True)).square()
        squares = squares + self.weight_of_sums * through.square() * products.square().sum(-1, keepdim=True)
        level = direct.square().mean(-1, keepdim=True)
        if self.spec.centring.numerator:
            squares = squares + direct.mean(-1, keepdim=True).square() + self.weight_of_sums * level / self.length
        # Plain code takes sums over the row with its mean still in it.
        return squares + self.centre_squares * level * (1.0 + self.row.square())
