"""The batch norms of a model in words: what they keep, and what the data would make of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.show.grouping import grouped
from normkit.show.parts import Column, Fact, Section, Table
from normkit.text import count_spread, counted, percent_spread, spread

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection
    from normkit.measurement.facts import BatchNorm


def _short(values: Sequence[float]) -> str:
    """A range of numbers that users set, such as eps, without zeros behind."""
    low, high = (f"{value:.4g}".replace("e-0", "e-") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


_COLUMNS = (
    Column("path", "batch norm"),
    Column("channels", "channels", count_spread),
    Column("eps", "eps", _short),
    Column("share", "momentum", _short, "share of the running statistics that one batch replaces, as observed"),
    Column("batches", "batches", count_spread, "that it has counted"),
    Column("mode", "mode", meaning="training: it normalizes by the batch"),
    Column(
        "change",
        "data moves",
        percent_spread,
        "how far the output of the median channel would move with the data's own statistics in place of the running "
        "ones, in its deviations",
    ),
    Column("largest", "largest", percent_spread, "the same of the channel that moves most"),
    Column("shift", "mean off", spread, "there, the data's mean less the running one, in running deviations"),
    Column("stretch", "deviation", spread, "there, the data's deviation over the running one"),
    Column("sampling", "sampling", percent_spread, "how far so few samples alone would move the median channel"),
    Column("eps_share", "eps share", percent_spread, "of variance + eps, in the median channel"),
    Column("dead", "gains 0", count_spread, "channels that leave as the bias alone"),
    Column("flat", "flat", count_spread, "channels with a running variance below eps"),
)
TERMINAL = ("path", "channels", "change", "largest", "eps_share", "dead")
"""The columns that fit a terminal."""


def describe_batch_norms(inspection: Inspection) -> Section | None:
    """The section of a report; None for a model without batch norms."""
    norms = inspection.batch_norms
    if not norms:
        return None
    # The line above the table has an eps and a momentum that all share.
    said = {"eps"} if len({norm.eps for norm in norms}) == 1 else set()
    said |= {"share"} if len({norm.share for norm in norms}) == 1 else set()
    said |= set() if any(norm.is_live for norm in norms) else {"mode"}
    said |= set() if any(norm.flat for norm in norms) else {"flat"}
    keys = [column.key for column in _COLUMNS if column.key not in said]
    table = grouped(Table.of("Batch norms", _COLUMNS, map(_row, norms)).only(*keys))
    glance = batch_norm_glance(inspection)
    return Section(id="batch-norms", title="Batch norms", gist=glance.value, tables=(table,))


def batch_norm_glance(inspection: Inspection) -> Fact:
    """The batch norms in one line: how many, their eps and momentum, their statistics."""
    norms = inspection.batch_norms
    parts = [f"{len(norms)}"]
    for label, values in (("eps", [norm.eps for norm in norms]), ("momentum", [norm.share for norm in norms])):
        if known := [value for value in values if math.isfinite(value)]:
            usual, _ = Counter(known).most_common(1)[0]
            parts.append(f"{label} {_short([usual]) if len(set(known)) == 1 else _short(known)}")
    if batches := [norm.batches for norm in norms if norm.batches > 0]:
        parts.append(f"{count_spread(batches)} batches counted")
    empty = sum(not norm.is_gathered for norm in norms)
    if empty == len(norms):
        words = "no statistics gathered yet"
    elif moved := [norm.change for norm in norms if norm.is_gathered and math.isfinite(norm.change)]:
        words = f"the data's statistics would move the median channel by {percent_spread(moved)}"
        words += f"; {counted(empty, 'batch norm')} without statistics" if empty else ""
    else:
        words = f"{counted(empty, 'batch norm')} without statistics" if empty else "statistics gathered"
    return Fact("batch norms", f"{', '.join(parts)}; {words}")


def _row(norm: BatchNorm) -> list[str | Sequence[float]]:
    return [
        norm.path,
        [norm.channels],
        _known(norm.eps),
        _known(norm.share),
        [norm.batches] if norm.batches >= 0 else "not counted",
        "training" if norm.is_live else "evaluation",
        _known(norm.change),
        _known(norm.largest_change),
        _known(norm.shift),
        _known(norm.stretch),
        _known(norm.sampling),
        _known(norm.eps_share),
        [norm.zero_gains],
        [norm.flat],
    ]


def _known(value: float) -> str | list[float]:
    return [value] if math.isfinite(value) else "unknown"
