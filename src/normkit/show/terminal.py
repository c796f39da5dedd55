"""The layout of texts for a terminal: marks, lines of facts, tables. Nothing is said by colour alone."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.containers import Lines
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from normkit.show.parts import Fact, Section, Table, Tone, Verdict

WIDTH = 100
"""Columns that every result fits into; a pipe gets this width too, unless COLUMNS asks for fewer."""
# Columns that names of rows keep before texts beside them are wrapped.
_NAME = 20
# Where a word that is too long for a line is broken, the best first. A path of a norm has dots.
_BREAKS = (".", "/", r"_,=\-")

# Tone -> the mark before it and its style.
_TONES: dict[Tone, tuple[str, str]] = {
    "error": ("x", "bold red"),
    "warning": ("!", "bold yellow"),
    "note": ("i", "bold blue"),
    "good": ("+", "bold green"),
    "neutral": ("-", "bold"),
}


class Words(Text):
    """Text that is wrapped at spaces; a word that is longer than a line, such as a path, is broken after dots.

    Rich copies a text that is printed alone into its own class; in a Group it stays as it is.
    """

    def wrap(self, console: Console, width: int, *options: Any, **more: Any) -> Lines:
        """The lines of a text, as `rich.text.Text.wrap` gives them."""
        rows: list[Text] = []
        for line in self.split(allow_blank=True):
            rows += line.divide(_breaks(line.plain, width))
        return Text("\n").join(rows).wrap(console, width, *options, **more)


def least_width(text: str) -> int:
    """The columns that a text needs if it is broken at spaces and after dots only.

    Example:
        >>> least_width("model.layers.3.post_attention_layernorm")
        24
    """
    return max((cell_len(part.rstrip()) for part in _parts(text, 0, _BREAKS[:1])), default=0)


def marked(tone: Tone, words: str) -> Words:
    """Text after the mark of a tone, in its colour."""
    mark, style = _TONES[tone]
    return Words(f"{mark} {words}", style)


def answer(verdict: Verdict) -> Text:
    """A verdict on one line."""
    return Words.assemble(marked(verdict.tone, verdict.headline), f"  {verdict.detail}" if verdict.detail else "")


def printed(part: RenderableType) -> str:
    """The text of a result for `print`: as wide as the terminal, at most 100 columns, without colours."""
    text, width = io.StringIO(), min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False).print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def section(part: Section, most: int = 24, depth: int = 0) -> RenderableType:
    """A section and those in it.

    Args:
        part: What to draw.
        most: Rows after which a table stops.
        depth: 0 for a whole report, 1 for a part of it, 2 for a remark in a part: label, then dim words.
    """
    head: list[RenderableType] = []
    if part.title:
        title = (part.title, "bold" if depth < 2 else "")
        head.append(Words.assemble(title, f"  {part.gist}" if part.gist else ""))
    if part.source:
        head += [Words(part.source, "dim"), ""]
    if part.verdict:
        head.append(answer(part.verdict))
    body: list[RenderableType] = [Words(note, "dim" if depth > 1 else "") for note in part.notes]
    for table in part.tables:
        body += ["", ruled(table, most)] if table.rows else []
        body += [Words(table.legend, "dim")] if table.legend else []
    for inner in part.sections:
        body += [*([""] if depth == 0 else []), section(inner, most, depth + 1)]
    if part.facts:
        body += [*([""] if body or depth == 0 else []), lines(part.facts)]
    body += [marked("note", remark) for remark in part.remarks]
    if depth and part.title:
        return Group(*head, *([Padding.indent(Group(*body), 2 * depth)] if body else []))
    return Group(*head, *body)


def lines(facts: Iterable[Fact]) -> RenderableType:
    """Labels on the left, values wrapped on the right."""
    return pairs(
        (marked(fact.tone, fact.label) if fact.tone else Words(fact.label, "dim"), Words(fact.value)) for fact in facts
    )


def pairs(rows: Iterable[tuple[Text, Text]]) -> RenderableType:
    """Two columns of which both are wrapped; where the left one is too wide, the right one is below it."""
    return _Pairs(tuple(rows))


@dataclass(frozen=True)
class _Pairs:
    rows: tuple[tuple[Text, Text], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width."""
        widest = options.max_width // 2
        if max((least_width(label.plain) for label, _ in self.rows), default=0) > widest:
            for label, value in self.rows:
                yield label
                yield Padding.indent(value, 4)
            return
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=min(widest, max((label.cell_len for label, _ in self.rows), default=0)))
        grid.add_column()
        for row in self.rows:
            grid.add_row(*row)
        yield grid


