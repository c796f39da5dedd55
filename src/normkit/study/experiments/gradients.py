"""`gradients`: the effect of a norm on the backward pass, on steps, and on the loss along a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.spec import NormSpec
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, Curves, arm_lines, arm_values, line
from normkit.study.corpus import held_out_loss, next_token_loss
from normkit.study.model_parts import DetachedNorm, NormLayer
from normkit.study.propagation import FACTORS, along_the_gradient, backward_errors, flat, turnings
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, largest, padded, ratio, slope, value_of
from normkit.study.training_run import Batch
from normkit.study.transformer import Residual, Transformer

_DOUBLE = "float64 rounds to about 1e-16; a few sums over a row and over a model come to some hundred times that"
_DESCENT = "gradient descent"
_NO_EPS = 1e-30


_SPECS: Mapping[str, NormSpec] = {
    "LayerNorm": specs.TORCH_LAYER_NORM,
    "RMSNorm": specs.TORCH_RMS_NORM.replace(eps=1e-5),
    "detached": specs.TORCH_LAYER_NORM,
}
NORMS: Mapping[str, NormLayer] = {**_SPECS, "detached": DetachedNorm, "no norm": None}


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    """Norms trained, the same deep and untrained, and scale-invariant weights."""
    return (
        *(Arm(name=norm, choices={"kind": "trained", "norm": norm}) for norm in NORMS),
        *(Arm(name=f"{norm}, deep", choices={"kind": "start", "norm": norm}, cost=0.3) for norm in NORMS),
        Arm(name=_DESCENT, choices={"kind": "turning"}, cost=0.5),
    )


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    batch = (context.text_ids(),)
    match arm.choices["kind"]:
        case "trained":
            return _trained(context, arm.choices["norm"], batch)
        case "start":
            return _start(context, arm.choices["norm"], batch)
        case _:
            return _turning(context, batch)


def _trained(context: ArmContext, norm: str, batch: Batch) -> Measurement:
    model, steps = context.transformer(norm=NORMS[norm]).to(context.device), context["steps"]
    at = list(range(0, steps, max(1, steps // 5)))

    def observe(model: nn.Module, step: int) -> Mapping[str, float]:
        return along_the_gradient(model, batch, next_token_loss).measures if step - 1 in at else {}

    run = context.train_on_text(model, context.recipe(), observe=observe)
    return run.measurement(
        steps,
        held_out=run.capped(held_out_loss(model)),
        diverged=run.diverged,
        at=at,
        **{name: padded(run.observed(name), len(at)) for name in ("roughness", "loss_range", "surprise")},
        **(_backward_errors(model, norm, batch) if norm in _SPECS else {}),
    )


def _backward_errors(model: Transformer, norm: str, batch: Batch) -> dict[str, float]:
    """Errors of the two formulas over all norms of a trained model, with its eps and without."""
    worst: dict[str, float] = {}
    for name, eps in (("with_eps", 1e-5), ("without_eps", _NO_EPS)):
        spec = _SPECS[norm].replace(eps=eps)
        layer: NormLayer = spec if norm != "detached" else DetachedNorm
        copied = Transformer(dataclasses.replace(model.config, norm=layer))
        copied.load_state_dict(model.state_dict())
        copied.to(next(model.parameters()).device, torch.float64)
        norms = {path: module.norm for path, module in copied.named_modules() if isinstance(module, Residual)}
        norms["final"] = copied.final_norm
        found = backward_errors(copied, norms, spec, batch, next_token_loss).values()
        worst[f"projected_{name}"] = max(each.projected for each in found)
        worst[f"exact_{name}"] = max(each.exact for each in found)
        worst["removed"] = max(each.removed for each in found)
    return worst


def _start(context: ArmContext, norm: str, batch: Batch) -> Measurement:
    """Roughness of a deep model's loss before the first step, and its loss with branches scaled up and down."""

    def build(gain: float) -> Transformer:
        layers = context["deep_layers"]
        return context.transformer(layers=layers, norm=NORMS[norm], branch_gain=gain).to(context.device)

    losses = []
    for gain in (0.5, 1.0, 2.0):
        with torch.no_grad():
            losses.append(next_token_loss(build(gain), batch).item())
        context.report(len(losses) / 4)
    measures = along_the_gradient(build(1.0), batch, next_token_loss).measures
    return {**measures, "scale_spread": max(losses) - min(losses)}


