"""What is written beside the parameters, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from normkit.comparison.metadata import EpsPair, Metadata, is_same
from normkit.show.parts import Fact, Section, Verdict, printable
from normkit.text import counted, shortened


def describe_metadata(found: Metadata) -> Section:
    """The metadata of a port and its reference, safe to print."""
    facts = [Fact(each.label, each.words, "error") for each in found.faults]
    is_told = any(each.label == "eps" for each in found.faults)
    for (given, expected), paths in _grouped((each.given, each.expected, each.path) for each in found.eps):
        same, at = is_same(given, expected), f"at {_where(paths, len(found.eps))}"
        if same is None and is_told:
            continue
        if same is None:
            lacks = "neither side states one" if given is expected is None else "one side states none"
            facts.append(Fact("eps", f"{_number(given)} against {_number(expected)} {at}: {lacks}", "note"))
        elif same:
            facts.append(Fact("eps", f"{_number(given)} {at}", "good"))
        else:
            facts.append(Fact("eps", f"{_number(given)} instead of {_number(expected)} {at}", "error"))
    facts += _ignored(found.eps, found.port, is_of_reference=False)
    facts += _ignored(found.eps, found.reference, is_of_reference=True)
    facts += [Fact("setting", each.words, "error" if each.computes else "note") for each in found.settings]
    names = [
        " ".join(filter(None, pair)) or "not stated" for pair in zip(found.runtimes, found.architectures, strict=True)
    ]
    facts.append(Fact("form", f"{names[0]}, the reference {names[1]}"))
    return printable(
        Section(
            id="metadata",
            title=f"Metadata of {found.port} against {found.reference}",
            source="read from what is written beside the parameters; nothing was run",
            verdict=_verdict(found),
            facts=tuple(facts),
            remarks=found.notes,
        )
    )


def _verdict(found: Metadata) -> Verdict:
    wrong = sum(each.is_same is False for each in found.eps)
    known = sum(each.is_same is not None for each in found.eps)
    if found.differs:
        count = sum(each.computes for each in found.settings)
        parts = [f"another eps at {wrong} of {_norms(len(found.eps))}"] if wrong else []
        parts += [f"{counted(count, 'setting')} with another value"] if count else []
        parts += [f"{each.label} {each.words}" for each in found.faults]
        return Verdict(tone="error", headline="different", detail=f"{'; '.join(parts)}.")
    if not known:
        return Verdict(tone="neutral", headline="nothing to compare", detail="no eps is stated on both sides.")
    return Verdict(tone="good", headline="the same", detail=f"one eps at {known} of {_norms(len(found.eps))}.")


def _ignored(pairs: Iterable[EpsPair], name: str, *, is_of_reference: bool) -> list[Fact]:
    """Norms whose class uses another eps than its configuration states."""
    entries = (
        (each.reference_used, each.reference_stored, each.reference_path)
        if is_of_reference
        else (each.used, each.stored, each.path)
        for each in pairs
    )
    apart = ((used, stored, path) for used, stored, path in entries if is_same(used, stored) is False)
    return [
        Fact(
            "class",
            f"{name} states eps {_number(stored)}, its class uses {_number(used)} at {_where(paths)}",
            "note",
        )
        for (used, stored), paths in _grouped(apart)
    ]


def _grouped(
    entries: Iterable[tuple[float | None, float | None, str]],
) -> list[tuple[tuple[float | None, float | None], list[str]]]:
    """The paths by their two numbers, the most first."""
    groups: dict[tuple[float | None, float | None], list[str]] = defaultdict(list)
    for one, other, path in entries:
        groups[(one, other)].append(path)
    return sorted(groups.items(), key=lambda item: (is_same(*item[0]) is not False, -len(item[1])))


def _where(paths: list[str], count: int = 0) -> str:
    """The norms, or how many and of which kinds: there is one of each kind in every layer."""
    if len(paths) == count > 1:
        return f"all {_norms(count)}"
    kinds = sorted({path.rpartition(".")[2] for path in paths})
    return shortened(paths) if len(paths) <= 2 else f"{_norms(len(paths))}: {shortened(kinds)}"


def _norms(count: int) -> str:
    return counted(count, "norm")


def _number(eps: float | None) -> str:
    return "none" if eps is None else f"{eps:.7g}"
