"""`noise`: does BatchNorm help because the inputs of layers shift less? Shift them on purpose, and see."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from statistics import fmean

from torch import nn

from normkit.study.digits import SIDE, digit_batches, digit_loss, digit_score, digits
from normkit.study.experiments.noise_charts import OBSERVED_RATE, charts, fewest_steps, nets
from normkit.study.experiments.shift import NoisyBatchNorm, observer
from normkit.study.laboratory import Laboratory
from normkit.study.loop import Recipe
from normkit.study.norms import BatchNorm, NormLayer
from normkit.study.perceptron import MLP, MLPConfig
from normkit.study.result import Arm, Claim, Condition, Measurement, Paired, Settings, Study
from normkit.study.speed import steps_to

_REACHED_LOSS = 0.5


def _arms(settings: Settings) -> tuple[Arm, ...]:
    rates = settings["rates"]
    assert isinstance(rates, tuple)
    return tuple(
        Arm(name=f"{net}, rate {rate:g}", choices={"net": net, "rate": rate}, cost=2 if rate == OBSERVED_RATE else 1)
        for net in nets(settings)
        for rate in sorted({*rates, OBSERVED_RATE})
    )


def _measure(lab: Laboratory, arm: Arm) -> Measurement:
    config = MLPConfig(
        inputs=SIDE * SIDE,
        width=lab.integer("width"),
        layers=lab.integer("layers"),
        norm=_norm(arm.choices["net"], lab.seed),
    )
    model = nn.Sequential(nn.Flatten(), MLP(config, seed=lab.seed))
    data = digits()
    rate = arm.choices["rate"]
    recipe = Recipe(steps=lab.integer("steps"), learning_rate=rate, final_rate=1.0, optimizer="sgd", clip=None)
    watched = (data.training[: lab.integer("probe")], data.training_labels[: lab.integer("probe")])
    run = lab.train(
        model,
        recipe,
        digit_batches(data, batch=lab.integer("batch"), seed=lab.seed),
        digit_loss,
        observe=observer(watched, digit_loss, rate=rate, every=lab.integer("every")) if rate == OBSERVED_RATE else None,
    )
    return {
        "losses": run.losses,
        "steps_to": steps_to(run.losses, _REACHED_LOSS),
        "error": digit_score(copy.deepcopy(model).eval(), data.held_out, data.held_out_labels).error,
        "training_mode_error": digit_score(
            copy.deepcopy(model).train(), data.held_out, data.held_out_labels, batch=lab.integer("batch")
        ).error,
        "at": run.observed("at"),
        "loss_at": run.observed("loss"),
        "shift": run.observed("shift"),
        "gradient_change": run.observed("gradient_change"),
        "smoothness": run.observed("smoothness"),
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


def _norm(net: str, seed: int) -> NormLayer:
    layers = itertools.count()

    def noisy(width: int) -> nn.Module:
        return NoisyBatchNorm(width, noise=_size(net), seed=(seed, next(layers)))

    named: dict[str, NormLayer] = {"BatchNorm": BatchNorm, "no norm": None}
    return named.get(net, noisy)


def _mean(paired: Paired, net: str, name: str) -> float:
    """A measure's mean over the observed steps at which the net's loss is above the one to reach."""
    measured = paired[f"{net}, rate {OBSERVED_RATE:g}"]
    values = [
        value
        for value, loss in zip(measured[name], measured["loss_at"], strict=True)
        if value is not None and loss is not None and loss > _REACHED_LOSS
    ]
    return fmean(values) if values else math.nan


def _times(name: str, first: str, second: str) -> Callable[[Paired], float]:
    """How many times the second net's mean of a measure the first one has."""
    return lambda paired: _mean(paired, first, name) / _mean(paired, second, name)


def sufficient_noise(paired: Paired) -> str:
    """The net with the least noise that makes layer inputs shift at least as far as they do without a norm.

    Raises:
        KeyError: If no noise does.
    """
    bound = _mean(paired, "no norm", "shift")
    noises = sorted({arm.split(", ")[0] for arm in paired if arm.startswith("noise ")}, key=_size)
    enough = [net for net in noises if _mean(paired, net, "shift") >= bound]
    if not enough:
        raise KeyError("no noise is large enough")
    return enough[0]


def _size(net: str) -> float:
    return float(net.removeprefix("noise "))


_BEST = "steps to a training loss of 0.5, each at the best of the rates"
_WHILE = (
    "means over the steps at which the loss is above 0.5, so that nets are compared at like losses; at a rate of 0.1"
)


_NOISES: tuple[tuple[str, Callable[[Paired], str]], ...] = (
    ("of half a deviation", lambda _paired: "noise 0.5"),
    ("just large enough to shift inputs as far as no norm does", sufficient_noise),
)


