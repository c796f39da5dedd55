"""The passports of a model for a terminal: norms that compute the same are grouped, each formula is in full."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from normkit.comparison.pairing import said
from normkit.identification.book import Entry, PassportBook
from normkit.identification.passport import CONVENTIONS, value_of
from normkit.report.conventions import LABELS, in_words, is_ordinary
from normkit.show.formula import formula_name
from normkit.show.grouping import pattern
from normkit.show.parts import Cell, Column, Fact, Table, printable
from normkit.show.terminal import lines, marked, ruled
from normkit.text import counted, rounded_percent

_MOST_PATTERNS = 24
_COLUMNS = (
    Column(key="path", heading="norm"),
    Column(key="count", heading="count", numeric=True),
    Column(key="class", heading="class"),
    Column(key="features", heading="features", numeric=True),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Norms that compute the same."""

    title: str
    formula: str
    """The formula in full, then what of it was not decided."""
    places: Table
    facts: tuple[Fact, ...]
    """The conventions, and how sure they are."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Everything that is said about a model's passports."""

    title: str
    """The model."""
    summary: str
    kinds: tuple[Kind, ...]
    """The most frequent first."""
    left_out: tuple[Fact, ...]
    """Modules that normalize as no spec describes."""


def describe_book(book: PassportBook) -> Kinds:
    """The passports in words, safe to print."""
    alike: dict[object, list[Entry]] = defaultdict(list)
    for entry in book.entries:
        alike[entry.passport.verdict, entry.passport.spec, _facts(entry)].append(entry)
    groups = sorted(alike.values(), key=len, reverse=True)
    kinds = f", of {counted(len(groups), 'kind')}" if groups else ""
    described = Kinds(
        title=book.model,
        summary=f"{counted(len(book.entries), 'norm')}{kinds}; found by what they do, not by their names",
        kinds=tuple(_kind(group) for group in groups),
        left_out=_folded_reasons(book),
    )
    return printable(described)


def passport_list(book: PassportBook) -> RenderableType:
    """The passports as text for a terminal: for each kind its formula, places and conventions."""
    described = describe_book(book)
    parts: list[RenderableType] = [Text.assemble((described.title, "bold"), "  ", described.summary)]
    for kind in described.kinds:
        body = Group(Text(kind.formula), "", ruled(kind.places, _MOST_PATTERNS), "", lines(kind.facts))
        parts += ["", Text(kind.title, "bold"), Padding.indent(body, 2)]
    if described.left_out:
        parts += ["", marked("warning", "these normalize, but no formula of a plain norm describes them")]
        parts.append(lines(described.left_out))
    if not described.kinds and not described.left_out:
        parts += ["", marked("neutral", "this model has no norm")]
    return Group(*parts)


def _kind(entries: list[Entry]) -> Kind:
    passport = entries[0].passport
    name: str = passport.verdict
    formula = "no formula was found"
    if passport.spec is not None:
        name, formula = formula_name(passport.spec), str(passport.spec)
        if undecided := [reading for reading in CONVENTIONS if reading in passport.undecidable]:
            # The formula also contains what was not decided, which must not be read as found.
            name, formula = f"{name.partition(',')[0]}, not wholly decided", f"{formula}  but: {', '.join(undecided)}?"
    places: dict[object, list[Entry]] = defaultdict(list)
    for entry in entries:
        places[pattern(entry.path), entry.class_name, entry.features].append(entry)
    rows = []
    for found in places.values():
        first = found[0]
        path = pattern(first.path) if len(found) > 1 else first.path
        texts = path, f"{len(found)}", first.class_name, f"{first.features:,}"
        rows.append(tuple(Cell(text=text) for text in texts))
    return Kind(
        title=f"{counted(len(entries), 'norm')}: {name}",
        formula=formula,
        places=Table(title="Norms", columns=_COLUMNS, rows=tuple(rows), empty=""),
        facts=_facts(entries[0]),
    )


def _facts(entry: Entry) -> tuple[Fact, ...]:
    passport = entry.passport
    facts = []
    if passport.spec is not None:
        for reading in CONVENTIONS:
            if reading == "offset dtype" and not passport.spec.gain.offset:
                continue
            values = value_of(passport.spec, reading)
            reason = passport.undecidable.get(reading)
            value = in_words(reading, values) if reason is None else f"undecided: {reason}"
            facts.append(Fact(label=LABELS[reading], value=value))
    for name, found in passport.readings.items():
        if name in (*CONVENTIONS, "kind"):
            continue
        if found.undecidable is not None:
            facts.append(Fact(label=LABELS.get(name, name), value=f"undecided: {found.undecidable}"))
        elif not is_ordinary(name, found.value):
            facts.append(Fact(label=LABELS.get(name, name), value=in_words(name, said(found.value))))
    sure = rounded_percent(passport.confidence)
    facts.append(Fact(label="confidence", value=f"{sure}; the evidence is in the JSON"))
    return tuple(facts)


def _folded_reasons(book: PassportBook) -> tuple[Fact, ...]:
    """Similar paths with the same reason, merged."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, reason in book.left_out.items():
        alike[pattern(path), reason].append(path)
    return tuple(
        Fact(label=f"{common} ({len(paths)})" if len(paths) > 1 else paths[0], value=reason)
        for (common, reason), paths in alike.items()
    )
