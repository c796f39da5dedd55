"""The charts of a study as data: curves with ranges over the seeds, bars, and tables of marks. `figures` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from normkit.study.statistics import Paired, block_means, filled, range_of


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    """Medians over seeds; NaN leaves a gap, infinity is marked at the upper edge."""
    low: tuple[float, ...] = ()
    """The least of the seeds, or empty."""
    high: tuple[float, ...] = ()
    """The greatest, or empty."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    name: str
    """A short identifier, as in "gradient-depth"."""
    title: str
    caption: str
    """One sentence that says how to read it."""
    description: str
    """The description for readers who cannot see it."""


@dataclass(frozen=True, kw_only=True)
class Curves(_Figure):
    """Lines in one or several panels that share their axes."""

    x_label: str
    """With its unit."""
    y_label: str
    """With its unit."""
    panels: tuple[tuple[str, tuple[Line, ...]], ...]
    """Title of each panel, which may be empty if there is one panel, and its lines."""
    x_log: bool = False
    y_log: bool = False
    reference: tuple[float, str] | None = None
    """Value and label of a horizontal line, such as a loss that no model can go below."""


@dataclass(frozen=True, kw_only=True)
class Bars(_Figure):
    """A value for each arm, with the range and the single seeds as points."""

    label: str
    """The quantity, with the unit."""
    values: tuple[tuple[str, tuple[float, ...]], ...]
    """Name of each arm, and its value for each seed."""
    log: bool = False

    @property
    def ranges(self) -> tuple[tuple[float, float, float], ...]:
        """Median, least and greatest seed of each arm."""
        return tuple(range_of(values) for _, values in self.values)


@dataclass(frozen=True, kw_only=True)
class Marks(_Figure):
    """A table of yes and no, or of numbers, by row and column."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[tuple[bool | None, float], ...], ...]
    """For each row and column whether it holds, and the number that decides it."""


Chart = Curves | Bars | Marks


def line(label: str, x: Sequence[float], seeds: Iterable[Sequence[float]]) -> Line:
    """The line of medians, with the ranges, through the values that each seed has at the places x."""
    ranges = [range_of(values) for values in zip(*seeds, strict=True)]
    return Line(
        label=label,
        x=tuple(x),
        y=tuple(middle for middle, _, _ in ranges),
        low=tuple(low for _, low, _ in ranges),
        high=tuple(high for _, _, high in ranges),
    )


def arm_lines(
    seeds: Iterable[Paired], arms: Iterable[str] | Mapping[str, str], quantity: str, x: Sequence[float]
) -> tuple[Line, ...]:
    """A line for each arm through a quantity that it measured at the places x; None counts as infinite.

    Args:
        seeds: What all arms measured with each seed.
        arms: Names of arms, or label -> name.
        quantity: A name in the measurements, one value per place.
        x: Places.
    """
    labelled = arms if isinstance(arms, Mapping) else {arm: arm for arm in arms}
    seeds = list(seeds)
    return tuple(line(label, x, [filled(paired[arm][quantity]) for paired in seeds]) for label, arm in labelled.items())


def swept_lines(
    seeds: Iterable[Paired],
    models: Iterable[str],
    arm: str,
    quantity: str,
    x: Sequence[float],
    missing: float = math.inf,
) -> tuple[Line, ...]:
    """A line for each model through a number that it measured in one arm for each x.

    Args:
        seeds: What all arms measured with each seed.
        models: Labels of the lines.
        arm: The name of an arm, with places for model and x, as in "{}, rate {:g}".
        quantity: A name in the measurements.
        x: Places.
        missing: In place of None.
    """
    seeds = list(seeds)
    return tuple(
        line(model, x, [filled([paired[arm.format(model, at)][quantity] for at in x], missing) for paired in seeds])
        for model in models
    )


def arm_values(
    seeds: Iterable[Paired], arms: Iterable[str], quantity: str
) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The `values` of `Bars`: a number that each arm measured, for each seed; None counts as infinite."""
    seeds = list(seeds)
    return tuple((arm, tuple(filled([paired[arm][quantity] for paired in seeds]))) for arm in arms)


def loss_line(label: str, arm: str, seeds: Iterable[Paired], steps: int) -> Line:
    """The line of an arm's losses, as means over blocks of the steps of its recipe."""
    curves = [block_means(paired[arm]["losses"], steps) for paired in seeds]
    return line(label, curves[0][0], [means for _, means in curves])
