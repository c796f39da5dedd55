"""The layout of texts for a terminal: marks, lines of facts, tables. Nothing is said by colour alone."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from normkit.report.parts import Fact, Table, Tone
from normkit.report.wording import tail

_WIDEST_LABEL = 44

# Tone -> the mark before it and its style.
_TONES: dict[Tone, tuple[str, str]] = {
    "error": ("x", "bold red"),
    "warning": ("!", "bold yellow"),
    "note": ("i", "bold blue"),
    "good": ("+", "bold green"),
    "neutral": ("-", "bold"),
}


def marked(tone: Tone, words: str) -> Text:
    """Text after the mark of a tone, in its colour."""
    mark, style = _TONES[tone]
    return Text(f"{mark} {words}", style)


def lines(facts: Iterable[Fact]) -> RenderableType:
    """Labels on the left, values wrapped on the right."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in facts:
        grid.add_row(Text(tail(fact.label, _WIDEST_LABEL)), Text(fact.value))
    return grid


def ruled(table: Table, most: int) -> RenderableType:
    """A table under ruled headings. Names of rows are wrapped where a terminal is narrow, numbers never.

    Args:
        table: What to draw.
        most: Rows after which it stops and says how many there are beyond.
    """
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for place, column in enumerate(table.columns):
        grid.add_column(
            # Numbers are narrow, and so is a heading with one word per line.
            column.heading.replace(" ", "\n") if column.numeric else column.heading,
            justify="right" if column.numeric else "left",
            vertical="bottom",
            no_wrap=place > 0,
            overflow="fold",
        )
    for row in table.rows[:most]:
        grid.add_row(*(Text(cell.text) for cell in row))
    if len(table.rows) > most:
        grid.add_row(Text(f"and {len(table.rows) - most} more", "dim"))
    return grid
