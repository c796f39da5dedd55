"""The passports of a model in words: norms that compute the same are grouped, each formula is in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normkit.identification.spec_readings import CONVENTIONS, said, words_of
from normkit.show.grouping import merged, pattern
from normkit.show.parts import Column, Fact, Section, Table, Verdict, formula_name, printable
from normkit.spec import NormSpec
from normkit.text import counted, rounded_percent

if TYPE_CHECKING:
    from normkit.identification.book import Entry, PassportBook
    from normkit.identification.passport import Passport

LABELS = {
    "kind": "kind",
    "features": "features",
    "rows": "a row is",
    "centring": "mean",
    "divisor": "squares",
    "eps": "eps",
    "gain": "gain",
    "offset dtype": "offset",
    "bias": "bias",
    "casts": "in 16 bits",
    "output dtype": "output",
    "input": "its input",
    "repeatable": "repeatable",
    "training": "in training",
    "time": "along time",
    "degenerate rows": "odd rows",
    "conditioning": "large means",
    "other sizes": "other axes",
}
"""The title of each reading."""

_ORDINARY: dict[str, Any] = {
    "input": "kept",
    "repeatable": True,
    "training": {"output": "as in eval", "updates": []},
    "time": [{"coupling": "none"}],
    "conditioning": {"cancels": False},
}
_COLUMNS = (
    Column("path", "norm"),
    Column("count", "count", numeric=True),
    Column("class", "class"),
    Column("features", "features", numeric=True),
)
_LEFT_OUT = Verdict(tone="warning", headline="these normalize, but no formula of a plain norm describes them")
_NO_NORM = Verdict(tone="neutral", headline="this model has no norm")


def describe_book(book: PassportBook) -> Section:
    """The passports, safe to print: for each kind of norm, the most frequent first, formula, places and conventions."""
    alike: dict[object, list[Entry]] = defaultdict(list)
    for entry in book.entries:
        alike[entry.passport.verdict, entry.passport.spec, _facts(entry.passport)].append(entry)
    groups = sorted(alike.values(), key=len, reverse=True)
    kinds = f", of {counted(len(groups), 'kind')}" if groups else ""
    sections = [_kind(group) for group in groups]
    if book.left_out:
        reasons = merged(("", path, reason) for path, reason in book.left_out.items())
        facts = tuple(Fact(where, reason) for _, where, reason in reasons)
        sections.append(Section(verdict=_LEFT_OUT, facts=facts))
    described = Section(
        title=book.model,
        gist=f"{counted(len(book.entries), 'norm')}{kinds}; found by what they do, not by their names",
        sections=tuple(sections or [Section(verdict=_NO_NORM)]),
    )
    return printable(described)


def describe_passport(passport: Passport) -> Section:
    """One passport, safe to print: the formula, each convention in words, and how sure it is."""
    name, formula = _name_and_formula(passport)
    return printable(Section(title=name, notes=(formula,), facts=_facts(passport, evidence="in its readings")))


def parts_of(reading: str, value: Any) -> tuple[str, ...]:
    """One aspect of a norm, in words that can be compared one by one.

    Args:
        reading: A key of `CONVENTIONS`, or another reading of a passport.
        value: The conventions that it decides, as plain JSON; of another reading its value.

    Example:
        >>> from normkit.identification.spec_readings import value_of
        >>> parts_of("eps", value_of(NormSpec(eps=1e-6), "eps"))
        ('1e-06', 'inside the root')
    """
    if reading in CONVENTIONS:
        return words_of(NormSpec.from_json(value), reading)
    if isinstance(value, Mapping):
        return tuple(f"{name} {', '.join(parts_of('', member))}" for name, member in value.items())
    if isinstance(value, list):
        return tuple(part for member in value for part in parts_of("", member)) or ("none",)
    return ({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value),)


def is_ordinary(reading: str, value: Any) -> bool:
    """Whether a reading that is no convention has its usual value."""
    if reading == "degenerate rows":
        return set(said(value).values()) <= {"finite"}
    return reading in _ORDINARY and said(value) == _ORDINARY[reading]


def _name_and_formula(passport: Passport) -> tuple[str, str]:
    """The name of what was found, and its formula with the conventions that are not decided."""
    if passport.spec is None:
        return passport.verdict, "no formula was found"
    name, formula = formula_name(passport.spec), str(passport.spec)
    if undecided := [reading for reading in CONVENTIONS if reading in passport.undecidable]:
        # The formula also contains what was not decided, which must not be read as found.
        return f"{name.partition(',')[0]}, not wholly decided", f"{formula}  but: {', '.join(undecided)}?"
    return name, formula


def _kind(entries: list[Entry]) -> Section:
    """Norms that compute the same."""
    name, formula = _name_and_formula(entries[0].passport)
    places: dict[object, list[Entry]] = defaultdict(list)
    for entry in entries:
        places[pattern(entry.path), entry.class_name, entry.features].append(entry)
    rows = []
    for found in places.values():
        first = found[0]
        path = pattern(first.path) if len(found) > 1 else first.path
        rows.append([path, f"{len(found)}", first.class_name, f"{first.features:,}"])
    return Section(
        title=f"{counted(len(entries), 'norm')}: {name}",
        notes=(formula,),
        tables=(Table.of("Norms", _COLUMNS, rows),),
        facts=_facts(entries[0].passport),
    )


def _facts(passport: Passport, evidence: str = "in the JSON") -> tuple[Fact, ...]:
    """The conventions, how sure they are, and where the evidence is."""
    spec = passport.spec
    # The reason why a reading is open, or its words; the ordinary ones that are no convention are left out.
    found: dict[str, tuple[str | None, tuple[str, ...]]] = {}
    if spec is not None:
        for reading in CONVENTIONS:
            if reading != "offset dtype" or spec.gain.offset:
                found[reading] = passport.undecidable.get(reading), words_of(spec, reading)
    for name, other in passport.readings.items():
        if name not in (*CONVENTIONS, "kind") and (other.undecidable or not is_ordinary(name, other.value)):
            found[name] = other.undecidable, parts_of(name, said(other.value))
    facts = [
        Fact(LABELS.get(name, name), ", ".join(parts) if reason is None else f"undecided: {reason}")
        for name, (reason, parts) in found.items()
    ]
    sure = rounded_percent(passport.confidence)
    return (*facts, Fact("confidence", f"{sure}; the evidence is {evidence}"))
