"""The one training loop: AdamW or SGD with warm-up, clipping and decay, for the studies and for the shipped models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.ranks import ALONE, Ranks
from normkit.study.run_checkpoint import RunCheckpoint
from normkit.study.training_run import Batch, Loss, Observe, Point, Recipe


def train(
    model: nn.Module,
    recipe: Recipe,
    batches: Iterator[Batch],
    loss_of: Loss,
    *,
    observe: Observe | None = None,
    report: Callable[[Point], None] | None = None,
    checkpoint: RunCheckpoint | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Point, ...]:
    """Train a model in place; a loss that is not finite ends the run and is its last point.

    Args:
        model: What to train.
        recipe: The choices.
        batches: One per step. A continued run draws those of its first steps again, and skips them.
        loss_of: The loss. With several ranks it must be a mean over the batch's first dimension.
        observe: Values to record at each step.
        report: Called with each point after its update, but not with the points of a checkpoint.
        checkpoint: Where the run is saved, so that it can be continued to the same bits.
        ranks: The processes that share each batch; every one of them draws the whole batch.

    Raises:
        InputError: If the checkpoint cannot be continued, the batches end before the steps, or the number of ranks
            does not divide a batch.
    """
    model.train()
    optimizer = build_optimizer(model, recipe)
    points = list(checkpoint.restore(model, optimizer, recipe, batches, ranks)) if checkpoint else []
    replica = ranks.replica(model)
    while len(points) < recipe.steps and (not points or math.isfinite(points[-1].loss)):
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
        is_finite = math.isfinite(mean)
        if is_finite:
            optimizer.step()
        if report:
            report(points[-1])
        is_last = step == recipe.steps or not is_finite
        if checkpoint and ranks.writes and (is_last or checkpoint.is_due):
            checkpoint.save(model, optimizer, recipe, points, batch)
    return tuple(points)


def learning_rate(step: int, recipe: Recipe) -> float:
    """The rate of a step, from 1: the lesser of a linear rise over the warm-up and half a cosine from peak to end.

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
    others = [p for p in model.parameters() if p.dim() == 1 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
