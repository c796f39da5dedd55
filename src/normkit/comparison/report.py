"""A comparison in words: the cause and what to do first, then what was looked at, then the evidence level by level."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.comparison.causes import difference, listed
from normkit.comparison.metadata import metadata_facts
from normkit.comparison.rows import Birth, Rows
from normkit.comparison.values import Values
from normkit.show.grouping import merged
from normkit.show.parts import Column, Fact, Section, Table, Tone, Verdict, printable
from normkit.text import by_value, counted, shortened, significant

if TYPE_CHECKING:
    from normkit.comparison.differences import Comparison, Level, Pair

_CASTS = ("casts", "output dtype", "offset dtype")
_LEVELS: tuple[Level, ...] = ("metadata", "values", "conventions", "rows")
_MOST_CAUSES = 3
_WHERE = {"before": "where they enter {}", "at": "where they leave {}", "after": "in the output"}
_TONES: dict[bool | None, Tone] = {False: "error", None: "note", True: "good"}


def describe_comparison(found: Comparison) -> Section:
    """The comparison, safe to print; norms that differ from their references in the same way share a section.

    It is short where nothing is wrong: what is alike is in the JSON.
    """
    alike: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in found.conventions.changed:
        alike[tuple(map(difference, pair.changes))].append(pair)
    parts = [Section(facts=facts) for facts in (_looked_at(found), _stored(found)) if facts]
    parts += [_contrast(words, pairs) for words, pairs in alike.items()]
    return printable(
        Section(
            title=f"{found.port} compared with {found.reference}",
            source=f"run on: {found.source}" if found.source else "",
            verdict=_verdict(found),
            notes=(*_more_causes(found), *(() if "rows" in found.not_looked_at else _beginnings(found.rows))),
            sections=tuple(parts),
            facts=_facts(found),
        )
    )


def _stored(found: Comparison) -> tuple[Fact, ...]:
    """The lines on stored numbers: eps, gains and biases."""
    facts: list[Fact] = []
    if found.metadata is not None:
        # Where norms were identified, an eps that one side does not state is known from them.
        is_known = "conventions" not in found.not_looked_at
        of_metadata = metadata_facts(found.metadata)
        facts += [each for each in of_metadata if each.label != "eps" or each.tone != "note" or not is_known]
    if found.values is not None:
        # A recording holds no other tensors.
        is_recorded = "recording" in found.forms
        facts += [each for each in values_facts(found.values) if not (is_recorded and each.label == "other tensors")]
    # What a fold changed by design is no fault.
    return tuple(each for each in facts if not found.is_fold or each.tone in (None, "good"))


def values_facts(found: Values) -> tuple[Fact, ...]:
    """The stored gains and biases against the reference's, group by group, and the other tensors."""
    facts = [
        Fact(group.title, f"{group.words}; {group.verdict}" if group.verdict else group.words, _TONES[group.is_right])
        for group in found.groups
    ]
    for told in dict.fromkeys(each.words for each in found.running):
        paths = [each.path for each in found.running if each.words == told]
        facts.append(Fact("running statistics", f"{shortened(paths, 2)}: {told}", _TONES[told == "equal"]))
    for told, is_right in dict.fromkeys((each.words, each.is_right) for each in found.batch_norms):
        paths = [each.path for each in found.batch_norms if each.words == told]
        facts.append(Fact("batch norms", f"{shortened(paths, 2)}: {told}", _TONES[is_right]))
    if found.missing:
        facts.insert(0, Fact("missing", listed(found.missing), "error"))
    if found.extra:
        facts.insert(0, Fact("only in the port", listed(found.extra), "error"))
    for where, names in by_value(found.elsewhere).items():
        label, said = ("not read", where[10:]) if where.startswith("not read: ") else ("elsewhere", where)
        facts.append(Fact(label, f"{counted(len(names), 'tensor')} ({shortened(names, 2)}): {said}"))
    pairing = {each.paired_by for each in found.tensors} - {"name"}
    if "order" in pairing:
        by_order = sum(each.paired_by == "order" for each in found.tensors)
        facts.append(Fact("paired", f"{by_order} of {len(found.tensors)} by their order alone", "note"))
    others = found.others
    for what, names in by_value(others.matrices).items():
        tone: Tone = "note" if what == "other values" else "error"
        facts.append(Fact("matrices", f"{shortened(names, 2)}: {what}", tone))
    facts += [Fact("matrices", f"{shortened(names, 2)}: {words}", "note") for words, names in others.near.items()]
    facts += [
        Fact("matrices", f"{shortened(names, 2)}: stored as {form}, and not compared", "note")
        for form, names in found.unread.items()
    ]
    facts += [Fact("matrices", note, "note") for note in others.notes]
    # A bias goes with its matrix, which comes first.
    joined = {each.place: each for each in reversed(others.joined)}.values()
    for (said, is_known), count in Counter((each.words, each.turns > 0) for each in reversed(joined)).items():
        times = f" ({count} times)" if count > 1 else ""
        facts.append(Fact("joined", f"{said}{times}", None if is_known else "note"))
    if others.missing or others.extra or others.reshaped or others.renamed:
        missing = [name for name in others.missing if name not in {*others.undecided}]
        like = [f"{name} for {other}" for name, other in others.renamed.items()]
        words = [
            f"{len(names)} {what} ({shortened(names, 2)})"
            for names, what in (
                (like, "by values or shapes, as names differ"),
                (others.undecided, "under no name of the port, which has others of their shapes"),
                (missing, "missing"),
                (others.extra, "only in the port"),
                ([*others.reshaped], "of another shape"),
            )
            if names
        ]
        facts.append(Fact("other tensors", f"{others.paired - len(like)} paired by name, {', '.join(words)}"))
    return tuple(facts)


