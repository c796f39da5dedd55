"""`gradients`: the effect of a norm on the backward pass, on steps, and on the loss along a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from normkit.study.arm_context import Settings
from normkit.study.chart import Bars, Chart, Curves, arm_lines, arm_values, line
from normkit.study.experiments.gradient_arms import TRAINED, arms, measure
from normkit.study.experiments.gradient_measures import FACTORS
from normkit.study.result import Claim, Condition, Study
from normkit.study.statistics import Paired, Statistic, difference, slope, value_of

_DOUBLE = "float64 rounds to about 1e-16; a few sums over a row and over a model come to some hundred times that"
_DESCENT = "gradient descent"


def _worst(name: str) -> Statistic:
    return lambda paired: float(max(paired[_DESCENT][name]))


def _steepest(name: str, theory: float) -> Statistic:
    """The exponent of the group that is farthest from theory."""

    def statistic(paired: Paired) -> float:
        exponents = [slope(FACTORS, angles) for angles in paired[_DESCENT][name]]
        return max(exponents, key=lambda exponent: abs(exponent - theory))

    return statistic


def _middle_ratio(name: str, arm: str, other: str) -> Statistic:
    """Geometric mean over the steps of the ratio of one arm's number to the other's."""

    def statistic(paired: Paired) -> float:
        one, two = paired[arm][name], paired[other][name]
        pairs = zip(one, two, strict=False) if isinstance(one, list) else [(one, two)]
        logs = [math.log(above / below) for above, below in pairs]
        return math.exp(sum(logs) / len(logs))

    return statistic


def _projects(norm: str, what: str) -> Condition:
    return Condition(
        says=f"{norm} without eps: dx is the gradient projected {what}, divided by s, in every norm of the model",
        statistic=value_of(norm, "projected_without_eps"),
        high=1e-12,
        published="exact",
        source=_DOUBLE,
    )


def _with_eps(norm: str) -> Condition:
    return Condition(
        says=f"{norm} with its eps: dx is the closed form that keeps eps / s^2 of the radial part",
        statistic=value_of(norm, "exact_with_eps"),
        high=1e-12,
        published="exact",
        source=_DOUBLE,
    )


def _removed(norm: str) -> Condition:
    return Condition(
        says=f"{norm}: the share of the gradient's energy along mean and row, in the norm where it is largest",
        statistic=value_of(norm, "removed"),
        judged=False,
        source="median over tokens; 2/n = 0.03 for a gradient without a preferred direction",
    )


def _exponent(name: str, theory: float, words: str) -> Condition:
    return Condition(
        says=f"{words} turns a weight of c times the length by c^{theory:g} of the angle",
        statistic=_steepest(name, theory),
        low=theory - 0.01,
        high=theory + 0.01,
        published=f"exponent {theory:g}",
        source="theory for small steps; float64 leaves errors below 1e-6",
    )


def _smoother(arm: str, other: str, name: str, words: str, regime: str) -> Condition:
    return Condition(
        says=f"{words} is at least 1.5 times as large without a norm as with LayerNorm: {regime}",
        statistic=_middle_ratio(name, other, arm),
        low=1.5,
        published="larger without BatchNorm throughout (figure 4)",
        regime=regime,
        source="set beforehand: a clear difference; the paper gives curves, of BatchNorm",
    )


_SHALLOW, _DEEP = "the model is shallow, through training", "the model is deep and at its start"

_CLAIMS = (
    Claim(
        says="The gradient through a norm is a projection onto the tangent space of its sphere, divided by the scale",
        source="Ba, Kiros & Hinton 2016 (arXiv:1607.06450), differentiated; dx = (I - 11'/n - zz'/n) (g u) / s",
        conditions=(
            _projects("LayerNorm", "off all-ones and off the row"),
            _projects("RMSNorm", "off the row"),
            _with_eps("LayerNorm"),
            _with_eps("RMSNorm"),
            Condition(
                says="control: a norm with detached statistics is off the projection by this much",
                statistic=value_of("detached", "projected_with_eps"),
                judged=False,
                source="sqrt(2/n) = 0.18 for a gradient without a preferred direction",
            ),
            _removed("LayerNorm"),
            _removed("detached"),
        ),
        ledger=("C42", "C43"),
    ),
    Claim(
        says="The derivatives of mean and variance matter more than the forward normalization",
        source="Xu et al. 2019, arXiv:1911.07013, abstract; DetachNorm against LayerNorm and none",
        conditions=(
            Condition(
                says="detached statistics end at least 0.2 nats a byte above LayerNorm",
                statistic=difference("detached", "LayerNorm", "held_out"),
                low=0.2,
                published="DetachNorm is worse than LayerNorm on all sets, as reported",
                source="four times what counts as equal in the studies `centring` and `affine`",
            ),
            Condition(
                says="... and at least 0.2 above no norm at all",
                statistic=difference("detached", "no norm", "held_out"),
                low=0.2,
                published="DetachNorm is worse than no norm, as reported",
                source="as above",
            ),
        ),
    ),
    Claim(
        says="A weight before a norm only turns: its effective learning rate is the rate over its squared length",
        source="van Laarhoven 2017, arXiv:1706.05350; Arora, Li & Lyu 2018, arXiv:1812.03981",
        conditions=(
            Condition(
                says="the groups found by behaviour are as many as the linear layers that a norm follows",
                statistic=lambda paired: float(len(paired[_DESCENT]["groups"]) - paired[_DESCENT]["expected_groups"]),
                low=0,
                high=0,
                source="theory",
            ),
            Condition(
                says="|cosine| of weight and gradient is at most 1e-10",
                statistic=_worst("cosines"),
                high=1e-10,
                source="Euler's theorem: 0. " + _DOUBLE,
            ),
            Condition(
                says="|gradient| |weight| is the same at 1, 1.5, 3 and 7 times the weight, to 1e-6",
                statistic=_worst("products"),
                high=1e-6,
                source="theory: the gradient of a function of degree 0 has degree -1; the loss is summed in float32",
            ),
            _exponent("by_gradient", -2.0, "a step of gradient descent"),
            _exponent("by_sign", -1.0, "a step along the gradient's signs (Adam's first)"),
            Condition(
                says="gradient descent lengthens it as w^2 + rate^2 g^2 says, to 1 % of the growth",
                statistic=_worst("growth_errors"),
                high=0.01,
                source="theory: orthogonal steps add up as squares; float32 rounds far below this",
            ),
        ),
        ledger=("C45",),
    ),
    Claim(
        says="Normalization smooths the loss along a step",
        source="Santurkar et al. 2018, arXiv:1805.11604, section 3 (of BatchNorm)",
        conditions=(
            _smoother("LayerNorm", "no norm", "roughness", "the gradient's change over the distance", _SHALLOW),
            _smoother("LayerNorm", "no norm", "surprise", "the gradient's relative change", _SHALLOW),
            _smoother(
                "LayerNorm, deep", "no norm, deep", "roughness", "the gradient's change over the distance", _DEEP
            ),
            _smoother("LayerNorm, deep", "no norm, deep", "surprise", "the gradient's relative change", _DEEP),
        ),
        ledger=("C71",),
    ),
    Claim(
        says="Normalization makes the loss less sensitive to the scale of the weights",
        source="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3.3; asked here of LayerNorm in a residual model",
        conditions=(
            Condition(
                says="branch matrices at 0.5, 1 and 2 times: the first loss of the deep model spreads at most 1 nat",
                statistic=value_of("LayerNorm, deep", "scale_spread"),
                high=1.0,
                source="a fifth of the first loss",
            ),
            Condition(
                says="... and at least 10 times as far without a norm",
                statistic=lambda paired: float(
                    paired["no norm, deep"]["scale_spread"] / paired["LayerNorm, deep"]["scale_spread"]
                ),
                low=10.0,
                source="12 layers whose stream doubles or halves in each differ by far more",
            ),
        ),
        ledger=("C71",),
    ),
)


def _charts(_settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    seeds = list(measured.values())
    trained = [norm for norm in TRAINED if all(norm in paired for paired in seeds)]
    charts: list[Chart] = [
        Bars(
            name="gradients-loss",
            title="Held-out loss with and without derivatives of mean and variance",
            caption="Detached: LayerNorm whose backward pass takes mean and scale for constants.",
            description="The detached norm ends highest.",
            label="held-out loss (nats a byte)",
            values=arm_values(seeds, trained, "held_out"),
        ),
        Curves(
            name="gradients-landscape",
            title="How the gradient changes along its own direction during training",
            caption="Largest change over 0.25 to 2 % of the weights' length; small is smooth.",
            description="One line for each norm; the verdicts hold the ratios.",
            x_label="step",
            y_label="change of the gradient",
            panels=tuple(
                (title, arm_lines(seeds, trained, name, seeds[0][trained[0]]["at"]) if trained else ())
                for title, name in (("over the distance", "roughness"), ("relative to the gradient", "surprise"))
            ),
            y_log=True,
        ),
    ]
    if all(_DESCENT in paired for paired in seeds):
        charts.append(
            Curves(
                name="gradients-turning",
                title="Angle of one step from a weight that stands before a norm",
                caption="The first group found; a step of gradient descent falls as 1/c^2, one of signs as 1/c.",
                description="Two straight lines in double logarithms, of slopes -2 and -1.",
                x_label="length of the weight over its own, c",
                y_label="angle (rad)",
                panels=(
                    (
                        "",
                        tuple(
                            line(words, FACTORS, [paired[_DESCENT][name][0] for paired in seeds])
                            for words, name in (("gradient", "by_gradient"), ("signs", "by_sign"))
                        ),
                    ),
                ),
                x_log=True,
                y_log=True,
            )
        )
    return tuple(charts)


STUDY = Study(
    name="gradients",
    title="Gradients",
    question="What does a norm do to the backward pass, to steps, and to the loss along a step?",
    claims=_CLAIMS,
    quick={
        "seeds": 3,
        "layers": 4,
        "deep_layers": 12,
        "width": 64,
        "batch": 8,
        "window": 64,
        "steps": 150,
        "warmup": 20,
        "learning_rate": 1e-3,
        "turning_layers": 2,
        "turning_steps": 60,
        "turning_rate": 0.3,
    },
    full={"seeds": 8, "steps": 600, "turning_steps": 400},
    arms=arms,
    measure=measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="Pre-LN models of 4 and 12 layers of width 64; peri-norm models of 2 layers for lengths of weights",
)
