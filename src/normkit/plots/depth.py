"""The horizontal axis of figures over depth: one place per site, named by block, legible at any length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from normkit.errors import InputError
from normkit.measurement.facts import Role, Site
from normkit.plots.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

_MOST_LABELS = 14
_MOST_SHADED = 40


def block_axis(ax: Axes, blocks: Sequence[int | None], what: str, outside: Sequence[str] = ()) -> None:
    """Name places 0, 1, 2, ... by their blocks, shade every other block and label the axis.

    Args:
        ax: Where to draw.
        blocks: The block of each place, or None outside the blocks.
        what: What stands at each place, in the plural.
        outside: A name for each place, used where its block is None.
    """
    ax.set_xlim(-0.75, len(blocks) - 0.25)
    ax.grid(visible=False, axis="x")
    if all(block is None for block in blocks):
        step = _step(len(blocks))
        ax.set_xticks(range(0, len(blocks), step), [str(place) for place in range(0, len(blocks), step)])
        ax.set_xlabel(f"{what} in forward order")
        return
    ticks, last_block = [], max(block for block in blocks if block is not None)
    step = _step(last_block + 1)
    for first, last in _runs(blocks):
        block = blocks[first]
        if block is None:
            name = outside[first] if outside else ""
        else:
            name = str(block) if block % step == 0 else ""
            if block % 2 and last > first and last_block < _MOST_SHADED:
                ax.axvspan(first - 0.5, last + 0.5, color=colour("surface"), linewidth=0, zorder=0)
        ticks.append(((first + last) / 2, name))
    ax.set_xticks(*_apart(ticks, len(blocks) / 24))
    ax.set_xlabel(f"block ({what} in forward order)")


def site_axis(ax: Axes, sites: Sequence[Site]) -> None:
    """The same for the norms of an inspection."""
    names: dict[Role, str] = {"embedding": "emb", "final": "final"}
    block_axis(ax, [site.block for site in sites], "norms", [names.get(site.role, "") for site in sites])


def marker_size(places: int) -> float:
    """A marker's size in points that keeps so many apart."""
    return max(2.0, min(5.5, 200 / places))


def log_axis(ax: Axes, values: Iterable[float]) -> None:
    """A logarithmic vertical axis around the positive values, its ticks written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    positive = [value for value in values if 0 < value < math.inf]
    low, high = min(positive, default=0.1), max(positive, default=10.0)
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


def positive(values: Iterable[float]) -> list[float]:
    """The values, with gaps for those that a log axis cannot show."""
    return [value if 0 < value < math.inf else math.nan for value in values]


def legend(ax: Axes) -> None:
    """A legend above the axes, so that it never covers data."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handlelength=1.8, columnspacing=1.4)


def shared_legend(ax: Axes) -> None:
    """The legend of some axes above all panels of their figure."""
    handles, labels = ax.get_legend_handles_labels()
    if labels:
        figure_of(ax).legend(handles, labels, loc="outside upper left", ncols=3, handlelength=1.8, columnspacing=1.4)


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to.

    Raises:
        InputError: If they belong to none.
    """
    figure = ax.get_figure(root=True)
    if figure is None:
        raise InputError("the axes belong to no figure; take axes from a Figure")
    return figure


def present(values: tuple[T, ...], figure: str, noun: str) -> tuple[T, ...]:
    """The values.

    Raises:
        InputError: If there are none.
    """
    if not values:
        raise InputError(f"{figure} needs at least one {noun}; this inspection has none")
    return values


def _plain(value: float) -> str:
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _step(labels: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... that leaves few enough labels."""
    steps = (digit * int(10**decade) for decade in range(12) for digit in (1, 2, 5))
    return next(step for step in steps if labels / step <= _MOST_LABELS)


def _runs(blocks: Sequence[int | None]) -> list[tuple[int, int]]:
    """First and last place of each stretch within one block."""
    starts = [place for place in range(len(blocks)) if place == 0 or blocks[place] != blocks[place - 1]]
    return list(zip(starts, [start - 1 for start in starts[1:]] + [len(blocks) - 1], strict=True))


def _apart(ticks: list[tuple[float, str]], distance: float) -> tuple[list[float], list[str]]:
    """The labelled ticks without those whose name would overlap another; words win over numbers."""
    kept: list[tuple[float, str]] = []
    for place, name in sorted(ticks, key=lambda tick: (tick[1].isdigit(), tick[0])):
        room = distance * (1 + len(name) / 5)
        if name and all(abs(place - other) >= room for other, _ in kept):
            kept.append((place, name))
    kept.sort()
    return [place for place, _ in kept], [name for _, name in kept]
