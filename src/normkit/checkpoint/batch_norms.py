"""Batch norms folded into the convolution or linear map beside them, in memory.

In evaluation mode a BatchNorm is y = a x + s per channel, with a = weight / sqrt(running_var + eps) and
s = bias - running_mean a.

before   W' = W a per output channel, b' = (b - running_mean) a + bias: where nothing else reads what the map gives
after    W' = W a per input channel, b' = b + sum W s: where nothing else reads what the norm gives, and s reaches each
         output through the same weights. Zeros that a convolution pads are zeros behind the norm, so they need s = 0

What reads what is seen in one run of the model. Everything is computed in float64 and rounded once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.channel_maps import Values, affine, lost, multiplied, values_of
from normkit.checkpoint.logits import TrueFloat64, agrees_within
from normkit.checkpoint.norm_neighbours import batch_norms_of, beside_norms, run_of
from normkit.checkpoint.plan import FoldPlan, NormChange
from normkit.errors import InputError, KindError
from normkit.identification.state import in_mode, random_numbers_kept
from normkit.text import first_line, significant

IN_EVALUATION = "folded batch norms are equal in evaluation mode, on the way that the batch takes through the model"
_FLOAT64 = torch.finfo(torch.float64).eps / 2


@dataclass(frozen=True, kw_only=True)
class BatchNormPlan:
    """The batch norms that are folded, and what the maps beside them become."""

    plan: FoldPlan
    """The change of each norm, and the refusals."""
    maps: dict[str, Values] = field(repr=False)
    """Path of a convolution or linear map -> its new weight and bias."""


def plan_batch_norms(model: nn.Module, batch: Any) -> tuple[BatchNormPlan, Callable[[nn.Module], Any]]:
    """Decide which batch norms of a model are folded, from one run of it; and how a model is called with the batch.

    Raises:
        KindError: If it is no module.
        InputError: If it has no batch norm, or does not run on the batch.
    """
    if not isinstance(model, nn.Module):
        raise KindError(f"expected a module with batch norms, got {type(model).__name__}")
    batch_norms_of(model)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(each):
            raise InputError(f"expected a model with weights, {name} is not initialized; run the model once")
        if each.is_meta or each.is_inference():
            given = "a meta tensor without values" if each.is_meta else "made in inference mode and cannot be changed"
            raise InputError(f"expected a model with weights that can be changed, {name} is {given}; load it again")
    call, seen = run_of(model, batch)
    maps: dict[str, Values] = {}

    def take(path: str, norm: Any, taker: str, layer: Any, is_after: bool) -> NormChange | str:
        new = multiplied(layer, maps.get(taker) or values_of(layer), affine(norm), is_after=is_after)
        if reason := lost(layer, new):
            return reason
        maps[taker] = new
        return NormChange(name=path, gain="folded", bias="folded", readers=(taker,))

    changes, refusals = beside_norms(model, seen, take)
    if not maps:
        rest = f" (and {len(refusals) - 1} more)" if refusals[1:] else ""
        first = refusals[0]
        raise InputError(f"nothing of what was asked can be done: {first.place}: {first.reason}{rest}")
    plan = FoldPlan(
        family="",
        architecture=type(model).__name__,
        operations=("batchnorm",),
        untie=False,
        edits=(),
        norms=changes,
        refusals=refusals,
        remarks=(IN_EVALUATION,),
    )
    return BatchNormPlan(plan=plan, maps=maps), call


def set_folded(model: nn.Module, planned: BatchNormPlan) -> None:
    """Give the maps of a model their new values, rounded once to their dtype, and take the norms out; in place."""
    with torch.no_grad():
        for path, values in planned.maps.items():
            layer: Any = model.get_submodule(path)
            dtype = layer.weight.dtype
            layer.weight.copy_(rounded(values.weight, dtype))
            if layer.bias is None:
                bias = rounded(values.bias, dtype).to(layer.weight.device)
                layer.bias = nn.Parameter(bias, requires_grad=layer.weight.requires_grad)
            else:
                layer.bias.copy_(rounded(values.bias, layer.bias.dtype))
    for norm in planned.plan.norms:
        if norm.readers:
            parts = list(model.get_submodule(norm.name).children())
            model.set_submodule(norm.name, nn.Sequential(*parts) if parts else nn.Identity())


@dataclass(frozen=True, kw_only=True)
class FoldProof:
    """How near the outputs of a folded model are to its source's, on one batch, in float64 throughout."""

    numbers: int
    """The number of outputs compared."""
    largest: float
    """The largest |output| of the source."""
    exact: float
    """The largest |difference| of an output where the folded weights are float64 too: that of the algebra."""
    exact_rounding: float
    """How far the source's own outputs move when each weight moves by up to half a unit of float64, at random."""
    difference: float
    """The largest |difference| of an output with the folded weights as they are, rounded to their dtype."""
    rounding: float
    """How far the source's own outputs move when each weight moves by up to half a unit of that dtype, at random."""

    def __str__(self) -> str:
        """Both differences, in one line."""
        said = f"outputs differ by {significant(self.exact)} of {significant(self.largest)} in float64"
        if self.difference == self.exact:
            return said
        return (
            f"{said}, by {significant(self.difference)} with rounded weights (half a unit on the source's own: "
            f"{significant(self.rounding)})"
        )

    @property
    def is_exact(self) -> bool:
        """exact <= 8 exact_rounding + 1e-11 largest."""
        return agrees_within(self.exact, self.exact_rounding, self.largest)

    @property
    def holds(self) -> bool:
        """It is exact, and difference <= 8 rounding + 1e-11 largest."""
        return self.is_exact and agrees_within(self.difference, self.rounding, self.largest)


