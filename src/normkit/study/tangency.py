"""The backward pass of every norm of a model against its formula: a tangent projection, divided by the row's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit import geometry, reference
from normkit.spec import NormSpec
from normkit.study.loop import Batch, Loss


@dataclass(frozen=True, kw_only=True)
class Tangency:
    """What one norm did with a gradient u of its output, on its way to a gradient dx of its input x.

    Attributes:
        projected: |dx - P(g u) / s| / |dx| with P the projection tangent to the sphere through the normalized row
            and s with eps; what is left of the radial part where eps > 0 counts as error.
        exact: The same for the closed form with eps, `geometry.vjp`.
        removed: Median over rows of the share of |g u|^2 that P takes away; at random it is 2/n, without centring 1/n.
    """

    projected: float
    exact: float
    removed: float


def tangencies(
    model: nn.Module, norms: Mapping[str, nn.Module], spec: NormSpec, batch: Batch, loss_of: Loss
) -> dict[str, Tangency]:
    """Compare the backward pass of norms with their formulas, in one pass of the model.

    Args:
        model: In float64, for which the formula holds to rounding; its gradients are accumulated in `grad`.
        norms: Path -> module that computes `spec`, with `weight` as its gain or none.
        spec: What they compute.
        batch: On the model's device.
        loss_of: The loss.
    """
    seen: dict[str, dict[str, Tensor]] = {path: {} for path in norms}

    def keep(path: str) -> list[Any]:
        def forward(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            seen[path]["x"] = inputs[0].detach()

        def backward(_module: nn.Module, of_input: Any, of_output: Any) -> None:
            seen[path].update(dx=of_input[0].detach(), u=of_output[0].detach())

        return [norms[path].register_forward_hook(forward), norms[path].register_full_backward_hook(backward)]

    handles = [handle for path in norms for handle in keep(path)]
    try:
        torch.autograd.backward(loss_of(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    return {path: _compare(**seen[path], spec=spec, weight=_gain(module)) for path, module in norms.items()}


def _gain(module: nn.Module) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.detach()


def _compare(x: Tensor, dx: Tensor, u: Tensor, spec: NormSpec, weight: Tensor | None) -> Tangency:
    upstream = u if weight is None else u * weight
    scale = reference.statistics(x, spec, reference.machine_eps(x, spec)).scale
    tangent = geometry.tangent_projection(upstream, x, is_centred=spec.centring.numerator)
    removed = 1 - tangent.square().sum(-1) / upstream.square().sum(-1)
    length = dx.norm()
    return Tangency(
        projected=((dx - tangent / scale).norm() / length).item(),
        exact=((dx - geometry.vjp(x, u, spec, weight)).norm() / length).item(),
        removed=removed.nanmedian().item(),
    )
