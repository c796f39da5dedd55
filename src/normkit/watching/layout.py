"""What is measured where: the norms, blocks and attention calls of a model, and their lines in the tables."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.identification.sites import NormSite
from normkit.identification.tracing import FunctionCall
from normkit.measurement.attention import head_tables
from normkit.measurement.blocks import BlockCall
from normkit.measurement.row_counters import gradient_table, row_tables
from normkit.measurement.structure import Structure
from normkit.measurement.tables import Table


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPlace:
    """One attention call of the model."""

    parent: str
    """Path of the module that makes the call."""
    function: str
    """Either "sdpa" or "softmax"."""
    heads: int
    """Query heads, of all processes together."""
    head_dim: int
    """Features of one head; 0 where only the logits are seen."""
    first_head: int = 0
    """The first head that this process has."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchLayout:
    """The measured norms, blocks and attention calls, in the order of their lines in the tables."""

    sites: tuple[NormSite, ...]
    """The norms, in forward order; norm i has row counters 2 i (its input) and 2 i + 1 (its output)."""
    blocks: tuple[BlockCall, ...]
    """The blocks; the row counters of their outputs follow, then that of the first block's input."""
    attentions: tuple[AttentionPlace, ...]
    callers: tuple[str, ...]
    """Paths of the modules whose own function calls are told apart."""

    @property
    def sentinels(self) -> tuple[str, ...]:
        """Paths of the sentinel's lines: norms in forward order, then blocks. It does not look at function calls."""
        return (*(site.path for site in self.sites), *(block.path for block in self.blocks))

    @property
    def hooked(self) -> int:
        """Number of the sentinel's lines that have a hook, and so are seen in a step."""
        return sum(site.module is not None for site in self.sites) + len(self.blocks)

    @property
    def forward_order(self) -> tuple[int, ...]:
        """The sentinel's lines in forward order: a block comes after everything inside it."""
        starts = {site.path: float(site.order) for site in self.sites}
        for block in self.blocks:
            inside = [site.order for site in self.sites if site.path.startswith(f"{block.path}.")]
            before = max((starts[other.path] for other in self.blocks[: block.index]), default=-1.0)
            starts[block.path] = max(inside, default=before) + 0.5
        return tuple(sorted(range(len(self.sentinels)), key=lambda line: starts[self.sentinels[line]]))

    def tables(self) -> tuple[Table, ...]:
        """The tables that the hooks write to."""
        heads = max((attention.heads for attention in self.attentions), default=1)
        return (
            *row_tables(2 * len(self.sites) + len(self.blocks) + 1),
            gradient_table(len(self.blocks) or len(self.sites)),
            *head_tables(len(self.attentions), heads),
        )


def layout_of(structure: Structure) -> WatchLayout:
    """The layout of a surveyed model."""
    attentions = tuple(_attention(structure, call) for call in _attention_calls(structure))
    parents = {site.parent for site in structure.sites if site.module is None} | {each.parent for each in attentions}
    # A module inside such a parent makes calls of its own, which must not be taken for the parent's.
    inner = {call.parent for call in structure.called.functions}
    callers = {
        path for path in inner if any(parent in ("", path) or path.startswith(f"{parent}.") for parent in parents)
    }
    return WatchLayout(
        sites=structure.sites, blocks=structure.blocks, attentions=attentions, callers=tuple(sorted(parents | callers))
    )


def _attention_calls(structure: Structure) -> list[FunctionCall]:
    """Calls of scaled_dot_product_attention; the softmax of (B, H, T, S) in modules that make no such call."""
    streams = {call.input_shape[:2] for call in structure.called.modules if len(call.input_shape) == 3}
    calls = [call for call in structure.called.functions if len(call.input_shape) == 4]
    fused = [call for call in calls if call.function == "sdpa"]
    known = {call.parent for call in fused}
    plain = [
        call
        for call in calls
        if call.function == "softmax"
        and (call.input_shape[0], call.input_shape[2]) in streams
        and call.parent not in known
    ]
    chosen = {(call.parent, call.function): call for call in (*fused, *plain)}
    return sorted(chosen.values(), key=lambda call: call.order)


def _attention(structure: Structure, call: FunctionCall) -> AttentionPlace:
    inside = [each.part for each in structure.called.modules if f"{each.path}.".startswith(f"{call.parent}.")]
    # Where the projections are split over processes, each process has its own heads.
    place, parts = max(inside, key=lambda part: part[1], default=(0, 1))
    heads = call.input_shape[1]
    return AttentionPlace(
        parent=call.parent,
        function=call.function,
        heads=heads * parts,
        head_dim=call.input_shape[3] if call.function == "sdpa" else 0,
        first_head=heads * place,
    )
