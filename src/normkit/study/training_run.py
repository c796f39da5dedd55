"""A training run: its batches and losses, its recipe, its steps, and the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from normkit.errors import InputError
from normkit.files import finite
from normkit.study.statistics import padded

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
    """Of the update."""
    gradient_norm: float
    """Norm of all gradients together, before clipping."""
    observed: Mapping[str, Any] = field(default_factory=dict)
    """What `Observe` returned."""


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
        """What was observed under a name, in the order of the steps that observed it."""
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
