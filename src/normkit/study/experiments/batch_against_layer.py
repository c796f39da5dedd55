"""`batch-vs-layer`: statistics over the batch against statistics over single samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from normkit.study.arm_context import ArmContext, Settings, integer, numbers
from normkit.study.chart import Bars, Chart, Curves, Line, Marks, arm_lines, line
from normkit.study.experiments import batch_models
from normkit.study.experiments.batch_claims import CLAIMS
from normkit.study.result import Arm, Study
from normkit.study.statistics import Measurement, Paired, block_means, filled, interval

_DEPENDENCES = ("samples", "batch size", "future", "padding", "mode")
_DEPENDS = 1e-8
"""Above the rounding of float64 sums in another order, below anything that statistics of a batch would do."""

_MEASURES: dict[str, Callable[[ArmContext, Arm], Measurement]] = {
    "MLP": batch_models.perceptron,
    "CNN": batch_models.convolutional,
    "RNN": batch_models.recurrent,
    "Transformer": batch_models.transformer,
    "dependence": batch_models.dependence,
    "variance": batch_models.variance,
}


def _arms(settings: Settings) -> tuple[Arm, ...]:
    perceptrons = [
        _arm("MLP", f"{norm}, batch {size}", norm=norm, batch=size)
        for norm in batch_models.NORMS
        for size in numbers(settings, "batch_sizes")
    ]
    images = [
        _arm("CNN", f"{norm}, batch {size}", norm=norm, batch=size)
        for norm in ("BatchNorm", "LayerNorm", "no norm")
        for size in numbers(settings, "image_batch_sizes")
    ]
    sequences = [
        _arm("RNN", words, cost=4.0, norm=norm, own_statistics=own)
        for words, norm, own in (
            ("one BatchNorm", "BatchNorm", False),
            ("a BatchNorm for each time", "BatchNorm", True),
            ("LayerNorm", "LayerNorm", False),
            ("no norm", "no norm", False),
        )
    ]
    texts = [
        _arm("Transformer", f"{norm}, rate {rate:g}", cost=6.0, norm=norm, rate=rate)
        for norm in ("BatchNorm", "LayerNorm")
        for rate in numbers(settings, "text_rates")
    ]
    dependences = [
        _arm("dependence", f"{norm}, {mode}", cost=0.3, norm=norm, training=mode == "training")
        for norm in batch_models.NORMS
        for mode in ("training", "evaluation")
    ]
    return (*perceptrons, *images, *sequences, *texts, *dependences, _arm("variance", "Gaussian rows", cost=0.1))


def _arm(kind: str, words: str, cost: float = 1.0, **choices: object) -> Arm:
    return Arm(name=f"{kind}: {words}", choices={"kind": kind, **choices}, cost=cost)


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    return _MEASURES[arm.choices["kind"]](context, arm)


def _charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    seeds = list(measured.values())
    return (
        *_over_batch_sizes(settings, seeds),
        _sequences(settings, seeds),
        _images(settings, seeds),
        _texts(settings, seeds),
        _dependences(seeds),
        _variances(seeds),
    )


def _over_batch_sizes(settings: Settings, seeds: list[Paired]) -> tuple[Chart, Chart]:
    sizes = numbers(settings, "batch_sizes")

    def over(norms: Iterable[str], name: str) -> tuple[Line, ...]:
        return tuple(
            line(
                norm,
                sizes,
                [
                    filled([paired[f"MLP: {norm}, batch {int(size)}"][name] for size in sizes], math.nan)
                    for paired in seeds
                ],
            )
            for norm in norms
        )

    return (
        Curves(
            name="batch-size-error",
            title="Error of an MLP by batch size",
            caption="All arms take the same number of steps on the same batches; chance is 90 %.",
            description="BatchNorm's curve rises steeply below 16 images, the others slowly.",
            x_label="images in a batch",
            y_label="held-out error (%)",
            panels=(("", over(batch_models.NORMS, "error")),),
            x_log=True,
        ),
        Curves(
            name="mode-gap",
            title="Loss in evaluation mode against training mode",
            caption="The same trained MLP on the same held-out images, in batches of the size it was trained with.",
            description="LayerNorm's line is zero; BatchNorm's leaves zero at small batches.",
            x_label="images in a batch",
            y_label="evaluation less training (nats)",
            panels=(("", over(("BatchNorm", "LayerNorm"), "gap")),),
            x_log=True,
        ),
    )


def _sequences(settings: Settings, seeds: list[Paired]) -> Chart:
    norms = {norm: f"RNN: {norm}" for norm in ("one BatchNorm", "a BatchNorm for each time", "LayerNorm", "no norm")}
    return Curves(
        name="recurrent-error",
        title="A recurrent net on sequences longer than those it was trained on",
        caption="Blank rows precede each digit; at 0 the sequences are as long as in training.",
        description="One BatchNorm for all times starts highest.",
        x_label="blank rows more than in training",
        y_label="held-out error (%)",
        panels=(("", arm_lines(seeds, norms, "errors", numbers(settings, "extra_rows"))),),
    )


def _images(settings: Settings, seeds: list[Paired]) -> Chart:
    steps = integer(settings, "image_steps")

    def means(norm: str, size: int) -> Line:
        curves = [block_means(paired[f"CNN: {norm}, batch {size}"]["losses"], steps) for paired in seeds]
        return line(norm, curves[0][0], [means for _, means in curves])

    return Curves(
        name="cnn-loss",
        title="A small CNN with each norm",
        caption="Loss of the training batches, means over steps; LayerNorm is over all of an image.",
        description="With 32 images BatchNorm and LayerNorm fall together and faster than no norm.",
        x_label="step",
        y_label="loss (nats)",
        panels=tuple(
            (
                f"{int(size)} images in a batch",
                tuple(means(norm, int(size)) for norm in ("BatchNorm", "LayerNorm", "no norm")),
            )
            for size in numbers(settings, "image_batch_sizes")
        ),
    )


def _texts(settings: Settings, seeds: list[Paired]) -> Chart:
    rate = numbers(settings, "text_rates")[-1]

    def held_out(norm: str, name: str) -> tuple[float, ...]:
        return tuple(float(paired[f"Transformer: {norm}, rate {rate:g}"][name]) for paired in seeds)

    return Bars(
        name="transformer-loss",
        title=f"BatchNorm in a Transformer, learning rate {rate:g}",
        caption="The same held-out text each time; new statistics are those of 16 batches under the final weights.",
        description="BatchNorm's bars are close together, a little above LayerNorm's.",
        label="held-out loss (nats a byte)",
        values=(
            ("LayerNorm", held_out("LayerNorm", "held_out")),
            ("BatchNorm, evaluation", held_out("BatchNorm", "held_out")),
            ("BatchNorm, new statistics", held_out("BatchNorm", "held_out_new_statistics")),
            ("BatchNorm, training mode", held_out("BatchNorm", "held_out_training_mode")),
        ),
    )


def _dependences(seeds: list[Paired]) -> Chart:
    rows = [f"{norm}, {mode}" for norm in batch_models.NORMS for mode in ("training", "evaluation")]

    def cell(row: str, name: str) -> tuple[bool | None, float]:
        middle, _, _ = interval([float(paired[f"dependence: {row}"][name]) for paired in seeds])
        return (None if math.isnan(middle) else middle > _DEPENDS), middle

    return Marks(
        name="dependence",
        title="What a causal Transformer's output depends on beside its own past",
        caption="Yes where it does, with the number that says how much; the last column compares the two modes.",
        description="Only the rows of BatchNorm hold a yes: all columns in training, the modes' in evaluation.",
        rows=tuple(rows),
        columns=("other samples", "batch size", "later tokens", "padding", "mode"),
        cells=tuple(tuple(cell(row, name) for name in _DEPENDENCES) for row in rows),
    )


def _variances(seeds: list[Paired]) -> Chart:
    theory = tuple(math.sqrt(2 / (size - 1)) for size in batch_models.VARIANCE_SIZES)
    (measured,) = arm_lines(seeds, {"measured": "variance: Gaussian rows"}, "scatter", batch_models.VARIANCE_SIZES)
    return Curves(
        name="batch-variance",
        title="How far the variance of a batch scatters",
        caption="Standard deviation of the variance of N independent Gaussian rows over its mean.",
        description="Measured points on the line of theory, from 1.4 at 2 rows to 0.13 at 128.",
        x_label="rows in a batch",
        y_label="relative deviation",
        panels=(
            (
                "",
                (
                    measured,
                    Line(label="sqrt(2 / (N - 1))", x=tuple(map(float, batch_models.VARIANCE_SIZES)), y=theory),
                ),
            ),
        ),
        x_log=True,
        y_log=True,
    )


STUDY = Study(
    name="batch-vs-layer",
    title="BatchNorm against LayerNorm",
    question="Where do statistics over the batch fail where those of single samples serve, and where not?",
    claims=CLAIMS,
    quick={
        "seeds": 3,
        "width": 64,
        "layers": 3,
        "steps": 600,
        "learning_rate": 1e-3,
        "batch_sizes": (1, 2, 4, 16, 64, 256),
        "channels": 16,
        "image_steps": 500,
        "image_rate": 1e-3,
        "image_batch_sizes": (2, 32),
        "sequence_steps": 600,
        "sequence_rate": 3e-3,
        "sequence_batch": 32,
        "extra_rows": (0, 1, 2, 4, 8),
        "text_layers": 4,
        "text_steps": 250,
        "text_rates": (1e-3, 3e-3),
        "text_batch": 8,
        "window": 64,
    },
    full={"seeds": 8, "steps": 3000, "image_steps": 2000, "sequence_steps": 2000, "text_steps": 1000},
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="scikit-learn's digits, the last 450 of 1,797 held out; bytes of Python's standard library",
    regime="nets of width 64 or 16 to 64 channels, a few hundred steps of AdamW, images of 8 x 8 pixels; the same rate "
    "for all norms of a kind of net; BatchNorm with a momentum of 0.1. At 1 row a batch BatchNorm cannot be trained",
    needs=("sklearn",),
)
