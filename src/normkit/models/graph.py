"""The graph of one checkpoint: each norm with its readers, each space with its writers, by the names in its files.

It says which changes keep what the model computes: each `against_...` returns None where the change is exact, else one
sentence that says why it is not. The conditions: docs/explanation/folding.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from normkit.errors import ModelError
from normkit.models.family import Family
from normkit.models.inclusion import stem


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm of the checkpoint; the fields are those of a `NormEntry`, for this norm."""

    name: str
    """Path of its module, as the checkpoint names it."""
    module: str
    """Path of its module in memory."""
    kind: Literal["layer", "rms"]
    weight: str | None
    """Name of the gain, or None."""
    bias: str | None
    """Name of the bias, or None."""
    offset: float
    """Added to the stored gain."""
    eps: float | None
    """In the units of its input squared."""
    eps_key: str = ""
    """Key of config.json that holds it; "" if it stands in the code of its class."""
    of: tuple[str, ...] = ()
    """Paths of the linear maps whose outputs it normalizes head by head."""
    reads: str
    """Space, or ""."""
    joined: str = ""
    """The other vectors of the space that each row is joined with, in words; "" if there are none."""
    gives: str
    """Point."""
    writes: tuple[str, ...]
    """Spaces that its output is added to."""
    opaque: str
    """The other taker of its output, in words, or ""."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear map of the checkpoint."""

    name: str
    """Path of its module."""
    weight: str
    """Name of its weight."""
    bias: str | None
    """Name of its bias, or None."""
    in_axis: int
    """Axis of the weight that faces its input."""
    out_axis: int
    """Axis of the weight that faces its output."""
    reads: str
    """Point or space, or ""."""
    is_joined: bool = False
    """It reads several rows of the point side by side."""
    beside: str = ""
    """Path of the linear map whose output its own is added to, or ""."""
    writes: str
    """Space, or ""."""
    through: str
    """A nonlinear step between it and the sum, in words, or ""."""
    scaled_by: str = ""
    """A factor for each coordinate between it and the sum, in words, or ""."""
    is_head: bool
    tied_to: str | None = None
    """Name of the table that it shares, or None."""
    parted_bias: str | None = None
    """Name of its bias when it no longer shares a table, if that differs."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A tensor whose rows are added to a space."""

    name: str
    """Name of the tensor."""
    axis: int
    """Axis of the features, not negative."""
    width: int
    """Number of its features, as config.json says."""
    writes: str
    """Space, or ""."""
    aliases: tuple[str, ...]
    """Other names in the checkpoint with the same values."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention; the fields are those of an `AttentionEntry`, for this one."""

    name: str
    """Path of its module."""
    value: Linear
    output: Linear
    key: Linear | None
    layout: Literal["own", "last", "last of each group"]
    heads: int
    kv_heads: int
    rotary: bool
    sinks: str | None
    """Name of the tensor of sinks, or None."""
    softcap: bool
    """Whether scores are capped."""
    clip: str | None
    """Key of a bound to which queries, keys and values are clipped, or None."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The norms, linear maps, tables and attentions of one checkpoint."""

    family: Family
    architecture: str
    """Class that its config names."""
    width: int
    """Width of the residual stream."""
    norms: tuple[Norm, ...]
    """In the order of the model."""
    linears: tuple[Linear, ...]
    """In the order of the file."""
    tables: tuple[Table, ...]
    """In the order of the file."""
    attentions: tuple[Attention, ...]
    """In the order of the model."""
    returned: frozenset[str]
    """Points and spaces that the class returns."""
    is_tied: bool
    """The head has no table of its own."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Path of a module without tensors of its own -> path of the one that it is; without the head."""

    def readers(self, place: str) -> tuple[Linear, ...]:
        """The linear maps that read a point or a space."""
        return tuple(linear for linear in self.linears if linear.reads == place)

    def norms_of(self, space: str) -> tuple[Norm, ...]:
        """The norms that read a space."""
        return tuple(norm for norm in self.norms if norm.reads == space)

    def writers(self, space: str) -> tuple[Linear | Table, ...]:
        """The linear maps and tables that write to a space."""
        found: list[Linear | Table] = [linear for linear in self.linears if linear.writes == space]
        return (*found, *(table for table in self.tables if table.writes == space))

    def added(self, space: str) -> tuple[Norm, ...]:
        """The norms whose output is added to a space."""
        return tuple(norm for norm in self.norms if space in norm.writes)

    def is_read(self, space: str) -> bool:
        """Whether anything takes what is in a space."""
        return bool(self.norms_of(space) or self.readers(space)) or space in self.returned

    @property
    def stream(self) -> tuple[str, ...]:
        """The spaces of the model itself, without those of the towers that it includes."""
        towers = tuple(f"{word} " for word in self.family.towers)
        return tuple(space for space in self.spaces if not towers or not space.startswith(towers))

    @property
    def spaces(self) -> tuple[str, ...]:
        """Every space that is written and read, in the order in which norms and linear maps read them."""
        written = {linear.writes for linear in self.linears} | {table.writes for table in self.tables}
        written |= {space for norm in self.norms for space in norm.writes}
        written.discard("")
        reads = [norm.reads for norm in self.norms] + [linear.reads for linear in self.linears]
        return tuple(dict.fromkeys(space for space in reads if space in written))

    def against_folding(self, norm: Norm, *, untie: bool = False) -> str | None:
        """Why the gain or bias of a norm cannot leave it: something other than linear maps takes its output."""
        if norm.opaque:
            return f"its output goes to {norm.opaque}"
        if norm.gives in self.returned or norm.name in self.returned:
            return f"its output is what {self.architecture} returns"
        for space in norm.writes:
            if self.is_read(space):
                return (
                    f"its output is added to the {space}, where no gain can leave it and no linear map alone takes it"
                )
        readers = self.readers(norm.gives)
        if not readers:
            return "no linear map reads it"
        tied = next((reader for reader in readers if reader.tied_to), None)
        if tied is None:
            return None
        return self.against_untying() if untie else f"its reader {self._sharing(tied)}"

    def against_untying(self) -> str | None:
        """Why a head and its table cannot be separated."""
        tie = self.family.tie
        return tie.fixed if self.is_tied and tie is not None and tie.fixed else None

    def against_centring(self, space: str) -> str | None:
        """Why the writers of a space cannot be centred: something that reads the space sees the mean."""
        if space in self.returned:
            return f"{self.architecture} returns the {space}"
        for norm in self.norms_of(space):
            if norm.joined:
                return f"{norm.name} normalizes the {space} joined with {norm.joined}, and sees the mean of each"
            if norm.kind == "rms":
                return f"{norm.name} is an RMSNorm, which sees the mean that centring would remove"
        for reader in self.readers(space):
            return f"{reader.name} reads the {space} without a norm, and sees the mean"
        return None

    def against_centring_writer(self, writer: Linear | Table, *, untie: bool = False) -> str | None:
        """Why one writer cannot be centred although its space can."""
        if isinstance(writer, Linear):
            if step := writer.through or writer.scaled_by:
                between = f"{step} stands between {writer.name} and the sum"
                return f"{between}, so that its mean cannot be taken out of it"
            return None
        tied = next((linear for linear in self.linears if linear.tied_to == writer.name), None)
        if tied is None:
            return None
        return self.against_untying() if untie else self._sharing(tied)

    def _sharing(self, head: Linear) -> str:
        reason = self.against_untying() or "--untie gives the head a table of its own"
        return f"{head.name} shares the table {head.tied_to}; {reason}"

    def against_rms(self, norm: Norm, *, untie: bool = False) -> str | None:
        """Why a LayerNorm cannot become an RMSNorm: what it reads may have a mean."""
        if norm.kind == "rms":
            return "it is one"
        if not norm.reads:
            return "what it normalizes is no sum of linear maps"
        if reason := self.against_centring(norm.reads):
            return reason
        for other in self.added(norm.reads):
            return f"the output of {other.name} is added to the {norm.reads}, and its gain and bias give it a mean"
        for writer in self.writers(norm.reads):
            if reason := self.against_centring_writer(writer, untie=untie):
                return reason
        return None if self.writers(norm.reads) else f"nothing that is known writes to the {norm.reads}"

    @staticmethod
    def against_value_fold(attention: Attention) -> str | None:
        """Why the bias of the values cannot pass through an attention into the bias behind it."""
        if attention.sinks is not None:
            return f"the sinks {attention.sinks} take part of each row, so that its weights do not sum to one"
        if attention.clip is not None:
            return f"{attention.clip} cuts off values with their bias"
        if attention.output.bias is None:
            return f"{attention.output.name} has no bias to take it"
        return None

    def ignores_key_bias(self, reader: Linear) -> bool:
        """Whether a bias of these keys would shift all scores of a query equally, which softmax does not see.

        Not if positions rotate the keys, the scores are capped, keys are clipped, or there is a sink.
        """
        users = [attention for attention in self.attentions if attention.key == reader]
        return bool(users) and not any(user.rotary or user.softcap or user.sinks or user.clip for user in users)


