"""A training run: its recipe, the one training loop, its steps, and the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.files import finite
from normkit.study.ranks import ALONE, Ranks
from normkit.study.statistics import padded

if TYPE_CHECKING:
    from normkit.study.run_checkpoint import RunCheckpoint

Batch = tuple[Tensor, ...]

Loss = Callable[[nn.Module, Batch], Tensor]
"""From model and batch to the mean loss of the batch. It uses the model only by calling it."""

Observe = Callable[[nn.Module, int], Mapping[str, Any]]
"""Called with model and step after the backward pass and before the update; returns values to record, ready for JSON.

A run that is continued calls it only for the steps that are left, so it must return everything that is to be kept."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All choices of a training run except model, data and seed.

    Raises:
        InputError: If there is no step.
    """

    steps: int
    learning_rate: float
    """At the peak, after `warmup` steps."""
    warmup: int = 0
    """Steps of linear increase."""
    final_rate: float = 0.1
    """Share of the peak at which half a cosine ends; 1 keeps the rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW with betas (0.9, 0.95), or plain SGD."""
    weight_decay: float = 0.0
    """For matrices; gains, biases and embeddings are not decayed."""
    clip: float | None = 1.0
    """Largest norm of all gradients together; None does not clip."""

    def __post_init__(self) -> None:
        """Refuse a run without a step."""
        if self.steps < 1:
            raise InputError(f"a run takes at least one step, got {self.steps}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One step of a run."""

    step: int
    """From 1."""
    loss: float
    """Before the update."""
    learning_rate: float
    """The learning rate of the update."""
    gradient_norm: float
    """Norm of all gradients together, before clipping."""
    observed: Mapping[str, Any] = field(default_factory=dict)
    """The values that `Observe` returned."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run that has ended."""

    points: tuple[Point, ...]
    """One per step; the last has a loss that is not finite if the run diverged."""
    findings: tuple[Mapping[str, Any], ...] = ()
    """The findings of `inspect` about the model after the last step, as JSON values: "rule", "severity", "sites"."""

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step, ready for JSON: None if it was not finite."""
        return [finite(point.loss) for point in self.points]

    @property
    def diverged(self) -> bool:
        """Whether a loss that is not finite ended the run."""
        return not math.isfinite(self.points[-1].loss)

    def capped(self, loss: float) -> float:
        """A loss of this run's model, at most the loss of the first step, also if it is not finite."""
        first = self.points[0].loss
        return min(loss, first) if math.isfinite(loss) else first

    def observed(self, name: str) -> list[Any]:
        """The values observed under a name, in the order of their steps."""
        return [point.observed[name] for point in self.points if name in point.observed]

    def mean_of_last(self, count: int = 20) -> float:
        """The mean loss of the last steps, each at most the loss of the first step; the latter if the run diverged.

        Source:
            Wortsman et al. 2023, arXiv:2309.14322, cap the loss of diverged runs in the same way.
        """
        if self.diverged:
            return self.points[0].loss
        last = self.points[-count:]
        return sum(self.capped(point.loss) for point in last) / len(last)

    def measurement(self, steps: int | None = None, **measured: object) -> dict[str, object]:
        """The measurement of an arm: the losses, further values, divergence and findings.

        Args:
            steps: Steps of the recipe, up to which None follows the losses of a run that diverged; None adds nothing.
            measured: Further names and values.
        """
        losses = self.losses if steps is None else padded(self.losses, steps)
        return {"losses": losses, **measured, "diverged": self.diverged, "findings": list(self.findings)}


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
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
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
        wrap: From the recipe's optimizer to the one that steps.

    Raises:
        InputError: If the checkpoint cannot be continued, the batches end before the steps, or the number of ranks
            does not divide a batch.
    """
    model.train()
    optimizer = wrap(build_optimizer(model, recipe))
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
    others = [p for p in model.parameters() if p.dim() < 2 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
