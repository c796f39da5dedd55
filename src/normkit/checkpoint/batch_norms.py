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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.channel_maps import (
    MAPS,
    Values,
    affine,
    against_shift,
    is_norm_then_parts,
    is_plain,
    lost,
    multiplied,
    values_of,
)
from normkit.checkpoint.dataflow import Call, Dataflow, observed, place_of
from normkit.checkpoint.logits import TrueFloat64, agrees_within
from normkit.checkpoint.plan import FoldPlan, NormChange, Refusal
from normkit.errors import InputError, KindError
from normkit.identification.state import buffers_kept, in_mode, random_numbers_kept
from normkit.text import dtype_name, first_line, significant

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SIDES = (64, 224, 32, 28)
"""Pixels of a side that are tried where no batch is given."""
_FLOAT64 = torch.finfo(torch.float64).eps / 2


@dataclass(frozen=True, kw_only=True)
class BatchNormPlan:
    """The batch norms that are folded, and what the maps beside them become."""

    plan: FoldPlan
    """What is done with each norm, and the refusals."""
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
    norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not norms:
        raise InputError(
            "expected a module with batch norms of torch's classes, found none: frozen or scripted ones are not folded"
        )
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(each):
            raise InputError(f"expected a model with weights, {name} is not initialized; run the model once")
        if each.is_meta or each.is_inference():
            given = "a meta tensor without values" if each.is_meta else "made in inference mode and cannot be changed"
            raise InputError(f"expected a model with weights that can be changed, {name} is {given}; load it again")
    modules: list[nn.Module] = [
        model,
        *norms.values(),
        *(module for module in model.modules() if isinstance(module, MAPS)),
    ]
    call, seen = _observed(model, batch, modules)
    planned = _Planning(model, seen)
    changes, refusals = [], []
    for path, norm in norms.items():
        target, reason = planned.fold(path, norm)
        if target:
            changes.append(NormChange(name=path, gain="folded", bias="folded", readers=(target,)))
        else:
            refusals.append(Refusal(operation="batchnorm", place=path or type(norm).__name__, reason=reason))
            changes.append(NormChange(name=path, gain="left", bias="left", reasons=(reason,)))
    if not planned.maps:
        rest = f" (and {len(refusals) - 1} more)" if refusals[1:] else ""
        first = refusals[0]
        raise InputError(f"nothing of what was asked can be done: {first.place}: {first.reason}{rest}")
    plan = FoldPlan(
        family="",
        architecture=type(model).__name__,
        operations=("batchnorm",),
        untie=False,
        edits=(),
        norms=tuple(changes),
        refusals=tuple(refusals),
        remarks=("folded batch norms are equal in evaluation mode, on the way that the batch takes through the model",),
    )
    return BatchNormPlan(plan=plan, maps=planned.maps), call


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


def _observed(model: nn.Module, batch: Any, modules: list[nn.Module]) -> tuple[Callable[[nn.Module], Any], Dataflow]:
    """How a model is called, and what one such call shows."""
    error: Exception = ValueError("no input could be made up")
    for given in _examples(model) if batch is None else [batch]:
        call = _caller(given)
        try:
            with buffers_kept(model), random_numbers_kept():
                return call, observed(lambda call=call: call(model), modules)  # type: ignore[misc]
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as raised:
            error = raised
    what = "the batch" if batch is not None else "any input that could be made up for it"
    raise InputError(
        f"{type(model).__name__} does not run on {what}: {first_line(error)}; "
        "give batch=, a tensor, a tuple of arguments or a dictionary of keyword arguments"
    )


def _caller(batch: Any) -> Callable[[nn.Module], Any]:
    """A call of a model with the batch, whose floating-point tensors take the dtype of the model's parameters."""

    def call(model: nn.Module) -> Any:
        first = next(chain(model.parameters(), model.buffers()), torch.empty(0))

        def fitted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # A copy, as a model may write into its input.
            return value.detach().to(first.device, first.dtype if value.is_floating_point() else value.dtype, copy=True)

        given = tree_map(fitted, batch)
        if isinstance(given, Mapping):
            return model(**given)
        return model(*given) if isinstance(given, (tuple, list)) else model(given)

    return call


def _examples(model: nn.Module) -> Iterator[Tensor]:
    """Inputs that a model may take: images or signals for its first convolution, else rows for its first map."""
    layer: Any = next((module for module in model.modules() if isinstance(module, (*MAPS, _BatchNorm))), None)
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, (nn.Linear, _BatchNorm)):
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.num_features
        axes = 2 if isinstance(layer, nn.BatchNorm2d) else 3 if isinstance(layer, nn.BatchNorm3d) else 0
        shapes = [(4, width, *[16] * axes)]
    else:
        shapes = [(2, layer.in_channels, *[side] * (layer.weight.dim() - 2)) for side in _SIDES]
    for shape in shapes:
        yield torch.randn(shape, generator=generator)


