"""Rows of two runs in words: where the first difference is born, what explains it, how it grows to the logits."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.comparison.rows import Birth, Rows, Step
from normkit.measurement.sampling import evenly
from normkit.show.parts import Column, Section, Table, printable
from normkit.text import counted, significant

_MOST_STEPS = 8


def describe_rows(found: Rows) -> Section:
    """The growth of the difference, safe to print; at some of the norms, from the birth of the difference on."""
    steps = [step for step in found.steps if step.where != "at"]
    first = next((place for place, step in enumerate(steps) if _is_birth(step, found.birth)), 0)
    steps = steps[first:]
    chosen = [steps[place] for place in evenly(len(steps), _MOST_STEPS).tolist()]
    columns = [
        Column("place", "what enters"),
        Column("distance", "distance", numeric=True),
        Column("units", "own roundings", numeric=True),
        Column("factor", "times the last", numeric=True),
    ]
    note = "Distance: |a - b| / |b| of the median row. One own rounding: how far the reference is from itself there."
    return printable(
        Section(
            id="rows",
            title="Rows",
            gist=found.verdict,
            tables=(Table.of("Growth", columns, _grown(chosen), note=note),) if chosen else (),
            remarks=found.notes,
        )
    )


def beginnings(found: Rows) -> tuple[str, ...]:
    """The first difference of two runs, its causes and the verdict, one sentence for each."""
    if found.birth is not None:
        sentences = [f"The first difference appears {_place(found.birth)}."]
        bits = found.first_bits
        if bits is not None and (bits.where, bits.path) != (found.birth.where, found.birth.path):
            sentences.append(f"Within rounding, the runs differ earlier, {_place(bits)}.")
        return (*sentences, *_sentences(found))
    if found.first_bits is not None:
        largest = f"at most by {significant(found.largest)}. It begins {_place(found.first_bits)}."
        verdict = found.verdict or "no more different than rounding explains"
        return (f"Side by side they are {verdict}, {largest}", *_sentences(found))
    return (f"Side by side they agree to the bit at {counted(found.compared, 'norm')} and in their output.",)


def _sentences(found: Rows) -> list[str]:
    return [f"{cause.words[0].upper()}{cause.words[1:]}." for cause in found.causes]


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


def _is_birth(step: Step, birth: Birth | None) -> bool:
    return birth is not None and step.path == birth.path


def _grown(steps: Sequence[Step]) -> list[list[str]]:
    rows, last = [], 0.0
    for step in steps:
        factor = significant(step.median / last) if last else ""
        rows.append([step.path or "(the output)", significant(step.median), significant(step.units), factor])
        last = step.median
    return rows