def _verdict(found: Comparison) -> Verdict:
    """The difference and its place in one sentence; or that all is the same."""
    if found.is_fold and (found.values is None or not found.values.is_right):
        how = f"folded from {found.reference} by {', '.join(found.folded_by)}, as its certificate says"
        detail = f"{found.port} was {how}: inside, numbers differ by design. The outputs agree within rounding; "
        detail += "normkit verify proves each tensor."
        return Verdict(tone="good", headline="the same", detail=detail)
    if found.causes:
        return Verdict(tone="error", headline="different", detail=found.causes[0].sentence)
    if found.differs:
        detail = f"{_sames(found)}, but the two runs differ." if _sames(found) else "The two runs differ."
        return Verdict(tone="error", headline="different", detail=detail)
    if not _sames(found):
        return Verdict(tone="neutral", headline="nothing to compare", detail="Neither of the two has a norm.")
    unsure = [] if found.values is None else [group for group in found.values.groups if group.is_right is None]
    if unsure:
        words = f": {unsure[0].verdict}" if unsure[0].verdict else ""
        detail = f"{unsure[0].title}: {unsure[0].words}{words}."
        return Verdict(tone="note", headline="undecided", detail=detail)
    if found.open_matrices:
        detail = "; ".join((_sames(found), *found.open_matrices))
        headline = "stored gains the same" if found.values and found.values.tensors else "undecided"
        return Verdict(tone="note", headline=headline, detail=f"{detail}.")
    return Verdict(tone="good", headline="the same", detail=f"{_sames(found)}.")


def _sames(found: Comparison) -> str:
    """The parts that are alike, in one clause."""
    parts = []
    if found.values is not None and found.values.tensors and found.values.is_right is not False:
        groups = found.values.groups
        is_told = len(groups) == 1 and groups[0].verdict and groups[0].words != "equal"
        words = f" ({groups[0].words}, {groups[0].verdict})" if is_told else ""
        roles = Counter[str](each.role for each in found.values.tensors)
        names = [f"{roles[role]} {name}" for role, name in (("weight", "gains"), ("bias", "biases")) if roles[role]]
        parts.append(f"all {' and '.join(names)} that are stored are right{words}")
    if found.values is not None and (norms := found.values.batch_norms) and all(each.is_right for each in norms):
        most = max(each.roundings or 0.0 for each in norms)
        are = f"all {len(norms)} batch norms" if len(norms) > 1 else "the batch norm"
        parts.append(f"{are} of the reference folded rightly, exact to {counted(math.ceil(most), 'rounding')}")
    if count := len(found.conventions.pairs):
        parts.append(
            f"all {count} norms compute the same formulas" if count > 1 else "the norm computes the same formula"
        )
    words = "; ".join(parts)
    return words[:1].upper() + words[1:]


