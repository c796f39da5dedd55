"""Whether a norm computes its own formula: some of its outputs against that formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.passport import Passport
from normkit.spec import NormSpec

_ROWS = 16

AffineRows = tuple[Tensor | None, Tensor | None]
"""Gain and bias of some rows, of the rows' shape."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowTruth:
    """A norm's formula in float64, with its gain and bias as they act."""

    spec: NormSpec
    """What the norm computes."""
    weight: Tensor | None
    """Effective gain, in its module's shape, or None."""
    bias: Tensor | None
    """Bias, likewise."""
    dtype: torch.dtype | None = None
    """Dtype of the gain as it is stored; None without one."""

    @classmethod
    def of(cls, passport: Passport) -> RowTruth | None:
        """The formula that a passport gives; None where it leaves something of it open."""
        spec, weight, bias, dtype = passport.spec, passport.weight, passport.bias, None
        if spec is None or "eps" in passport.undecidable:
            return None
        if (weight is None, bias is None) != (not spec.has_weight, not spec.has_bias):
            return None
        if weight is not None:
            dtype = weight.dtype
            weight = reference.effective_weight(weight, spec, torch.promote_types(torch.float32, weight.dtype))
        return cls(spec=spec, weight=weight, bias=bias, dtype=dtype)

    def beside(self, x: Tensor, pick: Callable[[Tensor], Tensor | None]) -> AffineRows | None:
        """Gain and bias of the rows that are picked of x; None where they do not fit it.

        Args:
            x: Input of the norm.
            pick: Picks rows of a tensor of x's shape.
        """
        found: list[Tensor | None] = []
        for part in (self.weight, self.bias):
            if part is None:
                found.append(None)
                continue
            over_channels = self.spec.axes in ((1,), "all_but_batch")
            part = part.reshape(-1, *(1,) * (x.dim() - 2)) if over_channels else part
            if not _fits(part.shape, x.shape):
                return None
            found.append(pick(part.expand(x.shape)))
        return found[0], found[1]

    def error(self, x: Tensor, y: Tensor, beside: AffineRows, dtypes: Iterable[torch.dtype]) -> float:
        """The largest error of a row's output, over up to 16 of the rows.

        In units of the coarsest dtype's machine epsilon times the row's largest output; to that belongs what the row's
        mean over its standard deviation, times the largest gain, leaves where a mean is subtracted.

        Args:
            x: Rows that entered, (rows, m), in float32 or wider.
            y: Rows that left, likewise.
            beside: Of these rows.
            dtypes: Of what entered and what left; the gain's counts too.

        Returns:
            The error: infinite where an output is NaN and should not be, NaN where no row can tell.
        """
        step = max(1, math.ceil(len(x) / _ROWS))
        exact = reference.unrounded(self.spec, x).replace(axes=(-1,), groups=1)
        x, y = x[::step].double(), y[::step].double()
        weight, bias = (None if part is None else part[::step].double() for part in beside)
        expected = reference.forward(x, exact, weight, bias)
        largest = expected.abs().amax(-1)
        size = largest
        if exact.centre_numerator or exact.centre_statistics:
            mean, scale = reference.statistics(x, exact, reference.machine_eps(x, exact))
            factor = math.sqrt(x.shape[-1]) if exact.multiplier == "sqrt_n" else 1.0
            gain = factor if weight is None else factor * weight.abs().amax(-1)
            size = largest + gain * (mean.abs() / scale).squeeze(-1)
        known = [*dtypes, *([] if self.dtype is None else [self.dtype])]
        numbers = max((torch.finfo(dtype) for dtype in known), key=lambda each: each.eps)
        error = (y - expected).abs().amax(-1) / (numbers.eps * size + numbers.tiny)
        # What is too large for the dtype is no matter of the formula.
        telling = size.isfinite() & (largest <= numbers.max)
        return (
            float(error.nan_to_num(nan=math.inf, posinf=math.inf)[telling].max()) if bool(telling.any()) else math.nan
        )


def _fits(part: torch.Size, whole: torch.Size) -> bool:
    """A tensor of one shape can be expanded to the other."""
    pairs = zip(reversed(part), reversed(whole), strict=False)
    return len(part) <= len(whole) and all(size in (1, full) for size, full in pairs)
