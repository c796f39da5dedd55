"""Numbers over the steps of a run on one axis: peaks are kept at any length, non-finite values become crosses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normkit.measurement.training import Parameter, Series, Training
from normkit.plots.depth import log_axis, positive
from normkit.plots.theme import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Course = tuple[Sequence[int], Sequence[float]]
"""Steps and the values there."""

# Number of stretches of which the lowest and highest value are drawn: finer than a page shows.
_STRETCHES = 250
# Up to this many values each gets a marker: a line alone would say too little.
_MOST_MARKED = 30
# Above this ratio of largest to smallest, a loss is legible on a log axis only.
_LINEAR = 30.0


def thinned(course: Course, stretches: int = _STRETCHES) -> Course:
    """The lowest, the highest and the first non-finite value of each of many stretches; and both ends."""
    steps, values = course
    if len(values) <= 2 * stretches:
        return course
    kept = {0, len(values) - 1}
    for stretch in range(stretches):
        places = range(len(values) * stretch // stretches, len(values) * (stretch + 1) // stretches)
        finite = [place for place in places if math.isfinite(values[place])]
        kept |= {pick(finite, key=values.__getitem__) for pick in (min, max) if finite}
        kept |= set([place for place in places if not math.isfinite(values[place])][:1])
    ordered = sorted(kept)
    return [steps[place] for place in ordered], [values[place] for place in ordered]


def largest(series: Iterable[Series]) -> Course:
    """The largest value of several series at each step; NaN if one of them is."""
    at: dict[int, list[float]] = {}
    for each in series:
        for step, value in zip(each.steps, each.values, strict=True):
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    return steps, [math.nan if any(map(math.isnan, at[step])) else max(at[step]) for step in steps]


def worst_update(training: Training) -> Series | None:
    """The update ratios of one parameter: the origin's, else the highest at the end; biases, which begin at 0, last."""
    biases = {parameter.path for parameter in training.parameters if is_bias(parameter)}
    series = [each for each in training.of("update ratio") if each.values and each.path]
    if training.origin is not None:
        for each in series:
            if each.path == training.origin.path:
                return each
    weights = [each for each in series if each.path not in biases]
    return max(weights or series, key=lambda each: height(each.last), default=None)


def is_bias(parameter: Parameter) -> bool:
    """Whether a parameter is the bias of a layer or of a norm."""
    return parameter.kind in ("bias", "bias of a norm")


def height(value: float) -> float:
    """The value to rank by; a value that is not finite ranks highest."""
    return value if math.isfinite(value) else math.inf


def draw(ax: Axes, course: Course, *, logarithmic: bool = True) -> None:
    """Draw a line over the steps on a fitting vertical axis, with gaps and crosses at values that are not finite.

    Args:
        ax: Where to draw.
        course: What to draw.
        logarithmic: The axis is logarithmic; else it is only where the values span too much.
    """
    steps, values = thinned(course)
    finite = [value for value in values if math.isfinite(value)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > _LINEAR * min(finite)
    if finite and (wide or (logarithmic and max(finite) > 0)):
        heights = positive(values)
        log_axis(ax, finite)
    else:
        heights = [value if math.isfinite(value) else math.nan for value in values]
    few = len(steps) <= _MOST_MARKED
    ax.plot(steps, heights, color=colour("accent"), linewidth=1.4, marker="o" if few else "", markersize=3.5, zorder=3)
    crosses(ax, [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)])
    if not finite:
        ax.set_yticks([])


def crosses(ax: Axes, places: Sequence[float]) -> None:
    """Draw a cross near the upper edge at each place."""
    if places:
        ax.plot(
            places,
            [0.9] * len(places),
            transform=ax.get_xaxis_transform(),
            color=colour("error"),
            linestyle="none",
            marker="x",
            markersize=6,
            markeredgewidth=1.8,
            zorder=4,
        )


def step_axis(ax: Axes, first: int, last: int, *, named: bool = True) -> None:
    """The horizontal axis over steps `first` to `last`, whole numbers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    room = max(0.5, 0.02 * (last - first))
    ax.set_xlim(first - room, last + room)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if named:
        ax.set_xlabel("optimizer step")
    else:
        ax.tick_params(labelbottom=False)
