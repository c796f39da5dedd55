"""The figures of a watched run: what happened over its steps; and `run_drawings`, all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.errors import InputError
from normkit.inspection.result import Inspection
from normkit.measurement.training import Quantity, Training
from normkit.plots import course, theme
from normkit.plots.course import Course
from normkit.plots.depth import figure_of, shared_legend
from normkit.plots.drawing import Drawing
from normkit.plots.drift import has_drift, norm_drift
from normkit.plots.profiles import depth_profiles, has_profiles
from normkit.plots.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A run this much longer than the part near its origin gets a second column of panels for that part.
_NEAR, _LONG = 24, 120


def run_drawings(inspection: Inspection) -> tuple[Drawing, ...]:
    """Every figure for which the run holds numbers; none without a run."""
    training = inspection.training
    if training is None:
        return ()
    figures = []
    if _strands(training):
        figures.append(run_timeline)
    if has_profiles(inspection):
        figures.append(depth_profiles)
    if has_drift(training):
        figures.append(norm_drift)
    return tuple(draw(inspection) for draw in figures)


def run_timeline(inspection: Inspection) -> Drawing:
    """Loss, its z-score, gradient norm, the worst parameter's update ratio and the largest logit bound over the steps.

    Where the run began to fail and where that was noticed are marked; a long run has the steps around its origin in a
    second column.

    Raises:
        InputError: If there is no run or it holds none of these.
    """
    training = inspection.training
    strands = _strands(training) if training else []
    if training is None or not strands:
        raise InputError("the timeline needs a run that was watched; this inspection has none")
    steps = [step for _, (steps, _), _ in strands for step in steps]
    spans = [(min(steps), max(steps))]
    if training.origin is not None and spans[0][1] - spans[0][0] > _LONG:
        began = training.origin.step
        noticed = max(began, training.reason_step) if training.was_noticed else began
        spans.append((max(spans[0][0], began - _NEAR), min(spans[0][1], noticed + _NEAR)))
    with theme.style():
        panels = theme.panels(len(strands), len(spans), 0.7 + 1.45 * len(strands))
        for place, ax in enumerate(panels):
            row, column = divmod(place, len(spans))
            name, strand, logarithmic = strands[row]
            first, last = spans[column]
            course.draw(ax, _between(strand, first, last), logarithmic=logarithmic)
            _marks(ax, training, first, last)
            course.step_axis(ax, first, last, named=row == len(strands) - 1)
            if column == 0:
                ax.set_ylabel(name)
        shared_legend(panels[0])
        if len(spans) > 1:
            panels[1].set_title("the steps around the origin", color=colour("muted"), weight="normal")
        figure = figure_of(panels[0])
        figure.align_ylabels(panels[:: len(spans)])
    return Drawing(
        name="run-timeline",
        figure=figure,
        title="What happened, step by step",
        caption="What moves first is nearer to the cause than what moves most. A cross is a number that was NaN or "
        "infinite.",
        description=_described(training),
    )


def _strands(training: Training) -> list[tuple[str, Course, bool]]:
    """Name, course and kind of axis of each panel; without panels of one step or without a finite number."""
    worst = course.worst_update(training)
    strands: list[tuple[str, Course, bool]] = [
        ("loss", course.largest(training.of("loss")), False),
        ("z of the loss", course.largest(training.of("loss z")), False),
        ("gradient norm", course.largest(training.of("gradient norm")), True),
        ("update ratio,\nworst parameter", (worst.steps, worst.values) if worst else ((), ()), True),
        ("logit bound,\nlargest", course.largest(training.of("logit bound")), True),
    ]
    steps = {step for _, (steps, _), _ in strands for step in steps}
    finite = any(math.isfinite(value) for _, (_, values), _ in strands for value in values)
    if len(steps) < 2 or not finite:
        return []
    return [strand for strand in strands if strand[1][0]]


def _between(strand: Course, first: int, last: int) -> Course:
    pairs = [(step, value) for step, value in zip(*strand, strict=True) if first <= step <= last]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _marks(ax: Axes, training: Training, first: int, last: int) -> None:
    """Draw vertical lines where the trouble began and where it was noticed."""
    origin, noticed = training.origin, training.reason_step
    marks: list[tuple[int, str, str, tuple[float, ...]]] = []
    if origin is not None and not training.was_noticed:
        marks = [(origin.step, f"began: step {origin.step:,}", "error", (4, 2))]
    elif origin is not None and origin.step == noticed:
        marks = [(noticed, f"began and noticed: step {noticed:,}", "error", (4, 2))]
    elif origin is not None:
        marks = [
            (origin.step, f"began: step {origin.step:,}", "error", (4, 2)),
            (noticed, f"noticed: step {noticed:,}", "ink", (1, 1.5)),
        ]
    for step, label, name, dash in marks:
        if first <= step <= last:
            ax.axvline(step, color=colour(name), linestyle=(0, dash), linewidth=1.2, label=label, zorder=2)


def _described(training: Training) -> str:
    sentences = []
    named: tuple[tuple[Quantity, str], ...] = (
        ("loss", "The loss"),
        ("loss z", "Its z-score"),
        ("gradient norm", "The gradient norm"),
    )
    for quantity, name in named:
        steps, values = course.largest(training.of(quantity))
        if steps:
            sentences.append(f"{name} {_from_to(steps, values)}.")
    worst = course.worst_update(training)
    if worst is not None:
        sentences.append(f"The update ratio of {worst.path} {_from_to(worst.steps, worst.values)}.")
    bounds, heights = course.largest(training.of("logit bound"))
    if bounds:
        sentences.append(f"The largest logit bound {_from_to(bounds, heights)}.")
    if training.origin is not None:
        noticed = f" and was noticed at step {training.reason_step:,}" if training.was_noticed else ""
        sentences.append(f"It began at step {training.origin.step:,}{noticed}.")
    return " ".join(sentences)


def _from_to(steps: Sequence[int], values: Sequence[float]) -> str:
    if len(steps) == 1:
        return f"is {significant(values[0])} at step {steps[0]:,}"
    span = f"goes from {significant(values[0])} at step {steps[0]:,} to {significant(values[-1])} at step {steps[-1]:,}"
    finite = [value for value in values if math.isfinite(value)]
    top = max(finite, default=math.nan)
    if finite and top > max(values[0], values[-1]):
        span += f", with a peak of {significant(top)} at step {steps[values.index(top)]:,}"
    return span
