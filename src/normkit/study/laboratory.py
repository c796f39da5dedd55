"""What an arm is measured with: settings, a seed, data, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normkit.study.loop import Batch, Loss, Observe, Point, Recipe, train
from normkit.study.result import Settings


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """Given to `Study.measure` with each arm.

    Attributes:
        settings: Of the study.
        seed: Of initial weights and batches; the same for all arms that are compared.
        device: Where models and batches are.
        dtype: Of parameters and batches.
        tell: Called with the share of the arm that is done.
    """

    settings: Settings
    seed: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    tell: Callable[[float], None] = lambda _share: None

    def integer(self, name: str) -> int:
        """A setting that is a whole number."""
        value = self.settings[name]
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        """A setting that is a number."""
        value = self.settings[name]
        assert isinstance(value, int | float)
        return float(value)

    def train(
        self,
        model: nn.Module,
        recipe: Recipe,
        batches: Iterator[Batch],
        loss_of: Loss,
        *,
        observe: Observe | None = None,
        name: str = "run",
    ) -> tuple[Point, ...]:
        """Train a model in place, moved to this laboratory's device and dtype, kept so that it can be continued.

        Args:
            model: What to train.
            recipe: The choices.
            batches: One a step, on any device.
            loss_of: The loss.
            observe: Numbers to keep from each step.
            name: Of the run, where an arm has several.
        """
        del name
        model.to(self.device, self.dtype)
        return train(
            model, recipe, batches, loss_of, observe=observe, tell=lambda point: self.tell(point.step / recipe.steps)
        )
