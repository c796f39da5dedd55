"""What a study shows, as data: curves with intervals, bars, and tables of marks. What draws it stands in plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.study.statistics import interval


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve.

    Attributes:
        label: Its name.
        x: Places.
        y: Medians over seeds; NaN leaves a gap, infinity is marked at the upper edge.
        low: Lower ends of the intervals, or empty.
        high: Upper ends, or empty.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Lines in one or several panels that share their axes.

    Attributes:
        name: A short identifier, as in "gradient-depth".
        title: What it shows.
        caption: One sentence that says how to read it.
        description: What is to be seen in it, for those who cannot see it.
        x_label: With its unit.
        y_label: With its unit.
        panels: Title of each panel -> its lines; one panel may have an empty title.
        x_log: Logarithmic horizontal axis.
        y_log: Logarithmic vertical axis.
        reference: Value and words of a horizontal line, such as a floor that no model can beat.
    """

    name: str
    title: str
    caption: str
    description: str
    x_label: str
    y_label: str
    panels: tuple[tuple[str, tuple[Line, ...]], ...]
    x_log: bool = False
    y_log: bool = False
    reference: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A value for each arm, with its interval and the single seeds as points.

    Attributes:
        name: A short identifier.
        title: What it shows.
        caption: One sentence that says how to read it.
        description: What is to be seen in it.
        label: Of the values, with its unit.
        values: Name of an arm -> its value for each seed.
        log: Logarithmic axis.
    """

    name: str
    title: str
    caption: str
    description: str
    label: str
    values: tuple[tuple[str, tuple[float, ...]], ...]
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Marks:
    """A table of yes and no, or of numbers, by row and column.

    Attributes:
        name: A short identifier.
        title: What it shows.
        caption: One sentence that says how to read it.
        description: What is to be seen in it.
        rows: Names.
        columns: Names.
        cells: For each row and column whether it holds, and the number behind it.
    """

    name: str
    title: str
    caption: str
    description: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[tuple[bool | None, float], ...], ...]


Chart = Curves | Bars | Marks


def line(label: str, x: Sequence[float], seeds: Sequence[Sequence[float]]) -> Line:
    """The line of medians, with intervals, through what several seeds gave at the same places.

    Args:
        label: Its name.
        x: Places.
        seeds: For each seed the values there.
    """
    intervals = [interval(values) for values in zip(*seeds, strict=True)]
    return Line(
        label=label,
        x=tuple(x),
        y=tuple(middle for middle, _, _ in intervals),
        low=tuple(low for _, low, _ in intervals),
        high=tuple(high for _, _, high in intervals),
    )
