"""The graph of one checkpoint: each norm with its readers, each space with its writers, by the names in its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normkit.models.family import Family


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
    reads: str
    """Space, or ""."""
    gives: str
    """Point."""
    writes: tuple[str, ...]
    """Spaces that its output is added to."""
    opaque: str
    """What else takes its output, in words, or ""."""


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
    writes: str
    """Space, or ""."""
    through: str
    """A nonlinear step between it and the sum, in words, or ""."""
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
    def spaces(self) -> tuple[str, ...]:
        """Every space that is written and read, in the order in which norms and linear maps read them."""
        written = {linear.writes for linear in self.linears} | {table.writes for table in self.tables}
        written |= {space for norm in self.norms for space in norm.writes}
        written.discard("")
        reads = [norm.reads for norm in self.norms] + [linear.reads for linear in self.linears]
        return tuple(dict.fromkeys(space for space in reads if space in written))