def check_places(graph: Graph) -> None:
    """Check that something writes each place that is read, and that something reads each place that is written.

    So a misspelt name in a family's file is an error, and nothing that reads or writes is overlooked.

    Raises:
        ModelError: If there is another place; the message names it, what names it, and the file.
    """
    for fault in _faults(graph):
        raise ModelError(f"models/{graph.family.model_type}.toml: {fault}")


def _faults(graph: Graph) -> Iterator[str]:
    points = {norm.gives for norm in graph.norms} | {norm.name for norm in graph.norms}
    writers: list[Linear | Table] = [*graph.linears, *graph.tables]
    written = {writer.writes for writer in writers}
    written |= {space for norm in graph.norms for space in norm.writes}
    for linear in graph.linears:
        if linear.reads and linear.reads not in points | written:
            yield f"{linear.name} reads {linear.reads!r}, which no norm gives and nothing writes"
    for norm in graph.norms:
        if norm.reads and norm.reads not in written:
            yield f"{norm.name} reads {norm.reads!r}, which nothing writes"
    for place in graph.returned - points - written:
        yield f"{graph.architecture} returns {place!r}, which no norm gives and nothing writes"
    for writer in writers:
        if writer.writes and not graph.is_read(writer.writes):
            yield f"{writer.name} writes {writer.writes!r}, which nothing reads"
    read = _read(graph)
    names = {linear.name for linear in graph.linears}
    for norm in graph.norms:
        for name in set(norm.of) - names:
            yield f"{norm.name} normalizes the output of {name!r}, which is no linear map"
        for space in norm.writes:
            if stem(space) not in read:
                yield f"{norm.name} writes {space!r}, which nothing reads"
        is_added = any(graph.is_read(space) for space in norm.writes)
        is_taken = is_added or bool(graph.readers(norm.gives)) or bool({norm.name, norm.gives} & graph.returned)
        if not norm.opaque and not is_taken:
            yield f"nothing takes {norm.gives!r}, which {norm.name} gives"