def _beginnings(found: Rows) -> tuple[str, ...]:
    """The place of the rows' first difference, and how it goes on; the causes are told before."""
    if found.birth is not None:
        goes_on = _growth(found, found.birth)
        return (f"The first difference appears {_place(found.birth)}.", *([goes_on] if goes_on else []))
    if found.first_bits is not None:
        verdict = found.verdict or "no more different than rounding explains"
        most = max(found.steps, key=lambda step: step.worst, default=None)
        where = "" if most is None else f" {_WHERE[most.where].format(most.path)}"
        largest = f"Rows differ at most by {significant(found.largest)} of their length{where}."
        return (f"Side by side they are {verdict}. {largest} The first difference is {_place(found.first_bits)}.",)
    return (f"Side by side they agree to the bit at {counted(found.compared, 'norm')} and in their output.",)


def _more_causes(found: Comparison) -> tuple[str, ...]:
    """The remedy of the first cause, and the causes after it."""
    causes = found.causes
    lines = [f"Do: {causes[0].remedy}."] if causes and causes[0].remedy else []
    lines += [f"Besides: {cause.sentence}" for cause in causes[1:_MOST_CAUSES]]
    if len(causes) > _MOST_CAUSES:
        lines.append(f"And {counted(len(causes) - _MOST_CAUSES, 'difference')} more.")
    return tuple(lines)


def _looked_at(found: Comparison) -> tuple[Fact, ...]:
    """Which levels were looked at, and why the others were not."""
    seen: list[str] = [level for level in _LEVELS if level not in found.not_looked_at]
    if found.wiring is not None:
        # Rows show where a norm stands; tensors show only whose a gain is.
        seen.append("wiring" if "rows" in found.wiring.seen_in else "wiring in part")
    facts = [Fact("looked at", ", ".join(seen))]
    reasons: dict[str, list[str]] = defaultdict(list)
    for level in _LEVELS:
        if level in found.not_looked_at:
            reasons[found.not_looked_at[level]].append(level)
    return (*facts, *(Fact("not looked at", f"{' and '.join(levels)}: {why}") for why, levels in reasons.items()))


def _contrast(words: Sequence[str], pairs: Sequence[Pair]) -> Section:
    """Norms that differ in the same way, the largest effect first."""
    observed = [(pair, pair.observed) for pair in pairs if pair.observed is not None]
    effects = [effect.dtype for effect in observed[0][1].effects] if observed else []
    columns = [Column("path", "norm"), Column("rms", "row rms", numeric=True)]
    for dtype in effects:
        columns += [
            Column(f"{dtype} median", f"{dtype} median", numeric=True),
            Column(f"{dtype} worst", f"{dtype} worst", numeric=True),
        ]
    rows = []
    for pair, seen in observed:
        numbers = [seen.rms[1], *(value for effect in seen.effects for value in (effect.median, effect.worst))]
        rows.append([_name(pair), *map(significant, numbers)])
    notes = []
    if rows:
        notes.append("Row rms: of the median row that arrives there.")
        notes.append("Median, worst: |y - y'| / |y'| of the two formulas on these rows.")
        if any(not pair.with_parameters for pair, _ in observed):
            notes.append("Without gain and bias: those of the reference are not at hand, or of another size.")
        if effects == ["float32"] and all(change.reading in _CASTS for pair in pairs for change in pair.changes):
            notes.append("Casts make a difference in 16 bits; in float32 it is the last bit at most.")
    elif any(not pair.with_parameters for pair in pairs):
        notes.append("No effect was measured: gain and bias of the reference are not at hand, or of another size.")
    many = f"{counted(len(pairs), 'norm')}: " if len(pairs) > 1 else f"{pairs[0].entry.path}: "
    return Section(
        title=many + (words[0] if len(words) == 1 else f"{len(words)} conventions differ"),
        notes=tuple(words) if len(words) > 1 else (),
        tables=(Table.of("Effects", columns, rows, note=" ".join(notes)),),
    )


def _name(pair: Pair) -> str:
    path, other = pair.entry.path, pair.reference.path
    return path if path == other else f"{path} for {other}"


