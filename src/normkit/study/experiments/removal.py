"""`removal`: LayerNorm replaced by a fixed affine map near the end of training, as in GPT-2 without LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.geometry import centre
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, loss_line
from normkit.study.corpus import held_out_loss
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, gap, share_of_effect

ARMS = ("norms kept", "norms removed", "never a norm")


class RemovableNorm(nn.LayerNorm):
    """LayerNorm that can be made affine: y = weight (x - mean(x)) / scale + bias, with one scale for all rows.

    Source:
        Heimersheim 2024, arXiv:2409.13710: the deviation of a row is replaced by its average, norm by norm.
    """

    scale: Tensor
    """The running average of the standard deviation of the rows, until the norm is removed; of several processes, that
    of the first's rows."""
    is_removed: Tensor
    """Whether it is affine."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("is_removed", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., width)."""
        if self.is_removed:
            return self.weight * (centre(x) / self.scale) + self.bias
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(centre(x).square().mean(-1).sqrt().mean(), 0.1)
        return super().forward(x)


def remove_in_turn(model: nn.Module, share: float) -> None:
    """Remove the first norms of a model, so many as their share says, in the order of the model."""
    norms = [module for module in model.modules() if isinstance(module, RemovableNorm)]
    for norm in norms[: round(share * len(norms))]:
        norm.is_removed.fill_(True)


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """Train; from three fifths to four fifths of the steps remove the norms in turn, then train on without."""
    is_bare = arm.name == "never a norm"
    model = context.transformer(**({"norm": None, "placement": "none"} if is_bare else {"norm": RemovableNorm}))
    recipe = context.recipe()

    def observe(model: nn.Module, step: int) -> Mapping[str, Any]:
        if arm.name == "norms removed":
            remove_in_turn(model, min(1.0, max(0.0, 5 * step / recipe.steps - 3)))
        return {}

    run = context.train_on_text(model, recipe, observe=observe)
    loss = run.capped(held_out_loss(model))
    remove_in_turn(model, 1.0)
    cut = run.capped(held_out_loss(model))
    return run.measurement(recipe.steps, held_out=loss, cut=cut)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Curves(
            name="removal-loss",
            title="Loss while the norms go",
            caption="Norms are removed in turn from three fifths to four fifths of the steps.",
            description="The loss of the model that loses its norms follows that of the model that keeps them.",
            x_label="step",
            y_label="loss (nats a byte)",
            panels=(("", tuple(loss_line(arm, arm, seeds, settings["steps"]) for arm in ARMS)),),
        ),
    )


_CONTROL = Condition(
    says="a model that never had a norm ends at least 0.1 nats a byte above one that keeps its norms",
    statistic=difference("never a norm", "norms kept", "held_out"),
    low=0.1,
    source="where no norm is needed in training, removing it shows nothing",
)

STUDY = Study(
    name="removal",
    title="Removing LayerNorm",
    question="Can LayerNorm be removed at the end of training, although training needs it?",
    claims=(
        Claim(
            says="LayerNorm can be removed near the end of training with little loss",
            source="Heimersheim 2024, arXiv:2409.13710, abstract; Baroni et al. 2025, arXiv:2507.02559, abstract",
            control=_CONTROL,
            conditions=(
                Condition(
                    says="the loss without norms, above that with norms, is less than a quarter of what a norm gains",
                    statistic=share_of_effect("norms removed", "norms kept", "never a norm", "held_out"),
                    high=0.25,
                    published="0.05 nats a token (GPT-2 small), 0.03 (GPT-2 XL)",
                    source="a share of the difference between a model that never had a norm and one with norms",
                ),
                Condition(
                    says="it is at most 0.05 nats a byte",
                    statistic=difference("norms removed", "norms kept", "held_out"),
                    high=0.05,
                    published="0.05 nats a token (GPT-2 small)",
                    bound="paper",
                ),
            ),
        ),
        Claim(
            says="It takes training to remove them: all at once breaks the model",
            source="the reason for the fine-tuning of Heimersheim 2024, arXiv:2409.13710",
            conditions=(
                Condition(
                    says="removing all norms at once costs at least 0.1 nats a byte",
                    statistic=gap("norms kept", "cut", "held_out"),
                    low=0.1,
                    source="twice what removal in turn may cost",
                ),
            ),
        ),
    ),
    quick=budget(seeds=3, layers=12, width=32, batch=8, window=32, steps=120, warmup=12, learning_rate=3e-3),
    full=budget(seeds=10, layers=12, width=256, batch=32, window=256, steps=5000, warmup=200, learning_rate=1e-3),
    arms=lambda _settings: tuple(Arm(name=name) for name in ARMS),
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="12 blocks of width 32, 120 steps of AdamW at 0.003; the papers fine-tune GPT-2",
)
