"""`depth`: activations and gradients of untrained models of 2 to 48 layers, and training without a norm."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import Any, cast

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, Line, arm_lines
from normkit.study.propagation import mean_square, propagate
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, exponent, filled
from normkit.study.transformer import Block, Transformer, deep_norm

_CHOICES: dict[str, dict[str, Any]] = {
    "no norm": {"placement": "none", "norm": None},
    "post": {"placement": "post"},
    "pre": {"placement": "pre"},
    "peri": {"placement": "peri"},
    "DeepNorm": {"placement": "post"},
    "depth-scaled": {"placement": "pre", "depth_scaled": True},
}
_VOCABULARY = 256

VARIANTS = tuple(_CHOICES)
"""Arms that are measured at the start, in the order of the legend."""

NORMED = VARIANTS[1:]
"""Those with a norm: on the scale of the arm without one, their lines would coincide."""

LONG, NARROW = "pre, longer windows", "post, MLP as wide as the stream"
"""Two more arms at the start; the second is the model of Xiong's lemma 2."""

TRAINED = ("pre", "no norm")
"""Variants that are trained as well."""


def build(context: ArmContext, variant: str, layers: int, /, **choices: Any) -> Transformer:
    """The model of a variant at a depth, with further choices of its configuration."""
    factors = deep_norm(layers) if variant == "DeepNorm" else {}
    return context.transformer(layers=layers, **_CHOICES[variant], **factors, **choices)


