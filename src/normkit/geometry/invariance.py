"""The invariances of a linear layer followed by a norm: the table of Ba et al. 2016, measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit import specs
from normkit.errors import InputError, ShapeError
from normkit.geometry.batches import centre_over_batch, scale_over_batch
from normkit.reference import forward
from normkit.spec import NormSpec

# A case scaled by less would be lost among others and their rounding.
_LEAST_CHANGE = 1e-3

_Layer = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One norm under one transformation."""

    norm: str
    """"batch", "weight", "layer" or "rms"."""
    error: float
    """Largest |change| of the output over the largest |output|."""
    is_invariant: bool
    """The error is within what rounding explains (`InvarianceTable.tolerance`)."""


@dataclass(frozen=True, kw_only=True)
class InvarianceRow:
    """One transformation and what each norm makes of it."""

    transformation: str
    """Its name, as in the paper."""
    what: str
    """Its formula. W holds one weight vector w_i per row, x is one case of the data, v a fixed vector."""
    cells: tuple[Cell, ...]
    """One per norm, in the order of the table's `norms`."""


@dataclass(frozen=True, kw_only=True)
class InvarianceTable:
    """Which norm ignores which change of weights and data; print it, or take `to_json`."""

    norms: tuple[str, ...]
    rows: tuple[InvarianceRow, ...]
    eps: float
    """The eps of every norm, inside the root."""
    scale: float
    """The factor c of the re-scalings."""
    tolerance: float
    """The largest error that counts as rounding."""

    def cell(self, transformation: str, norm: str) -> Cell:
        """The cell of one transformation and one norm, by their names.

        Raises:
            InputError: If the table has no such row or column.
        """
        for row in self.rows:
            for cell in row.cells:
                if (row.transformation, cell.norm) == (transformation, norm):
                    return cell
        rows, norms = ", ".join(row.transformation for row in self.rows), ", ".join(self.norms)
        raise InputError(f"the table has no cell ({transformation!r}, {norm!r}); its rows: {rows}; its norms: {norms}")

    def __str__(self) -> str:
        """Aligned columns: "yes" or "no", and the measured error."""
        header = ("transformation", "", *self.norms)
        body = [
            (
                row.transformation,
                row.what,
                *(f"{'yes' if cell.is_invariant else 'no':3} {cell.error:7.1e}" for cell in row.cells),
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (header, *body)
        ]
        return "\n".join([*lines, f"yes: error <= {self.tolerance:.1e}; eps = {self.eps:g}; c = {self.scale:.4g}"])

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        rows = [{**dataclasses.asdict(row), "cells": [vars(cell).copy() for cell in row.cells]} for row in self.rows]
        return {**dataclasses.asdict(self), "norms": list(self.norms), "rows": rows}


def invariances(
    *, n: int = 16, outputs: int = 12, batch: int = 32, seed: int = 0, eps: float = 0.0, scale: float | None = None
) -> InvarianceTable:
    """Measure which norms ignore which changes of the weights and the data.

    y = N(x W^T) for x of shape (batch, n), W of shape (outputs, n) and no linear bias, with N over a batch's
    column (batch), an output's row (layer, rms), or y_i = (w_i / sqrt(|w_i|^2 + eps)) . x (weight; no learned
    gain). The other three add eps to the variance or mean square under the root. All in float64, from Gaussian
    draws: |w_i| is near 1, the summed inputs have a variance near 1, and v is drawn like a weight vector or a case.

    A re-scaling is by one c > 0, drawn from (2, 4) unless given. Its sign is not ignored: every norm here is
    odd, so c < 0 turns the sign of what it scales, and nothing is invariant to a re-scaling. At eps > 0 what is
    invariant to a re-scaling becomes approximate, by about eps (1 - 1/c^2) / (2 variance); re-centring stays exact.

    tolerance = 32 * machine epsilon * sqrt(n * batch * outputs): roundings in a sum of n terms grow like
    sqrt(n), and the smallest spread among batch rows or outputs columns, by which they are divided, shrinks at
    most about as 1 / sqrt(batch * outputs).

    Args:
        n: Features of the data, at least 2.
        outputs: Weight vectors, at least 3: fewer outputs normalize to signs.
        batch: Cases, at least 3, for the same reason.
        seed: Seed of the random draws.
        eps: In units of the squared summed input (weight norm: of |w|^2).
        scale: The factor c, or None for a random positive one.

    Raises:
        ShapeError: If a size is too small.
        InputError: If eps is negative or not finite, or scale is 0, within a thousandth of 1, or not finite.

    Example:
        >>> from normkit.geometry import invariances
        >>> table = invariances()
        >>> [row.transformation for row in table.rows if row.cells[2].is_invariant]
        ['weight matrix re-scaling', 'weight matrix re-centring', 'dataset re-scaling', 'single case re-scaling']

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, section 5.1 and table 1; the RMSNorm column: Zhang and
        Sennrich 2019, arXiv:1910.07467, table 1.
    """
    if n < 2 or outputs < 3 or batch < 3:
        raise ShapeError(f"n >= 2, outputs >= 3 and batch >= 3 are needed, got {n}, {outputs} and {batch}")
    if not 0.0 <= eps < math.inf:
        raise InputError(f"eps must be a finite number of at least 0, got {eps!r}")
    if scale is not None and (scale == 0.0 or not math.isfinite(scale) or abs(scale - 1.0) < _LEAST_CHANGE):
        raise InputError(
            f"scale must be a finite number other than 0 and not within {_LEAST_CHANGE:g} of 1, at which every norm "
            f"seems invariant, got {scale!r}"
        )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, n, generator=generator, dtype=torch.float64) / math.sqrt(n)
    shift = torch.randn(n, generator=generator, dtype=torch.float64)
    weight_shift = torch.randn(n, generator=generator, dtype=torch.float64) / math.sqrt(n)
    drawn = 2.0 + 2.0 * float(torch.rand((), generator=generator, dtype=torch.float64))
    c = drawn if scale is None else float(scale)
    tolerance = 32 * torch.finfo(torch.float64).eps * math.sqrt(n * batch * outputs)
    before = {name: layer(x, weight, eps) for name, layer in _LAYERS.items()}

    def row(transformation: str, what: str, x: Tensor, weight: Tensor) -> InvarianceRow:
        cells = []
        for name, layer in _LAYERS.items():
            change = (layer(x, weight, eps) - before[name]).abs().max()
            error = float(change / before[name].abs().max())
            cells.append(Cell(norm=name, error=error, is_invariant=error <= tolerance))
        return InvarianceRow(transformation=transformation, what=what, cells=tuple(cells))

    rows = (
        row("weight matrix re-scaling", "W' = c W", x, c * weight),
        row("weight matrix re-centring", "W' = W + 1 v^T", x, weight + weight_shift),
        row("single weight vector re-scaling", "w_1' = c w_1", x, _first_scaled(weight, c)),
        row("dataset re-scaling", "x' = c x, every x", c * x, weight),
        row("dataset re-centring", "x' = x + v, every x", x + shift, weight),
        row("single case re-scaling", "x_1' = c x_1", _first_scaled(x, c), weight),
    )
    return InvarianceTable(norms=tuple(_LAYERS), rows=rows, eps=eps, scale=c, tolerance=tolerance)


def _first_scaled(rows: Tensor, factor: float) -> Tensor:
    return torch.cat([factor * rows[:1], rows[1:]])


_LAYERS: dict[str, _Layer] = {
    "batch": lambda x, weight, eps: scale_over_batch(centre_over_batch(x @ weight.mT), eps),
    "weight": lambda x, weight, eps: x @ (weight / (weight.square().sum(-1, keepdim=True) + eps).sqrt()).mT,
    "layer": lambda x, weight, eps: forward(x @ weight.mT, NormSpec(eps=eps, has_weight=False, has_bias=False)),
    "rms": lambda x, weight, eps: forward(x @ weight.mT, specs.TORCH_RMS_NORM.replace(eps=eps, has_weight=False)),
}
