"""The one training loop: AdamW or SGD with warm-up, clipping and decay, for the studies and for the shipped models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.study.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from normkit.study.keeping import Keeper

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
"""From model and batch to the mean loss of the batch. It calls the model and asks nothing else of it."""

Observe = Callable[[nn.Module, int], Mapping[str, Any]]
"""Called with model and step after the backward pass, before the update: values to keep, as JSON has them.

A run that is continued calls it only for the steps that are left, so what it must keep it returns."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All choices of a run but model, data and seed.

    Attributes:
        steps: Optimizer steps.
        learning_rate: At the peak, after `warmup` steps.
        warmup: Steps of linear increase.
        final_rate: Share of the peak where half a cosine ends; 1 keeps the rate.
        optimizer: AdamW with betas (0.9, 0.95), or plain SGD.
        weight_decay: Of matrices; gains, biases and embeddings are not decayed.
        clip: Largest norm of all gradients together; None does not clip.
    """

    steps: int
    learning_rate: float
    warmup: int = 0
    final_rate: float = 0.1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        """Refuse a run without a step.

        Raises:
            InputError: If there is none.
        """
        if self.steps < 1:
            raise InputError(f"a run takes at least one step, got {self.steps}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One step of a run.

    Attributes:
        step: From 1.
        loss: Before the update, nats or whatever the loss function gives.
        learning_rate: Of the update.
        gradient_norm: Of all gradients together, before clipping.
        observed: What `observe` gave.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    observed: Mapping[str, Any] = field(default_factory=dict)


def train(
    model: nn.Module,
    recipe: Recipe,
    batches: Iterator[Batch],
    loss_of: Loss,
    *,
    observe: Observe | None = None,
    tell: Callable[[Point], None] | None = None,
    keeper: Keeper | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Point, ...]:
    """Train a model in place; a loss that is not finite ends the run and is its last point.

    Args:
        model: What to train.
        recipe: The choices.
        batches: One a step. Those that a kept run has used are drawn and passed over.
        loss_of: The loss. With several ranks it must be a mean over the batch's first dimension.
        observe: Numbers to keep from each step.
        tell: Called with each point after its update; not with those of a kept run.
        keeper: Where the run is kept, so that it can be continued to the same bits.
        ranks: The processes that share each batch; every one of them draws the whole of it.

    Raises:
        InputError: If what was kept cannot be continued, the batches end before the steps, or the ranks do not divide
            a batch.
    """
    model.train()
    optimizer = build_optimizer(model, recipe)
    points = list(keeper.resume(model, optimizer, recipe, batches, ranks)) if keeper else []
    replica = ranks.replica(model)
    while len(points) < recipe.steps and _goes_on(points):
        step = len(points) + 1
        batch = next(batches, None)
        if batch is None:
            raise InputError(f"expected {recipe.steps} batches, got {step - 1}; give more, or ask for fewer steps")
        rate = learning_rate(step, recipe)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(replica, ranks.part(batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        observed = dict(observe(model, step)) if observe else {}
        gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if recipe.clip is None else recipe.clip)
        mean = ranks.mean(loss)
        points.append(
            Point(step=step, loss=mean, learning_rate=rate, gradient_norm=gradient_norm.item(), observed=observed)
        )
        going_on = _goes_on(points)
        if going_on:
            optimizer.step()
        if tell:
            tell(points[-1])
        done = step == recipe.steps or not going_on
        if keeper and ranks.writes and (done or keeper.due(step)):
            keeper.keep(model, optimizer, recipe, points, batch)
    return tuple(points)


def _goes_on(points: list[Point]) -> bool:
    return not points or math.isfinite(points[-1].loss)


def learning_rate(step: int, recipe: Recipe) -> float:
    """The rate of a step, from 1: a linear rise over the warm-up, under half a cosine from the peak to its last share.

    rate = peak * min(step / warmup, final + (1 - final) * (1 + cos(pi * step / steps)) / 2)
    """
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    rise = step / recipe.warmup if recipe.warmup else 1.0
    return recipe.learning_rate * min(rise, recipe.final_rate + (1 - recipe.final_rate) * cosine)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer with two groups: matrices, which are decayed, and everything else."""
    groups = parameter_groups(model, recipe.weight_decay)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with their weight decay; gains, biases and embeddings without."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    kept = [p for p in model.parameters() if p.dim() == 1 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
