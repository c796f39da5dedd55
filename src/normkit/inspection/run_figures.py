"""The figures of a watched run, over its steps and over depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from normkit.errors import InputError
from normkit.measurement.training import Quantity, Series, Training
from normkit.show import theme
from normkit.show.axes import (
    DASHED,
    DOTTED,
    crosses,
    drawable,
    figure_of,
    log_axis,
    marker_size,
    panels,
    shared_legend,
    step_axis,
)
from normkit.show.drawing import Drawing
from normkit.show.theme import colour
from normkit.text import rounded_percent, significant, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from normkit.inspection.result import Inspection

Course = tuple[Sequence[int], Sequence[float]]
"""Steps and the values there."""

Profile = tuple[Mapping[int, float], Mapping[int, float]]
"""Block -> value, at the first report and at the last."""

# A run this much longer than the part near its origin gets a second column of panels for that part.
_NEAR, _LONG = 24, 120
# Number of stretches of which the lowest and highest value are drawn: finer than a page shows.
_STRETCHES = 250
# Up to this many values each gets a marker: a line alone would say too little.
_MOST_MARKED = 30
# Above this ratio of largest to smallest, a loss is legible on a log axis only.
_LINEAR = 30.0
_BY_BLOCK: tuple[tuple[Quantity, str], ...] = (
    ("activation gradient", "rms of the gradient"),
    ("stream rms", "rms of the stream"),
)
# Quantity of a norm -> the name of its panel, and whether its axis is logarithmic.
_BY_NORM: dict[Quantity, tuple[str, bool]] = {
    "gain mean": ("mean of the gain", False),
    "input rms": ("input rms", True),
    "eps share": ("rows that eps cuts, %", False),
    "kurtosis": ("kurtosis of the input", True),
    "headroom": ("headroom, bits", False),
    "bias rms": ("rms of the bias", False),
}


def run_drawings(inspection: Inspection) -> tuple[Drawing, ...]:
    """Every figure for which the run holds numbers; none without a run."""
    training = inspection.training
    if training is None:
        return ()
    figures = []
    if _courses(training):
        figures.append(run_timeline)
    if _profiles(inspection):
        figures.append(depth_profiles)
    if _measured_twice(training):
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
    courses = _courses(training) if training else []
    if training is None or not courses:
        raise InputError("the timeline needs a run that was watched; this inspection has none")
    every_step = [step for _, (steps, _), _ in courses for step in steps]
    spans = [(min(every_step), max(every_step))]
    if training.origin is not None and spans[0][1] - spans[0][0] > _LONG:
        began = training.origin.step
        noticed = max(began, training.reason_step) if training.was_noticed else began
        spans.append((max(spans[0][0], began - _NEAR), min(spans[0][1], noticed + _NEAR)))
    with theme.style():
        axes = panels(len(courses), len(spans), 0.7 + 1.45 * len(courses))
        for place, ax in enumerate(axes):
            row, column = divmod(place, len(spans))
            name, (steps, values), logarithmic = courses[row]
            first, last = spans[column]
            near = [place for place, step in enumerate(steps) if first <= step <= last]
            draw_course(ax, ([steps[k] for k in near], [values[k] for k in near]), logarithmic=logarithmic)
            _mark_trouble(ax, training, first, last)
            step_axis(ax, first, last, "optimizer step" if row == len(courses) - 1 else None)
            if column == 0:
                ax.set_ylabel(name)
        shared_legend(axes[0])
        if len(spans) > 1:
            axes[1].set_title("the steps around the origin", color=colour("muted"), weight="normal")
        figure = figure_of(axes[0])
        figure.align_ylabels(axes[:: len(spans)])
    return Drawing(
        name="run-timeline",
        figure=figure,
        title="What happened, step by step",
        caption="What moves first is nearer to the cause than what moves most. A cross is a number that was NaN or "
        "infinite.",
        description=_described(training),
    )


def _courses(training: Training) -> list[tuple[str, Course, bool]]:
    """Name, course and kind of axis of each panel; without panels of one step or without a finite number."""
    worst = training.worst_update
    courses: list[tuple[str, Course, bool]] = [
        ("loss", training.largest("loss"), False),
        ("z of the loss", training.largest("loss z"), False),
        ("gradient norm", training.largest("gradient norm"), True),
        ("update ratio,\nworst parameter", (worst.steps, worst.values) if worst else ((), ()), True),
        ("logit bound,\nlargest", training.largest("logit bound"), True),
    ]
    steps = {step for _, (steps, _), _ in courses for step in steps}
    finite = any(math.isfinite(value) for _, (_, values), _ in courses for value in values)
    if len(steps) < 2 or not finite:
        return []
    return [course for course in courses if course[1][0]]


def _mark_trouble(ax: Axes, training: Training, first: int, last: int) -> None:
    """Draw vertical lines where the trouble began and where it was noticed."""
    origin, noticed = training.origin, training.reason_step
    if origin is None:
        return
    marks = [(origin.step, f"began: step {origin.step:,}", "error", DASHED)]
    if training.was_noticed and origin.step == noticed:
        marks = [(noticed, f"began and noticed: step {noticed:,}", "error", DASHED)]
    elif training.was_noticed:
        marks.append((noticed, f"noticed: step {noticed:,}", "ink", DOTTED))
    for step, label, name, dash in marks:
        if first <= step <= last:
            ax.axvline(step, color=colour(name), linestyle=dash, linewidth=1.2, label=label, zorder=2)


def _described(training: Training) -> str:
    sentences = []
    named: tuple[tuple[Quantity, str], ...] = (
        ("loss", "The loss"),
        ("loss z", "Its z-score"),
        ("gradient norm", "The gradient norm"),
    )
    for quantity, name in named:
        steps, values = training.largest(quantity)
        if steps:
            sentences.append(f"{name} {_from_to(steps, values)}.")
    worst = training.worst_update
    if worst is not None:
        sentences.append(f"The update ratio of {worst.path} {_from_to(worst.steps, worst.values)}.")
    steps, values = training.largest("logit bound")
    if steps:
        sentences.append(f"The largest logit bound {_from_to(steps, values)}.")
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


def draw_course(ax: Axes, course: Course, *, logarithmic: bool = True) -> None:
    """Draw a line over the steps on a fitting vertical axis, with gaps and crosses at values that are not finite.

    Unless `logarithmic`, the axis is so only where the values span too much.
    """
    steps, values = thinned(course)
    finite = [value for value in values if math.isfinite(value)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > _LINEAR * min(finite)
    log = bool(finite) and (wide or (logarithmic and max(finite) > 0))
    if log:
        log_axis(ax, finite)
    marker = "o" if len(steps) <= _MOST_MARKED else ""
    heights = drawable(values, log=log)
    ax.plot(steps, heights, color=colour("accent"), linewidth=1.4, marker=marker, markersize=3.5, zorder=3)
    crosses(ax, [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)])
    if not finite:
        ax.set_yticks([])


def thinned(course: Course) -> Course:
    """The lowest, the highest and the first non-finite value of each of many stretches; and both ends."""
    steps, values = course
    if len(values) <= 2 * _STRETCHES:
        return course
    kept = {0, len(values) - 1}
    for stretch in range(_STRETCHES):
        places = range(len(values) * stretch // _STRETCHES, len(values) * (stretch + 1) // _STRETCHES)
        finite = [place for place in places if math.isfinite(values[place])]
        kept |= {pick(finite, key=values.__getitem__) for pick in (min, max) if finite}
        kept |= set([place for place in places if not math.isfinite(values[place])][:1])
    ordered = sorted(kept)
    return [steps[place] for place in ordered], [values[place] for place in ordered]


def depth_profiles(inspection: Inspection) -> Drawing:
    """Gradient, residual stream and largest update ratio by block, one panel each, first report and last.

    Raises:
        InputError: If no block was measured in a run.
    """
    profiles, training = _profiles(inspection), inspection.training
    if not profiles or training is None:
        raise InputError("profiles over depth need a run that was watched in blocks; this inspection has none")
    measured = [step for quantity, _ in _BY_BLOCK for each in training.of(quantity) for step in each.steps]
    begin, end = (min(measured), max(measured)) if measured else (0, max(0, training.steps - 1))
    with theme.style():
        axes = panels(1, len(profiles), 3.0)
        for ax, (name, (first, last)) in zip(axes, profiles.items(), strict=True):
            before: Any = {"color": colour("muted"), "linestyle": DASHED, "markerfacecolor": colour("paper")}
            after: Any = {"color": colour("accent")}
            shown = ((first, begin, before), (last, end, after)) if end > begin else ((last, end, after),)
            for values, step, look in shown:
                places = sorted(values)
                heights = drawable((values[place] for place in places), log=True)
                size = 0.8 * marker_size(len(places))
                ax.plot(places, heights, marker="o", markersize=size, label=f"step {step:,}", **look)
            crosses(ax, [block for block, value in last.items() if not math.isfinite(value)])
            log_axis(ax, [*first.values(), *last.values()])
            ax.set_ylabel(name)
            step_axis(ax, min(last), max(last), "block")
        shared_legend(axes[0])
    told = []
    for name, (first, last) in profiles.items():
        at_first = f"{spread(first.values())} at first, " if end > begin else ""
        told.append(f"{name}: {at_first}{spread(last.values())} at last")
    return Drawing(
        name="run-depth",
        figure=figure_of(axes[0]),
        title="Gradients, stream and updates over depth",
        caption="Level lines train all blocks alike; a slope that steepens over the run ends in blocks that move too "
        "much or not at all.",
        description=f"Over the blocks, {'; '.join(told)}.",
    )


def _profiles(inspection: Inspection) -> dict[str, Profile]:
    """Name of each panel -> its values; panels without a positive value are left out."""
    training = inspection.training
    if training is None:
        return {}
    blocks = {block.path: block.index for block in inspection.blocks}
    profiles: dict[str, Profile] = {}
    for quantity, name in _BY_BLOCK:
        measured = {blocks[each.path]: each for each in training.of(quantity) if each.path in blocks and each.values}
        if any(0 < value < math.inf for each in measured.values() for value in (each.values[0], each.last)):
            at_first = {block: each.values[0] for block, each in measured.items()}
            profiles[name] = at_first, {block: each.last for block, each in measured.items()}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for parameter in training.parameters:
        if parameter.block is not None and parameter.kind == "weight" and not math.isnan(parameter.update_ratio):
            for at, value in ((first, parameter.first_update_ratio), (last, parameter.update_ratio)):
                at[parameter.block] = max(at.get(parameter.block, 0.0), value)
    if any(0 < value < math.inf for value in last.values()):
        profiles["largest update ratio"] = (first, last)
    return profiles


def norm_drift(inspection: Inspection) -> Drawing:
    """The quantities of all norms over the steps, one panel each: a band, its median, and the norm that moved most.

    Gain, input rms, eps share, kurtosis, headroom and bias.

    Raises:
        InputError: If no norm was measured twice in a run.
    """
    measured = _measured_twice(inspection.training) if inspection.training else {}
    if not measured:
        raise InputError("drift needs a run in which norms were measured more than once; this inspection has none")
    rows = math.ceil(len(measured) / 2)
    moved_most = {quantity: _moved_most(quantity, series) for quantity, series in measured.items()}
    with theme.style():
        axes = panels(rows, min(2, len(measured)), 0.5 + 2.1 * rows)
        for ax, (quantity, series) in zip(axes, measured.items(), strict=False):
            _draw_norms(ax, quantity, series, moved_most[quantity])
        for ax in axes[len(measured) :]:
            ax.remove()
        shared_legend(axes[0])
    told = []
    for quantity, most in moved_most.items():
        word = rounded_percent if quantity == "eps share" else significant
        name, _, _ = _BY_NORM[quantity][0].partition(",")
        told.append(f"{name} at {most.path}, {word(most.values[0])} to {word(most.last)}")
    return Drawing(
        name="run-drift",
        figure=figure_of(axes[0]),
        title="How the norms drift",
        caption="A band over all norms, and the one that moved most: what one does and the others do not is local.",
        description=f"The largest movers: {'; '.join(told)}.",
    )


def _measured_twice(training: Training) -> dict[Quantity, list[Series]]:
    """Quantity -> the series with at least two finite values that are not all 0."""
    found = {}
    for quantity in _BY_NORM:
        series = [each for each in training.of(quantity) if sum(map(math.isfinite, each.values)) > 1]
        if any(value for each in series for value in each.values):
            found[quantity] = series
    return found


def _moved_most(quantity: Quantity, series: Sequence[Series]) -> Series:
    """The series with the largest change from first to last value, in octaves if its axis is logarithmic."""

    def way(each: Series) -> float:
        first, last = each.values[0], each.last
        if not (math.isfinite(first) and math.isfinite(last)):
            return math.inf
        if _BY_NORM[quantity][1] and first > 0 and last > 0:
            return abs(math.log2(last / first))
        return abs(last - first)

    return max(series, key=way)


def _draw_norms(ax: Axes, quantity: Quantity, series: Sequence[Series], most: Series) -> None:
    name, logarithmic = _BY_NORM[quantity]
    scale = 100.0 if quantity == "eps share" else 1.0
    at: dict[int, list[float]] = {}
    for each in series:
        for step, value in each.pairs():
            if math.isfinite(value):
                at.setdefault(step, []).append(scale * value)
    steps, _ = thinned((sorted(at), [max(at[step]) for step in sorted(at)]))
    low, middle, high = ([pick(at[step]) for step in steps] for pick in (min, median, max))
    if logarithmic and min(low) > 0:
        log_axis(ax, [*low, *high])
    else:
        ax.ticklabel_format(axis="y", useOffset=False)
    if len(series) > 1:
        ax.fill_between(steps, low, high, color=colour("line"), linewidth=0, label="all norms")
        ax.plot(steps, middle, color=colour("muted"), linewidth=1.2, label="their median")
    shown = drawable((scale * value for value in most.values), log=False)
    # It may have been measured at fewer steps than the band.
    ax.plot(*thinned((most.steps, shown)), color=colour("accent"), label="moved most")
    crosses(ax, [step for step, value in most.pairs() if not math.isfinite(value)])
    step_axis(ax, min(steps[0], most.steps[0]), max(steps[-1], most.steps[-1]))
    ax.set_ylabel(name)
