"""Stored values in words: the relation of gains and biases to the reference's, group by group."""

from __future__ import annotations

from normkit.comparison.value_groups import ValueGroup
from normkit.comparison.values import Values
from normkit.show.parts import Fact, Section, Tone, Verdict, printable
from normkit.text import counted, shortened

_TONES: dict[bool | None, Tone] = {False: "error", None: "note", True: "good"}


def describe_values(found: Values) -> Section:
    """The stored gains and biases against the reference's, safe to print."""
    facts = [_fact(group) for group in found.groups]
    for told in dict.fromkeys(each.words for each in found.running):
        paths = [each.path for each in found.running if each.words == told]
        facts.append(Fact("running statistics", f"{shortened(paths, 2)}: {told}", _TONES[told == "equal"]))
    if found.missing:
        facts.insert(0, Fact("missing", _listed(found.missing), "error"))
    if found.extra:
        facts.insert(0, Fact("only in the port", _listed(found.extra), "error"))
    for where in dict.fromkeys(found.elsewhere.values()):
        names = [name for name, place in found.elsewhere.items() if place == where]
        label, said = ("not read", where[10:]) if where.startswith("not read: ") else ("elsewhere", where)
        facts.append(Fact(label, f"{counted(len(names), 'tensor')} ({shortened(names, 2)}): {said}"))
    pairing = {each.paired_by for each in found.tensors} - {"name"}
    if "order" in pairing:
        by_order = sum(each.paired_by == "order" for each in found.tensors)
        facts.append(Fact("paired", f"{by_order} of {len(found.tensors)} by their order alone", "note"))
    others = found.others
    for what in dict.fromkeys(others.matrices.values()):
        names = [name for name, each in others.matrices.items() if each == what]
        tone: Tone = "note" if what == "other values" else "error"
        facts.append(Fact("matrices", f"{shortened(names, 2)}: {what}", tone))
    facts += [Fact("matrices", note, "note") for note in others.notes]
    if others.missing or others.extra or others.reshaped:
        words = [
            f"{len(names)} {what} ({shortened(names, 2)})"
            for names, what in (
                (others.missing, "missing"),
                (others.extra, "only in the port"),
                ([*others.reshaped], "of another shape"),
            )
            if names
        ]
        facts.append(Fact("other tensors", f"{others.paired} paired by name, {', '.join(words)}"))
    return printable(
        Section(
            id="values",
            title=f"Values of {found.port} against {found.reference}",
            source="read from the stored gains and biases; nothing was run",
            verdict=_verdict(found),
            facts=tuple(facts),
            remarks=found.notes,
        )
    )


def _verdict(found: Values) -> Verdict:
    if not (found.tensors or found.missing or found.extra):
        return Verdict(tone="neutral", headline="nothing to compare", detail="no norm has a counterpart by name.")
    wrong = sum(each.is_right is False for each in found.tensors)
    unsure = sum(each.is_right is None for each in found.tensors)
    count = counted(len(found.tensors), "tensor")
    parts = []
    if wrong:
        parts.append(f"{wrong} of {count} of norms {'is' if wrong == 1 else 'are'} wrong")
    if lost := sum(not each.is_right for each in found.running):
        parts.append(f"the running statistics of {counted(lost, 'norm')} are wrong")
    if found.missing:
        parts.append(f"{len(found.missing)} {'is' if len(found.missing) == 1 else 'are'} missing")
    if found.extra:
        parts.append(f"{len(found.extra)} {'is' if len(found.extra) == 1 else 'are'} only in the port")
    if parts:
        return Verdict(tone="error", headline="different", detail=f"{'; '.join(parts)}.")
    if unsure:
        detail = f"{unsure} of {count} of norms {'is' if unsure == 1 else 'are'} undecided, none is wrong."
        return Verdict(tone="note", headline="undecided", detail=detail)
    return Verdict(tone="good", headline="the same", detail=f"all {count} of norms are what the port should store.")


def _fact(group: ValueGroup) -> Fact:
    words = f"{group.words}; {group.verdict}" if group.verdict else group.words
    return Fact(group.title, words, _TONES[group.is_right])


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)}: {shortened(names, 2)}"
