"""`noise`: whether BatchNorm helps because the inputs of layers shift less: shift them on purpose, and train."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from statistics import fmean

from torch import nn

from normkit import specs
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, line, loss_line
from normkit.study.digits import SIDE, digit_batches, digit_loss, digit_score, digits
from normkit.study.model_parts import BatchNorm, NoisyBatchNorm, NormLayer
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.small_nets import MLP, MLPConfig, step_changes
from normkit.study.statistics import Measurement, Paired, Statistic, filled, gap, over_rates, padded, steps_to

OBSERVED_RATE = 0.1
"""The learning rate at which shift and smoothness are measured."""

_REACHED_LOSS = 0.5


def nets(settings: Settings) -> tuple[str, ...]:
    """Names of the nets that are compared: BatchNorm, with noises after it, and no norm."""
    return ("BatchNorm", *(f"noise {noise:g}" for noise in settings["noises"]), "LayerNorm", "no norm")


def _arms(settings: Settings) -> tuple[Arm, ...]:
    return tuple(
        Arm(name=f"{net}, rate {rate:g}", choices={"net": net, "rate": rate}, cost=2 if rate == OBSERVED_RATE else 1)
        for net in nets(settings)
        for rate in sorted({*settings["rates"], OBSERVED_RATE})
    )


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    net, rate, layer_numbers = arm.choices["net"], arm.choices["rate"], itertools.count()

    def noisy(width: int) -> nn.Module:
        return NoisyBatchNorm(width, noise=_size(net), seed=(context.seed, next(layer_numbers)))

    norms: Mapping[str, NormLayer] = {"BatchNorm": BatchNorm, "LayerNorm": specs.TORCH_LAYER_NORM, "no norm": None}
    config = MLPConfig(inputs=SIDE * SIDE, width=context["width"], layers=context["layers"], norm=norms.get(net, noisy))
    model = nn.Sequential(nn.Flatten(), MLP(config, seed=context.seed))
    data, batch, count = digits(), context["batch"], context["probe"]

    def observe(model: nn.Module, step: int) -> Mapping[str, float]:
        """The changes by a step on always the same images, at step 1 and after every so many steps."""
        if rate != OBSERVED_RATE or (step - 1) % context["every"]:
            return {}
        weight = next(model.parameters())
        images, labels = data.training[:count].to(weight), data.training_labels[:count].to(weight.device)
        return {"at": step, **step_changes(model, (images, labels), digit_loss, rate)}

    recipe = context.recipe(learning_rate=rate, final_rate=1.0, optimizer="sgd", clip=None)
    batches = digit_batches(data, batch=batch, seed=context.seed)
    run = context.train(model, recipe, batches, digit_loss, observe=observe)
    held_out = (data.held_out, data.held_out_labels)
    return run.measurement(
        steps_to=steps_to(run.losses, _REACHED_LOSS),
        error=digit_score(copy.deepcopy(model).eval(), *held_out).error,
        training_mode_error=digit_score(copy.deepcopy(model).train(), *held_out, batch=batch).error,
        at=run.observed("at"),
        loss_at=run.observed("loss"),
        shift=run.observed("shift"),
        gradient_change=run.observed("gradient_change"),
        smoothness=run.observed("smoothness"),
    )


def _mean(paired: Paired, net: str, name: str) -> float:
    """The mean of a measure over the observed steps at which the net's loss is above the one to reach."""
    measured = paired[f"{net}, rate {OBSERVED_RATE:g}"]
    values = [
        value
        for value, loss in zip(measured[name], measured["loss_at"], strict=True)
        if value is not None and loss is not None and loss > _REACHED_LOSS
    ]
    return fmean(values) if values else math.nan


def _times(name: str, first: str, second: str) -> Statistic:
    """The ratio of a measure's means: the first net over the second."""
    return lambda paired: _mean(paired, first, name) / _mean(paired, second, name)


def fewest_steps(paired: Paired, net: str) -> float:
    """Steps of a net to the loss to reach, at its best rate; infinite if it reaches it at no rate.

    Raises:
        KeyError: If the net was not run.
    """
    taken = [measured["steps_to"] for measured in over_rates(paired, net)]
    if not taken:
        raise KeyError(net)
    return float(min((steps for steps in taken if steps is not None), default=math.inf))


def _steps(first: Callable[[Paired], str], second: Callable[[Paired], str]) -> Statistic:
    """The fewest steps of one net over those of another; the nets may follow from what was measured."""
    return lambda paired: fewest_steps(paired, first(paired)) / fewest_steps(paired, second(paired))


