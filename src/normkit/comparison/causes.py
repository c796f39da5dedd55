"""Why a port differs from its reference: one sentence for each cause, the cause before what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normkit.comparison.pairing import Change
from normkit.comparison.value_groups import TensorValue, ValueGroup
from normkit.identification.report import LABELS, parts_of
from normkit.show.grouping import pattern
from normkit.text import by_value, counted, shortened

if TYPE_CHECKING:
    from normkit.comparison.differences import Comparison, Level
    from normkit.comparison.metadata import Metadata
    from normkit.comparison.values import Values

_VERDICTS = {"doubled": "The 1 was added twice", "dropped": "The 1 was dropped", "wrong": "This is wrong"}
"""First word of a verdict on stored gains -> a clause."""

_ADVICE = {
    "doubled": "and add the 1 once",
    "dropped": "and add the 1",
    "wrong": "as its runtime stores them",
}

_WIRING = ("wiring", "swapped gains", "not applied", "applied twice", "missing norm", "extra norm", "final norm")
"""Kinds of what rows show that say where something stands, not what it computes."""

_PLACES = {"transformers": "config.json", "MLX": "config.json"}
"""Runtime -> where its models have their eps."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing in which a port differs from its reference."""

    level: Level
    """The place where it was seen."""
    sentence: str
    """The cause and its place."""
    remedy: str
    """The remedy, in a few words; "" if nothing better is known than to look there."""
    places: tuple[str, ...] = ()
    """Paths of norms in the port; those that it lacks as the reference names them."""


def causes_of(found: Comparison) -> tuple[Cause, ...]:
    """The causes: what is stored first, then what norms compute, where they stand, and what only rows show."""
    of_values = () if found.values is None else (*_of_values(found.values), *_only_in_port(found, found.values))
    of_metadata = () if found.metadata is None else _of_metadata(found.metadata)
    faults = () if found.metadata is None else found.metadata.faults
    of_faults = (Cause(level="metadata", sentence=each.sentence, remedy=each.remedy) for each in faults)
    made = [*of_faults, *of_values, *_of_matrices(found), *of_metadata, *_of_conventions(found)]
    explained = {path for each in made for path in each.places}
    settings = () if found.metadata is None else found.metadata.settings
    made += _of_rounding(found)
    for cause in found.rows.causes:
        if cause.kind in ("first token", "rotation") and any(each.is_of_attention for each in settings):
            continue
        # Causes that the files or the formulas have told are not told again.
        told = cause.paths[:1] if cause.kind == "gain" else cause.paths
        if not told or not explained.issuperset(told):
            is_path = "." in cause.words.split(" ")[0]
            sentence = f"{cause.words if is_path else cause.words[0].upper() + cause.words[1:]}."
            level: Level = "wiring" if cause.kind in _WIRING else "rows"
            made.append(Cause(level=level, sentence=sentence, remedy="", places=cause.paths))
    return tuple(made)


def difference(change: Change) -> str:
    """How a norm differs from its reference in one respect; what both do alike is left out, or said to be alike.

    Example:
        >>> from normkit.identification.spec_readings import value_of
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
            paths = tuple(tensors[name].path for name in group.names)
            level: Level = "wiring" if first.relation.kind == "copied" and first.relation.order else "values"
            yield Cause(level=level, sentence=sentence, remedy=remedy, places=paths)
    wrong = [each for each in found.running if not each.is_right]
    for words in dict.fromkeys(each.words for each in wrong):
        places = tuple(each.path for each in wrong if each.words == words)
        which = places[0] if len(places) == 1 else f"{len(places)} norms ({shortened(places, 2)})"
        yield Cause(
            level="values",
            sentence=f"The running statistics of {which}: {words}.",
            remedy=f"convert running mean and variance anew from {found.reference}",
            places=places,
        )
    for words in dict.fromkeys(each.words for each in found.batch_norms if each.is_right is False):
        places = tuple(each.path for each in found.batch_norms if each.words == words)
        many = f"{len(places)} batch norms ({shortened(places, 2)}) are"
        which = f"The batch norm {places[0]} is" if len(places) == 1 else many
        yield Cause(
            level="values",
            sentence=f"{which} {words}.",
            remedy=f"fold them anew from {found.reference}, with nk.fold or an exporter in evaluation mode",
            places=places,
        )
    if found.missing:
        are = "is" if len(found.missing) == 1 else "are"
        kept = {each.reference_path for each in found.tensors}
        yield Cause(
            level="values" if any(name.rpartition(".")[0] in kept for name in found.missing) else "wiring",
            sentence=f"{listed(found.missing)} of the reference {are} missing.",
            remedy="convert the named tensors, too",
            places=tuple(name.rpartition(".")[0] for name in found.missing),
        )


def _of_matrices(comparison: Comparison) -> Iterator[Cause]:
    """Matrices that are not the reference's."""
    wrong = comparison.wrong_matrices
    for what, names in by_value(wrong).items():
        which = matrices(names)
        which = f"{which[0].upper()}{which[1:]}"
        says = {
            "transposed": "transposed",
            "not transposed": "not transposed, unlike the others of the layers",
            "unrelated": "unrelated to the reference's",
            "rows in rotary order": "the reference's with the rows of each head in another rotary order",
            "scales of other groups": "quantized with scales of other groups",
        }[what]
        norms = " The norms are right." if comparison.values is not None and comparison.values.is_right else ""
        them = "it" if len(names) == 1 else "them"
        anew = f"convert {them} anew from {comparison.reference}"
        remedy = f"transpose {them}" if what.endswith("transposed") else anew
        yield Cause(level="values", sentence=f"{which} {says}.{norms}", remedy=remedy)


