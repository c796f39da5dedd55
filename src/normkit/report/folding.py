"""A plan of folding for a terminal: the fate of each norm, what is left and why, and the size of the result."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from normkit.checkpoint.plan import FoldPlan, NormChange, TensorEdit, VectorEdit
from normkit.checkpoint.reader import TensorInfo
from normkit.show.grouping import pattern
from normkit.show.parts import Cell, Column, Fact, Table, printable
from normkit.show.terminal import lines, marked, ruled
from normkit.text import counted, shortened

_MOST = 40
_INDEX = re.compile(r"\.\d+(?=[.,;:\s]|$)")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_FATES = {
    "folded": "folded",
    "divided": "kept as b / g",
    "identity": "nothing to fold",
    "none": "-",
    "left": "left",
}
_RELATIONS = {
    "identical": "bit for bit the source's",
    "product": "one product, rounded once",
    "sum": "summed in float64, rounded once",
    "constant": "constants",
}
_COLUMNS = (
    Column(key="norm", heading="norm"),
    Column(key="count", heading="count", numeric=True),
    Column(key="gain", heading="gain"),
    Column(key="bias", heading="bias"),
    Column(key="kind", heading="becomes"),
    Column(key="readers", heading="folded into"),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Everything that is said about a plan."""

    title: str
    """The architecture."""
    summary: str
    norms: Table
    """Norms that are alike share a row."""
    left: tuple[Fact, ...]
    """What was asked for and is not done: where, and why."""
    kept: tuple[Fact, ...]
    """What stays where it was: where, and why."""
    facts: tuple[Fact, ...]
    """Tensors, size, configuration."""
    remarks: tuple[str, ...]
    """What a user of the folded model must know."""


def describe_plan(plan: FoldPlan, tensors: Mapping[str, TensorInfo], memory: int | None = None) -> Planned:
    """A plan in words, safe to print.

    Args:
        plan: What is done.
        tensors: Of the source.
        memory: Bytes that carrying it out takes; None where it is done.
    """
    folded = sum(bool({norm.gain, norm.bias} & {"folded", "divided"}) for norm in plan.norms)
    rms = sum(norm.becomes_rms for norm in plan.norms)
    summary = f"{folded} of {counted(len(plan.norms), 'norm')} folded"
    if plan.centred:
        summary += f", {counted(len(plan.centred), 'writer')} centred"
    if rms:
        summary += f", {counted(rms, 'LayerNorm')} made {'an RMSNorm' if rms == 1 else 'RMSNorms'}"
    described = Planned(
        title=plan.architecture,
        summary=summary,
        norms=_norms(plan.norms),
        left=_alike((refusal.operation, refusal.place, refusal.reason) for refusal in plan.refusals),
        kept=_alike(("bias", norm.name, reason) for norm in plan.norms for reason in _kept(norm, plan)),
        facts=(*_tensors(plan, tensors), *_memory(memory), *_configuration(plan)),
        remarks=plan.remarks,
    )
    return printable(described)


def plan_summary(plan: FoldPlan, tensors: Mapping[str, TensorInfo], memory: int | None = None) -> RenderableType:
    """A plan on a screen; arguments as those of `describe_plan`."""
    described = describe_plan(plan, tensors, memory)
    parts: list[RenderableType] = [Text.assemble((described.title, "bold"), "  ", described.summary)]
    parts += ["", ruled(described.norms, _MOST)]
    if described.left:
        parts += ["", marked("warning", "asked for and not done, as it would change what the model computes")]
        parts += _explained(described.left)
    if described.kept:
        parts += ["", marked("note", "kept where it is, exactly"), *_explained(described.kept)]
    parts += ["", lines(described.facts)]
    parts += [marked("note", remark) for remark in described.remarks]
    return Group(*parts)


def _explained(facts: tuple[Fact, ...]) -> list[RenderableType]:
    """Labels with their reasons on the lines below: paths are too long to be beside a sentence."""
    return [part for fact in facts for part in (Text(fact.label), Padding.indent(Text(fact.value, "dim"), 4))]


def _norms(changes: tuple[NormChange, ...]) -> Table:
    alike: dict[tuple[str, ...], list[NormChange]] = defaultdict(list)
    for norm in changes:
        readers = tuple(dict.fromkeys(reader.rpartition(".")[2] for reader in norm.readers))
        kind = "RMSNorm" if norm.becomes_rms else "-"
        kept = f", {counted(len(norm.kept), 'coordinate')} kept" if norm.kept else ""
        alike[
            pattern(norm.name), _FATES[norm.gain] + kept, _FATES[norm.bias], kind, shortened(readers, 4) or "-"
        ].append(norm)
    rows = []
    for (path, *words), norms in alike.items():
        name = path if len(norms) > 1 else norms[0].name
        rows.append(tuple(Cell(text=text) for text in (name, f"{len(norms)}", *words)))
    return Table(title="Norms", columns=_COLUMNS, rows=tuple(rows), empty="no norm")


def _kept(norm: NormChange, plan: FoldPlan) -> tuple[str, ...]:
    """The remarks on kept norms that no refusal contains."""
    refused = {refusal.reason for refusal in plan.refusals if refusal.place == norm.name}
    return tuple(reason for reason in norm.reasons if reason not in refused)


def _alike(said: Iterable[tuple[str, str, str]]) -> tuple[Fact, ...]:
    """Operation, place and reason: similar ones merged into one line, with stars for their numbers."""
    alike: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    for operation, place, reason in said:
        alike[operation, pattern(place), _INDEX.sub(".*", reason)].append((place, reason))
    return tuple(
        Fact(label=f"{operation}: {place} ({len(found)})", value=reason)
        if len(found) > 1
        else Fact(label=f"{operation}: {found[0][0]}", value=found[0][1])
        for (operation, place, reason), found in alike.items()
    )


def _tensors(plan: FoldPlan, tensors: Mapping[str, TensorInfo]) -> tuple[Fact, ...]:
    counts: dict[str, int] = defaultdict(int)
    size = 0
    for edit in plan.edits:
        counts[edit.relation] += 1
        size += _size(edit, tensors)
    before = sum(info.nbytes for info in tensors.values())
    words = ", ".join(f"{count} {_RELATIONS[relation]}" for relation, count in counts.items())
    return (
        Fact(label="tensors", value=words),
        Fact(label="size", value=_bytes(before) + ("" if size == before else f" -> {_bytes(size)}")),
    )


def _memory(needed: int | None) -> tuple[Fact, ...]:
    return () if needed is None else (Fact(label="memory", value=f"some {needed / 1e9:.1f} GB, whatever the size"),)


def _size(edit: TensorEdit | VectorEdit, tensors: Mapping[str, TensorInfo]) -> int:
    if isinstance(edit, VectorEdit):
        return edit.size * _BYTES[edit.dtype]
    info = tensors[edit.source]
    return prod(info.shape) * _BYTES[edit.dtype] if edit.dtype in _BYTES else info.nbytes


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return counted(count, "byte")


def _configuration(plan: FoldPlan) -> tuple[Fact, ...]:
    changes = [f"{key} = {value}" for key, value in plan.config.items() if key != "normkit"]
    changes += [f"without {key}" for key in plan.dropped]
    if plan.swaps:
        changes.append(f"{counted(len(plan.swaps), 'norm')} recorded as RMSNorms, for nk.load")
    return (Fact(label="config.json", value=", ".join(changes)),) if changes else ()
