"""`attention`: how attention scores grow with the input and with the weights, after a norm and without one."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from normkit import specs
from normkit.geometry import attention_entropy
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, Line, line
from normkit.study.corpus import text_of_the_library
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired
from normkit.study.transformer import Transformer, attention_scores

_NORMS = {"no norm": None, "LayerNorm": specs.TORCH_LAYER_NORM, "RMSNorm": specs.TORCH_RMS_NORM.replace(eps=1e-5)}
_QUERY_KEY = "LayerNorm and QK-norm"


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """Largest score and mean entropy of the first block's attention, over scales of its input and of W_Q and W_K."""

    def build() -> Transformer:
        model = context.transformer(
            heads=context["heads"],
            layers=1,
            norm=_NORMS.get(arm.name, specs.TORCH_LAYER_NORM),
            query_key_norm=arm.name == _QUERY_KEY,
        )
        return model.to(context.device, torch.float64).eval()

    model = build()
    ids = context.text_ids(text_of_the_library()[0], seed=context.seed)
    with torch.no_grad():
        x = model.embed(ids[:, :-1])
        over_input = [_scores(model, scale * x) for scale in context["input_scales"]]
        over_weights = []
        for scale in context["weight_scales"]:
            scaled = build()
            for name in ("query", "key"):
                scaled.get_parameter(f"blocks.0.attention.branch.{name}.weight").mul_(scale)
            over_weights.append(_scores(scaled, x))
    measured = {"input": over_input, "weights": over_weights}
    return {
        **{
            over: dict(zip(("largest", "entropy"), zip(*each, strict=True), strict=True))
            for over, each in measured.items()
        },
        "root of head width": math.sqrt(model.config.width / model.config.heads),
    }


def _scores(model: Transformer, x: Tensor) -> tuple[float, float]:
    """Largest magnitude of a score that a token may see, and the mean entropy of all rows, in nats."""
    scores, seen = attention_scores(model, 0, x)
    return scores[..., seen].abs().max().item(), attention_entropy(scores, seen).mean().item()


def _entropy_spread(arm: str, paired: Paired) -> float:
    """The largest less the least of the mean entropies over the scales of the input."""
    entropies = paired[arm]["input"]["entropy"]
    return float(max(entropies) - min(entropies))


def _unchanged(arm: str, over: str, regime: str) -> Condition:
    def ratio(paired: Paired) -> float:
        largest = paired[arm][over]["largest"]
        return float(max(largest[-1] / largest[0], largest[0] / largest[-1]))

    of = {"input": "the input", "weights": "the query and key weights"}[over]
    return Condition(
        says=f"{arm}: the largest score changes by at most 1 % over all scales of {of}",
        statistic=ratio,
        low=1.0,
        high=1.01,
        regime=regime,
        source="invariance; eps = 1e-5 takes up to 0.1 % of the shortest rows",
    )


_CLAIMS = (
    Claim(
        says="A norm in front makes attention invariant to the scale of its input",
        source="follows from the scale invariance of LayerNorm, Ba et al. 2016, arXiv:1607.06450, section 5.1",
        conditions=tuple(
            Condition(
                says=f"{arm}: mean entropy moves by at most 0.01 nats from input x 0.1 to x 100",
                statistic=partial(_entropy_spread, arm),
                high=0.01,
                source="invariance, but for eps",
            )
            for arm in ("LayerNorm", "RMSNorm")
        ),
    ),
    Claim(
        says="Without a norm attention turns into the choice of one key as its input grows",
        source="softmax of scores that grow with the square of the input's scale",
        conditions=(
            Condition(
                says="no norm: mean entropy at input x 100 is below 0.05 nats",
                statistic=lambda paired: float(paired["no norm"]["input"]["entropy"][-1]),
                high=0.05,
                source="a twentieth of a nat: one key has more than 99 % of the weight",
            ),
            Condition(
                says="no norm: at input x 0.1 it is at least 2 nats",
                statistic=lambda paired: float(paired["no norm"]["input"]["entropy"][0]),
                low=2.0,
                source="the mean of log(t) over 64 positions is 3.2",
            ),
        ),
    ),
    Claim(
        says="LayerNorm prevents exploding attention scores",
        source="repeated in many introductions",
        conditions=(
            _unchanged("LayerNorm", "input", "the scale of the input is meant"),
            _unchanged("LayerNorm", "weights", ""),
        ),
    ),
    Claim(
        says="Normalizing queries and keys bounds the scores, whatever input and weights",
        source="Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442",
        conditions=(
            Condition(
                says="no score exceeds the root of the head width by 0.1 % at any scale",
                statistic=lambda paired: max(
                    max(paired[_QUERY_KEY][over]["largest"]) / paired[_QUERY_KEY]["root of head width"]
                    for over in ("input", "weights")
                ),
                high=1.001,
                source="|q| = |k| = sqrt(d) at gain 1, and Cauchy-Schwarz",
            ),
            _unchanged(_QUERY_KEY, "weights", ""),
        ),
    ),
)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    arms = (*_NORMS, _QUERY_KEY)
    window = settings["window"]
    # Uniform attention under the causal mask.
    uniform = sum(math.log(position) for position in range(1, window + 1)) / window

    def lines(over: str, name: str) -> tuple[Line, ...]:
        scales = settings[f"{over.removesuffix('s')}_scales"]
        return tuple(line(arm, scales, [paired[arm][over][name] for paired in seeds]) for arm in arms)

    return (
        Curves(
            name="attention-scores",
            title="Largest attention score",
            caption="Over the scale of the input, and over the scale of W_Q and W_K; the first block, before training.",
            description="After a norm the scale of the input has no effect; scores grow with the square of the scale "
            "of the weights unless queries and keys are normalized too.",
            x_label="factor",
            y_label="largest score",
            panels=(("input", lines("input", "largest")), ("query and key weights", lines("weights", "largest"))),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="attention-entropy",
            title="How spread attention is",
            caption="Mean entropy of the attention rows; 0 is one key, the dashed line is all keys alike.",
            description="Without a norm entropy falls to zero as the input grows; after a norm it stays the same.",
            x_label="factor",
            y_label="entropy (nats)",
            panels=(("input", lines("input", "entropy")), ("query and key weights", lines("weights", "entropy"))),
            x_log=True,
            reference=(uniform, "all keys alike"),
        ),
    )


STUDY = Study(
    name="attention",
    title="Attention scores",
    question="What does a norm in front of attention keep from growing, and what not?",
    claims=_CLAIMS,
    quick=budget(
        seeds=5,
        width=64,
        heads=4,
        batch=8,
        window=64,
        input_scales=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        weight_scales=(1.0, 2.0, 5.0, 10.0),
    ),
    full=budget(seeds=20, width=256, batch=32, window=256),
    arms=lambda _settings: tuple(Arm(name=name) for name in (*_NORMS, _QUERY_KEY)),
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="The first block of an untrained model, in float64; what training does to the scores is the study "
    "`learning-rate`.",
)
