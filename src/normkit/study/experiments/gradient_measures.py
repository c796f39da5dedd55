"""Measures of the study `gradients`: the backward pass of norms, the loss along a step, scale-invariant weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit import geometry, reference
from normkit.geometry.invariant_groups import replaced
from normkit.spec import NormSpec
from normkit.study.training_run import Batch, Loss

SHARES = (0.0025, 0.005, 0.01, 0.02)
"""Distances along the gradient, over the length of all parameters together; a step of training is about the first."""

FACTORS = (1.0, 1.5, 3.0, 7.0)
"""Lengths at which a scale-invariant weight is tried, over its own length."""

_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class BackwardErrors:
    """How far the gradient dx that a norm passes on is from its formulas, for a gradient u of its output."""

    projected: float
    """|dx - P(g u) / s| / |dx|, where P is the projection tangent to the sphere through the normalized row and s
    includes eps; with eps > 0 the rest of the radial part counts as error."""
    exact: float
    """The same for the closed form with eps, `geometry.vjp`."""
    removed: float
    """Median over rows of the share of |g u|^2 that P removes; 2/n for a random direction, 1/n without centring."""


def backward_errors(
    model: nn.Module, norms: Mapping[str, nn.Module], spec: NormSpec, batch: Batch, loss_of: Loss
) -> dict[str, BackwardErrors]:
    """Compare the backward pass of norms with their formulas, in one pass of the model.

    Args:
        model: In float64, in which the formulas hold to rounding; its gradients are accumulated in `grad`.
        norms: Path -> module that computes `spec`, with `weight` as its gain, or none.
        spec: The norm that they compute.
        batch: On the model's device.
        loss_of: The loss.
    """
    seen: dict[str, dict[str, Tensor]] = {path: {} for path in norms}

    def record(path: str) -> list[Any]:
        def forward(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            seen[path]["x"] = inputs[0].detach()

        def backward(_module: nn.Module, of_input: Any, of_output: Any) -> None:
            seen[path].update(dx=of_input[0].detach(), u=of_output[0].detach())

        return [norms[path].register_forward_hook(forward), norms[path].register_full_backward_hook(backward)]

    handles = [handle for path in norms for handle in record(path)]
    try:
        torch.autograd.backward(loss_of(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    gains = {path: getattr(module, "weight", None) for path, module in norms.items()}
    return {
        path: _compare(**seen[path], spec=spec, weight=None if gain is None else gain.detach())
        for path, gain in gains.items()
    }


def _compare(x: Tensor, dx: Tensor, u: Tensor, spec: NormSpec, weight: Tensor | None) -> BackwardErrors:
    upstream = u if weight is None else u * weight
    scale = reference.statistics(x, spec, reference.machine_eps(x, spec)).scale
    tangent = geometry.tangent_projection(upstream, x, is_centred=spec.centring.numerator)
    removed = 1 - tangent.square().sum(-1) / upstream.square().sum(-1)
    length = dx.norm()
    return BackwardErrors(
        projected=((dx - tangent / scale).norm() / length).item(),
        exact=((dx - geometry.vjp(x, u, spec, weight)).norm() / length).item(),
        removed=removed.nanmedian().item(),
    )


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Loss and gradient at theta - t g / |g|, for some distances t."""

    distances: tuple[float, ...]
    """t, ascending."""
    losses: tuple[float, ...]
    """At each distance."""
    changes: tuple[float, ...]
    """|gradient(t) - g| at each distance."""
    loss: float
    """At t = 0."""
    gradient: float
    """|g|."""

    @property
    def measures(self) -> dict[str, float]:
        """Three numbers; each is infinite if a loss or gradient on the line is not finite.

        - "roughness": the largest change of the gradient over the distance, the "effective beta-smoothness";
        - "loss_range": greatest minus least loss on the line, its start included;
        - "surprise": the largest change of the gradient over its length, below 1 while it keeps its direction.
        """
        losses = (self.loss, *self.losses)
        slopes = [change / distance for change, distance in zip(self.changes, self.distances, strict=True)]
        is_finite = all(map(math.isfinite, self.changes))
        return {
            "roughness": max(slopes) if all(map(math.isfinite, slopes)) else math.inf,
            "loss_range": max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.inf,
            "surprise": max(self.changes) / self.gradient if is_finite else math.inf,
        }


