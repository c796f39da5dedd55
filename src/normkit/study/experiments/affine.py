"""`affine`: LayerNorm with and without gain and bias, with a frozen gain, and on little text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from normkit import specs
from normkit.layers import LayerNorm
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, arm_values
from normkit.study.corpus import held_out_loss, text_of_the_library
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference

_BOTH, _NEITHER, _GAIN, _BIAS, _FROZEN = "gain and bias", "neither", "gain only", "bias only", "random frozen gain"
_FROZEN_SPREAD = 0.5


def frozen_gains(seed: int) -> Callable[[int], nn.Module]:
    """A maker of LayerNorms whose gain is drawn once, log-normal around 1, and not trained; the bias is.

    The seed decides the gains; each norm that is made has its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(width: int) -> nn.Module:
        layer = LayerNorm(width)
        with torch.no_grad():
            layer.weight.copy_((_FROZEN_SPREAD * torch.randn(width, generator=generator)).exp())
        layer.weight.requires_grad_(False)
        return layer

    return make


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    return (
        *(Arm(name=norm, choices={"norm": norm}) for norm in (_BOTH, _NEITHER, _GAIN, _BIAS, _FROZEN)),
        *(Arm(name=f"{norm}, little text", choices={"norm": norm, "little": True}) for norm in (_BOTH, _NEITHER)),
    )


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    is_little, name = bool(arm.choices.get("little")), arm.choices["norm"]
    trained = specs.TORCH_LAYER_NORM.replace(has_weight=name in (_BOTH, _GAIN), has_bias=name in (_BOTH, _BIAS))
    model = context.transformer(norm=frozen_gains(context.seed) if name == _FROZEN else trained)
    recipe = context.recipe(learning_rate=context["little_rate" if is_little else "learning_rate"])
    training, _ = text_of_the_library()
    if is_little:
        training = training[: context["little_bytes"]]
    run = context.train_on_text(model, recipe, text=training)
    unseen = run.capped(held_out_loss(model))
    gap = unseen - run.capped(held_out_loss(model, training))
    return run.measurement(recipe.steps, held_out=unseen, gap=gap)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    little = [arm.name for arm in _arms(settings) if arm.choices.get("little")]
    return (
        Bars(
            name="affine-loss",
            title="Held-out loss by what of the affine map is trained",
            caption="Every arm of one seed has the same initial matrices and batches; points are seeds.",
            description="All arms end at nearly the same loss.",
            label="held-out loss (nats a byte)",
            values=arm_values(seeds, (_BOTH, _NEITHER, _GAIN, _BIAS, _FROZEN), "held_out"),
        ),
        Bars(
            name="affine-gap",
            title="Held-out less training loss after many passes over little text",
            caption="A larger gap is more over-fitting; points are seeds.",
            description="The gap with gain and bias beside the gap without.",
            label="gap (nats a byte)",
            values=arm_values(seeds, little, "gap"),
        ),
    )


STUDY = Study(
    name="affine",
    title="Gain and bias",
    question="Does LayerNorm need its gain and bias, and do they over-fit?",
    claims=(
        Claim(
            says="LayerNorm without gain and bias (LayerNorm-simple) outperforms LayerNorm",
            source="Xu et al. 2019, arXiv:1911.07013, abstract",
            conditions=tuple(
                Condition(
                    says=f"{_NEITHER}{words} ends below {_BOTH}{words}",
                    statistic=difference(f"{_NEITHER}{words}", f"{_BOTH}{words}", "held_out"),
                    high=0.0,
                    published="on four data sets, as reported",
                    regime=regime,
                    source="held-out loss, without less with; the paper claims no more than its sign",
                )
                for words, regime in (
                    ("", "no text is trained on twice"),
                    (", little text", "little text is trained on many times"),
                )
            ),
        ),
        Claim(
            says="Gain and bias raise the risk of over-fitting",
            source="Xu et al. 2019, arXiv:1911.07013, abstract",
            conditions=(
                Condition(
                    says="on little text the gap of held-out and training loss is at least 0.02 nats larger with them",
                    statistic=difference(f"{_BOTH}, little text", f"{_NEITHER}, little text", "gap"),
                    low=0.02,
                    published="they increase the risk of over-fitting",
                    source="set beforehand, as a difference that could matter; the paper gives no such number",
                ),
            ),
        ),
        Claim(
            says="The linear layers after a norm can hold its gain and bias, so that neither is needed",
            source="derived: W (g z + b) = (W diag g) z + W b",
            conditions=tuple(
                Condition(
                    says=f"{arm} ends within 0.05 nats a byte of {_BOTH}",
                    statistic=difference(arm, _BOTH, "held_out"),
                    low=-0.05,
                    high=0.05,
                    source="set beforehand, as in the study `centring`: about the spread of one arm over seeds",
                )
                for arm in (_NEITHER, _GAIN, _BIAS, _FROZEN)
            ),
        ),
    ),
    quick=budget(
        seeds=3,
        layers=4,
        width=64,
        batch=8,
        window=64,
        steps=150,
        warmup=20,
        learning_rate=1e-3,
        little_bytes=4096,
        little_rate=3e-3,
    ),
    full=budget(seeds=10, steps=600),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="Pre-LN models of 4 layers of width 64, 150 steps of AdamW; over-fitting on 4 KiB of text",
)