class _Planning:
    """Decides norm after norm; `maps` is what the maps have become so far."""

    def __init__(self, model: nn.Module, seen: Dataflow) -> None:
        self.maps: dict[str, Values] = {}
        self._seen = seen
        self._paths: dict[nn.Module, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths[module].append(path)
        self._owners = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
        calls = [(layer, call) for layer, made in seen.calls.items() if isinstance(layer, MAPS) for call in made]
        self._givers = {id(call.output): layer for layer, call in calls}
        self._takers = {id(call.input): layer for layer, call in calls}

    def fold(self, path: str, norm: nn.Module) -> tuple[str, str]:
        """(the path of the map that takes a norm, ""), or ("", why none does)."""
        if reason := self._against_norm(path, norm):
            return "", reason
        reasons = []
        # Behind a norm with parts of its own its activation follows.
        for is_after, find in ((False, self._before), (True, self._after))[: 1 + is_plain(norm)]:
            layer, reason = find(norm, self._seen.calls[norm][0])
            if layer is not None and not reason:
                taker = self._paths[layer][0]
                new = multiplied(layer, self.maps.get(taker) or values_of(layer), affine(norm), is_after=is_after)
                reason = lost(layer, new) or ""
                if not reason:
                    self.maps[taker] = new
                    return taker, ""
            reasons.append(reason)
        return "", "; ".join(dict.fromkeys(reasons))

    def _against_norm(self, path: str, norm: Any) -> str | None:
        """Why a norm is no fixed map y = a x + s; None if it is one."""
        if norm.running_mean is None or norm.running_var is None:
            return "it has no running statistics: it normalizes with those of each batch"
        if norm.training:
            return "it is in training mode and normalizes with the statistics of each batch; call model.eval() first"
        if reason := self._against_module(norm, path):
            return reason
        if bool((norm.running_var.double() + norm.eps <= 0).any()):
            return "a running variance plus eps is not positive"
        by = affine(norm)
        if not bool((by.scale.isfinite() & by.shift.isfinite()).all()):
            return "its running statistics or parameters hold NaN or infinity"
        if not is_plain(norm) and not is_norm_then_parts(norm, self._seen.calls[norm][0].input):
            return f"its class {type(norm).__name__} computes a forward of its own, which does more than normalize"
        return None

    def _against_module(self, module: nn.Module, path: str = "") -> str | None:
        """Why a norm or a map cannot be changed on its own; None if it can."""
        named = path or self._paths[module][0]
        if not named:
            return "it is the whole model"
        if len(self._paths[module]) > 1:
            return f"{named} is the same module as {next(other for other in self._paths[module] if other != named)}"
        if any(self._owners[id(each)] > 1 for each in module.parameters()):
            return f"{named} shares a parameter with another module"
        if parametrize.is_parametrized(module):
            return f"the parameters of {named} are computed; call parametrize.remove_parametrizations first"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{named} has hooks; remove them first"
        if (count := len(self._seen.calls[module])) != 1:
            return f"{named} is called {count} times in a run" if count else f"{named} was not called with the batch"
        return None

    def _against_map(self, layer: Any) -> str | None:
        """Why a map cannot take a norm; None if it can."""
        kind = next(each for each in MAPS if isinstance(layer, each))
        path = self._paths[layer][0]
        own = [
            name
            for name in ("forward", "_conv_forward")
            if getattr(type(layer), name, None) is not getattr(kind, name, None)
        ]
        if own or "forward" in vars(layer):
            return f"{path} ({type(layer).__name__}) has a {(own or ['forward'])[0]} of its own"
        if reason := self._against_module(layer):
            return reason
        if layer.weight.dtype not in _FLOATING:
            return f"the weight of {path} is {dtype_name(layer.weight.dtype)}"
        if any(layer not in read.modules for read in self._seen.reads[place_of(layer.weight)]):
            return f"the weight of {path} is also read outside of it"
        axes, given = layer.weight.dim(), self._seen.calls[layer][0].output.dim()
        if given != axes:
            return f"the channels of {path} are on another axis than the norm's: it gives {given} axes, not {axes}"
        return None

    def _before(self, norm: nn.Module, call: Call) -> tuple[Any, str]:
        """The map before a norm, if there is one, and why it cannot take the norm, if it cannot."""
        layer = self._givers.get(id(call.input))
        if layer is None:
            maker = self._seen.makers.get(place_of(call.input))
            return None, f"it reads the output of {maker}, no map" if maker else "it reads an input of the model"
        reason = self._against_map(layer)
        if not reason and (reader := self._seen.other_reader(call.input, self._seen.calls[layer][0].end, norm)):
            reason = f"what {self._paths[layer][0]} gives is also read by {reader}"
        return layer, reason or ""

    def _after(self, norm: nn.Module, call: Call) -> tuple[Any, str]:
        """The map after a norm, if there is one, and why it cannot take the norm, if it cannot."""
        layer = self._takers.get(id(call.output))
        if layer is None:
            reader = self._seen.other_reader(call.output, call.end, norm)
            return None, f"what it gives is read by {reader}, no map" if reader else "nothing reads what it gives"
        path = self._paths[layer][0]
        if reason := self._against_map(layer):
            return layer, reason
        taken = self._seen.calls[layer][0]
        if reader := self._seen.other_reader(call.output, call.end, layer):
            return layer, f"what it gives is read by {path} and by {reader}"
        if any(read.is_write and call.end <= read.order < taken.end for read in self._seen.reads[place_of(call.input)]):
            return layer, f"its input is changed in place before {path} reads what it gives"
        return layer, (bool((affine(norm).shift != 0).any()) and against_shift(layer)) or ""
