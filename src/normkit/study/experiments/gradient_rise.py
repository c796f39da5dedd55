"""`gradient-rise`: weight decay on weights before a norm makes gradients rise as the learning rate falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, arm_lines
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference
from normkit.study.training_run import Batch, learning_rate

ARMS = ("constant rate", "falling rate", "falling rate, corrected decay", "falling rate, no decay")
_PLACES = 40


class NormalizedNet(nn.Module):
    """Two hidden layers, each a matrix, LayerNorm without gain and bias, and tanh; a head that is not trained.

    The matrices are invariant to their scale, as the theory asks of all weights.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.randn(2, width, width, generator=generator) / math.sqrt(width)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.register_buffer("head", torch.randn(width, 4, generator=generator) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (batch, 4) of x (batch, width)."""
        for matrix in (self.first, self.second):
            x = torch.tanh(nn.functional.layer_norm(x @ matrix, matrix.shape[1:]))
        outputs: Tensor = x @ self.get_buffer("head")
        return outputs


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """Fit noisy targets by SGD; decay before each update, and record |gradient| / |weight| of the two matrices."""
    width, decay = context["width"], 0.0 if "no decay" in arm.name else context["decay"]
    model, teacher = NormalizedNet(width, context.seed), NormalizedNet(width, context.seed + 1_000_003)
    recipe = context.recipe(optimizer="sgd", clip=None, final_rate=1.0 if arm.name == "constant rate" else 0.01)
    generator = torch.Generator().manual_seed(context.seed)

    def batches() -> Any:
        while True:
            x = torch.randn(context["batch"], width, generator=generator)
            yield x, teacher(x).detach() + torch.randn(len(x), 4, generator=generator)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        error: Tensor = model(batch[0]) - batch[1]
        return error.square().mean()

    @torch.no_grad()
    def observe(model: nn.Module, step: int) -> Mapping[str, Any]:
        rate = learning_rate(step, recipe)
        shrink = decay * (rate / recipe.learning_rate if "corrected" in arm.name else 1.0)
        ratios = []
        for weight in model.parameters():
            assert weight.grad is not None
            ratios.append((weight.grad.norm() / weight.norm()).item())
            weight.mul_(1 - rate * shrink)
        return {"ratio": math.exp(mean(map(math.log, ratios))), "steady": math.sqrt(2 * shrink / rate)}

    run = context.train(model, recipe, batches(), loss_of, observe=observe)
    return {
        "ratio": blocks(run.observed("ratio")),
        "steady": blocks(run.observed("steady")),
        "gradient": blocks([point.gradient_norm for point in run.points]),
        "loss": mean(point.loss for point in run.points[-recipe.steps // 10 :]),
        "diverged": run.diverged,
    }


def blocks(values: list[float]) -> list[float]:
    """The means of forty blocks of equal length."""
    length = len(values) // _PLACES
    return [mean(values[place * length : (place + 1) * length]) for place in range(_PLACES)]


def _rise(arm: str, paired: Paired) -> float:
    """The gradient norm in the last twentieth of the steps over that in the middle twentieth."""
    gradients = paired[arm]["gradient"]
    return float(mean(gradients[-2:]) / mean(gradients[19:21]))


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    places = [(place + 0.5) * settings["steps"] / _PLACES for place in range(_PLACES)]
    return (
        Curves(
            name="gradient-rise",
            title="Gradient over weight",
            caption="|gradient| / |weight| of the matrices before norms, and the steady state sqrt(2 decay / rate).",
            description="With a falling rate the ratio rises at the end, unless the decay falls with the rate.",
            x_label="step",
            y_label="ratio",
            panels=(
                ("measured", arm_lines(seeds, ARMS, "ratio", places)),
                ("steady state", arm_lines(seeds, ARMS[:3], "steady", places)),
            ),
            y_log=True,
        ),
    )


_DEFAZIO = "Defazio 2025, arXiv:2506.02285"

STUDY = Study(
    name="gradient-rise",
    title="Gradients that rise at the end",
    question="Do weight decay and a norm make gradients rise as the rate falls, and does AdamC's rule stop it?",
    claims=(
        Claim(
            says="Weight decay holds |gradient| / |weight| of weights before a norm at sqrt(2 decay / rate)",
            source=f"{_DEFAZIO}, section 3, after Van Laarhoven 2017, arXiv:1706.05350",
            conditions=(
                Condition(
                    says="constant rate: the ratio in the last tenth of the steps, over the formula, is 1 within 0.1",
                    statistic=lambda paired: (
                        mean(paired["constant rate"]["ratio"][-4:]) / paired["constant rate"]["steady"][-1]
                    ),
                    low=0.9,
                    high=1.1,
                    published="sqrt(2 decay / rate)",
                    source="the formula is exact for the mean square; the tolerance of a tenth is ours",
                ),
            ),
        ),
        Claim(
            says="Gradients rise near the end of training because the rate falls while the decay does not",
            source=f"{_DEFAZIO}, abstract",
            conditions=(
                Condition(
                    says="falling rate: the gradient norm at the end is at least 1.5 times that in the middle",
                    statistic=partial(_rise, "falling rate"),
                    low=1.5,
                    published="more than doubles (120M language model)",
                    source="half of the paper's rise",
                ),
                Condition(
                    says="without decay it rises less: difference of the two factors below 0",
                    statistic=lambda paired: _rise("falling rate, no decay", paired) - _rise("falling rate", paired),
                    high=0.0,
                    published="decay is the cause",
                    bound="paper",
                ),
            ),
        ),
        Claim(
            says="A decay that falls with the rate stops the rise and lowers the loss",
            source=f"{_DEFAZIO}, algorithm 1 (AdamC and SGDC)",
            conditions=(
                Condition(
                    says="corrected decay: it is at most 1.2 times that in the middle",
                    statistic=partial(_rise, "falling rate, corrected decay"),
                    high=1.2,
                    published="no rise",
                    source="a fifth is ours",
                ),
                Condition(
                    says="the loss at the end is below that without correction",
                    statistic=difference(ARMS[2], ARMS[1], "loss"),
                    high=0.0,
                    published="lower loss values throughout training",
                    bound="paper",
                ),
            ),
        ),
    ),
    quick=budget(seeds=3, width=16, batch=16, steps=1600, learning_rate=0.2, decay=0.2),
    full=budget(seeds=10, width=64, steps=20000),
    arms=lambda _settings: tuple(Arm(name=name) for name in ARMS),
    measure=_measure,
    charts=_charts,
    data="Gaussian inputs, and the outputs of a fixed net of the same kind with noise of variance 1",
    regime="two matrices of 16 by 16, 1,600 steps of SGD at 0.2 with decay 0.2; the paper trains a language model "
    "with AdamW",
)
