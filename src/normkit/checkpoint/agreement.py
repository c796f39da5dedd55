"""Two models run on the same tokens in float64: how far apart their logits are, and how far rounding takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checkpoint.precision import true_logits

_SEED = 0
# Weights of the result were rounded once more than those of the source, or not at all.
_SPARE = 8.0
# Of float64 itself, through all layers.
_FLOOR = 1e-11


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How near the logits of two models are.

    Attributes:
        tokens: On which they were compared.
        largest: The largest |logit| of the source.
        difference: The largest |difference| of a logit.
        rounding: By how much the source's own logits move when each of its weights moves by up to half a unit in its
            last place, at random.
        unit: That half unit, relative: the coarsest of the dtypes that folding rounded to; 0 where it rounded none.
    """

    tokens: int
    largest: float
    difference: float
    rounding: float
    unit: float

    @property
    def holds(self) -> bool:
        """difference <= 8 rounding + 1e-11 largest."""
        return self.difference <= _SPARE * self.rounding + _FLOOR * self.largest

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "holds": self.holds,
            "tokens": self.tokens,
            "largest_logit": self.largest,
            "difference": self.difference,
            "rounding": self.rounding,
            "unit": self.unit,
        }


def compare_logits(
    source: nn.Module, result: nn.Module, batches: Sequence[Mapping[str, Tensor]], *, unit: float
) -> Agreement:
    """Run two float64 models on the same batches.

    Args:
        source: Its weights are moved at the end, and are no longer the checkpoint's.
        result: What folding made of it.
        batches: Arguments of both.
        unit: Half a unit in the last place of the coarsest dtype that folding rounded to, relative: 2^-8 for bfloat16.
    """
    tokens, largest, difference = 0, 0.0, 0.0
    kept = []
    for batch in batches:
        expected = true_logits(source, **batch)
        largest = max(largest, float(expected.abs().max()))
        difference = max(difference, _apart(expected, true_logits(result, **batch)))
        tokens += batch["input_ids"].numel()
        kept.append(expected)
    rounding = 0.0
    if unit:
        _nudge(source, unit)
        rounding = max(
            _apart(expected, true_logits(source, **batch)) for expected, batch in zip(kept, batches, strict=True)
        )
    return Agreement(tokens=tokens, largest=largest, difference=difference, rounding=rounding, unit=unit)


def half_unit(dtypes: set[str]) -> float:
    """Half a unit in the last place of the coarsest of some dtypes, relative; 0 where there is none."""
    from normkit.checkpoint.source import TORCH

    return max((torch.finfo(TORCH[dtype]).eps / 2 for dtype in dtypes), default=0.0)


def _apart(left: Tensor, right: Tensor) -> float:
    """The largest |difference|; NaN counts as infinitely far."""
    apart = (left - right).abs().max()
    return float(apart) if bool(apart.isfinite()) else float("inf")


def _nudge(model: nn.Module, unit: float) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + unit * (2 * drawn - 1))
