"""The parts of a report: frozen, worded and formatted, independent of the output medium.

Strings are ready to print (no control characters) but not escaped for any markup.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from markupsafe import Markup

from normkit.spec import NormSpec

T = TypeVar("T")
Tone = Literal["error", "warning", "note", "good", "neutral"]


@dataclass(frozen=True)
class Fact:
    """A line with a label and a value."""

    label: str
    value: str
    tone: Tone | None = None
    """The mark before the label; None for none."""


@dataclass(frozen=True)
class Verdict:
    """The answer, before any detail."""

    tone: Tone
    """The severity of the worst finding, "good" without one, "neutral" if there was nothing to judge."""
    headline: str
    detail: str = ""
    """A sentence or two."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Identifier by which a backend chooses columns."""
    heading: str
    words: Callable[[Sequence[float]], str] | None = None
    """The text of a cell that holds one or more numbers; None if cells hold no numbers."""
    meaning: str = ""
    """One line for the legend, or ""."""
    numeric: bool = False
    """Cells are aligned right and sorted by their number; so they are where `words` is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numeric", self.numeric or self.words is not None)

    def cell(self, values: Sequence[float]) -> Cell:
        """A cell of this column that holds these numbers; "none" without one."""
        return Cell(text=self.words(values) if self.words and values else "none", values=tuple(values))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of a table."""

    text: str
    values: tuple[float, ...] = ()
    """The numbers in the text, if the row stands for several norms or blocks."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns, with what a reader needs to read them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """Tuples of cells, one per column; the first cell names the row."""
    empty: str
    """The text to show if there are no rows."""
    groups: tuple[tuple[Cell, ...], ...] = ()
    """The same rows, with rows that are equal in several blocks merged into one; empty if that merges none."""
    note: str = ""
    """The meaning of the numbers, beyond the headings."""

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str | Sequence[float]]],
        empty: str = "",
        note: str = "",
    ) -> Table:
        """A table from rows that hold one text, or the numbers of one cell, per column."""
        cells = (
            tuple(
                Cell(text=entry) if isinstance(entry, str) else column.cell(entry)
                for column, entry in zip(columns, row, strict=True)
            )
            for row in rows
        )
        return cls(title=title, columns=tuple(columns), rows=tuple(cells), empty=empty, note=note)

    @property
    def legend(self) -> str:
        """The meanings of the headings and the note, on one line."""
        meanings = [f"{column.heading}: {column.meaning}." for column in self.columns if column.meaning]
        return " ".join([*meanings, *([self.note] if self.note else [])])

    def only(self, *keys: str) -> Table:
        """The same table with some columns, in the order of `keys`."""
        places = [next(i for i, column in enumerate(self.columns) if column.key == key) for key in keys]
        return Table(
            title=self.title,
            columns=tuple(self.columns[place] for place in places),
            rows=tuple(tuple(row[place] for place in places) for row in self.rows),
            empty=self.empty,
            groups=tuple(tuple(row[place] for place in places) for row in self.groups),
            note=self.note,
        )


@dataclass(frozen=True, kw_only=True)
class Section:
    """A report, or a part of one, told in the order of its fields; most parts have only a few of them."""

    id: str = ""
    """The name for a renderer, if it needs one."""
    title: str = ""
    gist: str = ""
    """The content in a few words, beside the title."""
    source: str = ""
    """The run, in words, below the title."""
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()
    """Sentences."""
    formula: NormSpec | None = None
    figure: Markup | None = None
    """A small drawing, for a page only."""
    tables: tuple[Table, ...] = ()
    sections: tuple[Section, ...] = ()
    facts: tuple[Fact, ...] = ()
    remarks: tuple[str, ...] = ()
    """Remarks for the reader."""

    def part(self, id: str) -> Section | None:
        """The section in it that is known by a name, or None."""
        return next((section for section in self.sections if section.id == id), None)


def printable(part: T) -> T:
    """A part with every string in it made safe: invisible characters become escape sequences.

    Control characters could move a terminal's cursor, direction marks could reorder a page, and lone
    surrogates cannot be written to a file.
    """
    if isinstance(part, Markup):
        return part
    if isinstance(part, str):
        return part if part.isprintable() else cast(T, "".join(map(_visible, part)))
    if isinstance(part, tuple):
        return cast(T, tuple(printable(member) for member in part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type) and not isinstance(part, NormSpec):
        fields = {field.name: printable(getattr(part, field.name)) for field in dataclasses.fields(part)}
        return cast(T, dataclasses.replace(part, **fields))
    return part


def _visible(character: str) -> str:
    # C: control, format, surrogate, private, unassigned. Zl, Zp: line and paragraph separators.
    category = unicodedata.category(character)
    if category[0] != "C" and category not in ("Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


def formula_name(spec: NormSpec) -> str:
    """A spec in a few words: the family, its eps, and what is unusual.

    Example:
        >>> formula_name(NormSpec(eps=1e-12)), formula_name(NormSpec(eps=None, correction=1))
        ('LayerNorm, eps 1e-12', 'LayerNorm, machine eps, n - 1')
    """
    unusual = (*spec.divisor.labels, *spec.gain.labels, *spec.rows.labels)
    return ", ".join((_family(spec), spec.placement.label(spec.eps), *unusual))


def _family(spec: NormSpec) -> str:
    is_centred = spec.centring.numerator
    if spec.centring.is_half:
        return "half-centred norm"
    if spec.divisor.is_unit:
        return "centred L2 norm" if is_centred else "L2 norm"
    if spec.rows.are_samples or spec.rows.groups > 1:
        return "GroupNorm" if is_centred else "group RMSNorm"
    return "LayerNorm" if is_centred else "RMSNorm"
