"""Why a port differs from its reference: one sentence for each cause, the cause before what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normkit.comparison.pairing import Change
from normkit.comparison.value_groups import TensorValue, ValueGroup
from normkit.identification.report import LABELS, parts_of
from normkit.show.grouping import pattern
from normkit.text import counted, shortened

if TYPE_CHECKING:
    from normkit.comparison.differences import Comparison, Conventions, Level
    from normkit.comparison.values import Values


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing in which a port differs from its reference."""

    level: Level
    """Where it was seen."""
    sentence: str
    """What it is, and where."""
    remedy: str
    """What to do, in a few words; "" if nothing better is known than to look there."""
    places: tuple[str, ...] = ()
    """Paths of norms, or names of tensors, in the port."""


def causes_of(found: Comparison) -> tuple[Cause, ...]:
    """The causes: what is stored first, then what norms compute, then where they stand."""
    of_values = () if found.values is None else _of_values(found.values)
    missing = () if found.values is None else found.values.missing
    return (*of_values, *_of_conventions(found.conventions, missing))


def difference(change: Change) -> str:
    """How a norm differs from its reference in one respect; what both do alike is left out, or said to be alike.

    Example:
        >>> from normkit.identification.passport import value_of
        >>> from normkit.spec import NormSpec
        >>> given, expected = (value_of(NormSpec(eps=eps), "eps") for eps in (1e-6, 1e-5))
        >>> difference(Change(reading="eps", given=given, expected=expected))
        'eps 1e-06 instead of 1e-05, inside the root both'
    """
    given, expected = parts_of(change.reading, change.given), parts_of(change.reading, change.expected)
    common: tuple[str, ...] = ()
    if len(given) == len(expected):
        common = tuple(part for part, other in zip(given, expected, strict=True) if part == other)
    words, other = (", ".join(part for part in parts if part not in common) for parts in (given, expected))
    both = f", {', '.join(common)} both" if common and change.reading == "eps" else ""
    return f"{LABELS.get(change.reading, change.reading)} {words} instead of {other}{both}"


def _of_values(found: Values) -> Iterator[Cause]:
    tensors = {each.name: each for each in found.tensors}
    told = set[frozenset[str]]()
    for group in found.groups:
        if group.is_right is False:
            first = tensors[group.names[0]]
            if first.relation.kind == "swapped":
                yield from _swaps([tensors[name] for name in group.names], found.tensors, told)
                continue
            sentence, remedy = _of_group(group, first, found.reference)
            yield Cause(level="values", sentence=sentence, remedy=remedy, places=group.names)
    if found.missing:
        are = "is" if len(found.missing) == 1 else "are"
        yield Cause(
            level="values",
            sentence=f"{_listed(found.missing)} of the reference {are} missing.",
            remedy="convert the named tensors, too",
            places=found.missing,
        )


def _of_group(group: ValueGroup, first: TensorValue, reference: str) -> tuple[str, str]:
    """A group of wrong tensors in one sentence, and what to do."""
    alone, found = len(group.names) == 1, first.relation
    title = group.title[0].upper() + group.title[1:] if group.title.startswith("all ") else group.title
    remedy = f"convert {'it' if alone else 'them'} anew from {reference}"
    if found.kind == "offset":
        sign = "+" if (found.constant or 0) > 0 else "-"
        hold = f"{title} {'holds' if alone else 'hold'} the reference's {sign} {abs(found.constant or 0):g}"
        if group.verdict.startswith("doubled"):
            remedy = f"add the {abs(found.constant or 0) / 2:g} once: {remedy}"
        return f"{hold}{f': {group.verdict}' if group.verdict else ''}.", remedy
    if found.kind == "copied":
        return f"{title} {'is a copy' if alone else 'are copies'} of {_other(group, found.words)}.", remedy
    words = f"{group.words}; {group.verdict}" if group.verdict else group.words
    return f"{title}: {words}.", remedy


def _other(group: ValueGroup, words: str) -> str:
    """What is copied: "that of X" without its first word."""
    return words.removeprefix("that of ") if len(group.names) == 1 else "other norms' gains"


def _swaps(
    swapped: Sequence[TensorValue], tensors: Sequence[TensorValue], told: set[frozenset[str]]
) -> Iterator[Cause]:
    """One cause for each two norms that have exchanged their gains or biases."""
    held = {(each.role, each.reference_path): each for each in tensors}
    for each in swapped:
        other = held.get((each.role, each.relation.other))
        names = frozenset((each.name, other.name if other else each.relation.other))
        if names in told:
            continue
        told.add(names)
        one, two = sorted(names)
        role = "gains" if each.role == "weight" else "biases"
        yield Cause(
            level="values",
            sentence=f"The {role} of two norms are swapped: {one} and {two}.",
            remedy="exchange the two tensors",
            places=(one, two),
        )


def _of_conventions(found: Conventions, missing: Sequence[str]) -> Iterator[Cause]:
    """What norms compute, and norms without a counterpart unless their tensors are known to be missing."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for pair in found.changed:
        alike.setdefault(tuple(map(difference, pair.changes)), []).append(pair.entry.path)
    for words, paths in alike.items():
        which = f"{len(paths)} of {counted(len(found.pairs), 'norm')} do" if len(paths) > 1 else f"{paths[0]} does"
        yield Cause(
            level="conventions",
            sentence=f"{which} not compute what the reference's {which.split()[-1]}: {'; '.join(words)}.",
            remedy="",
            places=tuple(paths),
        )
    for owner, where in (("reference", "missing in the port"), ("port", "only in the port")):
        paths = [each.path for each in found.unmatched if each.owner == owner]
        if owner == "reference":
            paths = [path for path in paths if not any(name.startswith(f"{path}.") for name in missing)]
        if paths:
            are = "is" if len(paths) == 1 else "are"
            yield Cause(level="wiring", sentence=f"{_listed(paths)} {are} {where}.", remedy="", places=tuple(paths))


def _listed(names: Sequence[str]) -> str:
    """The only name, or a pattern that all share, else the first names."""
    if len(names) == 1:
        return names[0]
    shapes = {*map(pattern, names)}
    which = shapes.pop() if len(shapes) == 1 else shortened([*names], 2)
    return f"{len(names)} norms ({which})"
