"""Which weights have a length that makes no difference, as a norm forgets it: found by behaviour, not by place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from normkit.identification.tracing import first_output

# If f(c w) = f(w), no gradient has a part along w. One backward pass sorts out nearly all others.
_ORTHOGONAL = {torch.float16: 0.02, torch.bfloat16: 0.02}
_ORTHOGONAL_32 = 1e-3
# Relative change of the output when the weight is doubled: eps, and rounding.
_UNCHANGED = {torch.float16: 0.01, torch.bfloat16: 0.03}
_UNCHANGED_32 = 1e-3
# Where a weight hardly matters its length matters little too: other weights of its length must change 20 times as much.
_BESIDE_OTHERS = 0.05


def scale_invariant(model: nn.Module, run: Callable[[], object]) -> frozenset[str]:
    """The paths of the weights that can be doubled without a change of the output.

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
    """Candidates, with the number type that their gradient was computed in: under autocast that of the output."""
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
            # An input may come with a graph of its own, which the training needs yet.
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
    """Whether the output stays when the weight is doubled, and does not when its elements change places."""
    doubled = _change(weight, weight * 2, before, run)
    if not doubled <= (limit or _UNCHANGED_32):
        return False
    return doubled < _BESIDE_OTHERS * _change(weight, weight.roll(1), before, run)


def _change(weight: Tensor, other: Tensor, before: Tensor, run: Callable[[], object]) -> float:
    """How far the output moves with other values; the weight is put back to the bit, also after an error."""
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
    """The values of an output that is a mapping, as those of transformers are."""
    return tuple(output.values()) if isinstance(output, Mapping) else output
