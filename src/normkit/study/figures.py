"""The charts of a study: curves with their ranges over the seeds, bars with their seeds, and tables of marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from normkit.show import theme
from normkit.show.axes import crosses, disc_or_ring, drawable, figure_of, log_axis, new_axes, panels
from normkit.show.drawing import Drawing
from normkit.show.theme import colour
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
    axes = panels(rows, columns, 0.5 + 2.7 * rows)
    labels = list(dict.fromkeys(line.label for _, lines in chart.panels for line in lines))
    heights = [value for _, lines in chart.panels for line in lines for value in (*line.y, *line.low, *line.high)]
    for place, (ax, (title, lines)) in enumerate(zip(axes, chart.panels, strict=False)):
        for line in lines:
            _draw_line(ax, line, labels.index(line.label), log=chart.y_log)
        _scale_axes(ax, [value for line in lines for value in line.x], heights, chart)
        _draw_reference(ax, chart.reference, labelled=place == 0)
        ax.set_title(title)
        ax.set_xlabel(chart.x_label)
        if place % columns == 0:
            ax.set_ylabel(chart.y_label)
        else:
            ax.tick_params(labelleft=False)
    for ax in axes[len(chart.panels) :]:
        ax.set_axis_off()
    if len(labels) > 1:
        _draw_legend(axes, labels)
    return axes[0]


def _draw_line(ax: Axes, line: Line, place: int, *, log: bool) -> None:
    shade = colour(_COLOURS[place % len(_COLOURS)])
    turn = place // len(_COLOURS) % len(_DASHES)
    marker = _MARKERS[place % len(_MARKERS)] if len(line.x) <= _MOST_MARKED else ""
    look: Any = {"marker": marker, "markersize": 4.5, "markerfacecolor": colour("paper") if turn else shade}
    heights = drawable(line.y, log=log)
    ax.plot(line.x, heights, color=shade, linestyle=_DASHES[turn], label=line.label, zorder=3, **look)
    if line.low:
        low, high = drawable(line.low, log=log), drawable(line.high, log=log)
        ax.fill_between(line.x, low, high, color=shade, alpha=0.18, linewidth=0, zorder=2)
    crosses(ax, [x for x, y in zip(line.x, line.y, strict=True) if y == math.inf])


def _scale_axes(ax: Axes, places: Sequence[float], heights: Sequence[float], chart: Curves) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if chart.x_log:
        ax.set_xscale("log")
        # The places that were measured, without those whose names would overlap.
        measured = sorted({place for place in places if place > 0})
        ticks = measured[:1]
        for tick in measured[1:]:
            if math.log(tick / ticks[-1]) >= _TICK_ROOM * math.log(measured[-1] / measured[0]):
                ticks.append(tick)
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    shown = [value for value in drawable(heights, log=chart.y_log) if not math.isnan(value)]
    if chart.y_log:
        log_axis(ax, shown)
    elif shown:
        room = 0.06 * (max(shown) - min(shown)) or 0.1 * abs(shown[0]) or 1.0
        ax.set_ylim(min(shown) - room, max(shown) + room)


def _draw_reference(ax: Axes, reference: tuple[float, str] | None, *, labelled: bool) -> None:
    if reference is None:
        return
    value, words = reference
    ax.axhline(value, color=colour("ink"), linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    low, high = ax.get_ylim()
    # The text is below the line, where no curve is.
    ax.set_ylim(bottom=min(low, value - 0.12 * (high - value)))
    if labelled:
        look: Any = {"ha": "right", "va": "top", "fontsize": 8.5, "color": colour("muted")}
        ax.annotate(words, (0.99, value), (0, -3), ("axes fraction", "data"), "offset points", **look)


def _draw_legend(axes: Sequence[Axes], labels: Sequence[str]) -> None:
    """One legend above all panels."""
    drawn = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure = figure_of(axes[0])
    columns = max(1, min(len(labels), int(_LEGEND_CHARACTERS / (max(map(len, labels)) + 7))))
    height = _LEGEND_ROW * math.ceil(len(labels) / columns) / figure.get_size_inches()[1]
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - height))
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0, 1), "bbox_transform": figure.transFigure}
    look: Any = {"ncols": columns, "borderaxespad": 0, "handlelength": 2.4, "columnspacing": 1.4}
    legend = figure.legend([drawn[label] for label in labels], labels, **place, **look)
    # The layout leaves the room above the panels free; one that it placed would move in a file with a title.
    legend.set_in_layout(False)


def _draw_bars(chart: Bars) -> Axes:
    ax = new_axes(_WIDTH, 0.9 + 0.42 * len(chart.values))
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    names = []
    for place, ((name, values), (middle, low, high)) in enumerate(zip(chart.values, chart.ranges, strict=True)):
        seeds = [value for value in values if math.isfinite(value)]
        ax.plot(seeds, [place] * len(seeds), "o", color=colour("accent"), alpha=0.45, markersize=5, markeredgewidth=0)
        if math.isfinite(middle):
            left, right = (end if math.isfinite(end) else middle for end in (low, high))
            ax.hlines(place, left, right, color=colour("accent"), linewidth=2.2)
            ax.plot(middle, place, "|", color=colour("ink"), markersize=15, markeredgewidth=2)
        missing = len(values) - len(seeds)
        names.append(f"{name} ({missing} of {len(values)} not finite)" if missing else name)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(chart.label)
    if chart.log and any(0 < value < math.inf for _, values in chart.values for value in values):
        ax.set_xscale("log")
    return ax


def _draw_marks(chart: Marks) -> Axes:
    widest = _LETTER_WIDTH * max(map(len, chart.rows), default=0) + _MARK_ROOM
    # One unit is one column; the names of rows are left of 0.
    columns = len(chart.columns) - 0.1
    left = columns * widest / (_WIDTH - widest)
    letters = int(_WIDTH / (left + columns) / _LETTER_WIDTH) - 1
    headings = [fill(name, max(letters, 1), break_long_words=False) for name in chart.columns]
    lines = max(heading.count("\n") + 1 for heading in headings)
    ax = new_axes(_WIDTH, 0.42 * (len(chart.rows) + 1) + 0.18 * lines)
    ax.set_axis_off()
    ax.set_xlim(-left, columns)
    ax.set_ylim(len(chart.rows) - 0.4, -0.65 - 0.43 * lines)
    for column, heading in enumerate(headings):
        ax.text(column, -0.65, heading, va="bottom", weight="bold", fontsize=9)
    beside = 0.08 + (left + columns) * 0.14 / _WIDTH
    for place, (name, cells) in enumerate(zip(chart.rows, chart.cells, strict=True)):
        ax.axhline(place - 0.5, color=colour("line"), linewidth=0.8)
        ax.text(-left, place, name, va="center")
        for column, (holds, number) in enumerate(cells):
            if holds is not None:
                disc_or_ring(ax, column + 0.08, place, holds=holds)
            look: Any = {"va": "center", "fontsize": 8.5, "color": colour("muted")}
            ax.text(column + beside, place, significant(number), **look)
    return ax
