"""How far a step turns scale-invariant weights of different lengths, and how plain gradient descent lengthens them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit import geometry

FACTORS = (1.0, 1.5, 3.0, 7.0)
_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Turning:
    """One scale-invariant group of weights w, tried at several lengths c |w|.

    Attributes:
        paths: Names of its parameters.
        factors: c.
        products: |gradient| |weight| at each; a constant in theory.
        cosine: Largest |cosine| of weight and gradient; 0 in theory.
        by_gradient: Angle in radians by which a step of given rate times the gradient turns it, at each c: ~ 1 / c^2.
        by_sign: The same for a step along the gradient's signs, as Adam's first is: ~ 1 / c.
    """

    paths: tuple[str, ...]
    factors: tuple[float, ...]
    products: tuple[float, ...]
    cosine: float
    by_gradient: tuple[float, ...]
    by_sign: tuple[float, ...]


def turnings(
    model: nn.Module, run: Callable[[], Tensor], loss: Callable[[], Tensor], factors: Sequence[float] = FACTORS
) -> tuple[Turning, ...]:
    """Find the scale-invariant groups of a model by behaviour, and measure each; the weights are put back to the bit.

    Args:
        model: In float64, whose rounding hides nothing; its norms with an eps that is as good as 0.
        run: Its output for a small input.
        loss: Its loss, which must not notice the scale.
        factors: Lengths to try, over the weights' own.

    Source:
        van Laarhoven 2017, arXiv:1706.05350; Arora, Li & Lyu 2018, arXiv:1812.03981.
    """
    groups = geometry.scale_invariant_groups(model, run)
    return tuple(_turning(group, loss, tuple(factors)) for group in groups)


def _turning(group: geometry.InvariantGroup, loss: Callable[[], Tensor], factors: tuple[float, ...]) -> Turning:
    originals = [parameter.data for parameter in group.parameters]
    products, cosines, by_gradient, by_sign = [], [], [], []
    try:
        for factor in factors:
            for parameter, original in zip(group.parameters, originals, strict=True):
                parameter.data = factor * original
            weight, gradient = flat(group.parameters), flat(torch.autograd.grad(loss(), group.parameters))
            products.append((weight.norm() * gradient.norm()).item())
            cosines.append(abs(geometry.radial_cosine(weight, gradient).item()))
            by_gradient.append(geometry.angle_between(weight, weight - _RATE * gradient).item())
            by_sign.append(geometry.angle_between(weight, weight - _RATE * gradient.sign()).item())
    finally:
        for parameter, original in zip(group.parameters, originals, strict=True):
            parameter.data = original
    return Turning(
        paths=group.paths,
        factors=factors,
        products=tuple(products),
        cosine=max(cosines),
        by_gradient=tuple(by_gradient),
        by_sign=tuple(by_sign),
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of some tensors as one vector, detached."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
