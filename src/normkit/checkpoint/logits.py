"""Logits in float64 throughout, with nothing on the way rounded to less; and how far apart those of two models are.

Many classes of transformers compute norms, routers and softmax in float32 whatever they are given, so that two equal
float64 models differ by 1e-7.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.errors import InputError
from normkit.identification.state import in_mode
from normkit.text import dtype_name

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)
# `Tensor.type` also takes the name of a class of tensors, or the class.
_LEGACY = {f"torch.{name}Tensor" for name in ("Float", "Half", "BFloat16")}

# Weights of the result were rounded once more than those of the source, or not at all.
_SPARE = 8.0
# The rounding of float64 itself, through all layers.
_FLOOR = 1e-11


class TrueFloat64(TorchFunctionMode):
    """Inside it, every request for a narrower floating-point dtype gets float64.

    So `x.float()`, `x.to(torch.float32)`, `x.type_as(y)`, `softmax(x, dim=-1, dtype=torch.float32)` and
    `torch.zeros(3, dtype=torch.float32)` give float64. A tensor that is narrower already stays so unless a dtype is
    asked for, and what is written into it is rounded.

    Example:
        >>> with TrueFloat64():
        ...     torch.tensor([0.1], dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with float64 in place of the narrower dtypes among its arguments."""
        given = [_widened(value) for value in args]
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func in _NARROWING:
            func = Tensor.double
        elif func in (Tensor.to, Tensor.type_as) and len(given) > 1:
            other = given[1]
            if isinstance(other, Tensor) and other.dtype in _NARROW:
                # Another tensor stands for its dtype and its device.
                func, given = Tensor.to, [given[0], other.device, torch.float64, *given[2:]]
        return func(*given, **named)


def _widened(value: Any) -> Any:
    """Float64 in place of a narrower dtype."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    name = f"{value.__module__}.{value.__name__}" if isinstance(value, type) else value
    return torch.float64 if isinstance(name, str) and name in _LEGACY else value


def true_logits(model: nn.Module, **inputs: Any) -> Tensor:
    """The logits of a float64 model of transformers, in evaluation mode and without a cache, in true float64.

    Experts are computed one by one, as the faster ways do not support float64. The model is left as it was found.

    Args:
        model: All its parameters are float64.
        inputs: Arguments of its forward; floating-point ones are made float64.

    Returns:
        The logits; of a model with an encoder for each of images and text, the score of each pair; for a class without
        a head, its last hidden state.

    Raises:
        InputError: If a parameter is not float64.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            given = dtype_name(parameter.dtype)
            raise InputError(f"expected a float64 model, {name} is {given}; load it with dtype='float64'")
    call = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    if "use_cache" in inspect.signature(model.forward).parameters:
        call.setdefault("use_cache", False)
    with torch.no_grad(), in_mode(model, training=False), _plain_experts(model), TrueFloat64():
        output = model(**call)
    logits: Tensor = next(
        output[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in output
    )
    return logits


@contextmanager
def _plain_experts(model: Any) -> Iterator[None]:
    """Have transformers compute experts in plain matrix products, if the model has any."""
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if set(before.values()) <= {None, "eager"}:
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def agrees_within(difference: float, rounding: float, largest: float) -> bool:
    """difference <= 8 rounding + 1e-11 largest."""
    return difference <= _SPARE * rounding + _FLOOR * largest


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How near the logits of two models are."""

    tokens: int
    """The number of tokens, or of images, compared."""
    largest: float
    """The largest |logit| of the source."""
    difference: float
    """The largest |difference| of a logit."""
    rounding: float
    """How far the source's own logits move when each of its weights moves by up to half a unit in its last place, at
    random."""
    divergence: float = 0.0
    """KL(source || result) of the next token, in nats: the mean over all tokens."""
    same_first: float = 1.0
    """The share of tokens for which both models have the same highest logit."""
    unit: float
    """That half unit, relative: of the coarsest dtype that folding rounded to; 0 if it rounded none."""
    noun: str = "token"
    """The unit that is counted: "token" or "image"."""
    moved_by_eps: float = 0.0
    """The largest |difference| before the source's norms were given the eps that those of the result act as with."""

    @property
    def holds(self) -> bool:
        """difference <= 8 rounding + 1e-11 largest."""
        return agrees_within(self.difference, self.rounding, self.largest)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "holds": self.holds,
            "tokens": self.tokens,
            "largest_logit": self.largest,
            "difference": self.difference,
            "rounding": self.rounding,
            "kl_divergence": self.divergence,
            "same_first": self.same_first,
            "unit": self.unit,
            **({"moved_by_eps": self.moved_by_eps} if self.moved_by_eps else {}),
        }


def compare_logits(
    source: nn.Module, result: nn.Module, batches: Sequence[Mapping[str, Tensor]], *, unit: float
) -> Agreement:
    """Run two float64 models on the same batches.

    Args:
        source: The model that was folded; its weights are moved at the end and stay so.
        result: The folded model.
        batches: Arguments of both.
        unit: Half a unit in the last place of the coarsest dtype that folding rounded to, relative: 2^-8 for bfloat16.
    """
    logits = [true_logits(source, **batch) for batch in batches]
    difference = divergence = same = places = 0.0
    for expected, batch in zip(logits, batches, strict=True):
        found = true_logits(result, **batch)
        difference = max(difference, _largest_difference([expected], [found]))
        # A few rows at a time: a vocabulary is large.
        for one, other in zip(*(torch.split(each.flatten(0, -2), 16) for each in (expected, found)), strict=True):
            logs = one.log_softmax(-1)
            divergence += float((logs.exp() * (logs - other.log_softmax(-1))).sum())
            same += float((one.argmax(-1) == other.argmax(-1)).sum())
            places += len(one)
    rounding = 0.0
    if unit:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in source.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + unit * (2 * drawn - 1))
        rounding = _largest_difference(logits, (true_logits(source, **batch) for batch in batches))
    return Agreement(
        tokens=sum(
            batch["input_ids"].numel() if "input_ids" in batch else len(batch["pixel_values"]) for batch in batches
        ),
        noun="token" if all("input_ids" in batch for batch in batches) else "image",
        largest=max(0.0, *(float(expected.abs().max()) for expected in logits)),
        difference=difference,
        rounding=rounding,
        divergence=max(0.0, divergence / max(1, places)),
        same_first=same / places if places else 1.0,
        unit=unit,
    )


def half_unit(dtypes: set[str]) -> float:
    """Half a unit in the last place of the coarsest of some dtypes, relative; 0 for no dtype."""
    from normkit.checkpoint.reader import TORCH

    return max((torch.finfo(TORCH[dtype]).eps / 2 for dtype in dtypes), default=0.0)


def _largest_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The largest |difference| of an element; infinity if any is not finite."""
    largest = [float((one - other).abs().max()) for one, other in zip(left, right, strict=True)]
    return max(apart if math.isfinite(apart) else math.inf for apart in largest)