def _facts(found: Comparison) -> tuple[Fact, ...]:
    """How norms were paired, norms without a counterpart, parameters, and what was not compared."""
    facts = []
    by_order = [pair for pair in found.conventions.pairs if pair.matched_by == "order"]
    if by_order:
        how = "the paths differ, so they were paired in forward order and by size"
        facts.append(Fact("pairs", f"{len(by_order)} of {counted(len(found.conventions.pairs), 'norm')}: {how}"))
        facts.append(Fact("", shortened([_name(pair) for pair in by_order])))
    owners = {"port": found.port, "reference": found.reference}
    alone = merged(
        (f"only in {owners[each.owner]}", each.path, each.reason)
        for each in found.conventions.unmatched
        if not each.counterpart
    )
    strange = merged(
        ("no convention", each.counterpart if each.owner == "reference" else each.path, each.reason)
        for each in found.conventions.unmatched
        if each.counterpart
    )
    alone = [*alone, *strange]
    facts += [Fact(label, f"{where}: {reason}" if reason else where) for label, where, reason in alone]
    for role in ("weight", "bias"):
        facts += _parameter_facts(found, role)
    noted = Counter((difference(change), pair.dtypes) for pair in found.conventions.pairs for change in pair.casts)
    for (words, dtypes), count in noted.items():
        both = f"both run in {dtypes[0]}, which does not feel it"
        why = both if dtypes[0] == dtypes[1] else f"the port is in {dtypes[0]}, the reference in {dtypes[1]}"
        facts.append(Fact("casts", f"{words} at {counted(count, 'norm')}: {why}", "note"))
    left_out = merged(
        ("not compared", path, reason if reason == other else f"{reason}; in the reference: {other}")
        for path, (reason, other) in found.conventions.left_out.items()
    )
    facts += [Fact(label, f"{where}: {reason}") for label, where, reason in left_out]
    undecided: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair in found.conventions.pairs:
        for reading, reason in pair.undecided.items():
            undecided[reading].append((pair.entry.path, reason))
    for reading, open_pairs in undecided.items():
        path, reason = open_pairs[0]
        where = path if len(open_pairs) == 1 else f"{counted(len(open_pairs), 'norm')}, such as {path}"
        facts.append(Fact("not compared", f"{reading}: {reason} ({where})"))
    return tuple(facts)


def _parameter_facts(found: Comparison, role: str) -> list[Fact]:
    """Gains or biases that differ and that the level of values has not told."""
    told = set() if found.values is None else {each.path for each in found.values.tensors}
    changes = [
        (pair, change)
        for pair in found.conventions.pairs
        for change in pair.parameters
        if change.role == role and pair.entry.path not in told
    ]
    if not changes:
        return []
    sizes = [change.difference for _, change in changes if change.difference is not None]
    by = f" by up to {significant(max(sizes))} of the largest," if sizes else " (their digests do)"
    at = shortened([pair.entry.path for pair, _ in changes])
    swapped = {frozenset((pair.entry.path, change.swapped_with)) for pair, change in changes if change.swapped_with}
    return [
        Fact(role, f"differs{by} at {counted(len(changes), 'norm')}: {at}"),
        *(Fact("", f"swapped between {both}") for both in sorted(" and ".join(sorted(paths)) for paths in swapped)),
    ]


def _growth(found: Rows, birth: Birth) -> str:
    """How the first difference goes on to the outputs, in one sentence; "" if there is no place after it."""
    steps = [step for step in found.steps if step.where != "at"]
    first = next((place for place, step in enumerate(steps) if step.path == birth.path), None)
    if first is None or first + 1 >= len(steps):
        return ""
    later = steps[first + 1 :]
    between = max(later[:-1], key=lambda step: step.median, default=None)
    parts = [f"by up to {significant(between.median)} at {between.path}"] if between is not None else []
    where = "in the output" if later[-1].path is None else f"at {later[-1].path}"
    parts.append(f"by {significant(later[-1].median)} {where}")
    own = f", {significant(later[-1].units)} times as much as rounding" if later[-1].units else ""
    agree = " The outputs agree within rounding." if found.outputs_agree else ""
    return f"After it the median row differs {', '.join(parts)}{own}.{agree}"


def _place(birth: Birth) -> str:
    agreed = "agrees to the bit" if birth.agreed == 0 else f"agrees to {significant(birth.agreed)}"
    differs = f"differs by {significant(birth.differs)} in the worst row"
    if birth.where == "at":
        return f"at {birth.path}: its input {agreed}, its output {differs}"
    if birth.where == "after":
        since = f"after {birth.since}, the last norm: what leaves it {agreed}" if birth.since else "where no norm is"
        return f"{since}, the model's output {differs}"
    if birth.since is None:
        return f"before the first norm: the input of {birth.path} {differs}"
    block = {"attention": "in attention", "MLP": "in the MLP", "residual sum": "in the sum with the residual"}
    where = block.get(birth.block, "between two norms")
    return f"{where}: what leaves {birth.since} {agreed}, what enters {birth.path} {differs}"