def _read(graph: Graph) -> set[str]:
    """The places that are read in any layer, without the index: after the last layer nothing reads what norms write."""
    found = set(graph.returned)
    for part in graph.family.parts:
        found |= {norm.reads for norm in part.norm.values()} | {linear.reads for linear in part.linear.values()}
    return {stem(place) for place in found}


def check_widths(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that all that is added in one space has one width, and all that reads one point.

    Raises:
        ModelError: If a tensor has the wrong size along the axis that faces a norm or a sum, or a bias the wrong size.
    """
    for table in graph.tables:
        shape = shapes[table.name]
        if table.writes and shape[table.axis : table.axis + 1] != (table.width,):
            raise ModelError(_unfit(table.name, shape, f"{table.width} along axis {table.axis}, as config.json says"))
    for linear in graph.linears:
        weight = linear.tied_to or linear.weight
        axes = max(linear.in_axis, linear.out_axis) + 1
        if len(shapes[weight]) < axes:
            raise ModelError(_unfit(weight, shapes[weight], f"at least {axes} axes"))
    known: dict[str, tuple[int, str]] = {}
    for name, axis, place in _facing(graph):
        if name not in shapes:
            continue
        shape = shapes[name]
        if axis >= len(shape):
            raise ModelError(_unfit(name, shape, f"at least {axis + 1} axes"))
        width, other = known.setdefault(place, (shape[axis], name))
        if shape[axis] != width:
            raise ModelError(_unfit(name, shape, f"{width} along axis {axis}, as {other} has"))
    for linear in graph.linears:
        if linear.is_joined and linear.reads in known:
            (width, other), size = known[linear.reads], shapes[linear.weight][linear.in_axis]
            if size % width:
                wanted = f"a multiple of {width} along axis {linear.in_axis}, as {other} has {width}"
                raise ModelError(_unfit(linear.weight, shapes[linear.weight], wanted))
    for linear in graph.linears:
        if linear.bias is None or linear.weight not in shapes:
            continue
        size = shapes[linear.weight][linear.out_axis]
        if shapes[linear.bias][-1:] != (size,):
            raise ModelError(_unfit(linear.bias, shapes[linear.bias], f"{size} numbers, one for each output"))
    for attention in graph.attentions:
        _check_heads(attention, shapes)


def _check_heads(attention: Attention, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the rows of the values: alone, or fused with the heads of the queries and the keys."""
    value, output = attention.value, attention.output
    heads, kv_heads = attention.heads, attention.kv_heads
    rows, size = shapes[value.weight][value.out_axis], shapes[output.weight][output.in_axis]
    held = kv_heads if attention.layout == "own" else heads + 2 * kv_heads
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0 and size % heads == 0
    if not fits or rows != held * (size // heads):
        wanted = f"rows for {heads} heads, {kv_heads} of them with values, as config.json says"
        raise ModelError(_unfit(value.weight, shapes[value.weight], wanted))


def _facing(graph: Graph) -> Iterator[tuple[str, int, str]]:
    """(tensor, axis, the point or space that the axis faces)."""
    for table in graph.tables:
        if table.writes:
            yield table.name, table.axis, table.writes
    for norm in graph.norms:
        for tensor in (norm.weight, norm.bias):
            if tensor is not None and norm.reads:
                if not norm.joined:
                    yield tensor, 0, norm.reads
                yield tensor, 0, norm.gives
                yield from ((tensor, 0, space) for space in norm.writes)
    for linear in graph.linears:
        if linear.reads and not linear.is_joined:
            yield linear.tied_to or linear.weight, linear.in_axis, linear.reads
        if linear.writes:
            yield linear.weight, linear.out_axis, linear.writes


def _unfit(name: str, shape: tuple[int, ...], wanted: str) -> str:
    return (
        f"expected {name} to have {wanted}, got the shape {shape}; weights and config.json belong to different models"
    )