def _of_rounding(comparison: Comparison) -> Iterator[Cause]:
    """Matrices that are the reference's, rounded to a grid, where the rows differ."""
    if comparison.values is None or comparison.rows.birth is None:
        return
    for words, names in comparison.values.others.near.items():
        if not any(comparison.values.others.rounded[name].bits for name in names):
            continue
        which = matrices(names)
        norms = " The norms are right." if comparison.values.is_right else ""
        yield Cause(
            level="values",
            sentence=f"{which[0].upper()}{which[1:]} {words}.{norms}",
            remedy="nothing, if the port is meant to be quantized; else convert the matrices anew",
        )


def matrices(names: Sequence[str]) -> str:
    """The only matrix, or the number of all and the first names, with a verb."""
    return f"the matrix {names[0]} is" if len(names) == 1 else f"{len(names)} matrices ({shortened(names, 2)}) are"


def _only_in_port(comparison: Comparison, found: Values) -> Iterator[Cause]:
    """Norms, and gains and biases of norms, that the reference lacks; and whether the port's class has such a norm."""
    norms = {each.path for each in found.tensors}
    parts = [name for name in found.extra if name.rpartition(".")[0] in norms]
    for names, what in (([name for name in found.extra if name not in parts], "norm"), (parts, "gain or bias")):
        if not names:
            continue
        paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
        use, is_used = "", True
        if what == "norm" and comparison.forms[0] == "folder" and "conventions" not in comparison.not_looked_at:
            own = [pair.entry.path for pair in comparison.conventions.pairs]
            own += [each.path for each in comparison.conventions.unmatched if each.owner == "port"]
            is_used = any(f".{path}".endswith(f".{each}") for path in paths for each in own)
            use = f"; the port's class {'uses' if is_used else 'does not use'} {'it' if len(paths) == 1 else 'them'}"
        are = "is" if len(names) == 1 else "are"
        yield Cause(
            level="wiring" if what == "norm" else "values",
            sentence=f"{listed(names)} {are} only in the port: the reference has no such {what}{use}.",
            remedy="find out whose it is: the reference may be of another model"
            if is_used
            else "remove it, or load the port with the class that it belongs to",
            places=paths,
        )


def _of_group(group: ValueGroup, first: TensorValue, reference: str) -> tuple[str, str]:
    """A group of wrong tensors in one sentence or two, and what to do."""
    alone, found, added = len(group.names) == 1, first.relation, abs(first.relation.constant or 0)
    title = group.title[0].upper() + group.title[1:] if group.title.startswith("all ") else group.title
    hold = f"{title} {'holds' if alone else 'hold'}"
    role = "gain" if first.role == "weight" else "bias"
    remedy = f"convert {'it' if alone else 'them'} anew from {reference}"
    if found.kind in ("equal", "offset"):
        sign = "+" if (found.constant or 0) > 0 else "-"
        values = f"the reference's {sign} {added:g}" if found.kind == "offset" else "the reference's values"
        kind, _, effect = group.verdict.partition(": ")
        if found.rounding.startswith("float8"):
            return f"{hold} {values}, rounded to {found.rounding}: {effect}.", f"{remedy}, in 16 bits or more"
        if kind not in _VERDICTS:
            return f"{hold} {values}{f'; {group.verdict}' if group.verdict else ''}.", remedy
        return f"{hold} {values}. {_VERDICTS[kind]}: {effect}.", f"{remedy}, {_ADVICE[kind]}"
    if found.kind == "copied":
        if found.order:
            return f"The layers stand in the order {found.order}.", f"convert {reference} anew, layer by layer"
        where = f", {found.place}" if found.place and found.place != found.other else ""
        if found.place.endswith("of the same layer"):
            where = " of the same layer"
        if alone:
            return f"{hold} a copy of the {role} of {found.other}{where}.", remedy
        return f"{hold} copies of those of other norms{where}.", remedy
    if found.kind == "different" and found.reason:
        return f"{title} {'is' if alone else 'are'} of another size: {found.reason}.", "compare models of one size"
    words = f"{group.words}; {group.verdict}" if group.verdict else group.words
    return f"{title}: {words}.", remedy


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
            level="wiring",
            sentence=f"The {role} of two norms are swapped: {one} and {two}.",
            remedy="exchange the two tensors",
            places=tuple({each.path, other.path if other else each.path}),
        )


