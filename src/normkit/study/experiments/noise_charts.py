"""What the study `noise` shows, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping

from normkit.study.chart import Chart, Curves, Line, line
from normkit.study.result import Paired, Settings, integer
from normkit.study.speed import descent

OBSERVED_RATE = 0.1
"""The learning rate at which shift and smoothness are measured."""


def nets(settings: Settings) -> tuple[str, ...]:
    """Names of what is compared: BatchNorm, with noises after it, and no norm."""
    noises = settings["noises"]
    assert isinstance(noises, tuple)
    return ("BatchNorm", *(f"noise {noise:g}" for noise in noises), "no norm")


_COURSES = (
    (
        "shift",
        "How far the statistics of layer inputs move in one step",
        "distance moved over deviation",
        "BatchNorm's curve stands lowest, those with noise far above it.",
    ),
    (
        "gradient_change",
        "How much the step of the layers before changes a layer's gradient",
        "change over its length",
        "At the start of training no norm stands highest.",
    ),
    (
        "smoothness",
        "Change of the gradient along its own direction",
        "change over the way gone",
        "At the start of training no norm stands highest.",
    ),
)


def fewest_steps(paired: Paired, net: str) -> float:
    """Steps of a net to the loss that is to be reached, at its best rate; infinite where it reaches it at none.

    Raises:
        KeyError: If the net was not run.
    """
    taken = [measured["steps_to"] for arm, measured in paired.items() if arm.startswith(f"{net}, ")]
    if not taken:
        raise KeyError(net)
    return float(min((steps for steps in taken if steps is not None), default=math.inf))


def charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    """Loss, speed by size of the noise, and what a step changes, over the course of training."""
    return (
        _losses(settings, measured),
        _speed(settings, measured),
        *(_course(settings, measured, *words) for words in _COURSES),
    )


def _losses(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    steps = integer(settings, "steps")
    rates = settings["rates"]
    assert isinstance(rates, tuple)

    def descents(net: str, rate: float) -> Line:
        curves = [descent(paired[f"{net}, rate {rate:g}"]["losses"], steps) for paired in measured.values()]
        return line(net, curves[0][0], [means for _, means in curves])

    return Curves(
        name="noise-loss",
        title="Loss with BatchNorm, with noise after it, and without a norm",
        caption="Means over steps; all nets start from the same weights, and a loss counts for the first one at most.",
        description="BatchNorm falls first at each rate above 0.03; the more noise, the later the others follow.",
        x_label="step",
        y_label="loss (nats)",
        panels=tuple(
            (
                f"learning rate {rate:g}",
                tuple(descents(net, rate) for net in nets(settings)),
            )
            for rate in rates
        ),
    )


def _speed(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    *noisy, without = nets(settings)
    noises = [0.0, *(float(net.removeprefix("noise ")) for net in noisy[1:])]
    return Curves(
        name="noise-speed",
        title="Steps to a loss by size of the noise",
        caption="Each net at its best learning rate; at 0 stands BatchNorm without noise.",
        description="The steps rise with the noise, from far below no norm's to about as many.",
        x_label="noise (deviations of the norm's output)",
        y_label="steps to the loss",
        panels=(
            (
                "",
                (
                    line(
                        "BatchNorm and noise",
                        noises,
                        [[fewest_steps(paired, net) for net in noisy] for paired in measured.values()],
                    ),
                    line(
                        without,
                        noises,
                        [[fewest_steps(paired, without)] * len(noises) for paired in measured.values()],
                    ),
                ),
            ),
        ),
    )


def _course(
    settings: Settings, measured: Mapping[int, Paired], name: str, title: str, label: str, description: str
) -> Chart:
    places = max(
        (
            list(paired[f"{net}, rate {OBSERVED_RATE:g}"]["at"])
            for paired in measured.values()
            for net in nets(settings)
        ),
        key=len,
    )

    def filled(values: list[float | None]) -> list[float]:
        numbers = [math.nan if value is None else value for value in values]
        return numbers + [math.nan] * (len(places) - len(numbers))

    return Curves(
        name=f"noise-{name.replace('_', '-')}",
        title=title,
        caption=f"Measured in training mode on the same images at every so manieth step, rate {OBSERVED_RATE:g}.",
        description=description,
        x_label="step",
        y_label=label,
        panels=(
            (
                "",
                tuple(
                    line(
                        net,
                        places,
                        [filled(paired[f"{net}, rate {OBSERVED_RATE:g}"][name]) for paired in measured.values()],
                    )
                    for net in nets(settings)
                ),
            ),
        ),
        y_log=True,
    )
