"""`late-blocks`: are the late blocks of Pre-LN models of little use, and do LayerNorm Scaling and Mix-LN mend that?"""

from __future__ import annotations

import math
from statistics import fmean
from typing import cast

import torch
from torch import Tensor, nn

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, arm_lines
from normkit.study.corpus import held_out_loss
from normkit.study.propagation import mean_square
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, Statistic, difference
from normkit.study.transformer import Block, Transformer

ARMS = ("Pre-LN", "LayerNorm Scaling", "Mix-LN")


def build(context: ArmContext, name: str) -> Transformer:
    """The model of an arm; in Mix-LN the first quarter of the blocks is Post-LN, the others Pre-LN."""
    model = context.transformer(depth_scaled=name == "LayerNorm Scaling")
    for block in model.blocks[: len(model.blocks) // 4 if name == "Mix-LN" else 0]:
        for residual in (cast(Block, block).attention, cast(Block, block).mlp):
            residual.placement = "post"
    return model


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    model, recipe = build(context, arm.name), context.recipe()
    run = context.train_on_text(model, recipe)
    stream, angles = through_blocks(model, context.text_ids(batch=8)[:, :-1])
    whole = held_out_loss(model)
    without = [removed_loss(model, place) - whole for place in range(len(model.blocks))]
    return run.measurement(recipe.steps, held_out=whole, without=without, stream=stream, angles=angles)


@torch.no_grad()
def through_blocks(model: Transformer, ids: Tensor) -> tuple[list[float], list[float]]:
    """E|x|^2 / n after each block, and the mean angle between its input and output at the last token, over pi.

    Source:
        Gromov et al. 2024, arXiv:2403.17887, for the angular distance.
    """
    stream, angles = [], []
    x = model.embed(ids)
    for block in model.blocks:
        before, x = x, block(x)
        cosine = nn.functional.cosine_similarity(before[:, -1].double(), x[:, -1].double(), dim=-1)
        angles.append((cosine.clamp(-1, 1).arccos() / math.pi).mean().item())
        stream.append(mean_square(x))
    return stream, angles


def removed_loss(model: Transformer, place: int, text: bytes | None = None) -> float:
    """The held-out loss with one block replaced by the identity."""
    block, model.blocks[place] = model.blocks[place], nn.Identity()
    try:
        return held_out_loss(model, text)
    finally:
        model.blocks[place] = block


def late_mean(arm: str, name: str) -> Statistic:
    """The statistic that is the mean of a quantity over the late half of an arm's blocks."""
    return lambda paired: fmean(paired[arm][name][len(paired[arm][name]) // 2 :])


def late_over_early(paired: Paired) -> float:
    """The cost of removing a late block over that of an early one; the first is none, for all others stand on it."""
    costs = paired["Pre-LN"]["without"]
    early = costs[1 : len(costs) // 2]
    return late_mean("Pre-LN", "without")(paired) / fmean(early)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Curves(
            name="late-blocks-without",
            title="What each block is worth",
            caption="Held-out loss without the block, less that of the whole model; medians and ranges over seeds.",
            description="The first block matters most; the height after it says how useful the others are.",
            x_label="block that is removed",
            y_label="loss above the whole model (nats a byte)",
            panels=(("", arm_lines(seeds, ARMS, "without", range(1, settings["layers"] + 1))),),
        ),
    )


_SUN = "Sun et al. 2025, arXiv:2502.05795 (The Curse of Depth), abstract and section 2"
_LI = "Li et al. 2024, arXiv:2412.13795 (Mix-LN), abstract"
_CONTROL = Condition(
    says="without a late block Pre-LN loses at least 0.01 nats a byte, on the average",
    statistic=late_mean("Pre-LN", "without"),
    low=0.01,
    source="if blocks did nothing at all, no norm could make them more or less useful",
)


def _above(says: str, name: str, arm: str, published: str) -> Condition:
    late, pre = late_mean(arm, name), late_mean("Pre-LN", name)
    ratio: Statistic = lambda paired: late(paired) / pre(paired)  # noqa: E731
    return Condition(says=says, statistic=ratio, low=1.0, published=published, bound="paper")


_CLAIMS = (
    Claim(
        says="In Pre-LN a late block matters less than an early one",
        source=_SUN,
        control=_CONTROL,
        conditions=(
            Condition(
                says="removing a late block costs less than half of removing an early one but the first",
                statistic=late_over_early,
                high=0.5,
                published="nearly half of the layers are less effective than expected",
            ),
        ),
    ),
    *(
        Claim(
            says=f"{arm} makes late blocks more useful and lowers the loss",
            source=source,
            control=_CONTROL,
            conditions=(
                _above("cost of removing a late block, over Pre-LN: above 1", "without", arm, "a larger drop"),
                _above("angular distance through a late block, over Pre-LN: above 1", "angles", arm, "a larger one"),
                Condition(
                    says="the held-out loss is below that of Pre-LN",
                    statistic=difference(arm, "Pre-LN", "held_out"),
                    high=0.0,
                    published="a lower perplexity at every size up to 7B",
                    bound="paper",
                ),
            ),
        )
        for arm, source in (("LayerNorm Scaling", _SUN), ("Mix-LN", _LI))
    ),
)

STUDY = Study(
    name="late-blocks",
    title="Late blocks",
    question="Are the late blocks of Pre-LN models of little use, and do LayerNorm Scaling and Mix-LN mend that?",
    claims=_CLAIMS,
    quick=budget(seeds=3, layers=8, width=32, batch=8, window=32, steps=120, warmup=12, learning_rate=3e-3),
    full=budget(seeds=10, layers=24, width=256, batch=32, window=256, steps=5000, warmup=200, learning_rate=1e-3),
    arms=lambda _settings: tuple(Arm(name=name) for name in ARMS),
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="8 blocks of width 32, 120 steps of AdamW at 3e-3. The papers train 12 to 32 blocks for billions of tokens: "
    "that needs a GPU, --budget full under torchrun",
)
