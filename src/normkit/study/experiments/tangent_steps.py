"""`tangent-steps`: whether steps that keep the length of weights explain what a norm does to training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from normkit import specs
from normkit.geometry import InvariantGroup, TangentOptimizer
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, swept_lines
from normkit.study.digits import digit_batches, digit_loss, digits
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.small_nets import MLP, MLPConfig
from normkit.study.statistics import Measurement, Paired, sensitivity
from normkit.study.training_run import Batch

NETS = ("LayerNorm", "LayerNorm, tangent", "no norm", "no norm, tangent")
_AT_RATE = "{}, rate {:g}"
_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_BARE_NORM = specs.TORCH_LAYER_NORM.replace(has_weight=False, has_bias=False)
_PROBED_RATE = 0.1
_LAST = 20
"""Steps at the end of a run whose mean loss is compared."""
_MOST_SURPRISE = 10.0


class Reader(MLP):
    """A perceptron that takes images (batch, 8, 8); its output layer is not trained, so that all rates are of spheres.

    The norm has no gain and no bias: behind it, everything that is trained is free of scale.
    """

    def __init__(self, config: MLPConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self.output.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 10)."""
        return super().forward(x.flatten(1))


def _arms(settings: Settings) -> tuple[Arm, ...]:
    return tuple(
        Arm(name=_AT_RATE.format(net, rate), choices={"net": net, "rate": rate})
        for net in NETS
        for rate in settings["rates"]
    )


def spheres(model: nn.Module, paths: Iterable[str]) -> tuple[InvariantGroup, ...]:
    """One group for each linear layer: its matrix and bias, whose common scale a norm behind it ignores."""
    found = []
    for path in paths:
        named = [(f"{path}.{name}", weight) for name, weight in model.get_submodule(path).named_parameters()]
        names, weights = zip(*named, strict=True)
        found.append(InvariantGroup(paths=names, parameters=weights, kind="matrix", error=0.0, control=1.0))
    return tuple(found)


def hidden(model: MLP) -> list[str]:
    """The paths of the linear layers but the last."""
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][:-1]


def surprise(model: MLP, batch: Batch, rate: float, *, is_tangent: bool) -> float:
    """How far the loss after a step is from what the gradient predicts, over what it predicts; at most 10.

    |L' - L - g . d| / |g . d| for the step d that the optimizer makes on this batch: 0 on a plane, 1 where the loss
    does not fall at all.
    """
    twin = copy.deepcopy(model)
    optimizer: Optimizer = SGD(twin.parameters(), lr=rate)
    if is_tangent:
        optimizer = TangentOptimizer(optimizer, spheres(twin, hidden(twin)))
    loss = digit_loss(twin, batch)
    torch.autograd.backward(loss)
    start = [weight.detach().clone() for weight in twin.parameters()]
    optimizer.step()
    with torch.no_grad():
        parts = [
            (weight.grad * (weight - was)).sum()
            for weight, was in zip(twin.parameters(), start, strict=True)
            if weight.grad is not None
        ]
        predicted = float(torch.stack(parts).sum())
        error = abs(float(digit_loss(twin, batch)) - loss.item() - predicted)
    found = error / abs(predicted) if predicted else math.nan
    return min(found, _MOST_SURPRISE) if math.isfinite(found) else _MOST_SURPRISE


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    net, rate = arm.choices["net"], arm.choices["rate"]
    is_tangent = net.endswith("tangent")
    norm = _BARE_NORM if net.startswith("LayerNorm") else None
    model = Reader(MLPConfig(width=context["width"], layers=context["layers"], norm=norm), seed=context.seed)
    context.move(model)
    data = digits()
    probe = tuple(part.to(context.device) for part in next(digit_batches(data, batch=256, seed=context.seed + 1)))
    probe = (probe[0].to(next(model.parameters()).dtype), probe[1])
    paths, steps = hidden(model), context["steps"]
    lengths = [group_length(group) for group in spheres(model, paths)]

    def observe(model: nn.Module, step: int) -> Mapping[str, Any]:
        if rate != _PROBED_RATE or step % (steps // 10) != 1 or not isinstance(model, MLP):
            return {}
        return {"surprise": surprise(model, probe, rate, is_tangent=is_tangent)}

    def wrap(optimizer: Optimizer) -> Optimizer:
        return TangentOptimizer(optimizer, spheres(model, paths)) if is_tangent else optimizer

    recipe = context.recipe(learning_rate=rate, optimizer="sgd", clip=None, final_rate=1.0)
    batches = digit_batches(data, batch=context["batch"], seed=context.seed)
    run = context.train(model, recipe, batches, digit_loss, observe=observe, wrap=wrap)
    grown = [group_length(group) / was for group, was in zip(spheres(model, paths), lengths, strict=True)]
    surprises = run.observed("surprise")
    return run.measurement(
        last=run.mean_of_last(_LAST),
        growth=math.prod(grown) ** (1 / len(grown)),
        surprise=mean(surprises) if surprises else None,
    )


def group_length(group: InvariantGroup) -> float:
    """The length of all parameters of a group together."""
    return float(torch.stack([weight.detach().norm() for weight in group.parameters]).norm())


def _surprise(paired: Paired, net: str) -> float:
    return math.log(float(paired[_AT_RATE.format(net, _PROBED_RATE)]["surprise"]))


def _share(paired: Paired, measure: Any) -> float:
    """The share of the way from no norm to LayerNorm that tangent steps without a norm go."""
    bare, tangent, norm = (measure(paired, net) for net in ("no norm", "no norm, tangent", "LayerNorm"))
    return float((bare - tangent) / (bare - norm))


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Curves(
            name="tangent-steps",
            title="Loss at the end, and growth of the weights, over the learning rate",
            caption=f"Mean of the last {_LAST} steps; a run that diverged counts as its first loss. Tangent steps keep "
            "the length of each hidden layer's weights.",
            description="With and without LayerNorm, each with plain and with tangent steps of gradient descent.",
            x_label="learning rate",
            y_label="loss (nats)",
            panels=(("", swept_lines(seeds, NETS, _AT_RATE, "last", settings["rates"])),),
            x_log=True,
        ),
        Curves(
            name="tangent-growth",
            title="Growth of the hidden weights",
            caption="Length at the end over length at the start, geometric mean over layers.",
            description="Under plain steps behind LayerNorm weights grow with the rate; under tangent steps they stay.",
            x_label="learning rate",
            y_label="growth",
            panels=(("", swept_lines(seeds, NETS, _AT_RATE, "growth", settings["rates"])),),
            x_log=True,
            y_log=True,
        ),
    )


