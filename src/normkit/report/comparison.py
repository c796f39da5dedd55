"""A comparison of a model with its reference for a terminal: where the difference begins, what differs, its effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from normkit.comparison.differences import Comparison, Pair
from normkit.comparison.divergence import Birth
from normkit.report.conventions import difference
from normkit.show.grouping import pattern
from normkit.show.parts import Cell, Column, Fact, Table, Verdict, printable
from normkit.show.terminal import lines, marked, ruled
from normkit.text import counted, shortened, significant

_MOST_ROWS = 16
_CASTS = ("casts", "output dtype", "offset dtype")


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Norms that differ from their references in the same way."""

    title: str
    changes: tuple[str, ...]
    """The differences, one line each, if there is more than one; else empty."""
    effects: Table
    """One row per norm, largest effect first; empty if no effect was measured."""
    note: str
    """What the numbers are."""


@dataclass(frozen=True, kw_only=True)
class Contrasts:
    """Everything that is said about a comparison."""

    title: str
    source: str
    """What both models were run on."""
    verdict: Verdict
    birth: tuple[str, ...]
    """Where the difference begins."""
    contrasts: tuple[Contrast, ...]
    """Largest effect first."""
    facts: tuple[Fact, ...]
    """Parameters, norms without a counterpart, how norms were paired, what was not compared."""


def describe_comparison(found: Comparison) -> Contrasts:
    """The comparison in words, safe to print."""
    alike: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in found.changed:
        alike[tuple(map(difference, pair.changes))].append(pair)
    return printable(
        Contrasts(
            title=f"{found.model}, held against {found.reference}",
            source=found.source,
            verdict=_verdict(found),
            birth=_births(found),
            contrasts=tuple(_contrast(words, pairs) for words, pairs in alike.items()),
            facts=_facts(found),
        )
    )


def contrast_list(found: Comparison) -> RenderableType:
    """The comparison as text for a terminal."""
    described = describe_comparison(found)
    parts: list[RenderableType] = [Text(described.title, "bold"), Text(f"run on: {described.source}", "dim"), ""]
    parts.append(
        Text.assemble(marked(described.verdict.tone, described.verdict.headline), "  ", described.verdict.detail)
    )
    parts += [Text(sentence) for sentence in described.birth]
    for each in described.contrasts:
        parts += ["", Text(each.title, "bold")]
        parts += [Padding.indent(Text(change), 2) for change in each.changes]
        if each.effects.rows:
            parts.append(Padding.indent(Group("", ruled(each.effects, _MOST_ROWS)), 2))
        if each.note:
            parts.append(Padding.indent(Text(each.note, "dim"), 2))
    if described.facts:
        parts += ["", lines(described.facts)]
    return Group(*parts)


def _verdict(found: Comparison) -> Verdict:
    changed, count = len(found.changed), len(found.pairs)
    parts = []
    if changed:
        verb = "does" if changed == 1 else "do"
        parts.append(f"{changed} of {counted(count, 'norm')} {verb} not compute what the reference's {verb}")
    if found.unmatched:
        parts.append(f"{counted(len(found.unmatched), 'norm')} without counterpart")
    if found.divergence.birth and not parts:
        parts.append(f"{_all(count)}, and yet the two runs part" if count else "the two runs part")
    if parts:
        return Verdict(tone="error", headline="different", detail="; ".join(parts) + ".")
    if not count:
        return Verdict(tone="neutral", headline="nothing to compare", detail="neither model has a norm.")
    return Verdict(tone="good", headline="the same", detail=f"{_all(count)}.")


def _all(count: int) -> str:
    return f"all {count} norms compute the same formulas" if count > 1 else "the norm computes the same formula"


def _births(found: Comparison) -> tuple[str, ...]:
    divergence = found.divergence
    if divergence.not_run:
        return (f"The two were not run side by side: {divergence.not_run}.",)
    if divergence.birth is not None:
        sentences = [f"The first difference is born {_place(divergence.birth)}."]
        bits = divergence.first_bits
        if bits is not None and (bits.where, bits.path) != (divergence.birth.where, divergence.birth.path):
            sentences.append(f"Within rounding it shows earlier, {_place(bits)}.")
        return tuple(sentences)
    if divergence.first_bits is not None:
        return (
            f"Side by side they differ by no more than rounding can, at most by {significant(divergence.largest)}. "
            f"It begins {_place(divergence.first_bits)}.",
        )
    return (f"Side by side they agree to the bit at {counted(divergence.compared, 'norm')} and in their output.",)


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
    return f"between two norms: what leaves {birth.since} {agreed}, what enters {birth.path} {differs}"