def _turning(context: ArmContext, batch: Batch) -> Measurement:
    """Scale-invariant groups, found by behaviour, under steps from several lengths; then plain gradient descent."""
    layers = context["turning_layers"]

    def build() -> Transformer:
        norm = specs.TORCH_LAYER_NORM.replace(eps=_NO_EPS)
        return context.transformer(layers=layers, norm=norm, placement="peri").to(context.device)

    wide = build().double()
    measured = turnings(wide, lambda: wide(batch[0][:2, :-1]), lambda: next_token_loss(wide, batch))
    model = build()
    named = dict(model.named_parameters())
    groups = [[named[path] for path in each.paths] for each in measured]

    def squares(of_groups: Sequence[Sequence[Tensor]]) -> list[float]:
        return [flat(tensors).double().square().sum().item() for tensors in of_groups]

    def observe(_model: nn.Module, _step: int) -> Mapping[str, Any]:
        slopes = [[parameter.grad for parameter in group if parameter.grad is not None] for group in groups]
        return {"squares": squares(groups), "steps": squares(slopes)}

    steps, rate = context["turning_steps"], context["turning_rate"]
    recipe = context.recipe(steps=steps, learning_rate=rate, warmup=0, optimizer="sgd", clip=None)
    run = context.train_on_text(model, recipe, observe=observe)
    start, end = run.observed("squares")[0], squares(groups)
    rates = [point.learning_rate for point in run.points]
    grown = [
        sum(rate**2 * square for rate, square in zip(rates, each, strict=True))
        for each in zip(*run.observed("steps"), strict=True)
    ]
    return {
        "losses": padded(run.losses, recipe.steps),
        "groups": [list(each.paths) for each in measured],
        "expected_groups": 2 * layers,
        "products": [max(each.products) / min(each.products) - 1 for each in measured],
        "cosines": [each.cosine for each in measured],
        "by_gradient": [each.by_gradient for each in measured],
        "by_sign": [each.by_sign for each in measured],
        "growth_errors": [abs((b - a) / g - 1) for a, b, g in zip(start, end, grown, strict=True)],
        "growth": [b / a for a, b in zip(start, end, strict=True)],
        "findings": list(run.findings),
    }


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
        source="median over tokens; 2/n = 0.03 for a gradient without a preferred direction",
    )


def _exponent(name: str, theory: float, words: str) -> Condition:
    def farthest(paired: Paired) -> float:
        """The exponent of the group that is farthest from theory."""
        exponents = [slope(FACTORS, angles) for angles in paired[_DESCENT][name]]
        return max(exponents, key=lambda exponent: abs(exponent - theory))

    return Condition(
        says=f"{words} turns a weight of c times the length by c^{theory:g} of the angle",
        statistic=farthest,
        low=theory - 0.01,
        high=theory + 0.01,
        published=f"exponent {theory:g}",
        source="theory for small steps; float64 leaves errors below 1e-6",
    )


def _smoother(depth: str, name: str, words: str, regime: str) -> Condition:
    def without_over_with(paired: Paired) -> float:
        """Geometric mean over the steps of the ratio of the two models' numbers."""
        without, kept = paired[f"no norm{depth}"][name], paired[f"LayerNorm{depth}"][name]
        pairs = zip(without, kept, strict=False) if isinstance(without, list) else [(without, kept)]
        logs = [math.log(above / below) for above, below in pairs]
        return math.exp(sum(logs) / len(logs))

    return Condition(
        says=f"{words} is at least 1.5 times as large without a norm as with LayerNorm: {regime}",
        statistic=without_over_with,
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
                statistic=largest(_DESCENT, "cosines"),
                high=1e-10,
                source="Euler's theorem: 0. " + _DOUBLE,
            ),
            Condition(
                says="|gradient| |weight| is the same at 1, 1.5, 3 and 7 times the weight, to 1e-6",
                statistic=largest(_DESCENT, "products"),
                high=1e-6,
                source="theory: the gradient of a function of degree 0 has degree -1; the loss is summed in float32",
            ),
            _exponent("by_gradient", -2.0, "a step of gradient descent"),
            _exponent("by_sign", -1.0, "a step along the gradient's signs (Adam's first)"),
            Condition(
                says="gradient descent lengthens it as w^2 + rate^2 g^2 says, to 1 % of the growth",
                statistic=largest(_DESCENT, "growth_errors"),
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
            _smoother("", "roughness", "the gradient's change over the distance", _SHALLOW),
            _smoother("", "surprise", "the gradient's relative change", _SHALLOW),
            _smoother(", deep", "roughness", "the gradient's change over the distance", _DEEP),
            _smoother(", deep", "surprise", "the gradient's relative change", _DEEP),
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
                statistic=ratio("no norm, deep", "LayerNorm, deep", "scale_spread"),
                low=10.0,
                source="12 layers whose stream doubles or halves in each differ by far more",
            ),
        ),
        ledger=("C71",),
    ),
)


def _charts(_settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    places = seeds[0]["LayerNorm"]["at"]
    return (
        Bars(
            name="gradients-loss",
            title="Held-out loss with and without derivatives of mean and variance",
            caption="Detached: LayerNorm whose backward pass takes mean and scale for constants.",
            description="The detached norm ends highest.",
            label="held-out loss (nats a byte)",
            values=arm_values(seeds, NORMS, "held_out"),
        ),
        Curves(
            name="gradients-landscape",
            title="How the gradient changes along its own direction during training",
            caption="Largest change over 0.25 to 2 % of the weights' length; small is smooth.",
            description="One line for each norm; the verdicts hold the ratios.",
            x_label="step",
            y_label="change of the gradient",
            panels=tuple(
                (title, arm_lines(seeds, list(NORMS), name, places))
                for title, name in (("over the distance", "roughness"), ("relative to the gradient", "surprise"))
            ),
            y_log=True,
        ),
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
        ),
    )


STUDY = Study(
    name="gradients",
    title="Gradients",
    question="What does a norm do to the backward pass, to steps, and to the loss along a step?",
    claims=_CLAIMS,
    quick=budget(
        seeds=3,
        layers=4,
        deep_layers=12,
        width=64,
        batch=8,
        window=64,
        steps=150,
        warmup=20,
        learning_rate=1e-3,
        turning_layers=2,
        turning_steps=60,
        turning_rate=0.3,
    ),
    full=budget(seeds=10, steps=600, turning_steps=400),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="Pre-LN models of 4 and 12 layers of width 64; peri-norm models of 2 layers for lengths of weights",
)
