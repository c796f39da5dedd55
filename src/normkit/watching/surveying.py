"""What calls of the model on a small part of a batch show before the first step.

These are its structure, and the weights whose length makes no difference because a norm removes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from normkit.errors import InputError
from normkit.identification.sharding import fully_sharded
from normkit.identification.state import buffers_kept, random_numbers_kept
from normkit.identification.tracing import first_output
from normkit.measurement.running import evaluating
from normkit.measurement.structure import Structure, survey

_TOKENS = 16

# If f(c w) = f(w), no gradient has a part along w. One backward pass excludes nearly all other weights.
_ORTHOGONAL = {torch.float16: 0.02, torch.bfloat16: 0.02}
_ORTHOGONAL_32 = 1e-3
# Relative change of the output when the weight is doubled: eps, and rounding.
_UNCHANGED = {torch.float16: 0.01, torch.bfloat16: 0.03}
_UNCHANGED_32 = 1e-3
# Where a weight hardly matters its length matters little too: other weights of its length must change 20 times as much.
_BESIDE_OTHERS = 0.05


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
        """The first two rows, and of token ids the first sixteen columns; arguments without batch axis are kept."""
        given = [*self.args, *self.kwargs.values()]
        first = next((value for value in given if isinstance(value, Tensor) and value.dim() > 0), None)
        if first is None:
            return self
        is_tokens = first.dim() == 2 and not first.is_floating_point()

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != first.shape[0]:
                return value
            if is_tokens and value.dim() >= 2 and value.shape[1] == first.shape[1]:
                return value[:2, :_TOKENS]
            return value[:2]

        def cut_named(name: str, value: Any) -> Any:
            # The first tokens of a padded sequence may be padding.
            is_mask = name.endswith("attention_mask") and isinstance(value, Tensor) and value.dim() == 2
            return torch.ones_like(cut(value)) if is_mask else cut(value)

        kwargs = {key: cut_named(key, value) for key, value in self.kwargs.items()}
        return Arguments(args=tuple(map(cut, self.args)), kwargs=kwargs)

    def detached(self) -> Arguments:
        """These arguments without the graphs that made them, which the training needs; inference tensors are copied."""
        return self.with_tensors([each.clone() if each.is_inference() else each.detach() for each in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """These arguments with other tensors in the same order, each on the device of the one that it replaces."""
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
    """Survey a model without wrappers; it and the random numbers are left as they were."""
    with _undisturbed(model):
        return survey(model, lambda: model(*arguments.args, **arguments.kwargs), stages=False)


def called(model: nn.Module, arguments: Arguments) -> None:
    """Call a model without wrappers; it and the random numbers are left as they were."""
    with _undisturbed(model):
        model(*arguments.args, **arguments.kwargs)


def insensitive(model: nn.Module, arguments: Arguments) -> frozenset[str]:
    """`scale_invariant` of a model without wrappers; it and the random numbers are left as they were."""
    with _undisturbed(model):
        return scale_invariant(model, lambda: model(*arguments.args, **arguments.kwargs))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model eagerly in evaluation mode, then restore modes, buffers and random numbers."""
    # Compiled code would be compiled again for the small shapes, and then for shapes that change.
    eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    # Autocast keeps the cast of a weight, and would not see that it is doubled.
    keeps_casts = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with random_numbers_kept(), buffers_kept(model), evaluating(model), torch.no_grad(), eager:
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
        for sharded in fully_sharded(model):
            # Its root keeps what it gathered until a backward pass, which does not come.
            sharded.reshard()


def scale_invariant(model: nn.Module, run: Callable[[], object]) -> frozenset[str]:
    """The paths of the weights that can be doubled without a change of the output: found by behaviour, not by place.

    A weight W before a norm: norm(c W x) = norm(W x) for c > 0, but for eps. Candidates have a gradient orthogonal to
    them for a random combination of the outputs; each is then doubled and the model run again, and once more with its
    elements in another order, which must change the output far more. Biases, gains, and weights without any gradient do
    not count. Parameters, their `grad` and the random numbers are as before.

    Args:
        model: In evaluation mode; the same input must give the same output.
        run: Calls it on a small input.

    Returns:
        Names as in `model.named_parameters()`; empty where the output is not finite, or none can be differentiated.
    """
    weights = {
        path: parameter
        for path, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.requires_grad and parameter.is_floating_point()
    }
    devices = {parameter.device for parameter in weights.values() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        candidates = _orthogonal(weights, run)
        if not candidates:
            return frozenset()
        with torch.no_grad():
            before = _output(run)
            return frozenset(
                path for path, dtype in candidates.items() if _stays(weights[path], _UNCHANGED.get(dtype), before, run)
            )


def _orthogonal(weights: Mapping[str, Tensor], run: Callable[[], object]) -> Mapping[str, torch.dtype]:
    """Candidates, with the dtype in which their gradient was computed: under autocast that of the output."""
    with torch.enable_grad():
        output = first_output(_unpacked(run()))
        if output is None or not output.requires_grad or not bool(output.isfinite().all()):
            return {}
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            output,
            list(weights.values()),
            direction,
            allow_unused=True,
            # An input may come with a graph of its own, which the training still needs.
            retain_graph=True,
        )
    found = {}
    for (path, weight), gradient in zip(weights.items(), gradients, strict=True):
        if gradient is None:
            continue
        lengths = float(gradient.double().norm() * weight.detach().double().norm())
        inner = float((gradient.double() * weight.detach().double()).sum())
        if math.isfinite(lengths) and lengths > 0:
            dtype = output.dtype if output.dtype in _ORTHOGONAL else weight.dtype
            if abs(inner) <= _ORTHOGONAL.get(dtype, _ORTHOGONAL_32) * lengths:
                found[path] = dtype
    return found


def _stays(weight: Tensor, limit: float | None, before: Tensor, run: Callable[[], object]) -> bool:
    """Whether the output stays when the weight is doubled, and changes when its elements change places."""
    doubled = _change(weight, weight * 2, before, run)
    if not doubled <= (limit or _UNCHANGED_32):
        return False
    return doubled < _BESIDE_OTHERS * _change(weight, weight.roll(1), before, run)


def _change(weight: Tensor, other: Tensor, before: Tensor, run: Callable[[], object]) -> float:
    """How far the output moves with other values; the weight is restored to the bit, also after an error."""
    kept = weight.detach().clone()
    try:
        weight.copy_(other)
        after = _output(run)
    finally:
        weight.copy_(kept)
    return float((after - before).abs().max() / before.abs().max())


def _output(run: Callable[[], object]) -> Tensor:
    output = first_output(_unpacked(run()))
    assert output is not None
    return output.detach().double()


def _unpacked(output: object) -> object:
    """The values of an output that is a mapping, as outputs of transformers are."""
    return tuple(output.values()) if isinstance(output, Mapping) else output