def sufficient_noise(paired: Paired) -> str:
    """The net with the least noise under which layer inputs shift at least as far as without a norm.

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


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    steps = settings["steps"]
    *noisy, _, without = nets(settings)
    noises = [0.0, *(_size(net) for net in noisy[1:])]

    def course(name: str, title: str, label: str, description: str) -> Chart:
        """A measure over the steps of training; a run that ended early leaves gaps."""
        arms = {net: f"{net}, rate {OBSERVED_RATE:g}" for net in nets(settings)}
        places = max((list(paired[arm]["at"]) for paired in seeds for arm in arms.values()), key=len)
        lines = tuple(
            line(net, places, [filled(padded(paired[arm][name], len(places)), math.nan) for paired in seeds])
            for net, arm in arms.items()
        )
        return Curves(
            name=f"noise-{name.replace('_', '-')}",
            title=title,
            caption=f"Measured in training mode on the same images, every few steps, at rate {OBSERVED_RATE:g}.",
            description=description,
            x_label="step",
            y_label=label,
            panels=(("", lines),),
            y_log=True,
        )

    return (
        Curves(
            name="noise-loss",
            title="Loss with BatchNorm, with noise after it, and without a norm",
            caption="Means over steps; all nets start from the same weights, and a loss counts for the first one at "
            "most.",
            description="BatchNorm falls first at each rate above 0.03; the more noise, the later the others follow.",
            x_label="step",
            y_label="loss (nats)",
            panels=tuple(
                (
                    f"learning rate {rate:g}",
                    tuple(loss_line(net, f"{net}, rate {rate:g}", seeds, steps) for net in nets(settings)),
                )
                for rate in settings["rates"]
            ),
        ),
        Curves(
            name="noise-speed",
            title="Steps to a loss by size of the noise",
            caption="Each net at its best learning rate; 0 is BatchNorm without noise.",
            description="The steps rise with the noise, from far below those without a norm to about as many.",
            x_label="noise (deviations of the norm's output)",
            y_label="steps to the loss",
            panels=(
                (
                    "",
                    (
                        line(
                            "BatchNorm and noise",
                            noises,
                            [[fewest_steps(paired, net) for net in noisy] for paired in seeds],
                        ),
                        line(without, noises, [[fewest_steps(paired, without)] * len(noises) for paired in seeds]),
                    ),
                ),
            ),
        ),
        course(
            "shift",
            "How far the statistics of layer inputs move in one step",
            "distance moved over deviation",
            "BatchNorm's curve is lowest, those with noise are far above it.",
        ),
        course(
            "gradient_change",
            "How much the step of the layers before changes a layer's gradient",
            "change over its length",
            "At the start of training the curve without a norm is highest.",
        ),
        course(
            "smoothness",
            "Change of the gradient along its own direction",
            "change over the way gone",
            "At the start of training the curve without a norm is highest.",
        ),
    )


STUDY = Study(
    name="noise",
    title="Covariate shift on purpose",
    question="Does BatchNorm help because the inputs of layers shift less from step to step?",
    claims=(
        *(
            Claim(
                says=f"{norm} reduces internal covariate shift",
                source=source,
                conditions=(
                    Condition(
                        says="in a step the statistics of layer inputs move at most 0.8 times as far as without a norm",
                        statistic=_times("shift", norm, "no norm"),
                        high=0.8,
                        regime="the shift is that of the means and deviations of layer inputs",
                        source=_WHILE,
                    ),
                    Condition(
                        says="the step of the layers before changes a layer's gradient at most 0.8 times as much as "
                        "without a norm",
                        statistic=_times("gradient_change", norm, "no norm"),
                        high=0.8,
                        published="as much or more (Santurkar et al., figure 3)",
                        regime="the shift is that of a layer's gradient as the layers before it move",
                        source=_WHILE,
                    ),
                ),
                ledger=("C74",),
            )
            for norm, source in (
                (
                    "BatchNorm",
                    "Ioffe & Szegedy 2015, arXiv:1502.03167; Santurkar et al. 2018 disagree",
                ),
                ("LayerNorm", "repeated of LayerNorm in many introductions"),
            )
        ),
        Claim(
            says="That is not why it helps: with noise under which inputs shift more than without a norm, it still "
            "helps",
            source="Santurkar et al. 2018, arXiv:1805.11604, section 2.1 and figure 2",
            conditions=(
                *(
                    Condition(
                        says=f"noise {words}: no norm takes at least 1.2 times the steps of BatchNorm with noise",
                        statistic=_steps(lambda _: "no norm", noise),
                        low=1.2,
                        published="noisy BatchNorm trains faster than no norm",
                        regime=f"the noise is {words}",
                        source=f"{_BEST}; a fifth more steps is above what the choice of batches does",
                    )
                    for words, noise in _NOISES
                ),
                Condition(
                    says="the shift of inputs with noise 0.5 over the shift with BatchNorm alone",
                    statistic=_times("shift", "noise 0.5", "BatchNorm"),
                ),
                Condition(
                    says="the least noise with which inputs shift as far as without a norm",
                    statistic=lambda paired: _size(sufficient_noise(paired)),
                ),
            ),
            ledger=("C74",),
        ),
        Claim(
            says="With that noise it trains as fast as without",
            source="Santurkar et al. 2018, arXiv:1805.11604, section 2.1 and figure 2",
            conditions=(
                *(
                    Condition(
                        says=f"noise {words}: BatchNorm takes at most 1.5 times the steps that it takes without noise",
                        statistic=_steps(noise, lambda _: "BatchNorm"),
                        high=1.5,
                        published="almost no difference",
                        regime=f"the noise is {words}",
                        source=f"{_BEST}; half as many again is already more than almost none",
                    )
                    for words, noise in _NOISES
                ),
                Condition(
                    says="with noise 0.5: the error in evaluation minus the error in training mode, in points",
                    statistic=gap("noise 0.5, rate 0.1", "error", "training_mode_error"),
                ),
            ),
            ledger=("C74",),
        ),
        Claim(
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
        ),
    ),
    quick=budget(
        seeds=3,
        layers=8,
        width=64,
        batch=64,
        steps=200,
        rates=(0.03, 0.1, 0.3, 1.0),
        noises=(0.5, 1.0, 1.5, 2.0),
        probe=256,
        every=10,
    ),
    full=budget(seeds=10, steps=600, rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="scikit-learn's digits, the last 450 of 1,797 held out",
    regime="an MLP of 8 layers of width 64 with ReLU and He's initial weights, gradient descent without momentum on "
    "batches of 64, training loss; noise is the same for all samples of a step",
    needs=("sklearn",),
)
