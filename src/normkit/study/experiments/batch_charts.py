"""What the study `batch-vs-layer` shows, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from normkit.study.chart import Bars, Chart, Curves, Line, Marks, line
from normkit.study.experiments.batch_models import NORMS, VARIANCE_SIZES
from normkit.study.result import Paired, Settings, integer, numbers
from normkit.study.speed import descent
from normkit.study.statistics import interval

_DEPENDENCES = ("samples", "batch size", "future", "padding", "mode")
_DEPENDS = 1e-8
"""Above the rounding of float64 sums in another order, below anything that statistics of a batch would do."""

_SEQUENCE_NORMS = ("one BatchNorm", "a BatchNorm for each time", "LayerNorm", "no norm")


def charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    """Error and gap over batch sizes, recurrent nets, CNNs, the Transformer, dependences, and the batch variance."""
    return (
        _errors(settings, measured),
        _gaps(settings, measured),
        _sequences(settings, measured),
        _images(settings, measured),
        _texts(settings, measured),
        _dependences(measured),
        _variances(measured),
    )


def _errors(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    sizes = numbers(settings, "batch_sizes")
    return Curves(
        name="batch-size-error",
        title="Error of an MLP by batch size",
        caption="All arms take the same number of steps on the same batches; chance is 90 %.",
        description="BatchNorm's curve rises steeply below 16 images, the others slowly.",
        x_label="images in a batch",
        y_label="held-out error (%)",
        panels=(
            ("", tuple(line(norm, sizes, _over(measured, f"MLP: {norm}, batch", sizes, "error")) for norm in NORMS)),
        ),
        x_log=True,
    )


def _gaps(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    sizes = numbers(settings, "batch_sizes")
    return Curves(
        name="mode-gap",
        title="Loss in evaluation mode against training mode",
        caption="The same trained MLP on the same held-out images, in batches of the size it was trained with.",
        description="LayerNorm's line is zero; BatchNorm's leaves zero at small batches.",
        x_label="images in a batch",
        y_label="evaluation less training (nats)",
        panels=(
            (
                "",
                tuple(
                    line(norm, sizes, _over(measured, f"MLP: {norm}, batch", sizes, "gap"))
                    for norm in ("BatchNorm", "LayerNorm")
                ),
            ),
        ),
        x_log=True,
    )


def _sequences(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    rows = numbers(settings, "extra_rows")
    return Curves(
        name="recurrent-error",
        title="A recurrent net on sequences longer than those it was trained on",
        caption="Blank rows stand before each digit; at 0 the sequences are as long as in training.",
        description="One BatchNorm for all times starts highest.",
        x_label="blank rows more than in training",
        y_label="held-out error (%)",
        panels=(
            (
                "",
                tuple(
                    line(norm, rows, [_values(paired[f"RNN: {norm}"]["errors"]) for paired in measured.values()])
                    for norm in _SEQUENCE_NORMS
                ),
            ),
        ),
    )


def _images(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    steps = integer(settings, "image_steps")
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
                tuple(
                    _descents(norm, measured, f"CNN: {norm}, batch {int(size)}", steps)
                    for norm in ("BatchNorm", "LayerNorm", "no norm")
                ),
            )
            for size in numbers(settings, "image_batch_sizes")
        ),
    )


def _descents(label: str, measured: Mapping[int, Paired], arm: str, steps: int) -> Line:
    curves = [descent(paired[arm]["losses"], steps) for paired in measured.values()]
    return line(label, curves[0][0], [means for _, means in curves])


def _texts(settings: Settings, measured: Mapping[int, Paired]) -> Chart:
    rate = numbers(settings, "text_rates")[-1]

    def held_out(norm: str, name: str) -> tuple[float, ...]:
        return tuple(float(paired[f"Transformer: {norm}, rate {rate:g}"][name]) for paired in measured.values())

    return Bars(
        name="transformer-loss",
        title=f"BatchNorm in a Transformer, learning rate {rate:g}",
        caption="The same held-out text each time; new statistics are those of 16 batches under the final weights.",
        description="BatchNorm's bars stand close together, a little above LayerNorm's.",
        label="held-out loss (nats a byte)",
        values=(
            ("LayerNorm", held_out("LayerNorm", "held_out")),
            ("BatchNorm, evaluation", held_out("BatchNorm", "held_out")),
            ("BatchNorm, new statistics", held_out("BatchNorm", "held_out_new_statistics")),
            ("BatchNorm, training mode", held_out("BatchNorm", "held_out_training_mode")),
        ),
    )


def _dependences(measured: Mapping[int, Paired]) -> Chart:
    rows = [f"{norm}, {mode}" for norm in NORMS for mode in ("training", "evaluation")]

    def cell(row: str, name: str) -> tuple[bool | None, float]:
        middle, _, _ = interval([float(paired[f"dependence: {row}"][name]) for paired in measured.values()])
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


def _variances(measured: Mapping[int, Paired]) -> Chart:
    theory = tuple(math.sqrt(2 / (size - 1)) for size in VARIANCE_SIZES)
    scatter = [_values(paired["variance: Gaussian rows"]["scatter"]) for paired in measured.values()]
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
                    line("measured", VARIANCE_SIZES, scatter),
                    Line(label="sqrt(2 / (N - 1))", x=tuple(map(float, VARIANCE_SIZES)), y=theory),
                ),
            ),
        ),
        x_log=True,
        y_log=True,
    )


def _over(measured: Mapping[int, Paired], arm: str, sizes: Sequence[float], name: str) -> list[list[float]]:
    return [_values([paired[f"{arm} {int(size)}"][name] for size in sizes]) for paired in measured.values()]


def _values(values: Sequence[Any]) -> list[float]:
    """Numbers with NaN for None."""
    return [math.nan if value is None else float(value) for value in values]
