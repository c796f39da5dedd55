"""The graph of one checkpoint: every norm with its readers, every space with its writers, by the names in its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normkit.models.family import Family


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm of the checkpoint.

    Attributes:
        name: Path of its module, as the checkpoint names it.
        module: Path of its module in memory.
        kind: "layer" or "rms".
        weight: Name of the gain, or None.
        bias: Name of the bias, or None.
        offset: Added to the stored gain.
        eps: In the units of its input squared.
        reads: Space, or "".
        gives: Point.
        writes: Spaces that its output is added to.
        opaque: What else takes its output, in words, or "".
    """

    name: str
    module: str
    kind: Literal["layer", "rms"]
    weight: str | None
    bias: str | None
    offset: float
    eps: float | None
    reads: str
    gives: str
    writes: tuple[str, ...]
    opaque: str


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear map of the checkpoint.

    Attributes:
        name: Path of its module.
        weight: Name of its weight.
        bias: Name of its bias, or None.
        in_axis: Axis of the weight that faces its input.
        out_axis: Axis of the weight that faces its output.
        reads: Point or space, or "".
        writes: Space, or "".
        through: What stands between it and the sum, where that is not linear.
        is_head: It makes the scores.
        tied_to: Name of the table that it shares, or None.
        parted_bias: Name that its bias has once it shares no table, where that is another.
    """

    name: str
    weight: str
    bias: str | None
    in_axis: int
    out_axis: int
    reads: str
    writes: str
    through: str
    is_head: bool
    tied_to: str | None = None
    parted_bias: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A tensor whose rows are added to a space.

    Attributes:
        name: Of the tensor.
        axis: Of the features, not negative.
        writes: Space, or "".
        aliases: Other names in the checkpoint that hold the same.
    """

    name: str
    axis: int
    writes: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What decides whether a bias may pass through an attention.

    Attributes:
        name: Path of its module.
        value: Linear map of the values, or the fused one.
        output: Linear map behind the heads.
        key: Linear map of the keys, if it is one of its own.
        layout: Where values lie in the rows of `value`.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        rotary: Queries and keys are rotated by their positions.
        sinks: Name of the tensor of sinks, or None.
        softcap: Whether scores are capped.
        clip: Key of a bound at which queries, keys and values are cut off, or None.
    """

    name: str
    value: Linear
    output: Linear
    key: Linear | None
    layout: Literal["own", "last", "last of each group"]
    heads: int
    kv_heads: int
    rotary: bool
    sinks: str | None
    softcap: bool
    clip: str | None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All that matters of one checkpoint.

    Attributes:
        family: Its family.
        architecture: Class that its config names.
        width: Of the residual stream.
        norms: In the order of the model.
        linears: In the order of the file.
        tables: In the order of the file.
        attentions: In the order of the model.
        returned: Points and spaces that the class returns.
        is_tied: The head has no table of its own.
    """

    family: Family
    architecture: str
    width: int
    norms: tuple[Norm, ...]
    linears: tuple[Linear, ...]
    tables: tuple[Table, ...]
    attentions: tuple[Attention, ...]
    returned: frozenset[str]
    is_tied: bool

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
        """Every space that is read, in the order in which norms and linear maps do."""
        written = {linear.writes for linear in self.linears} | {table.writes for table in self.tables}
        written |= {space for norm in self.norms for space in norm.writes}
        written.discard("")
        reads = [norm.reads for norm in self.norms] + [linear.reads for linear in self.linears]
        return tuple(dict.fromkeys(space for space in reads if space in written))