def prove(model: nn.Module, planned: BatchNormPlan, call: Callable[[nn.Module], Any]) -> FoldProof:
    """Fold float64 copies of a model and compare all their floating-point outputs with its own; it is not changed.

    Raises:
        InputError: If a folded copy does not run, as where the model's code reads a parameter of a norm.
    """
    source = copy.deepcopy(model).double()
    exact = copy.deepcopy(source)
    set_folded(exact, planned)
    result = copy.deepcopy(model)
    set_folded(result, planned)
    dtypes = {model.get_parameter(f"{path}.weight").dtype for path in planned.maps}
    unit = max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)
    before = _outputs(source, call)
    if not bool(before.isfinite().all()):
        raise InputError(f"the outputs of {type(model).__name__} on the batch hold NaN or infinity; give another batch")
    try:
        apart = [_apart(before, _outputs(each, call)) for each in (exact, result.double())]
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the folded {type(model).__name__} does not run: {first_line(error)}; it is left as it was"
        ) from None
    moved = [_apart(before, _outputs(_jittered(source, size), call)) for size in (_FLOAT64, unit)]
    return FoldProof(
        numbers=before.numel(),
        largest=float(before.abs().max()),
        exact=apart[0],
        exact_rounding=moved[0],
        difference=apart[1],
        rounding=moved[1],
    )


def _apart(one: Tensor, other: Tensor) -> float:
    apart = float((one - other).abs().max()) if one.shape == other.shape else math.inf
    return apart if math.isfinite(apart) else math.inf


def _jittered(model: nn.Module, unit: float) -> nn.Module:
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + unit * (2 * drawn - 1).to(parameter.device))
    return moved


def _outputs(model: nn.Module, call: Callable[[nn.Module], Any]) -> Tensor:
    """All floating-point outputs of a float64 model in evaluation mode, one after the other."""
    with torch.no_grad(), in_mode(model, training=False), random_numbers_kept(), TrueFloat64():
        torch.manual_seed(0)
        leaves = [leaf for leaf in tree_leaves(call(model)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not any(leaf.numel() for leaf in leaves):
        raise InputError(f"expected a floating-point tensor from {type(model).__name__}, got none to compare")
    return torch.cat([leaf.double().flatten() for leaf in leaves])
