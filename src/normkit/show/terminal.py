"""The layout of texts for a terminal: marks, lines of facts, tables. Nothing is said by colour alone."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from normkit.show.parts import Fact, Section, Table, Tone, Verdict

WIDTH = 100
"""Columns that every result fits into; a pipe gets this width too, unless COLUMNS asks for fewer."""
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


def answer(verdict: Verdict) -> Text:
    """A verdict on one line."""
    return Text.assemble(marked(verdict.tone, verdict.headline), f"  {verdict.detail}" if verdict.detail else "")


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
        head.append(Text.assemble(title, f"  {part.gist}" if part.gist else ""))
    if part.source:
        head += [Text(part.source, "dim"), ""]
    if part.verdict:
        head.append(answer(part.verdict))
    body: list[RenderableType] = [Text(note, "dim" if depth > 1 else "") for note in part.notes]
    for table in part.tables:
        body += ["", ruled(table, most)] if table.rows else []
        body += [Text(table.legend, "dim")] if table.legend else []
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
    rows = []
    for fact in facts:
        # The end of a path tells most.
        label = fact.label if len(fact.label) <= _WIDEST_LABEL else f"…{fact.label[1 - _WIDEST_LABEL :]}"
        rows.append((marked(fact.tone, label) if fact.tone else Text(label, "dim"), Text(fact.value)))
    return pairs(rows)


def pairs(rows: Iterable[tuple[Text, Text]]) -> RenderableType:
    """Two columns: the left one is never wrapped, the right one is."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def headed(space: int, style: str = "bold") -> Grid:
    """An empty table under ruled headings, with so many spaces between columns, and headings in this style."""
    return Grid(box=box.SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, show_edge=False, header_style=style)


def ruled(table: Table, most: int) -> RenderableType:
    """A table under ruled headings. Names of rows are wrapped where a terminal is narrow, numbers never.

    Args:
        table: What to draw.
        most: Rows after which it stops and says how many there are beyond.
    """
    grid = headed(2)
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


def fitting(paths: Sequence[str], width: int) -> list[str]:
    """Paths shortened in their middle to a width, all still different; whole paths if that is impossible.

    The outermost parts go first, as they are the same in all; then the middle of the last part, as names of norms
    differ at both ends; then the number of the block before it.

    Example:
        >>> fitting(["model.layers.{0-17}.pre_feedforward_layernorm", "model.layers.{0-17}.mlp.norm"], 24)
        ['…{0-17}.pre_feedfo…rnorm', '…layers.{0-17}.mlp.norm']
    """
    for with_block in (True, False):
        short = [_cut(path, width, with_block=with_block) for path in paths]
        if len(set(short)) == len(set(paths)):
            return short
    return list(paths)


def _cut(path: str, width: int, *, with_block: bool) -> str:
    if len(path) <= width:
        return path
    parts = path.split(".")
    for first in range(1, len(parts) - 1):
        rest = ".".join(parts[first:])
        if len(rest) < width:
            return f"…{rest}"
    # The number of the block is kept before the name if it fits into half of the room.
    block = f"{parts[-2]}." if with_block and len(parts) > 1 and len(parts[-2]) + 2 <= width // 2 else ""
    head, last = "…" + block if len(parts) > 1 else "", parts[-1]
    room = width - len(head) - 1
    return f"{head}{last}" if len(last) <= room + 1 else f"{head}{last[: room - room // 3]}…{last[-(room // 3) :]}"
