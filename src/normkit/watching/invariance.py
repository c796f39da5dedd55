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


def scale_invariant(model: nn.Module, run: Callable[[], object]) -> frozenset[str]:
    """The paths of the weights that can be doubled without a change of the output.

    A weight W before a norm: norm(c W x) = norm(W x) for c > 0, but for eps. Candidates have a gradient orthogonal to
    them for a random combination of the outputs; each is then doubled and the model run again. Biases, gains, and
    weights without any gradient do not count. Parameters, their `grad` and the random numbers are as before.

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
            return frozenset(path for path in candidates if _stays(weights[path], before, run))


def _orthogonal(weights: Mapping[str, Tensor], run: Callable[[], object]) -> tuple[str, ...]:
    with torch.enable_grad():
        output = first_output(_unpacked(run()))
        if output is None or not output.requires_grad or not bool(output.isfinite().all()):
            return ()
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            output, list(weights.values()), direction, allow_unused=True
        )
    found = []
    for (path, weight), gradient in zip(weights.items(), gradients, strict=True):
        if gradient is None:
            continue
        lengths = float(gradient.double().norm() * weight.detach().double().norm())
        inner = float((gradient.double() * weight.detach().double()).sum())
        if math.isfinite(lengths) and lengths > 0:
            limit = _ORTHOGONAL.get(weight.dtype, _ORTHOGONAL_32)
            found += [path] if abs(inner) <= limit * lengths else []
    return tuple(found)


def _stays(weight: Tensor, before: Tensor, run: Callable[[], object]) -> bool:
    """Whether the output stays when the weight is doubled; the weight is put back to the bit, also after an error."""
    kept = weight.detach().clone()
    try:
        weight.mul_(2)
        after = _output(run)
    finally:
        weight.copy_(kept)
    change = float((after - before).abs().max() / before.abs().max())
    return change <= _UNCHANGED.get(weight.dtype, _UNCHANGED_32)


def _output(run: Callable[[], object]) -> Tensor:
    output = first_output(_unpacked(run()))
    assert output is not None
    return output.detach().double()


def _unpacked(output: object) -> object:
    """The values of an output that is a mapping, as those of transformers are."""
    return tuple(output.values()) if isinstance(output, Mapping) else output
