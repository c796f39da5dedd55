"""`data-size`: Dynamic Tanh in place of LayerNorm, on little text and on much."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, arm_values
from normkit.study.corpus import held_out_loss, text_of_the_library
from normkit.study.model_parts import NormLayer
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, share_of_effect, value_of

TEXTS = ("little text", "much text")


class DynamicTanh(nn.Module):
    """y = weight tanh(alpha x) + bias, with one alpha for all features, learned from 0.5.

    Source:
        Zhu et al. 2025, arXiv:2503.10622, equation 1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.saturated = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., width)."""
        bounded = torch.tanh(self.alpha * x)
        self.saturated = (bounded.detach().abs() > 0.9).float().mean()
        return self.weight * bounded + self.bias


NORMS: dict[str, NormLayer] = {"LayerNorm": specs.TORCH_LAYER_NORM, "DyT": DynamicTanh, "no norm": None}


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    norm = arm.choices["norm"]
    model = context.transformer(norm=NORMS[norm], placement="none" if norm == "no norm" else "pre")
    training, _ = text_of_the_library()
    text = training[: context["little"]] if arm.choices["text"] == "little text" else training
    recipe = context.recipe()
    run = context.train_on_text(model, recipe, text=text)
    loss = run.capped(held_out_loss(model))
    saturated = [module.saturated.item() for module in model.modules() if isinstance(module, DynamicTanh)]
    return run.measurement(
        recipe.steps,
        held_out=loss,
        trained=run.mean_of_last(),
        gap=loss - run.mean_of_last(),
        saturated=sum(saturated) / max(1, len(saturated)),
    )


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    pairs = [(norm, text) for text in TEXTS for norm in NORMS if (norm, text) != ("no norm", "little text")]
    return tuple(Arm(name=f"{norm}, {text}", choices={"norm": norm, "text": text}) for norm, text in pairs)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Bars(
            name="data-size-loss",
            title="Held-out loss by data",
            caption=f"The same steps on {settings['little']:,} bytes many times over, and on the whole library.",
            description="Each arm with its seeds.",
            label="nats a byte",
            values=arm_values(seeds, [arm.name for arm in _arms(settings)], "held_out"),
        ),
    )


_VERMA = "Verma 2026, arXiv:2604.23434, abstract"
_SCARCE = Condition(
    says="on little text LayerNorm over-fits: held-out less training loss at least 0.3 nats a byte",
    statistic=value_of("LayerNorm, little text", "gap"),
    low=0.3,
    source="a regularizer can help only a model that over-fits",
)


def _percent(text: str, says: str, published: str, *, low: float | None = None) -> Condition:
    ours, theirs = f"DyT, {text}", f"LayerNorm, {text}"
    return Condition(
        says=says,
        statistic=lambda paired: 100 * difference(ours, theirs, "held_out")(paired) / paired[theirs]["held_out"],
        low=-math.inf if low is None else low,
        high=0.0 if low is None else math.inf,
        published=published,
        bound="paper",
    )


STUDY = Study(
    name="data-size",
    title="Dynamic Tanh by data size",
    question="Does Dynamic Tanh do as well as LayerNorm, and does that depend on the amount of data?",
    claims=(
        Claim(
            says="Dynamic Tanh does as well as LayerNorm",
            source="Zhu et al. 2025, arXiv:2503.10622, abstract",
            control=Condition(
                says="on much text a model without a norm ends at least 0.05 nats a byte above LayerNorm",
                statistic=difference("no norm, much text", "LayerNorm, much text", "held_out"),
                low=0.05,
                source="a task that needs no norm cannot tell what replaces it",
            ),
            conditions=(
                Condition(
                    says="on much text DyT ends at most a quarter of the gain of a norm above LayerNorm",
                    statistic=share_of_effect(
                        "DyT, much text", "LayerNorm, much text", "no norm, much text", "held_out"
                    ),
                    high=0.25,
                    published="the same or better",
                ),
            ),
        ),
        Claim(
            says="Dynamic Tanh helps where data is scarce and harms where it is plentiful",
            source=_VERMA,
            control=_SCARCE,
            conditions=(
                _percent(
                    "little text", "little text: loss over LayerNorm's in percent, below 0", "-27.3 % (1M tokens)"
                ),
                _percent("much text", "much text: loss in percent, above 0", "+18.8 % (118M tokens)", low=0.0),
                Condition(
                    says="more activations beyond 0.9 on little text than on much: difference of shares above 0",
                    statistic=difference("DyT, little text", "DyT, much text", "saturated"),
                    low=0.0,
                    published="49 % against 23 %",
                    bound="paper",
                ),
            ),
        ),
    ),
    quick=budget(
        seeds=3, layers=12, width=32, batch=8, window=32, steps=100, warmup=10, learning_rate=3e-3, little=1000
    ),
    full=budget(seeds=10, layers=12, width=256, batch=32, window=256, steps=5000, warmup=200, learning_rate=1e-3),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library: all of them, or the first thousand",
    regime="12 blocks of width 32, 26,000 bytes drawn; the paper has 64M parameters and 1M to 118M tokens",
)
