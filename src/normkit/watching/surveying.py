"""What a model is made of, seen on a small part of a batch that it is about to be trained on."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from normkit.errors import InputError
from normkit.identification.sharding import fully_sharded
from normkit.identification.tracing import FunctionCall
from normkit.inspection.running import evaluating
from normkit.inspection.structure import Structure, survey
from normkit.watching.instruments import AttentionPlace, Plan
from normkit.watching.invariance import scale_invariant

_TOKENS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, batch: object) -> Arguments:
        """The arguments that a batch stands for: a mapping, a tuple, or one tensor.

        Raises:
            InputError: If it is something else.
        """
        if isinstance(batch, Mapping):
            return cls(args=(), kwargs=dict(batch))
        if isinstance(batch, tuple):
            return cls(args=batch, kwargs={})
        if isinstance(batch, Tensor):
            return cls(args=(batch,), kwargs={})
        raise InputError(
            f"batch must be what the model is called with, a mapping, a tuple or a tensor; got {type(batch).__name__}"
        )

    def shortened(self) -> Arguments:
        """The first two rows, and of token ids the first sixteen columns; what is no batch stays as it is."""
        given = [*self.args, *self.kwargs.values()]
        first = next((value for value in given if isinstance(value, Tensor) and value.dim() > 0), None)
        if first is None:
            return self
        is_tokens = first.dim() == 2 and not first.is_floating_point()

        def shortened(name: str, value: Any) -> Any:
            # The first tokens of a padded sequence may be padding.
            is_mask = name.endswith("attention_mask") and isinstance(value, Tensor) and value.dim() == 2
            return torch.ones_like(cut(value)) if is_mask else cut(value)

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != first.shape[0]:
                return value
            if is_tokens and value.dim() >= 2 and value.shape[1] == first.shape[1]:
                return value[:2, :_TOKENS]
            return value[:2]

        return Arguments(
            args=tuple(map(cut, self.args)), kwargs={key: shortened(key, value) for key, value in self.kwargs.items()}
        )

    def usual(self) -> Arguments:
        """They without the graphs that made them, which the training needs; copies of those of inference mode."""
        return self.with_tensors([each.clone() if each.is_inference() else each.detach() for each in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Those among them."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """They with other tensors in the same order, each on the device of the one in whose place it comes."""
        others = iter(tensors)

        def other(value: Any) -> Any:
            return next(others).to(value.device) if isinstance(value, Tensor) else value

        args = tuple(map(other, self.args))
        return Arguments(args=args, kwargs={key: other(value) for key, value in self.kwargs.items()})


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile` or a data-parallel wrapper makes of it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def surveyed(model: nn.Module, arguments: Arguments) -> Structure:
    """Survey a model; it and the random numbers are left as they were.

    Args:
        model: The model, without wrappers.
        arguments: Of a call of it.
    """
    with _undisturbed(model):
        return survey(model, lambda: model(*arguments.args, **arguments.kwargs), stages=False)


def called(model: nn.Module, arguments: Arguments) -> None:
    """Call a model; it and the random numbers are left as they were.

    Args:
        model: The model, without wrappers.
        arguments: Of a call of it.
    """
    with _undisturbed(model):
        model(*arguments.args, **arguments.kwargs)


def insensitive(model: nn.Module, arguments: Arguments) -> frozenset[str]:
    """Names of the weights whose length makes no difference to the output; see `normkit.watching.invariance`.

    Args:
        model: The model, without wrappers; it and the random numbers are left as they were.
        arguments: Of a call of it.
    """
    with _undisturbed(model):
        return scale_invariant(model, lambda: model(*arguments.args, **arguments.kwargs))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model evaluates, eagerly; outside, modes, buffers and random numbers are those of before."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # What was compiled would be compiled again for the small shapes, and then for shapes that change.
    eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    randomness, arrays = random.getstate(), numpy.random.get_state()
    # Autocast keeps the cast of a weight, and would not see that it is doubled.
    keeps_casts = torch.is_autocast_cache_enabled()
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        torch.set_autocast_cache_enabled(False)
        with torch.random.fork_rng(devices=sorted(devices, key=str)), evaluating(model), torch.no_grad(), eager:
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
        random.setstate(randomness)
        numpy.random.set_state(arrays)
        for module, name, buffer, version, copy in buffers:
            module._buffers[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copy)
        for sharded in fully_sharded(model):
            # Its root keeps what it gathered until a backward pass, which does not come.
            sharded.reshard()


def planned(structure: Structure) -> Plan:
    """What is measured where."""
    attentions = _attentions(structure)
    parents = {site.parent for site in structure.sites if site.module is None} | {each.parent for each in attentions}
    # A module inside such a one makes calls of its own, which are not to be taken for those of the outer one.
    inner = {call.parent for call in structure.called.functions}
    callers = {
        path for path in inner if any(parent in ("", path) or path.startswith(f"{parent}.") for parent in parents)
    }
    return Plan(
        sites=structure.sites, blocks=structure.blocks, attentions=attentions, callers=tuple(sorted(parents | callers))
    )


def _attentions(structure: Structure) -> tuple[AttentionPlace, ...]:
    """Attention calls: those of scaled_dot_product_attention; the softmax of (B, H, T, S) where a module makes none."""
    streams = {call.input_shape[:2] for call in structure.called.modules if len(call.input_shape) == 3}
    calls = [call for call in structure.called.functions if len(call.input_shape) == 4]
    fused = [call for call in calls if call.function == "sdpa"]
    plain = [
        call for call in calls if call.function == "softmax" and (call.input_shape[0], call.input_shape[2]) in streams
    ]
    known = {call.parent for call in fused}
    chosen = {(call.parent, call.function): call for call in (*fused, *(c for c in plain if c.parent not in known))}
    return tuple(_attention(structure, call) for call in sorted(chosen.values(), key=lambda call: call.order))


def _attention(structure: Structure, call: FunctionCall) -> AttentionPlace:
    inside = [each.part for each in structure.called.modules if f"{each.path}.".startswith(f"{call.parent}.")]
    # Where the projections are split over processes, each has its own heads.
    place, parts = max(inside, key=lambda part: part[1], default=(0, 1))
    heads = call.input_shape[1]
    return AttentionPlace(
        parent=call.parent,
        function=call.function,
        heads=heads * parts,
        head_dim=call.input_shape[3] if call.function == "sdpa" else 0,
        first_head=heads * place,
    )


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """Of each group, one optimizer after the other; 0 where it has none, or one that lies on another device."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [
        float(rate) if rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") else 0.0
        for rate in rates
    ]


def describe_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], peaks: Sequence[float] | None = None
) -> tuple[str, ...]:
    """One line each: class, learning rate and decay of the groups, parameters.

    Args:
        optimizers: As they are now.
        peaks: The largest `learning_rates` so far; by default those of now.
    """
    lines, left = [], list(peaks if peaks is not None else learning_rates(optimizers))
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            now, peak = group.get("lr"), left.pop(0) if left else 0.0
            settings = [f"{sum(parameter.numel() for parameter in group['params']):,} parameters"]
            if now is not None:
                settings.append(f"rate {float(now):.3g}" if peak <= float(now) else f"rate up to {peak:.3g}")
            if group.get("weight_decay") is not None:
                settings.append(f"decay {float(group['weight_decay']):.3g}")
            groups.append(" with ".join(filter(None, (settings[0], ", ".join(settings[1:])))))
        lines.append(f"{type(optimizer).__name__}: {'; '.join(groups)}")
    return tuple(lines)