def _of_metadata(found: Metadata) -> Iterator[Cause]:
    file = _PLACES.get(found.runtimes[0], "metadata")
    wrong: dict[tuple[float | None, float | None], list[str]] = {}
    for each in found.eps:
        if each.is_same is False:
            wrong.setdefault((each.given, each.expected), []).append(each.path)
    for (given, expected), paths in wrong.items():
        which = f"{len(paths)} of {counted(len(found.eps), 'norm')} have" if len(paths) > 1 else f"{paths[0]} has"
        yield Cause(
            level="metadata",
            sentence=f"{which} eps {given:.7g} instead of {expected:.7g}.",
            # A model in memory or in code has no file to write to.
            remedy=f"write the reference's eps into the {file} of {found.port}"
            if found.runtimes[0]
            else "give them the reference's eps",
            places=tuple(paths),
        )
    for setting in found.settings:
        if setting.computes:
            yield Cause(
                level="metadata",
                sentence=f"{setting.words} ({file}).",
                remedy=f"write {setting.name} {setting.shown} into the {file} of {found.port}",
            )


def _of_conventions(comparison: Comparison) -> Iterator[Cause]:
    """Causes in the formulas of norms, and norms without a counterpart; not those that files have told."""
    found = comparison.conventions
    values = comparison.values
    stored = () if values is None else (*values.missing, *values.extra)
    told = set[str]()
    if comparison.metadata is not None:
        told = {each.path for each in comparison.metadata.eps if each.is_same is False}
    alike: dict[tuple[str, ...], list[str]] = {}
    for pair in found.changed:
        changes = [each for each in pair.changes if each.reading != "eps" or pair.entry.path not in told]
        if changes:
            alike.setdefault(tuple(map(difference, changes)), []).append(pair.entry.path)
    for words, paths in alike.items():
        which = f"{len(paths)} of {counted(len(found.pairs), 'norm')} do" if len(paths) > 1 else f"{paths[0]} does"
        yield Cause(
            level="conventions",
            sentence=f"{which} not compute what the reference's {which.split()[-1]}: {'; '.join(words)}.",
            remedy="",
            places=tuple(paths),
        )
    yield from _of_strange(comparison)
    for owner, where in (("reference", "missing in the port"), ("port", "only in the port")):
        paths = [each.path for each in found.unmatched if each.owner == owner and not each.counterpart]
        paths = [path for path in paths if not any(f".{name}".find(f".{path}.") >= 0 for name in stored)]
        if paths:
            are = "is" if len(paths) == 1 else "are"
            yield Cause(level="wiring", sentence=f"{listed(paths)} {are} {where}.", remedy="", places=tuple(paths))


def _of_strange(comparison: Comparison) -> Iterator[Cause]:
    """Norms of one side in whose place the other has something that no spec describes."""
    causes = [each for each in comparison.rows.causes if each.kind == "divisor"]
    divisions = {path: f"its rows are {each.words.partition(' are ')[2]}" for each in causes for path in each.paths}
    alike: dict[tuple[str, str], list[str]] = {}
    for each in comparison.conventions.unmatched:
        if each.counterpart:
            path = each.path if each.owner == "port" else each.counterpart
            # The class comes first.
            reason = each.reason.partition(": ")[2] or each.reason
            alike.setdefault((each.owner, divisions.get(path) or reason), []).append(path)
    for (owner, reason), paths in alike.items():
        does = "do" if len(paths) > 1 else "does"
        strange = "no norm of the space of conventions" if owner == "reference" else "which is none of the conventions"
        which = listed(paths)
        yield Cause(
            level="conventions",
            sentence=f"{which} {does} not compute what the reference's {does}: {strange} ({reason}).",
            remedy="",
            places=tuple(paths),
        )


def listed(names: Sequence[str]) -> str:
    """The only name, or the number of all and the pattern that they share, else the first names."""
    if len(names) == 1:
        return names[0]
    shapes = {*map(pattern, names)}
    which = shapes.pop() if len(shapes) == 1 else shortened([*names], 2)
    return f"{len(names)} norms ({which})"
