"""The distance of two formulas on the rows that really arrive at a norm, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.gain import Gain
from normkit.identification.passport import Passport
from normkit.spec import NormSpec
from normkit.text import dtype_name


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The distance of two formulas in one dtype."""

    dtype: str
    """Dtype of rows and parameters."""
    median: float
    """|y - y of the reference| over |y of the reference|, of the median row."""
    worst: float
    """The same of the worst row."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The rows that arrived at a norm, and what two formulas make of them."""

    rows: int
    """Rows that were looked at."""
    rms: tuple[float, float, float]
    """5 %, 50 % and 95 % quantile of their root mean square."""
    effects: tuple[Effect, ...]
    """The distance in float32, and in the dtype of the arriving rows if that is another."""

    @property
    def worst(self) -> float:
        """The worst row's difference in the worst dtype."""
        return max(effect.worst for effect in self.effects)


@dataclass(frozen=True, kw_only=True, eq=False)
class Formula:
    """A norm's formula as a callable on the CPU."""

    spec: NormSpec
    weight: Tensor | None
    """The weight as the spec takes it, or None."""
    bias: Tensor | None
    """The bias as the spec takes it, or None."""

    @classmethod
    def of(cls, spec: NormSpec, passport: Passport) -> Formula:
        """The formula with the parameters of a passport that the spec takes."""
        weight, bias = passport.weight, passport.bias
        return cls(
            spec=spec,
            weight=weight.detach().cpu() if weight is not None and spec.has_weight else None,
            bias=bias.detach().cpu() if bias is not None and spec.has_bias else None,
        )

    @classmethod
    def bare(cls, spec: NormSpec) -> Formula:
        """The formula without gain and bias."""
        return cls(spec=spec.replace(**Gain(is_present=False, has_bias=False).conventions()), weight=None, bias=None)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The formula's output with x and the parameters in this dtype, returned as float64."""
        weight, bias = (None if each is None else each.to(dtype) for each in (self.weight, self.bias))
        return reference.forward(x.to(dtype), self.spec, weight, bias).double()

    @property
    def span(self) -> int | None:
        """Number of trailing axes that make a row; None if the formula needs a whole sample."""
        if (trailing := self.spec.rows.num_trailing) is None:
            return None
        return max(trailing, *(0 if each is None else each.dim() for each in (self.weight, self.bias)))


def distances(y: Tensor, expected: Tensor) -> Tensor:
    """|y - expected| over |expected| of each part, in float64: 0 where they agree, infinite where one is not finite."""
    y, expected = y.double().flatten(1), expected.double().flatten(1)
    apart = torch.linalg.vector_norm(y - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    same = ((y == expected) | (y.isnan() & expected.isnan())).all(1)
    return torch.where(same, 0.0, apart.nan_to_num(nan=torch.inf, posinf=torch.inf))


def observed(formula: Formula, expected: Formula, rows: Tensor) -> Observed | None:
    """The difference of two formulas on the rows that arrived at a norm; None without a row.

    Args:
        formula: Formula of the port's norm.
        expected: Formula of the reference's norm.
        rows: Shape (rows, ...), in the dtype in which they arrived.
    """
    if not len(rows):
        return None
    parts = rows if rows.dtype == torch.float64 else rows.float()
    rms = parts.double().flatten(1).square().mean(1).sqrt()
    low, median, high = rms.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    effects = []
    for dtype in dict.fromkeys((torch.float32, rows.dtype)):
        apart = distances(formula(parts, dtype), expected(parts, dtype))
        middle = float(apart.sort().values[(len(apart) - 1) // 2])
        effects.append(Effect(dtype=dtype_name(dtype), median=middle, worst=float(apart.max())))
    return Observed(rows=len(rows), rms=(low, median, high), effects=tuple(effects))
