"""The convolution or linear map beside each batch norm of a model, and why it may not take the norm.

What reads what is seen in one run of the model, which needs no values: it may be on the meta device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from normkit.checkpoint.channel_maps import MAPS, affine, against_shift, is_norm_then_parts, is_plain
from normkit.checkpoint.dataflow import Call, Dataflow, observed, place_of
from normkit.checkpoint.plan import NormChange, Refusal
from normkit.errors import InputError
from normkit.identification.state import buffers_kept, random_numbers_kept
from normkit.text import dtype_name, first_line

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SIDES = (64, 224, 32, 28)
"""Pixels of a side that are tried where no batch is given."""

Take = Callable[[str, Any, str, Any, bool], NormChange | str]
"""(path of a norm, the norm, path of a map, the map, whether it stands after the norm) -> what becomes of the norm, or
why the map cannot take it."""


def batch_norms_of(model: nn.Module) -> dict[str, Any]:
    """The batch norms of a model by their paths.

    Raises:
        InputError: If it has none.
    """
    norms = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not norms:
        raise InputError(
            "expected a model with batch norms of torch's classes, found none: frozen or scripted ones are not folded"
        )
    return norms


def run_of(model: nn.Module, batch: Any) -> tuple[Callable[[nn.Module], Any], Dataflow]:
    """How a model is called with a batch, or with one that is made up, and what one such call shows of its norms.

    Raises:
        InputError: If it does not run.
    """
    modules: list[nn.Module] = [model, *(each for each in model.modules() if isinstance(each, (_BatchNorm, *MAPS)))]
    error: Exception = ValueError("no input could be made up")
    for given in made_up(model) if batch is None else [batch]:
        call = _caller(given)
        try:
            with buffers_kept(model), random_numbers_kept():
                return call, observed(lambda call=call: call(model), modules)  # type: ignore[misc]
        except Exception as raised:  # each model fails in its own way
            error = raised
    what = "the batch" if batch is not None else "any input that could be made up for it"
    raise InputError(
        f"{type(model).__name__} does not run on {what}: {first_line(error)}; "
        "give nk.fold a batch=, a tensor, a tuple of arguments or a dictionary of keyword arguments"
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


def made_up(model: nn.Module) -> Iterator[Tensor]:
    """Inputs that a model may take: images or signals for its first convolution, else rows for its first map.

    They are drawn from a fixed seed.
    """
    layer: Any = next((module for module in model.modules() if isinstance(module, (*MAPS, _BatchNorm))), None)
    generator, config = torch.Generator().manual_seed(0), cast(Any, getattr(model, "config", None))
    shapes: list[tuple[int, ...]]
    reads = getattr(model, "main_input_name", "")
    if reads == "input_values":
        # A second of sound.
        shapes = [(2, 16_000)]
    elif reads == "input_features" and hasattr(config, "num_mel_bins"):
        shapes = [(2, 128, config.num_mel_bins)]
    elif isinstance(layer, (nn.Linear, _BatchNorm)):
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.num_features
        axes = 2 if isinstance(layer, nn.BatchNorm2d) else 3 if isinstance(layer, nn.BatchNorm3d) else 0
        shapes = [(4, width, *[16] * axes)]
    else:
        shapes = [(2, layer.in_channels, *[side] * (layer.weight.dim() - 2)) for side in _SIDES]
    for shape in shapes:
        yield torch.randn(shape, generator=generator)


def beside_norms(model: nn.Module, seen: Dataflow, take: Take) -> tuple[tuple[NormChange, ...], tuple[Refusal, ...]]:
    """The change of each batch norm of a model whose run was seen, and the refusals; `take` is asked in order."""
    neighbours, changes, refusals = _Neighbours(model, seen), [], []
    for path, norm in batch_norms_of(model).items():
        found = neighbours.asked(path, norm, take)
        if isinstance(found, str):
            refusals.append(Refusal(operation="batchnorm", place=path or type(norm).__name__, reason=found))
            found = NormChange(name=path, gain="left", bias="left", reasons=(found,))
        changes.append(found)
    return tuple(changes), tuple(refusals)


class _Neighbours:
    """The maps that stand beside norms in a run, and who else reads what is between them."""

    def __init__(self, model: nn.Module, seen: Dataflow) -> None:
        self._seen = seen
        self._paths: dict[nn.Module, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths[module].append(path)
        self._owners = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
        calls = [(layer, call) for layer, made in seen.calls.items() if isinstance(layer, MAPS) for call in made]
        self._givers = {place_of(call.output): (layer, call.output) for layer, call in calls}
        self._takers = {place_of(call.input): (layer, call.input) for layer, call in calls}

    def asked(self, path: str, norm: nn.Module, take: Take) -> NormChange | str:
        """The change of a norm that the map before or after it takes, or the reason why neither does."""
        if reason := self._against_norm(path, norm):
            return reason
        reasons = []
        # Behind a norm with parts of its own its activation follows.
        for is_after, find in ((False, self._before), (True, self._after))[: 1 + is_plain(norm)]:
            layer, reason = find(norm, self._seen.calls[norm][0])
            if layer is not None and not reason:
                taken = take(path, norm, self._paths[layer][0], layer, is_after)
                if isinstance(taken, NormChange):
                    return taken
                reason = taken
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons))

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
        given = self._seen.calls[norm][0].input
        if not is_plain(norm) and (given.is_meta or not is_norm_then_parts(norm, given)):
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

    def _against_map(self, layer: Any, between: Tensor) -> str | None:
        """Why a map cannot take a norm, of what stands between them as the norm has it; None if it can."""
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
        axes, given = layer.weight.dim(), between.dim()
        if given != axes:
            return f"the channels of {path} are on another axis than the norm's: it gives {given} axes, not {axes}"
        return None

    def _before(self, norm: nn.Module, call: Call) -> tuple[Any, str]:
        """The map before a norm, if there is one, and why it cannot take the norm, if it cannot."""
        layer = _beside(self._givers, call.input)
        if layer is None:
            maker = self._seen.makers.get(place_of(call.input))
            return None, f"it reads the output of {maker}, no map" if maker else "it reads an input of the model"
        reason = self._against_map(layer, call.input)
        if not reason and (reader := self._seen.other_reader(call.input, self._seen.calls[layer][0].end, norm)):
            reason = f"what {self._paths[layer][0]} gives is also read by {reader}"
        return layer, reason or ""

    def _after(self, norm: nn.Module, call: Call) -> tuple[Any, str]:
        """The map after a norm, if there is one, and why it cannot take the norm, if it cannot."""
        layer = _beside(self._takers, call.output)
        if layer is None:
            reader = self._seen.other_reader(call.output, call.end, norm)
            return None, f"what it gives is read by {reader}, no map" if reader else "nothing reads what it gives"
        path = self._paths[layer][0]
        if reason := self._against_map(layer, call.output):
            return layer, reason
        taken = self._seen.calls[layer][0]
        if reader := self._seen.other_reader(call.output, call.end, layer):
            return layer, f"what it gives is read by {path} and by {reader}"
        if any(read.is_write and call.end <= read.order < taken.end for read in self._seen.reads[place_of(call.input)]):
            return layer, f"its input is changed in place before {path} reads what it gives"
        return layer, (bool((affine(norm).shift != 0).any()) and against_shift(layer)) or ""


def _beside(maps: Mapping[int, tuple[nn.Module, Tensor]], tensor: Tensor) -> Any:
    """The map that gives or takes a tensor of a norm; a linear map may have its rows with other axes before them."""
    layer, other = maps.get(place_of(tensor), (None, tensor))
    if tensor is other:
        return layer
    forms = [(each.is_contiguous(), each.storage_offset(), each.numel(), each.shape[-1]) for each in (tensor, other)]
    return layer if isinstance(layer, nn.Linear) and forms[0][0] and forms[0] == forms[1] else None
