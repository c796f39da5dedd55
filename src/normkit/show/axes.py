"""The axes of figures: new ones, log axes, the axes over depth and over steps, legends, marks.

Draw under `theme.style`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from normkit.errors import InputError
from normkit.show.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dash = tuple[float, tuple[float, float]]

DASHED: Dash = (0, (4, 2))
DOTTED: Dash = (0, (1, 1.5))
"""Styles of lines: of a reference, and of a limit."""

_MOST_LABELS = 14
_MOST_SHADED = 40


def new_axes(width: float = 7.2, height: float = 3.5) -> Axes:
    """Axes alone in a new figure, of a size in inches."""
    return panels(1, 1, height, width)[0]


def panels(
    rows: int, columns: int, height: float, width: float = 7.2, given: Sequence[Axes] | None = None
) -> list[Axes]:
    """Axes in rows and columns of a new figure, of a size in inches, or those given.

    Raises:
        InputError: If too few or too many are given.
    """
    from matplotlib.figure import Figure

    if given is not None:
        if len(given) != rows * columns:
            raise InputError(f"this figure needs {rows * columns} axes, got {len(given)}; give one a panel")
        return list(given)
    figure = Figure(figsize=(width, height), layout="constrained")
    return list(figure.subplots(rows, columns, squeeze=False).flat)


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to.

    Raises:
        InputError: If they belong to none.
    """
    figure = ax.get_figure(root=True)
    if figure is None:
        raise InputError("the axes belong to no figure; take axes from a Figure")
    return figure


def block_axis(
    ax: Axes, blocks: Sequence[int | None], what: str, outside: Sequence[str] = (), stacks: Sequence[str] = ()
) -> None:
    """Name places 0, 1, 2, ... by their blocks, shade every other block and label the horizontal axis.

    Args:
        ax: Where to draw.
        blocks: The block of each place, or None outside the blocks.
        what: What is at each place, in the plural.
        outside: A name for each place, used where its block is None.
        stacks: The name of the stack of each block, where there are several: each is counted from 0, above its name.
    """
    ax.set_xlim(-0.75, len(blocks) - 0.25)
    ax.grid(visible=False, axis="x")
    if all(block is None for block in blocks):
        step = _label_step(len(blocks))
        ax.set_xticks(range(0, len(blocks), step), [str(place) for place in range(0, len(blocks), step)])
        ax.set_xlabel(f"{what} in forward order")
        return
    ticks, last_block = [], max(block for block in blocks if block is not None)
    step = _label_step(last_block + 1)
    firsts = [place for place in range(len(blocks)) if place == 0 or blocks[place] != blocks[place - 1]]
    for first, following in zip(firsts, [*firsts[1:], len(blocks)], strict=True):
        block, last = blocks[first], following - 1
        if block is None:
            name = outside[first] if outside else ""
        else:
            number = stacks[:block].count(stacks[block]) if stacks else block
            name = str(number) if number % step == 0 else ""
            if block % 2 and last > first and last_block < _MOST_SHADED:
                ax.axvspan(first - 0.5, last + 0.5, color=colour("surface"), linewidth=0, zorder=0)
        ticks.append(((first + last) / 2, name))
    ax.set_xticks(*_without_overlaps(ticks, len(blocks) / 24))
    named = []
    for stack in dict.fromkeys(stacks):
        inside = [place for place, block in enumerate(blocks) if block is not None and stacks[block] == stack]
        named += [((inside[0] + inside[-1]) / 2, stack)] if inside else []
    for place, name in zip(*_without_overlaps(named, len(blocks) / 24), strict=True):
        look: Any = {"ha": "center", "va": "top", "fontsize": 9, "color": colour("muted")}
        ax.annotate(name, (place, 0), (0, -20), ("data", "axes fraction"), "offset points", **look)
    ax.set_xlabel(f"block ({what} in forward order)", labelpad=19 if named else None)