def headed(space: int, style: str = "bold") -> Grid:
    """An empty table under ruled headings, with so many spaces between columns, and headings in this style."""
    return Grid(box=box.SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, show_edge=False, header_style=style)


def ruled(table: Table, most: int) -> RenderableType:
    """A table under ruled headings. Names are broken after dots where a terminal is narrow, numbers never.

    Where that is not enough, each row is the name and, below it, the other cells after their headings.

    Args:
        table: What to draw.
        most: Rows after which it stops and says how many there are beyond.
    """
    return _Ruled(table, most)


@dataclass(frozen=True)
class _Ruled:
    table: Table
    most: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for a width."""
        columns, rows = self.table.columns, [[cell.text for cell in row] for row in self.table.rows[: self.most]]
        # Numbers are narrow, and so is a heading with one word per line.
        headings = [each.heading.replace(" ", "\n") if each.numeric else each.heading for each in columns]
        widths = widths_of(headings, *rows)
        least = [
            widths[place] if column.numeric else max(least_width(row[place]) for row in [headings, *rows])
            for place, column in enumerate(columns)
        ]
        # There are three between columns.
        over = sum(widths) + 3 * (len(columns) - 1) - options.max_width
        others = sorted(range(1, len(columns)), key=lambda place: -widths[place])
        for place, floor in [(0, max(least[0], _NAME)), *((other, least[other]) for other in others), (0, least[0])]:
            taken = min(max(0, over), max(0, widths[place] - floor))
            widths[place], over = widths[place] - taken, over - taken
        if over > 0:
            yield records([column.heading for column in columns[1:]], rows)
        else:
            grid = headed(2)
            for column, heading, width in zip(columns, headings, widths, strict=True):
                side: Literal["left", "right"] = "right" if column.numeric else "left"
                grid.add_column(heading, justify=side, vertical="bottom", width=width)
            for row in rows:
                grid.add_row(*map(Words, row))
            yield grid
        if len(self.table.rows) > self.most:
            yield Words(f"and {len(self.table.rows) - self.most} more", "dim")


def records(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Rows of a table that is too wide: the name of each, and below it its other cells after their headings."""
    parts: list[RenderableType] = []
    for name, *cells in rows:
        said = [f"{heading} {cell}" for heading, cell in zip(headings, cells, strict=True) if cell not in ("", "-")]
        parts += [Words(name), Padding.indent(Words(", ".join(said), "dim"), 2)]
    return Group(*parts)


def widths_of(*rows: Sequence[str]) -> list[int]:
    """The columns that the longest line of each column of a table takes."""
    return [max(cell_len(line) for text in column for line in text.split("\n")) for column in zip(*rows, strict=True)]


def _breaks(line: str, width: int) -> list[int]:
    """The offsets at which a line is divided, so that each part fits into the width."""
    parts, used, found = _parts(line, width), 0, []
    for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
        if used and used + cell_len(part.rstrip()) > width:
            found.append(end - len(part))
            used = 0
        used += cell_len(part)
    return found


def _parts(text: str, width: int, breaks: Sequence[str] = _BREAKS) -> list[str]:
    """Words with the blanks around them; a word that is longer than the width is divided where it may be broken."""
    return [part for word in re.findall(r"\s*\S+\s*", text) for part in _divided(word, width, breaks)]


def _divided(word: str, width: int, breaks: Sequence[str]) -> Iterator[str]:
    if cell_len(word.rstrip()) <= width:
        yield word
    elif breaks:
        for part in re.split(rf"(?<=[{breaks[0]}])(?=[^\s{breaks[0]}])", word):
            yield from _divided(part, width, breaks[1:])
    elif width:
        yield from chop_cells(word, width)
    else:
        yield word