def _faster(words: str, noise: Callable[[Paired], str]) -> Condition:
    return Condition(
        says=f"noise {words}: no norm takes at least 1.2 times the steps of BatchNorm with noise",
        statistic=lambda paired: fewest_steps(paired, "no norm") / fewest_steps(paired, noise(paired)),
        low=1.2,
        published="noisy BatchNorm trains faster than no norm",
        regime=f"the noise is {words}",
        source=f"{_BEST}; a fifth more steps is above what the choice of batches does",
    )


def _as_fast(words: str, noise: Callable[[Paired], str]) -> Condition:
    return Condition(
        says=f"noise {words}: BatchNorm takes at most 1.5 times the steps that it takes without noise",
        statistic=lambda paired: fewest_steps(paired, noise(paired)) / fewest_steps(paired, "BatchNorm"),
        high=1.5,
        published="almost no difference",
        regime=f"the noise is {words}",
        source=f"{_BEST}; half as many again is already more than almost none",
    )


def _mode_gap(paired: Paired) -> float:
    measured = paired["noise 0.5, rate 0.1"]
    return float(measured["error"] - measured["training_mode_error"])


_REDUCES = Claim(
    says="BatchNorm reduces internal covariate shift",
    source="Ioffe & Szegedy 2015, arXiv:1502.03167, abstract; against it Santurkar et al. 2018, arXiv:1805.11604",
    conditions=(
        Condition(
            says="in a step the statistics of layer inputs move at most 0.8 times as far as without a norm",
            statistic=_times("shift", "BatchNorm", "no norm"),
            high=0.8,
            regime="the shift is that of the means and deviations of layer inputs",
            source=_WHILE,
        ),
        Condition(
            says="the step of the layers before changes a layer's gradient at most 0.8 times as much as without a norm",
            statistic=_times("gradient_change", "BatchNorm", "no norm"),
            high=0.8,
            published="as much or more (Santurkar et al., figure 3)",
            regime="the shift is that of a layer's gradient as the layers before it move",
            source=_WHILE,
        ),
    ),
    ledger=("C74",),
)

_NOT_WHY = Claim(
    says="That is not why it helps: with noise under which inputs shift more than without a norm, it still helps",
    source="Santurkar et al. 2018, arXiv:1805.11604, section 2.1 and figure 2",
    conditions=(
        *(_faster(*noise) for noise in _NOISES),
        Condition(
            says="inputs shift with noise 0.5 so many times as far as with BatchNorm alone",
            statistic=_times("shift", "noise 0.5", "BatchNorm"),
            judged=False,
        ),
        Condition(
            says="the least noise with which they shift as far as without a norm",
            statistic=lambda paired: _size(sufficient_noise(paired)),
            judged=False,
        ),
    ),
    ledger=("C74",),
)

_HARMLESS = Claim(
    says="With that noise it trains as fast as without",
    source="Santurkar et al. 2018, arXiv:1805.11604, section 2.1 and figure 2",
    conditions=(
        *(_as_fast(*noise) for noise in _NOISES),
        Condition(
            says="with noise 0.5 the net errs so many points more in evaluation than in training mode",
            statistic=_mode_gap,
            judged=False,
        ),
    ),
    ledger=("C74",),
)

_SMOOTHER = Claim(
    says="BatchNorm makes gradients change less along a step",
    source="Santurkar et al. 2018, arXiv:1805.11604, section 3 and figure 4",
    conditions=(
        Condition(
            says="without a norm the gradient changes at least as much for the way gone, at the same rate",
            statistic=_times("smoothness", "no norm", "BatchNorm"),
            low=1.0,
            published="more, throughout the training (VGG on CIFAR-10)",
            source=_WHILE,
        ),
    ),
    ledger=("C74", "C71"),
)


STUDY = Study(
    name="noise",
    title="Covariate shift on purpose",
    question="Does BatchNorm help because the inputs of layers shift less from step to step?",
    claims=(_REDUCES, _NOT_WHY, _HARMLESS, _SMOOTHER),
    quick={
        "seeds": 3,
        "layers": 8,
        "width": 64,
        "batch": 64,
        "steps": 200,
        "rates": (0.03, 0.1, 0.3, 1.0),
        "noises": (0.5, 1.0, 1.5, 2.0),
        "probe": 256,
        "every": 10,
    },
    full={"seeds": 8, "steps": 600, "rates": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)},
    arms=_arms,
    measure=_measure,
    charts=charts,
    data="scikit-learn's digits, the last 450 of 1,797 held out",
    regime="an MLP of 8 layers of width 64 with ReLU and He's initial weights, gradient descent without momentum on "
    "batches of 64, training loss; noise is the same for all samples of a step",
    needs=("sklearn",),
)
