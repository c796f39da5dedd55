"""`initialisation`: gain 1 and bias 0 against other starts, and scaled outputs of the branches."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, Curves, arm_lines, arm_values
from normkit.study.corpus import MarkovChain, next_token_loss
from normkit.study.propagation import propagate
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, exponent, value_of
from normkit.study.transformer import Transformer, branch_ends, deep_norm

_REFERENCE = "gain 1, bias 0"

SHALLOW = (_REFERENCE, "gain 0.1", "gain 0.5", "gain 2", "random bias", "outputs at 0", "outputs over sqrt(2L)")
"""Starts of a Pre-LN model, the usual one first."""

DEEP: Mapping[str, tuple[str, ...]] = {
    "post": (),
    "alpha alone": ("residual_scale",),
    "beta alone": ("branch_gain",),
    "DeepNorm": ("residual_scale", "branch_gain"),
}
"""Starts of a deep Post-LN model -> the factors of DeepNorm that they have."""

_VOCABULARY = 32


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    return (
        *(Arm(name=name, choices={"deep": False}) for name in SHALLOW),
        *(Arm(name=name, choices={"deep": True}, cost=2.5) for name in DEEP),
    )


@torch.no_grad()
def build(context: ArmContext, name: str, layers: int) -> Transformer:
    """The model of an arm: gains or biases of all norms set, or outputs of all branches scaled, as its name says."""
    factors = {factor: deep_norm(layers)[factor] for factor in DEEP.get(name, ())}
    placement = "post" if name in DEEP else "pre"
    model = context.transformer(vocabulary=_VOCABULARY, layers=layers, placement=placement, **factors)
    generator = torch.Generator().manual_seed(context.seed)
    scale = {"outputs at 0": 0.0, "outputs over sqrt(2L)": 1 / math.sqrt(2 * layers)}.get(name, 1.0)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        if name.startswith("gain "):
            norm.weight.fill_(float(name.removeprefix("gain ").partition(",")[0]))
        elif name == "random bias":
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator))
    for _, linear in branch_ends(model):
        linear.weight.mul_(scale)
    return model


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    model = build(context, arm.name, context["deep_layers" if arm.choices["deep"] else "layers"])
    chain = MarkovChain(window=context["window"])
    (ids,) = next(chain.batches(batch=context["batch"], seed=context.seed))
    moved = _moved(model, ids)
    batches = chain.batches(batch=context["batch"], seed=context.seed)
    recipe = context.recipe()
    run = context.train(model, recipe, batches, next_token_loss)
    return {
        **moved,
        **({} if arm.choices["deep"] else _streams(context, arm.name)),
        **run.measurement(recipe.steps, loss=run.mean_of_last(), first=run.points[0].loss),
    }


@torch.no_grad()
def _moved(model: Transformer, ids: Tensor) -> dict[str, float]:
    """How far the first norm moves its rows, and how far its gain and bias alone do, over the length of the rows."""
    calls: list[tuple[Tensor, Tensor]] = []
    norm = model.get_submodule("blocks.0.attention.norm")
    with norm.register_forward_hook(lambda _module, inputs, output: calls.append((inputs[0], output))):
        model(ids[:, :-1])
    ((x, normalized),) = calls
    assert isinstance(norm, nn.LayerNorm)
    bare = nn.functional.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    affine = norm.weight * bare + norm.bias
    return {
        "whole": ((normalized - x).norm() / x.norm()).item(),
        "affine": ((affine - bare).norm() / bare.norm()).item(),
    }


def _streams(context: ArmContext, name: str) -> dict[str, list[float]]:
    """E|x|^2 / n after the last block at several depths, before any training."""
    depths, sizes = context["depths"], {"rows": context["batch"], "tokens": context["window"]}
    stream = []
    for layers in depths:
        model = build(context, name, layers)
        context.move(model)
        stream.append(propagate(model, *context.random_ids(_VOCABULARY, **sizes)).stream[-1])
    return {"depths": list(depths), "stream": stream}


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    floor = MarkovChain(window=settings["window"]).floor
    steps = range(1, settings["steps"] + 1)
    return (
        Curves(
            name="initialisation-loss",
            title="Loss from each start",
            caption="Left Pre-LN with other gains, biases and outputs; right deep Post-LN with DeepNorm's factors.",
            description="How fast each start reaches the entropy of the chain.",
            x_label="step",
            y_label="loss (nats a token)",
            panels=tuple(
                (title, arm_lines(seeds, names, "losses", steps))
                for title, names in (("Pre-LN", SHALLOW), ("deep Post-LN", tuple(DEEP)))
            ),
            reference=(floor, "entropy of the chain"),
        ),
        Bars(
            name="initialisation-end",
            title="Loss after short training",
            caption=f"Mean of the last 20 steps; no model can be below {floor:.2f} for long.",
            description="Each start with its seeds.",
            label="loss (nats a token)",
            values=arm_values(seeds, (*SHALLOW, *DEEP), "loss"),
        ),
    )


STUDY = Study(
    name="initialisation",
    title="Initialisation",
    question="Is gain 1 and bias 0 the right start, and what do scaled outputs of the branches do?",
    claims=(
        Claim(
            says="With gain 1 and bias 0 a norm starts as the identity",
            source="common in tutorials",
            conditions=(
                Condition(
                    says="Gain and bias move the rows by at most a millionth of their length",
                    statistic=value_of(_REFERENCE, "affine"),
                    high=1e-6,
                    source="the definition, exactly 0",
                    regime="only its affine part is meant",
                ),
                Condition(
                    says="The norm moves the rows by at most a millionth of their length",
                    statistic=value_of(_REFERENCE, "whole"),
                    high=1e-6,
                    source="the definition; rows of another length than the root of n cannot stay",
                ),
            ),
        ),
        Claim(
            says="Training from gain 1 and bias 0 is better than from other gains and biases",
            source="the start of Ba et al. 2016, arXiv:1607.06450, and of every library since",
            conditions=tuple(
                Condition(
                    says=f"{name[0].upper()}{name[1:]}: ends at least 0.05 nats a token above gain 1 and bias 0",
                    statistic=difference(name, _REFERENCE, "loss"),
                    low=0.05,
                    source="a twentieth of a nat; runs of one seed share weights and batches, so that less would be "
                    "seen",
                    regime=f"the other start is {name}",
                )
                for name in ("gain 0.1", "gain 0.5", "gain 2", "random bias")
            ),
        ),
        Claim(
            says="Outputs over sqrt(2 L) keep the stream of an untrained Pre-LN model from growing with depth",
            source="Radford et al. 2019 (GPT-2), section 2.3",
            conditions=(
                Condition(
                    says="With outputs over sqrt(2 L): exponent of the stream's rms 0 within 0.1",
                    statistic=exponent("outputs over sqrt(2L)", "stream", 0.5),
                    low=-0.1,
                    high=0.1,
                    source="2 L branches of variance v / (2 L) add v; fitted on 12 layers and more",
                ),
                Condition(
                    says="Without: at least 0.4",
                    statistic=exponent(_REFERENCE, "stream", 0.5),
                    low=0.4,
                    source="1/2 if all layers add alike (Xiong et al. 2020, arXiv:2002.04745, lemma 2); more where "
                    "tokens become alike, so that attention averages less",
                ),
                Condition(
                    says="Loss after short training, over that of outputs as drawn",
                    statistic=difference("outputs over sqrt(2L)", _REFERENCE, "loss"),
                ),
            ),
        ),
        Claim(
            says="A Pre-LN model trains as well when every branch starts at 0",
            source="Goyal et al. 2017, arXiv:1706.02677, and Bachlechner et al. 2020, arXiv:2003.04887, start so",
            conditions=(
                Condition(
                    says="Outputs at 0: ends at most 0.05 nats a token above outputs as drawn",
                    statistic=difference("outputs at 0", _REFERENCE, "loss"),
                    high=0.05,
                    source="the same twentieth of a nat",
                ),
            ),
        ),
        Claim(
            says="DeepNorm's factors let a deep Post-LN model train without warm-up",
            source="Wang et al. 2022, arXiv:2203.00555",
            conditions=(
                Condition(
                    says="Alpha and beta: ends at least 0.2 nats a token below Post-LN",
                    statistic=difference("DeepNorm", "post", "loss"),
                    high=-0.2,
                    source="a fifth of a nat; Post-LN without warm-up stays near the entropy of single symbols",
                ),
                Condition(
                    says="Beta, the start, alone: loss over that of Post-LN",
                    statistic=difference("beta alone", "post", "loss"),
                ),
                Condition(
                    says="Alpha, the factor on the stream, alone: loss over that of Post-LN",
                    statistic=difference("alpha alone", "post", "loss"),
                ),
            ),
            ledger=("C70",),
        ),
    ),
    quick=budget(
        seeds=3,
        layers=4,
        deep_layers=12,
        depths=(12, 24, 48),
        width=64,
        batch=8,
        window=32,
        steps=100,
        learning_rate=1e-3,
    ),
    full=budget(seeds=10, width=128, steps=400),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="a Markov chain over 32 symbols of known entropy; random token ids for the stream at the start",
    regime="4 layers (12 of Post-LN) of width 64, 100 steps of AdamW at 1e-3 without warm-up",
)
