"""The charts of a study: curves with their intervals, bars with their seeds, and tables of marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from normkit.plots import theme
from normkit.plots.course import crosses
from normkit.plots.depth import figure_of, log_axis
from normkit.plots.drawing import Drawing
from normkit.plots.invariance import mark
from normkit.plots.theme import colour
from normkit.study.chart import Bars, Chart, Curves, Line, Marks
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("accent", "contrast", "third", "muted")
_DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.6)))
_MARKERS = "osD^"
# Up to this many places get a marker each.
_MOST_MARKED = 12
_MOST_COLUMNS = 3
# Inches of one row of a legend, and characters that the widest row holds.
_LEGEND_ROW, _LEGEND_CHARACTERS = 0.24, 84
# In inches: width of a figure, of a letter of a name in it, and distance of a row's name.
_WIDTH, _LETTER_WIDTH, _MARK_ROOM = 7.2, 0.083, 0.15
# Share of a log axis that the name of a tick needs.
_TICK_ROOM = 0.1


def study_drawing(chart: Chart) -> Drawing:
    """One chart of a study as a figure.

    Args:
        chart: Curves, bars or marks.
    """
    with theme.style():
        if isinstance(chart, Curves):
            ax = _draw_curves(chart)
        elif isinstance(chart, Bars):
            ax = _draw_bars(chart)
        else:
            ax = _draw_marks(chart)
        return Drawing(
            name=chart.name,
            figure=figure_of(ax),
            title=chart.title,
            caption=chart.caption,
            description=chart.description,
        )


def _draw_curves(chart: Curves) -> Axes:
    columns = min(len(chart.panels), _MOST_COLUMNS)
    rows = math.ceil(len(chart.panels) / columns)
    axes = theme.panels(rows, columns, 0.5 + 2.7 * rows)
    labels = list(dict.fromkeys(line.label for _, lines in chart.panels for line in lines))
    heights = [value for _, lines in chart.panels for line in lines for value in (*line.y, *line.low, *line.high)]
    for place, (ax, (title, lines)) in enumerate(zip(axes, chart.panels, strict=False)):
        for line in lines:
            _draw_line(ax, line, labels.index(line.label), log=chart.y_log)
        _horizontal(ax, [value for line in lines for value in line.x], log=chart.x_log)
        _vertical(ax, heights, log=chart.y_log)
        _reference(ax, chart.reference, labelled=place == 0)
        ax.set_title(title)
        ax.set_xlabel(chart.x_label)
        if place % columns == 0:
            ax.set_ylabel(chart.y_label)
        else:
            ax.tick_params(labelleft=False)
    for ax in axes[len(chart.panels) :]:
        ax.set_axis_off()
    _legend_of_all(axes, labels)
    return axes[0]


def _draw_line(ax: Axes, line: Line, place: int, *, log: bool) -> None:
    shade = colour(_COLOURS[place % len(_COLOURS)])
    marker = _MARKERS[place % len(_MARKERS)] if len(line.x) <= _MOST_MARKED else ""
    shown = [_drawable(value, log=log) for value in line.y]
    turn = place // len(_COLOURS) % len(_DASHES)
    face = colour("paper") if turn else shade
    ax.plot(
        line.x,
        shown,
        color=shade,
        linestyle=_DASHES[turn],
        marker=marker,
        markersize=4.5,
        markerfacecolor=face,
        label=line.label,
        zorder=3,
    )
    if line.low:
        low, high = ([_drawable(value, log=log) for value in edge] for edge in (line.low, line.high))
        ax.fill_between(line.x, low, high, color=shade, alpha=0.18, linewidth=0, zorder=2)
    crosses(ax, [x for x, y in zip(line.x, line.y, strict=True) if y == math.inf])


def _drawable(value: float, *, log: bool) -> float:
    """The value, or a gap if the axis cannot show it."""
    return value if math.isfinite(value) and (value > 0 or not log) else math.nan


def _horizontal(ax: Axes, places: Sequence[float], *, log: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not log:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        return
    ax.set_xscale("log")
    ticks = _far_apart(sorted({place for place in places if place > 0}))
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _far_apart(ticks: list[float]) -> list[float]:
    """The ticks, from ascending ones on a log axis, whose names do not overlap."""
    kept = ticks[:1]
    for tick in ticks[1:]:
        if math.log(tick / kept[-1]) >= _TICK_ROOM * math.log(ticks[-1] / ticks[0]):
            kept.append(tick)
    return kept


def _vertical(ax: Axes, heights: Sequence[float], *, log: bool) -> None:
    finite = [value for value in heights if math.isfinite(value) and (value > 0 or not log)]
    if log:
        log_axis(ax, finite)
    elif finite:
        room = 0.06 * (max(finite) - min(finite)) or 0.1 * abs(finite[0]) or 1.0
        ax.set_ylim(min(finite) - room, max(finite) + room)


def _reference(ax: Axes, reference: tuple[float, str] | None, *, labelled: bool) -> None:
    if reference is None:
        return
    value, words = reference
    ax.axhline(value, color=colour("ink"), linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    low, high = ax.get_ylim()
    # The text is below the line, where no curve is.
    ax.set_ylim(bottom=min(low, value - 0.12 * (high - value)))
    if labelled:
        ax.annotate(
            words,
            (0.99, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8.5,
            color=colour("muted"),
        )


def _legend_of_all(axes: Sequence[Axes], labels: Sequence[str]) -> None:
    """One legend above all panels; none if there is a single line."""
    if len(labels) < 2:
        return
    drawn = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure = figure_of(axes[0])
    columns = max(1, min(len(labels), int(_LEGEND_CHARACTERS / (max(map(len, labels)) + 7))))
    height = _LEGEND_ROW * math.ceil(len(labels) / columns) / figure.get_size_inches()[1]
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - height))
    legend = figure.legend(
        [drawn[label] for label in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        bbox_transform=figure.transFigure,
        ncols=columns,
        borderaxespad=0,
        handlelength=2.4,
        columnspacing=1.4,
    )
    # The layout leaves the room above the panels free; one that it placed would move in a file with a title.
    legend.set_in_layout(False)


def _draw_bars(chart: Bars) -> Axes:
    from normkit.study.statistics import interval

    ax = theme.new_axes(7.2, 0.9 + 0.42 * len(chart.values))
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    for place, (_, values) in enumerate(chart.values):
        middle, low, high = interval(values)
        seeds = [value for value in values if math.isfinite(value)]
        ax.plot(seeds, [place] * len(seeds), "o", color=colour("accent"), alpha=0.45, markersize=5, markeredgewidth=0)
        if math.isfinite(middle):
            left, right = (end if math.isfinite(end) else middle for end in (low, high))
            ax.hlines(place, left, right, color=colour("accent"), linewidth=2.2)
            ax.plot(middle, place, "|", color=colour("ink"), markersize=15, markeredgewidth=2)
    ax.set_yticks(range(len(chart.values)), [_bar_name(name, values) for name, values in chart.values])
    ax.set_ylim(len(chart.values) - 0.4, -0.6)
    ax.set_xlabel(chart.label)
    positive = [value for _, values in chart.values for value in values if 0 < value < math.inf]
    if chart.log and positive:
        ax.set_xscale("log")
    return ax


def _bar_name(name: str, values: Sequence[float]) -> str:
    """The name, and how many seeds gave no number that can be drawn."""
    missing = sum(not math.isfinite(value) for value in values)
    return f"{name} ({missing} of {len(values)} not finite)" if missing else name


def _draw_marks(chart: Marks) -> Axes:
    widest = _LETTER_WIDTH * max(map(len, chart.rows), default=0) + _MARK_ROOM
    # One unit is one column; the names of rows are left of 0.
    columns = len(chart.columns) - 0.1
    left = columns * widest / (_WIDTH - widest)
    letters = int(_WIDTH / (left + columns) / _LETTER_WIDTH) - 1
    headings = [fill(name, max(letters, 1), break_long_words=False) for name in chart.columns]
    lines = max(heading.count("\n") + 1 for heading in headings)
    ax = theme.new_axes(_WIDTH, 0.42 * (len(chart.rows) + 1) + 0.18 * lines)
    ax.set_axis_off()
    ax.set_xlim(-left, columns)
    ax.set_ylim(len(chart.rows) - 0.4, -0.65 - 0.43 * lines)
    for column, heading in enumerate(headings):
        ax.text(column, -0.65, heading, va="bottom", weight="bold", fontsize=9)
    for place, (name, cells) in enumerate(zip(chart.rows, chart.cells, strict=True)):
        ax.axhline(place - 0.5, color=colour("line"), linewidth=0.8)
        ax.text(-left, place, name, va="center")
        for column, (holds, number) in enumerate(cells):
            if holds is not None:
                mark(ax, column + 0.08, place, is_invariant=holds)
            beside = 0.08 + (left + columns) * 0.14 / _WIDTH
            ax.text(column + beside, place, significant(number), va="center", fontsize=8.5, color=colour("muted"))
    return ax