def _contrast(words: Sequence[str], pairs: Sequence[Pair]) -> Contrast:
    observed = [pair for pair in pairs if pair.observed is not None]
    effects = [effect.dtype for pair in observed[:1] if pair.observed for effect in pair.observed.effects]
    columns = [Column(key="path", heading="norm"), Column(key="rms", heading="row rms", numeric=True)]
    for dtype in effects:
        columns += [
            Column(key=f"{dtype} median", heading=f"{dtype} median", numeric=True),
            Column(key=f"{dtype} worst", heading=f"{dtype} worst", numeric=True),
        ]
    rows = tuple(_row(pair) for pair in observed)
    many = f"{counted(len(pairs), 'norm')}: " if len(pairs) > 1 else f"{pairs[0].entry.path}: "
    notes = []
    if rows:
        notes.append("Row rms: of the median row that arrives there.")
        notes.append("Median, worst: |y - y'| / |y'| of the two formulas on these rows.")
        if any(not pair.with_parameters for pair in observed):
            notes.append("Without gain and bias: those of the reference are not at hand, or of another size.")
        if effects == ["float32"] and all(change.reading in _CASTS for pair in pairs for change in pair.changes):
            notes.append("Casts make a difference in 16 bits; in float32 it is the last bit at most.")
    elif any(not pair.with_parameters for pair in pairs):
        notes.append("No effect was measured: gain and bias of the reference are not at hand, or of another size.")
    return Contrast(
        title=many + (words[0] if len(words) == 1 else f"{len(words)} conventions differ"),
        changes=tuple(words) if len(words) > 1 else (),
        effects=Table(title="Effects", columns=tuple(columns), rows=rows, empty=""),
        note=" ".join(notes),
    )


def _row(pair: Pair) -> tuple[Cell, ...]:
    assert pair.observed is not None
    cells = [Cell(text=_name(pair)), Cell(text=significant(pair.observed.rms[1]))]
    for effect in pair.observed.effects:
        cells += [Cell(text=significant(effect.median)), Cell(text=significant(effect.worst))]
    return tuple(cells)


def _name(pair: Pair) -> str:
    path, other = pair.entry.path, pair.reference.path
    return path if path == other else f"{path} for {other}"


def _facts(found: Comparison) -> tuple[Fact, ...]:
    facts = []
    by_order = [pair for pair in found.pairs if pair.matched_by == "order"]
    if by_order:
        how = "the paths differ, so they were paired in forward order and by size"
        facts.append(Fact(label="pairs", value=f"{len(by_order)} of {counted(len(found.pairs), 'norm')}: {how}"))
        facts.append(Fact(label="", value=shortened([_name(pair) for pair in by_order])))
    alone: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in found.unmatched:
        name = found.model if each.owner == "model" else found.reference
        alone[f"only in {name}", pattern(each.path), each.reason].append(each.path)
    for (label, common, reason), paths in alone.items():
        where = f"{common} ({len(paths)})" if len(paths) > 1 else paths[0]
        facts.append(Fact(label=label, value=f"{where}: {reason}" if reason else where))
    facts += _parameter_facts(found)
    left_out: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, (reason, other) in found.left_out.items():
        left_out[pattern(path), reason if reason == other else f"{reason}; in the reference: {other}"].append(path)
    for (common, reason), paths in left_out.items():
        where = f"{common} ({len(paths)})" if len(paths) > 1 else paths[0]
        facts.append(Fact(label="not compared", value=f"{where}: {reason}"))
    undecided: dict[str, list[str]] = defaultdict(list)
    for pair in found.pairs:
        for reading, reason in pair.undecided.items():
            undecided[f"{reading}: {reason}"].append(pair.entry.path)
    facts += [Fact(label="not compared", value=f"{what} ({shortened(at)})") for what, at in undecided.items()]
    return tuple(facts)


def _parameter_facts(found: Comparison) -> list[Fact]:
    facts = []
    for role in ("weight", "bias"):
        changes = [(pair, change) for pair in found.pairs for change in pair.parameters if change.role == role]
        if not changes:
            continue
        sizes = [change.difference for _, change in changes if change.difference is not None]
        by = f" by up to {significant(max(sizes))} of the largest," if sizes else " (their digests do)"
        at = shortened([pair.entry.path for pair, _ in changes])
        facts.append(Fact(label=role, value=f"differs{by} at {counted(len(changes), 'norm')}: {at}"))
        swapped = {frozenset((pair.entry.path, change.swapped_with)) for pair, change in changes if change.swapped_with}
        pairs = sorted(" and ".join(sorted(paths)) for paths in swapped)
        facts += [Fact(label="", value=f"swapped between {both}") for both in pairs]
    return facts
