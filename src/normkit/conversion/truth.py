"""Output and gradients of a norm in float64, and the unit in which an error is measured against each.

The unit of an element is the machine epsilon of its dtype times the root sum of squares of the terms that are added to
form it; for gradients, of those that a row or a parameter adds on the average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit import reference
from normkit.spec import NormSpec


class Truth:
    """A norm of one input in float64, every cast taken as the identity.

    Args:
        spec: The conventions.
        x: Input.
        weight: Gain, or None.
        bias: Bias, or None.

    Attributes:
        y: The output.
        y_size: Root sum of squares of the terms of each output: the normalized row with its gain, what the row leaves
            in its mean, and the bias.
    """

    def __init__(self, spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self._spec = reference.unrounded(spec, x)
        self._x = x.double()
        gain = None if weight is None else reference.effective_weight(weight.detach(), spec, torch.float64)
        self._weight = None if gain is None else gain.double()
        self._bias = None if bias is None else bias.detach().double()
        self.y = reference.forward(self._x, self._spec, self._weight, self._bias)
        scaled = reference.forward(self._x, self._spec.replace(has_bias=False), self._weight)
        own = self._row_mean(scaled.square()) / self.row_length if spec.centre_numerator else 0.0
        self.y_size = (scaled.square() + own + (self.y - scaled).square()).sqrt()

    def gradients(self, dy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """For a gradient of the output: "input", "weight", "bias" -> the gradient, and the size of its terms."""
        dx, dweight, dbias = reference.backward(dy.double(), self._x, self._spec, self._weight, self._bias)
        direct = dy.double() * self._multiplier() * self._gain() / self._scale()
        found = {"input": (dx, (dx.square() + self._row_mean(direct.square())).sqrt())}
        for name, gradient in (("weight", dweight), ("bias", dbias)):
            if gradient is not None:
                found[name] = gradient, (gradient.square() + gradient.square().mean()).sqrt()
        return found

    @property
    def row_length(self) -> int:
        """How many elements share one set of statistics."""
        return int(reference.to_rows(self._x, self._spec).shape[-1])

    def _row_mean(self, values: Tensor) -> Tensor:
        """The mean over each row, in the layout of x."""
        rows = reference.to_rows(values, self._spec)
        return reference.from_rows(rows.mean(-1, keepdim=True).expand_as(rows), values, self._spec)

    def _scale(self) -> Tensor:
        rows = reference.to_rows(self._x, self._spec)
        eps = self._spec.eps
        assert eps is not None
        scale = reference.statistics(rows, self._spec, eps).scale
        return reference.from_rows(scale.expand_as(rows), self._x, self._spec)

    def _gain(self) -> Tensor | float:
        if self._weight is None:
            return 1.0
        if self._spec.axes in ((1,), "all_but_batch"):
            return self._weight.reshape(-1, *(1,) * (self._x.dim() - 2))
        return self._weight

    def _multiplier(self) -> float:
        return math.sqrt(self.row_length) if self._spec.multiplier == "sqrt_n" else 1.0


def units(actual: Tensor, true: Tensor, size: Tensor) -> float:
    """The largest error of a tensor in units of its dtype; infinity if it is not finite."""
    information = torch.finfo(actual.dtype)
    # No error can be asked to be smaller than the spacing of subnormal numbers.
    unit = information.eps * size + information.smallest_normal * information.eps
    error = (actual.detach().double() - true).abs() / unit
    return float(error.nan_to_num(nan=math.inf).max())
