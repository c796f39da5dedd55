"""Merges rows that say the same of several blocks into one: "layers.{0-17}.input_layernorm", numbers as ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from normkit.show.parts import Cell, Table

_INDEX = re.compile(r"\.\d+(?=[.,;:\s]|$)")

Place = tuple[str, int | None, str]
"""A path before its block's number, that number, and the path behind it."""


def grouped(table: Table, blocks: Iterable[str] | None = None) -> Table:
    """The table with its `groups`: one row for alike rows of several blocks, in the order in which they first appear.

    Rows are alike where their paths differ in the number of the block alone and every cell without numbers reads the
    same; a cell with numbers then holds those of all of them.

    Args:
        table: First cells are paths.
        blocks: Paths of the blocks; without them, rows are alike whose paths differ in any number.
    """
    place = (lambda path: (pattern(path), None, "")) if blocks is None else _placer(blocks)
    alike: dict[object, list[tuple[Place, tuple[Cell, ...]]]] = {}
    for row in table.rows:
        stem, number, rest = place(row[0].text)
        words = [cell.text for cell, column in zip(row, table.columns, strict=True) if column.words is None]
        key = (stem, rest, *words[1:]) if number is not None or blocks is None else row[0].text
        alike.setdefault(key, []).append(((stem, number, rest), row))
    rows = []
    for members in alike.values():
        (stem, _, rest), first = members[0]
        numbers = [number for (_, number, _), _ in members if number is not None]
        name = Cell(text=f"{stem}{_braced(numbers)}{rest}") if numbers else first[0]
        if blocks is None and len(members) > 1:
            parts = zip(*(row[0].text.split(".") for _, row in members), strict=True)
            named = [_braced([*map(int, each)]) if each[0].isdigit() else each[0] for each in parts]
            name = Cell(text=".".join(named))
        cells = [
            first[column]
            if table.columns[column].words is None
            else _joined(table, column, [row for _, row in members])
            for column in range(1, len(first))
        ]
        rows.append((name, *cells))
    return replace(table, groups=tuple(rows) if len(rows) < len(table.rows) else ())


def grouped_paths(paths: Sequence[str], blocks: Iterable[str]) -> tuple[str, ...]:
    """The same for paths alone.

    Example:
        >>> grouped_paths(["h.0.ln", "h.1.ln", "h.3.ln", "ln_f"], ["h.0", "h.1", "h.2", "h.3"])
        ('h.{0-1,3}.ln', 'ln_f')
    """
    place = _placer(blocks)
    alike: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        stem, number, rest = place(path)
        alike.setdefault((stem, rest), []).extend([] if number is None else [number])
    return tuple(f"{stem}{_braced(numbers)}{rest}" for (stem, rest), numbers in alike.items())


def pattern(path: str) -> str:
    """A path with every number in it replaced by a star.

    Example:
        >>> pattern("model.layers.17.input_layernorm")
        'model.layers.*.input_layernorm'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def merged(said: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Label, path and reason, each once: where several are alike but for numbers, with stars for these and a count.

    Example:
        >>> merged([("left", "h.0.ln", "h.0.q reads it"), ("left", "h.1.ln", "h.1.q reads it"), ("left", "f", "tied")])
        [('left', 'h.*.ln (2)', 'h.*.q reads it'), ('left', 'f', 'tied')]
    """
    alike: dict[tuple[str, str, str], tuple[set[str], set[str]]] = {}
    for label, path, reason in said:
        paths, reasons = alike.setdefault((label, pattern(path), _INDEX.sub(".*", reason)), (set(), set()))
        paths.add(path)
        reasons.add(reason)
    return [
        (
            label,
            f"{common} ({len(paths)})" if len(paths) > 1 else paths.pop(),
            starred if len(reasons) > 1 else reasons.pop(),
        )
        for (label, common, starred), (paths, reasons) in alike.items()
    ]


def _placer(blocks: Iterable[str]) -> Callable[[str], Place]:
    known = {path for path in blocks if path.rpartition(".")[2].isdigit()}

    def place(path: str) -> Place:
        ends = [end for end, character in enumerate(path) if character in ".:"]
        inside = next((path[:end] for end in (len(path), *reversed(ends)) if path[:end] in known), None)
        if inside is None:
            return path, None, ""
        stem, dot, number = inside.rpartition(".")
        return f"{stem}{dot}", int(number), path[len(inside) :]

    return place


def _joined(table: Table, column: int, rows: Sequence[tuple[Cell, ...]]) -> Cell:
    values = tuple(value for row in rows for value in row[column].values)
    return table.columns[column].cell(values) if values else rows[0][column]


def _braced(numbers: Sequence[int]) -> str:
    """As in "{0-3,5}"; a single number as it is."""
    ordered = sorted(set(numbers))
    if len(ordered) < 2:
        return "".join(map(str, ordered))
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    return "{" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) + "}"
