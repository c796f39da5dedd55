"""How smooth a loss is along a step: what loss and gradient do on the line of steepest descent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.study.loop import Batch, Loss

SHARES = (0.0025, 0.005, 0.01, 0.02)
"""Distances in units of the length of all parameters together; a step of training is about the first."""


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Loss and gradient at theta - t g / |g|, for some distances t.

    Attributes:
        distances: t, ascending.
        losses: There.
        changes: |gradient(t) - g|.
        loss: At t = 0.
        gradient: |g|.
    """

    distances: tuple[float, ...]
    losses: tuple[float, ...]
    changes: tuple[float, ...]
    loss: float
    gradient: float

    @property
    def loss_range(self) -> float:
        """Greatest less least loss on the line, its start included; infinite where one is not finite."""
        losses = (self.loss, *self.losses)
        return max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.inf

    @property
    def roughness(self) -> float:
        """The largest change of the gradient over the distance: the "effective beta-smoothness", small where smooth."""
        slopes = [change / distance for change, distance in zip(self.changes, self.distances, strict=True)]
        return max(slopes) if all(map(math.isfinite, slopes)) else math.inf

    @property
    def surprise(self) -> float:
        """The largest change of the gradient over its length: below 1 while the gradient still points the same way."""
        return max(self.changes) / self.gradient if all(map(math.isfinite, self.changes)) else math.inf


def along_the_gradient(model: nn.Module, batch: Batch, loss_of: Loss, shares: Sequence[float] = SHARES) -> Landscape:
    """Walk down the gradient of one batch's loss, and put the parameters back to the bit.

    Distances are shares of |theta|, all parameters together, and not multiples of learning rate times gradient: models
    whose gradients differ in length are then compared over equal distances.

    Args:
        model: Where it is now; `grad` of its parameters is left alone.
        batch: On the model's device.
        loss_of: The loss.
        shares: Distances over |theta|.

    Source:
        Santurkar et al. 2018, arXiv:1805.11604, section 3.2, with distances of our own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss, gradient = _loss_and_gradient(model, parameters, batch, loss_of)
    length, size = _norm(gradient), _norm([parameter.detach() for parameter in parameters])
    losses, changes = [], []
    for share in shares:
        moved = [
            parameter.detach() - share * size / length * slope
            for parameter, slope in zip(parameters, gradient, strict=True)
        ]
        with _replaced(parameters, moved):
            there, slopes = _loss_and_gradient(model, parameters, batch, loss_of)
        losses.append(there)
        changes.append(_norm([slope - old for slope, old in zip(slopes, gradient, strict=True)]))
    return Landscape(
        distances=tuple(share * size for share in shares),
        losses=tuple(losses),
        changes=tuple(changes),
        loss=loss,
        gradient=length,
    )


def _loss_and_gradient(
    model: nn.Module, parameters: Sequence[nn.Parameter], batch: Batch, loss_of: Loss
) -> tuple[float, tuple[Tensor, ...]]:
    with torch.enable_grad():
        loss = loss_of(model, batch)
        return loss.item(), torch.autograd.grad(loss, list(parameters), materialize_grads=True)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


@contextmanager
def _replaced(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    originals = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