STUDY = Study(
    name="tangent-steps",
    title="Steps along the sphere",
    question="Is it the projection of steps that makes training with LayerNorm smoother, or the weights that may grow?",
    claims=(
        Claim(
            says="A norm projects gradients onto a tangent space, and that explains smoother optimization and less "
            "sensitivity to scale",
            source="repeated in introductions to LayerNorm; the projection by itself is AdamP's, Heo et al. 2020, "
            "arXiv:2006.08217",
            control=Condition(
                says="LayerNorm is less sensitive to the rate than no norm: the mean loss above the best, over all "
                "rates, is at least 0.1 nats lower",
                statistic=lambda paired: sensitivity(paired, "no norm") - sensitivity(paired, "LayerNorm"),
                low=0.1,
                source="several times the difference of two seeds, as in the study of learning rates",
            ),
            conditions=(
                Condition(
                    says="without a norm, tangent steps alone go at least half of the way from no norm to LayerNorm in "
                    "that sensitivity",
                    statistic=partial(_share, measure=sensitivity),
                    low=0.5,
                    source="what explains an effect brings most of it about",
                ),
                Condition(
                    says=f"and at least half of the way in how far the gradient mispredicts a step at rate "
                    f"{_PROBED_RATE:g} (logarithms)",
                    statistic=partial(_share, measure=_surprise),
                    low=0.5,
                    source="what explains an effect brings most of it about",
                ),
            ),
        ),
        Claim(
            says="Behind a norm weights tune their own rate: one that is too high makes them grow, and falls",
            source="Arora, Li and Lyu 2018, arXiv:1812.03981, of BatchNorm",
            control=Condition(
                says="at the highest rate the hidden weights behind LayerNorm grow at least twofold under plain steps",
                statistic=lambda paired: float(paired[_AT_RATE.format("LayerNorm", _RATES[-1])]["growth"]),
                low=2.0,
                source="a fourfold fall of the effective rate",
            ),
            conditions=(
                Condition(
                    says="kept on their spheres, nets with LayerNorm are more sensitive to the rate: the mean loss "
                    "above the best is at least 0.05 nats higher",
                    statistic=lambda paired: (
                        sensitivity(paired, "LayerNorm, tangent") - sensitivity(paired, "LayerNorm")
                    ),
                    low=0.05,
                    source="half of the smallest effect of a norm that the first claim asks for",
                ),
            ),
        ),
    ),
    quick=budget(seeds=3, width=64, layers=4, batch=64, steps=150, rates=_RATES),
    full=budget(steps=1500, width=256),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="handwritten digits of scikit-learn, 8 by 8 pixels",
    regime="a perceptron of four hidden layers of width 64 with ReLU and an output layer that is not trained, 150 "
    "steps of SGD at a constant rate, batches of 64",
    needs=("sklearn",),
)