def along_the_gradient(model: nn.Module, batch: Batch, loss_of: Loss, shares: Sequence[float] = SHARES) -> Landscape:
    """Loss and gradient down the gradient of one batch's loss; the parameters are restored to the bit.

    Distances are shares of |theta|, all parameters together, and not multiples of learning rate times gradient, so that
    models whose gradients differ in length are compared over equal distances.

    Args:
        model: A model; `grad` of its parameters is left alone.
        batch: On the model's device.
        loss_of: The loss.
        shares: Distances over |theta|.

    Source:
        Santurkar et al. 2018, arXiv:1805.11604, section 3.2, with distances of our own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss_and_gradient() -> tuple[float, tuple[Tensor, ...]]:
        with torch.enable_grad():
            loss = loss_of(model, batch)
            return loss.item(), torch.autograd.grad(loss, parameters, materialize_grads=True)

    loss, gradient = loss_and_gradient()
    length, size = _norm(gradient), _norm([parameter.detach() for parameter in parameters])
    losses, changes = [], []
    for share in shares:
        moved = [
            parameter.detach() - share * size / length * slope
            for parameter, slope in zip(parameters, gradient, strict=True)
        ]
        with replaced(parameters, moved):
            there, slopes = loss_and_gradient()
        losses.append(there)
        changes.append(_norm([slope - old for slope, old in zip(slopes, gradient, strict=True)]))
    return Landscape(
        distances=tuple(share * size for share in shares),
        losses=tuple(losses),
        changes=tuple(changes),
        loss=loss,
        gradient=length,
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class Turning:
    """How steps turn one scale-invariant group of weights w, at several lengths c |w|."""

    paths: tuple[str, ...]
    """Names of its parameters."""
    products: tuple[float, ...]
    """|gradient| |weight| at each c; a constant in theory."""
    cosine: float
    """Largest |cosine| of weight and gradient; 0 in theory."""
    by_gradient: tuple[float, ...]
    """Angle in radians by which a step of given rate times the gradient turns it, at each c: ~ 1 / c^2."""
    by_sign: tuple[float, ...]
    """The same for a step along the signs of the gradient, as Adam's first step is: ~ 1 / c."""


def turnings(model: nn.Module, run: Callable[[], Tensor], loss: Callable[[], Tensor]) -> tuple[Turning, ...]:
    """Find the scale-invariant groups of a model by behaviour, and measure each; the weights are restored to the bit.

    Args:
        model: In float64, so that rounding hides nothing; its norms with an eps that is practically 0.
        run: Its output for a small input.
        loss: Its loss, which must not depend on the scale.

    Source:
        van Laarhoven 2017, arXiv:1706.05350; Arora, Li & Lyu 2018, arXiv:1812.03981.
    """
    return tuple(_turning(group, loss) for group in geometry.scale_invariant_groups(model, run))


def _turning(group: geometry.InvariantGroup, loss: Callable[[], Tensor]) -> Turning:
    originals = [parameter.data for parameter in group.parameters]
    products, cosines, by_gradient, by_sign = [], [], [], []
    for factor in FACTORS:
        with replaced(group.parameters, [factor * original for original in originals]):
            weight, gradient = flat(group.parameters), flat(torch.autograd.grad(loss(), group.parameters))
            products.append((weight.norm() * gradient.norm()).item())
            cosines.append(abs(geometry.radial_cosine(weight, gradient).item()))
            by_gradient.append(geometry.angle_between(weight, weight - _RATE * gradient).item())
            by_sign.append(geometry.angle_between(weight, weight - _RATE * gradient.sign()).item())
    return Turning(
        paths=group.paths,
        products=tuple(products),
        cosine=max(cosines),
        by_gradient=tuple(by_gradient),
        by_sign=tuple(by_sign),
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of some tensors as one vector, detached."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