def with_gaps(stacks: Sequence[str], places: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Places and values, with a gap between different stacks."""
    xs, ys, before = list[float](), list[float](), None
    for stack, place, value in zip(stacks, places, values, strict=True):
        gap: list[float] = [] if before in (None, stack) else [math.nan]
        xs, ys, before = [*xs, *gap, place], [*ys, *gap, value], stack
    return xs, ys


def _label_step(labels: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... that leaves few enough labels."""
    steps = (digit * int(10**decade) for decade in range(12) for digit in (1, 2, 5))
    return next(step for step in steps if labels / step <= _MOST_LABELS)


def _without_overlaps(ticks: list[tuple[float, str]], distance: float) -> tuple[list[float], list[str]]:
    """The labelled ticks without those whose name would overlap another; words win over numbers."""
    kept: list[tuple[float, str]] = []
    for place, name in sorted(ticks, key=lambda tick: (tick[1].isdigit(), tick[0])):
        room = distance * (1 + len(name) / 5)
        if name and all(abs(place - other) >= room for other, _ in kept):
            kept.append((place, name))
    kept.sort()
    return [place for place, _ in kept], [name for _, name in kept]


def step_axis(ax: Axes, first: int, last: int, label: str | None = "optimizer step") -> None:
    """The horizontal axis over steps `first` to `last`, whole numbers only; None for no label and no numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    room = max(0.5, 0.02 * (last - first))
    ax.set_xlim(first - room, last + room)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if label is None:
        ax.tick_params(labelbottom=False)
    else:
        ax.set_xlabel(label)


def log_axis(ax: Axes, values: Iterable[float]) -> None:
    """A logarithmic vertical axis around the positive values, its ticks written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shown = [value for value in values if 0 < value < math.inf]
    low, high = min(shown, default=0.1), max(shown, default=10.0)
    ax.set_yscale("log")
    ax.set_ylim(low / 1.6, high * 1.6)
    subdivisions = (1, 2, 5) if high / low < 60 else (1,)
    ax.yaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=7))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def symlog_axis(ax: Axes, values: Iterable[float], smallest: float) -> None:
    """A vertical axis that is logarithmic on both sides of zero and linear between, its ticks as plain numbers.

    Args:
        ax: Where to draw.
        values: All that is drawn.
        smallest: A magnitude that is to be told from zero; the axis is linear below the power of ten under it, and
            below a ten-thousandth of the largest magnitude.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    largest = math.ceil(math.log10(max(-low, high)))
    linear = max(math.floor(math.log10(smallest)), largest - 4)
    ax.set_yscale("symlog", linthresh=10.0**linear, linscale=0.5)
    step = 1 if largest - linear < 4 else 2
    decades = [10.0**power for power in range(largest, linear - 1, -step)]
    ticks = [*(-tick for tick in decades if tick <= -low), 0.0, *(tick for tick in decades if tick <= high)]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def drawable(values: Iterable[float], *, log: bool) -> list[float]:
    """The values, with gaps for those that a log axis, or a linear one, cannot show."""
    return [value if math.isfinite(value) and (value > 0 or not log) else math.nan for value in values]


def marker_size(places: int) -> float:
    """The size of a marker in points at which that many do not touch."""
    return max(2.0, min(5.5, 200 / places))


def crosses(ax: Axes, places: Sequence[float]) -> None:
    """Draw a cross near the upper edge at each place, for a value that is not finite."""
    if places:
        look: Any = {
            "color": colour("error"),
            "linestyle": "none",
            "markersize": 6,
            "markeredgewidth": 1.8,
            "zorder": 4,
        }
        ax.plot(places, [0.9] * len(places), transform=ax.get_xaxis_transform(), marker="x", **look)


def disc_or_ring(ax: Axes, x: float, y: float, *, holds: bool) -> None:
    """A full disc for yes, a ring of another colour for no."""
    name = "accent" if holds else "contrast"
    face = colour(name) if holds else "none"
    ax.plot(x, y, "o", markersize=10, color=face, markeredgecolor=colour(name), markeredgewidth=1.6)


def legend(ax: Axes) -> None:
    """A legend above the axes, so that it never covers data."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handlelength=1.8, columnspacing=1.4)


def shared_legend(ax: Axes) -> None:
    """The legend of some axes above all panels of their figure."""
    handles, labels = ax.get_legend_handles_labels()
    if labels:
        figure_of(ax).legend(handles, labels, loc="outside upper left", ncols=3, handlelength=1.8, columnspacing=1.4)
