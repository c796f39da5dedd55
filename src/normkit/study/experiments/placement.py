"""`placement`: Pre-LN, Post-LN, Peri-LN and HybridNorm: growth of the stream, steadiness of gradients, and loss."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, stdev
from typing import cast

from torch import Tensor, nn

from normkit import specs
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, arm_lines
from normkit.study.corpus import held_out_loss
from normkit.study.experiments.late_blocks import through_blocks
from normkit.study.model_parts import norm_layer
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, ratio
from normkit.study.transformer import Attention, Block, Transformer

ARMS = ("pre", "post", "peri", "hybrid")


class NormalizedValues(nn.Module):
    """The value projection of an attention, whose values are normalized head by head."""

    def __init__(self, attention: Attention, width: int) -> None:
        super().__init__()
        self.linear, self.heads = attention.value, attention.heads
        self.norm = norm_layer(specs.TORCH_RMS_NORM.replace(eps=1e-6), width // attention.heads)

    def forward(self, x: Tensor) -> Tensor:
        """Values (..., width) of x (..., width)."""
        normalized: Tensor = self.norm(self.linear(x).unflatten(-1, (self.heads, -1))).flatten(-2)
        return normalized


def build(context: ArmContext, name: str) -> Transformer:
    """The model of an arm; in HybridNorm queries, keys and values are normalized, and the MLP is Post-LN."""
    is_hybrid = name == "hybrid"
    model = context.transformer(placement="post" if is_hybrid else name, query_key_norm=is_hybrid)
    for block in model.blocks if is_hybrid else ():
        residual = cast(Block, block).attention
        residual.placement, residual.norm = "none", nn.Identity()
        attention = cast(Attention, residual.branch)
        attention.value = cast(nn.Linear, NormalizedValues(attention, model.config.width))
    return model


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    model, recipe = build(context, arm.name), context.recipe()
    ids = context.text_ids(batch=8)[:, :-1]
    start, _ = through_blocks(context.move(model), ids)  # type: ignore[arg-type]
    run = context.train_on_text(model, recipe)
    stream, _ = through_blocks(model, ids)
    norms = [math.log(point.gradient_norm) for point in run.points[recipe.warmup :]]
    return run.measurement(
        recipe.steps,
        held_out=run.capped(held_out_loss(model)),
        start=start,
        stream=stream,
        growth=stream[-1] / start[-1],
        unsteady=stdev(after - before for before, after in pairwise(norms)),
        gradient=mean(norms),
    )


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    blocks = range(1, settings["layers"] + 1)
    return (
        Curves(
            name="placement-stream",
            title="The residual stream before and after training",
            caption="E|x|^2 / n after each block; medians and ranges over seeds, both panels on one logarithmic axis.",
            description="Post-LN stays at 1 until its gains move; the others rise with depth.",
            x_label="block",
            y_label="E|x|^2 / n",
            panels=(
                ("untrained", arm_lines(seeds, ARMS, "start", blocks)),
                ("trained", arm_lines(seeds, ARMS, "stream", blocks)),
            ),
            y_log=True,
        ),
    )


_KIM = "Kim et al. 2025, arXiv:2502.02732 (Peri-LN)"
_ZHUO = "Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm), abstract"


def _lower(arm: str, other: str, words: str, published: str) -> Condition:
    return Condition(
        says=words,
        statistic=difference(arm, other, "held_out"),
        high=0.0,
        published=published,
        bound="paper",
    )


_CLAIMS = (
    Claim(
        says="In training the stream grows less in Peri-LN than in Pre-LN",
        source=f"{_KIM}, abstract: more balanced variance growth",
        control=Condition(
            says="training makes the stream of Pre-LN grow at all: E|x|^2 after the last block, over the start",
            statistic=lambda paired: float(paired["pre"]["growth"]),
            low=1.0,
            source="what is to be kept from growing must grow",
        ),
        conditions=(
            Condition(
                says="growth of E|x|^2 after the last block, Peri-LN over Pre-LN: below 1",
                statistic=ratio("peri", "pre", "growth"),
                high=1.0,
                published="linear in depth, against exponential in Pre-LN",
                bound="paper",
            ),
        ),
    ),
    Claim(
        says="Peri-LN has steadier gradients and a lower loss than Pre-LN and Post-LN",
        source=f"{_KIM}, abstract and table 1",
        conditions=(
            Condition(
                says="deviation of the log gradient norm from step to step: below that of Pre-LN",
                statistic=difference("peri", "pre", "unsteady"),
                high=0.0,
                published="steadier gradient flow",
                bound="paper",
            ),
            _lower("peri", "pre", "held-out loss below that of Pre-LN", "3.34 against 3.43 (C4, 400M)"),
            _lower("peri", "post", "held-out loss below that of Post-LN", "below both at every size"),
        ),
    ),
    Claim(
        says="HybridNorm trains to a lower loss than Pre-LN and Post-LN",
        source=_ZHUO,
        conditions=(
            _lower("hybrid", "pre", "held-out loss below that of Pre-LN", "consistently better than both"),
            _lower("hybrid", "post", "held-out loss below that of Post-LN", "consistently better than both"),
        ),
    ),
)

STUDY = Study(
    name="placement",
    title="Placement: Peri-LN and HybridNorm",
    question="Do Peri-LN and HybridNorm train better than Pre-LN and Post-LN, and what grows in them?",
    claims=_CLAIMS,
    quick=budget(seeds=3, layers=6, width=32, batch=8, window=32, steps=120, warmup=12, learning_rate=3e-3),
    full=budget(seeds=10, layers=24, width=256, batch=32, window=256, steps=5000, warmup=200, learning_rate=1e-3),
    arms=lambda _settings: tuple(Arm(name=name) for name in ARMS),
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="6 blocks of width 32, 120 steps of AdamW at 3e-3; the papers train 400M parameters and more: --budget full "
    "under torchrun with a GPU",
)