def _arms(settings: Settings) -> tuple[Arm, ...]:
    starts = tuple(Arm(name=name, choices={"variant": name, "window": settings["window"]}) for name in VARIANTS)
    long = Arm(name=LONG, choices={"variant": "pre", "window": settings["long_window"]})
    narrow = Arm(name=NARROW, choices={"variant": "post", "window": settings["window"], "expansion": 1})
    runs = tuple(
        Arm(name=f"{name}, {layers} layers trained", choices={"variant": name, "layers": layers}, cost=layers / 4)
        for layers in settings["trained_layers"]
        for name in TRAINED
    )
    return (*starts, long, narrow, *runs)


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """A short run without warm-up; or untrained models on random ids, always equally many, in windows of one length."""
    if "layers" in arm.choices:
        sizes = {"context": context["trained_window"], "width": context["trained_width"]}
        model, recipe = build(context, arm.choices["variant"], arm.choices["layers"], **sizes), context.recipe()
        run = context.train_on_text(model, recipe, batch=context["trained_batch"])
        return run.measurement(recipe.steps, loss=run.mean_of_last(), first=run.points[0].loss)
    depths, window = context["depths"], arm.choices["window"]
    rows = max(1, context["tokens"] // window)
    starts, before = [], list[float]()
    for done, layers in enumerate(depths, start=1):
        expansion = {"expansion": arm.choices["expansion"]} if "expansion" in arm.choices else {}
        model = build(context, arm.choices["variant"], layers, vocabulary=_VOCABULARY, context=window, **expansion)
        context.move(model)
        if arm.name == NARROW:
            before.clear()
            for block in model.blocks:
                norm = cast(Block, block).mlp.norm
                norm.register_forward_pre_hook(lambda _module, inputs: before.append(mean_square(inputs[0])))
        starts.append(propagate(model, *context.random_ids(_VOCABULARY, rows=rows, tokens=window)))
        context.report(done / len(depths))
    return {
        "depths": list(depths),
        "stream": [start.stream[-1] for start in starts],
        "last_gradient": [start.token_gradient for start in starts],
        "all_gradients": [math.hypot(*start.gradients) for start in starts],
        "change": [start.change for start in starts],
        "deepest_stream": starts[-1].stream,
        "deepest_gradients": starts[-1].gradients,
        # The first pass is before the weights are perturbed.
        **({"before_norms": before[: depths[-1]]} if before else {}),
    }


def _growth(paired: Paired, *, quantity: str) -> float:
    """The last value of the arm without a norm over the first: from the least depth to the greatest."""
    values = filled(paired["no norm"][quantity])
    return values[-1] / values[0]


def _steepest(paired: Paired) -> float:
    """The exponent of the stream's rms that is farthest from 1/4, the middle of the range of theory."""
    exponents = [exponent(name, "stream", 0.5)(paired) for name in NORMED]
    return max(exponents, key=lambda value: abs(value - 0.25))


def _spread(paired: Paired) -> float:
    """Greatest gradient of a block over the least, in the deepest model of the arm in which this ratio is largest."""
    profiles = [filled(paired[name]["deepest_gradients"]) for name in NORMED if name != "depth-scaled"]
    return max(max(profile) / min(profile) for profile in profiles)


def _added(paired: Paired) -> float:
    """The mean increase of E|x|^2 / n per block in the deepest Pre-LN model."""
    stream = paired["pre"]["deepest_stream"]
    return float(stream[-1] - stream[0]) / (len(stream) - 1)


_XIONG = "Xiong et al. 2020, arXiv:2002.04745"

_CLAIMS = (
    Claim(
        says="Without normalization activations and gradients explode with depth; with it neither does",
        source="common knowledge; Brock et al. 2021, arXiv:2101.08692, analyse the growth in residual networks",
        conditions=(
            Condition(
                says="Without a norm the stream's rms is at least 1,000 times as large at 48 layers as at 2",
                statistic=lambda paired: math.sqrt(_growth(paired, quantity="stream")),
                low=1e3,
                source="a factor c > 1 a layer gives c^46; with a norm theory has at most the root of 24, 4.9",
            ),
            Condition(
                says="Without a norm the gradient is at least 1,000 times as large at 48 layers as at 2",
                statistic=partial(_growth, quantity="all_gradients"),
                low=1e3,
                source="as for the activations; infinite where float32 overflows",
            ),
            Condition(
                says="With a norm, wherever it stands, the stream's rms grows like L^-0.1 to L^0.6",
                statistic=_steepest,
                low=-0.1,
                high=0.6,
                published="constant (post), the root of L (pre)",
                source=f"theory has 0 to 1/2, {_XIONG}, lemma 2; 0.1 for the width and the draw of the weights",
            ),
            Condition(
                says="At 48 layers no block of post, pre, peri or DeepNorm has 10 times the gradient of another",
                statistic=_spread,
                high=10,
                source="pre and peri divide block l's by the root of l, 6.9 at 48; the rest is the draw",
            ),
        ),
        ledger=("C69",),
    ),
    Claim(
        says="Without normalization a transformer does not train; with it a deep one does",
        source="common knowledge, unqualified",
        conditions=(
            Condition(
                says="At 4 layers no norm ends at least 0.2 nats a byte above Pre-LN",
                statistic=difference("no norm, 4 layers trained", "pre, 4 layers trained", "loss"),
                low=0.2,
                source="a fifth of a nat is far above the spread of seeds",
                regime="the model has 4 layers",
            ),
            Condition(
                says="At 12 layers no norm ends at least 1 nat a byte above Pre-LN",
                statistic=difference("no norm, 12 layers trained", "pre, 12 layers trained", "loss"),
                low=1.0,
                source="what does not train ends near the loss of a guess, 5.5, or above",
                regime="the model has 12 layers",
            ),
            Condition(
                says="Pre-LN at 12 layers ends within 0.2 nats a byte of 4 layers",
                statistic=difference("pre, 12 layers trained", "pre, 4 layers trained", "loss"),
                high=0.2,
                source="depth must not cost Pre-LN what it costs the model without a norm",
            ),
        ),
        ledger=("C69",),
    ),
    Claim(
        says="The gradient of the last MLP does not depend on depth in Post-LN and falls like 1/sqrt(L) in Pre-LN",
        source=f"{_XIONG}, theorem 1",
        conditions=(
            Condition(
                says="Post-LN: exponent 0 within 0.1",
                statistic=exponent("post", "last_gradient"),
                low=-0.1,
                high=0.1,
                published="0",
                source="theory; fitted on 12 layers and more, since the law is one of great L",
            ),
            Condition(
                says="Pre-LN: exponent -1/2 within 0.1",
                statistic=exponent("pre", "last_gradient"),
                low=-0.6,
                high=-0.4,
                published="-1/2",
                source="theory, of layers that all add alike; windows are short, and 12 layers and more are fitted",
            ),
            Condition(
                says="Pre-LN over windows four times as long: exponent",
                statistic=exponent(LONG, "last_gradient"),
                source="steeper: tokens become alike with depth, so that attention averages less and the stream grows",
            ),
            Condition(
                says="The same against the rms of the stream in place of the depth",
                statistic=lambda paired: (
                    exponent(LONG, "last_gradient")(paired) / exponent(LONG, "stream", 0.5)(paired)
                ),
                published="-1",
                source="the Jacobian of the final norm",
            ),
            Condition(
                says="Peri-LN: exponent, beside Pre-LN's",
                statistic=exponent("peri", "last_gradient"),
            ),
            Condition(
                says="DeepNorm: exponent; beta alone gives -1/4 - 1/4",
                statistic=exponent("DeepNorm", "last_gradient"),
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="In Pre-LN each layer adds between n/2 and 3n/2 to E|x|^2; in Post-LN it is 3n/2 before the norm",
        source=f"{_XIONG}, lemma 2",
        conditions=(
            Condition(
                says="Pre-LN: n/2 to 3n/2 a layer, on the average over 48",
                statistic=_added,
                low=0.5,
                high=1.5,
                published="(1 + l/2) n to (1 + 3l/2) n after l layers",
                source="theory, of ReLU and an MLP as wide as the stream; here GELU and four times as wide",
            ),
            Condition(
                says="Post-LN: 3n/2 within 3n/20 before the last norm of a block, on the average over 48",
                statistic=lambda paired: fmean(paired[NARROW]["before_norms"]),
                low=1.35,
                high=1.65,
                published="3n/2",
                source="theory, of an MLP as wide as the stream, as here; GELU in place of ReLU makes it 1.43 n",
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="When its weights are nudged, the output of Pre-LN changes like log L",
        source="Liu et al. 2020 (Admin), arXiv:2004.08249",
        conditions=(
            Condition(
                says="Pre-LN: exponent of the mean squared change 0.32 within 0.1",
                statistic=exponent("pre", "change"),
                low=0.22,
                high=0.42,
                published="log L, which between 12 and 48 is an exponent of 0.32",
                source="as for the other exponents; a constant would be 0, the root of L 0.5",
            ),
        ),
        ledger=("C70",),
    ),
    Claim(
        says="When its weights are nudged, the output of Post-LN changes like L",
        source="Liu et al. 2020 (Admin), arXiv:2004.08249",
        conditions=(
            Condition(
                says="Post-LN: exponent of the mean squared change 0.75 to 1.25",
                statistic=exponent("post", "change"),
                low=0.75,
                high=1.25,
                published="1",
                source="theory, within a quarter",
            ),
        ),
        ledger=("C70",),
    ),
)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    def over_depth(quantity: str) -> tuple[Line, ...]:
        return arm_lines(seeds, NORMED, quantity, settings["depths"])

    def over_blocks(quantity: str, first: int) -> tuple[Line, ...]:
        return arm_lines(seeds, VARIANTS, quantity, range(first, settings["depths"][-1] + 1))

    steps = range(1, settings["steps"] + 1)
    return (
        Curves(
            name="depth-stream",
            title="Activations at the start, block by block",
            caption="Mean square of the stream after each block of the deepest model; block 0 is the embedding.",
            description="Without a norm it grows by a factor a block; pre and peri grow in a line, post stays at 1.",
            x_label="block",
            y_label="E|x|^2 / n",
            panels=(("", over_blocks("deepest_stream", 0)),),
            y_log=True,
        ),
        Curves(
            name="depth-gradient",
            title="Gradient of the last MLP against depth",
            caption="Gradient norm of its two matrices under the loss of one token; a power law is a straight line.",
            description="Post is level; pre, peri and DeepNorm fall like the inverse root of the depth.",
            x_label="layers",
            y_label="gradient norm",
            panels=(("", over_depth("last_gradient")),),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="depth-blocks",
            title="Gradients at the start, block by block",
            caption="Norm of the gradient of each block's MLP in the deepest model; an overflow is at the edge.",
            description="With norms all blocks are within a factor of about ten; without one the first overflow.",
            x_label="block",
            y_label="gradient norm",
            panels=(("", over_blocks("deepest_gradients", 1)),),
            y_log=True,
        ),
        Curves(
            name="depth-change",
            title="Change of the output when all matrices change by one part in a thousand",
            caption="Mean squared change of what the unembedding reads, over the square of the relative change.",
            description="Post rises faster than the depth, pre like its logarithm, DeepNorm falls.",
            x_label="layers",
            y_label="change / relative change^2",
            panels=(("", over_depth("change")),),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="depth-training",
            title="Training with and without norm",
            caption="Loss without warm-up; both arms of a panel see the same batches.",
            description="With few layers the lines coincide; with many the model without a norm starts far above.",
            x_label="step",
            y_label="loss (nats a byte)",
            panels=tuple(
                (
                    f"{layers} layers",
                    arm_lines(seeds, {name: f"{name}, {layers} layers trained" for name in TRAINED}, "losses", steps),
                )
                for layers in settings["trained_layers"]
            ),
            y_log=True,
        ),
    )


STUDY = Study(
    name="depth",
    title="Depth",
    question="What do 2 to 48 layers do to activations and gradients, with norms and without?",
    claims=_CLAIMS,
    quick=budget(
        seeds=3,
        depths=(2, 4, 6, 12, 24, 48),
        width=128,
        tokens=128,
        window=8,
        long_window=32,
        trained_layers=(4, 12),
        trained_width=64,
        trained_batch=8,
        trained_window=32,
        steps=60,
        learning_rate=1e-3,
    ),
    full=budget(seeds=10, width=256, steps=200),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="random token ids for what is measured at the start; bytes of Python's standard library for the training",
    regime="width 128 and windows of 8 tokens at the start, width 64 and 60 steps of AdamW at 1e-3 for the training",
)
