"""The figure of the norms over a run: the drift of all norms, and the norm that drifts most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from normkit.errors import InputError
from normkit.inspection.result import Inspection
from normkit.measurement.training import Quantity, Series, Training
from normkit.plots import course, theme
from normkit.plots.depth import figure_of, log_axis, shared_legend
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import rounded_percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Quantity -> the name of its panel, and whether its axis is logarithmic.
_PANELS: dict[Quantity, tuple[str, bool]] = {
    "gain mean": ("mean of the gain", False),
    "input rms": ("input rms", True),
    "eps share": ("rows that eps cuts, %", False),
    "kurtosis": ("kurtosis of the input", True),
    "headroom": ("headroom, bits", False),
    "bias rms": ("rms of the bias", False),
}


def has_drift(training: Training) -> bool:
    """Whether some norm was measured more than once."""
    return bool(_measured(training))


def norm_drift(inspection: Inspection) -> Drawing:
    """The quantities of all norms over the steps, one panel each: a band, its median, and the norm that moved most.

    Gain, input rms, eps share, kurtosis, headroom and bias.

    Raises:
        InputError: If no norm was measured twice in a run.
    """
    measured = _measured(inspection.training) if inspection.training else {}
    if not measured:
        raise InputError("drift needs a run in which norms were measured more than once; this inspection has none")
    rows = math.ceil(len(measured) / 2)
    columns = min(2, len(measured))
    with theme.style():
        panels = theme.panels(rows, columns, 0.5 + 2.1 * rows)
        for ax, (quantity, series) in zip(panels, measured.items(), strict=False):
            _panel(ax, quantity, series)
        for ax in panels[len(measured) :]:
            ax.remove()
        shared_legend(panels[0])
    told = []
    for quantity, series in measured.items():
        mover, word = _mover(quantity, series), rounded_percent if quantity == "eps share" else significant
        name, _, _ = _PANELS[quantity][0].partition(",")
        told.append(f"{name} at {mover.path}, {word(mover.values[0])} to {word(mover.last)}")
    return Drawing(
        name="run-drift",
        figure=figure_of(panels[0]),
        title="How the norms drift",
        caption="A band over all norms, and the one that moved most: what one does and the others do not is local.",
        description=f"The largest movers: {'; '.join(told)}.",
    )


def _measured(training: Training) -> dict[Quantity, list[Series]]:
    """Quantity -> the series with at least two finite values that are not all 0."""
    found = {}
    for quantity in _PANELS:
        series = [each for each in training.of(quantity) if sum(map(math.isfinite, each.values)) > 1]
        if any(value for each in series for value in each.values):
            found[quantity] = series
    return found


def _panel(ax: Axes, quantity: Quantity, series: Sequence[Series]) -> None:
    name, logarithmic = _PANELS[quantity]
    scale = 100.0 if quantity == "eps share" else 1.0
    at: dict[int, list[float]] = {}
    for each in series:
        for step, value in zip(each.steps, each.values, strict=True):
            if math.isfinite(value):
                at.setdefault(step, []).append(scale * value)
    steps, _ = course.thinned((sorted(at), [max(at[step]) for step in sorted(at)]))
    low, middle, high = ([pick(at[step]) for step in steps] for pick in (min, median, max))
    if logarithmic and min(low) > 0:
        log_axis(ax, [*low, *high])
    else:
        ax.ticklabel_format(axis="y", useOffset=False)
    if len(series) > 1:
        ax.fill_between(steps, low, high, color=colour("line"), linewidth=0, label="all norms")
        ax.plot(steps, middle, color=colour("muted"), linewidth=1.2, label="their median")
    most = _mover(quantity, series)
    shown = [scale * value if math.isfinite(value) else math.nan for value in most.values]
    # It may have been measured at fewer steps than the band.
    ax.plot(*course.thinned((most.steps, shown)), color=colour("accent"), label="moved most")
    course.crosses(ax, [step for step, value in zip(most.steps, most.values, strict=True) if not math.isfinite(value)])
    course.step_axis(ax, min(steps[0], most.steps[0]), max(steps[-1], most.steps[-1]))
    ax.set_ylabel(name)


def _mover(quantity: Quantity, series: Sequence[Series]) -> Series:
    """The series with the largest change from first to last value, in octaves if its axis is logarithmic."""

    def way(each: Series) -> float:
        first, last = each.values[0], each.last
        if not (math.isfinite(first) and math.isfinite(last)):
            return math.inf
        if _PANELS[quantity][1] and first > 0 and last > 0:
            return abs(math.log2(last / first))
        return abs(last - first)

    return max(series, key=way)
