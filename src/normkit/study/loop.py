"""The one training loop: AdamW or SGD with warm-up, clipping and decay, for the studies and for the shipped models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
"""From model and batch to the mean loss of the batch."""

Observe = Callable[[nn.Module, int], Mapping[str, Any]]
"""Called after the backward pass of a step, before its update: numbers to keep."""


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
) -> tuple[Point, ...]:
    """Train a model in place; a loss that is not finite ends the run and is its last point.

    Args:
        model: What to train.
        recipe: The choices.
        batches: One a step.
        loss_of: The loss.
        observe: Numbers to keep from each step.
        tell: Called with each point.
    """
    model.train()
    optimizer = build_optimizer(model, recipe)
    points: list[Point] = []
    for step, batch in enumerate(islice(batches, recipe.steps), start=1):
        rate = learning_rate(step, recipe)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        observed = dict(observe(model, step)) if observe else {}
        gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if recipe.clip is None else recipe.clip)
        point = Point(
            step=step, loss=loss.item(), learning_rate=rate, gradient_norm=gradient_norm.item(), observed=observed
        )
        points.append(point)
        if tell:
            tell(point)
        if not math.isfinite(point.loss):
            break
        optimizer.step()
    return tuple(points)


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
