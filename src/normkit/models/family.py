"""A model family as its TOML file declares it: which tensors read what, and write where.

    model_type = "llama"                 # as in config.json
    prefix = "model."                    # what a checkpoint of a class without a head leaves out
    source = "..."                       # the code that this was read from

    [classes]                            # class -> points whose value it returns: nothing may be moved out of them
    LlamaForCausalLM = []
    LlamaModel = ["model.norm"]

    [config]                             # keys of config.json, and what transformers takes for missing ones
    [requires]                           # what they must be for this file to hold
    [repeat]                             # placeholder in names -> the key that counts it
    [tie]                                # a head that may share its table

    [[part]]                             # names below `at`; a reference with a leading dot is below it too
    at = "model.layers.{layer}"
    [part.norm]                          # reads a space or a point, gives a point
    [part.linear]                        # reads a point or a space, writes to a space
    [part.table]                         # writes to a space
    [part.attention]                     # what is known of the weights that rows are mixed with

A space is a sum: the residual stream, or the input of one norm. A point is what one norm gives. Names may hold
`{layer}`, `{layer+1}` and `{layer-1}`; where nothing repeats, `{layer}` is the number of layers.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from normkit.errors import ModelError

Condition = Mapping[str, Any]
"""Key of config.json -> the value it must have, or a list of them; true and false ask for its truth only."""


@dataclass(frozen=True, kw_only=True)
class NormEntry:
    """A norm.

    Attributes:
        kind: "layer" subtracts the mean, "rms" does not.
        reads: Space whose rows it normalizes; "" where it is of no matter, as for a norm of query heads.
        gives: Point that readers name; "" is the norm's own path.
        writes: Spaces that its output is added to.
        opaque: What else takes its output, in words: then nothing can leave it.
        offset: Added to the stored gain.
        weight: Whether there is a gain, or the key that says so.
        bias: Whether there is a bias, or the key that says so.
        eps: Key that holds it, or a number; "" is the family's.
        when: Only where this holds.
    """

    kind: Literal["layer", "rms"]
    reads: str = ""
    gives: str = ""
    writes: tuple[str, ...] = ()
    opaque: str = ""
    offset: float = 0.0
    weight: bool | str = True
    bias: bool | str = False
    eps: str | float = ""
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinearEntry:
    """A linear map, whatever module computes it.

    Attributes:
        reads: Point or space; "" is anything else, as the mixed values of an attention.
        writes: Space; "" is anything else.
        through: What stands between the map and the sum that it writes to, where that is not linear.
        axes: Axes of the weight that face its input and its output.
        weight: Appended to the path for the name of its weight.
        bias: Whether there is a bias, or the key that says so.
        bias_name: Appended to the path for the name of its bias.
        aliases: Other paths, in full, under which a checkpoint may hold it.
        is_head: It makes the scores of the vocabulary or of classes.
        only: Classes that have it; () is all.
        when: Only where this holds.
    """

    reads: str = ""
    writes: str = ""
    through: str = ""
    axes: tuple[int, int] = (1, 0)
    weight: str = ".weight"
    bias: bool | str = False
    bias_name: str = ".bias"
    aliases: tuple[str, ...] = ()
    is_head: bool = False
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A tensor whose rows are added to a space: embeddings, positions, a class token. Named in full.

    Attributes:
        writes: Space, or "" where it is something else that is only carried over.
        axis: Axis of the features.
        aliases: Other names under which a checkpoint may hold the same table.
        only: Classes that have it; () is all.
        when: Only where this holds.
    """

    writes: str = ""
    axis: int = -1
    aliases: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionEntry:
    """What decides whether a bias may pass through an attention.

    Attributes:
        value: Linear map of the values, or the fused one.
        output: Linear map behind the heads.
        key: Linear map of the keys, if it is one of its own.
        layout: Where values lie in the rows of `value`: "own", "last" of a fused one, "last of each group".
        heads: Key that counts query heads; "" is the family's.
        kv_heads: Key that counts heads of keys and values, or their number; "" is the family's.
        rotary: Queries and keys are rotated by their positions.
        sinks: A tensor of sinks: with it the weights of a row do not sum to one.
        softcap: Key of a cap on the scores.
        clip: Key of a bound at which queries, keys and values are cut off.
        when: Only where this holds.
    """

    value: str
    output: str
    key: str = ""
    layout: Literal["own", "last", "last of each group"] = "own"
    heads: str = ""
    kv_heads: str | int = ""
    rotary: bool = True
    sinks: str = ""
    softcap: str = ""
    clip: str = ""
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Entries whose names begin alike.

    Attributes:
        at: The beginning, without the last dot; "" for full names.
        in_memory: The beginning of the modules' paths, where it is another than that of the tensors' names on disk.
        first: Index that the repetition starts from.
        either: Of the parts that share this word exactly one is in the checkpoint at each index, told by its tensors.
        given: Only where the checkpoint has this tensor.
        lacking: Only where the checkpoint lacks this tensor.
        only: Classes that have it; () is all.
        when: Only where this holds.
        norm: Path below `at` -> entry.
        linear: Path below `at` -> entry.
        table: Name below `at` -> entry.
        attention: Path below `at` -> entry.
    """

    at: str = ""
    in_memory: str = ""
    first: int = 0
    either: str = ""
    given: str = ""
    lacking: str = ""
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)
    norm: Mapping[str, NormEntry] = field(default_factory=dict)
    linear: Mapping[str, LinearEntry] = field(default_factory=dict)
    table: Mapping[str, TableEntry] = field(default_factory=dict)
    attention: Mapping[str, AttentionEntry] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Keys of config.json, and what transformers takes where one is missing.

    Attributes:
        width: Of the residual stream.
        eps: Of the norms.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values; "" is `heads`.
        head_dim: Width of a head; "" or missing is width / heads.
        dropout: Rates that matter in training only.
        default: Key -> what a missing one means; "=key" is the value of another key.
    """

    width: str
    eps: str = ""
    heads: str = ""
    kv_heads: str = ""
    head_dim: str = ""
    dropout: tuple[str, ...] = ()
    default: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A head that may share the table of the embeddings.

    Attributes:
        head: Path of the linear map.
        table: Name of the table.
        key: Of config.json that says whether they are one.
        unless: Where this holds they are two, whatever the key says.
        fixed: Why they cannot be parted, where they cannot; then a checkpoint without the head's table shares it.
        bias: Name of a tensor that is the bias of the head while they are one, and of no matter afterwards.
        ignored_by: Runtimes that take the table for the head whatever the checkpoint holds, or refuse one with both.
    """

    head: str
    table: str
    key: str = "tie_word_embeddings"
    unless: Condition = field(default_factory=dict)
    fixed: str = ""
    bias: str = ""
    ignored_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Becomes:
    """The stock family that this one is, once its norms are RMSNorms without a bias.

    Attributes:
        model_type: Of that family.
        classes: Class -> class of that family.
        config: Keys to set; a value of "=key" is taken from another key.
        drop: Keys that go.
        when: Only where this holds.
        otherwise: What to say where it does not.
    """

    model_type: str
    classes: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that a TOML file says.

    Attributes:
        model_type: As in config.json.
        source: The code that it was read from.
        classes: Class -> points and spaces that it returns.
        config: Keys of config.json.
        parts: In the order of the file.
        repeat: Placeholder -> the key that counts it, or the keys to try in turn.
        prefix: What a checkpoint of a class without a head leaves out of all names.
        requires: What must hold for the file to describe a checkpoint.
        tie: Head and table that may be one.
        becomes: A stock family that an RMSNorm version is.
        buffers: Patterns of names that older checkpoints hold and no model reads.
        remarks: What a user of the folded model must know.
    """

    model_type: str
    source: str
    classes: Mapping[str, tuple[str, ...]]
    config: ConfigKeys
    parts: tuple[Part, ...]
    repeat: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefix: str = ""
    requires: Condition = field(default_factory=dict)
    tie: Tie | None = None
    becomes: Becomes | None = None
    buffers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


_ENTRIES: Mapping[str, type] = MappingProxyType(
    {"norm": NormEntry, "linear": LinearEntry, "table": TableEntry, "attention": AttentionEntry}
)
_Entry = TypeVar("_Entry")


def parse(text: str, name: str) -> Family:
    """The family that a TOML text declares.

    Args:
        text: The file's.
        name: Of the file, for messages.

    Raises:
        ModelError: If it is no TOML, or a key is unknown or missing.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{name} is not TOML: {error}") from None
    values["config"] = _made(ConfigKeys, values.get("config", {}), f"{name}: [config]")
    if "tie" in values:
        values["tie"] = _made(Tie, values["tie"], f"{name}: [tie]")
    if "becomes" in values:
        values["becomes"] = _made(Becomes, values["becomes"], f"{name}: [becomes]")
    values["parts"] = tuple(_part(part, name) for part in values.pop("part", []))
    values["classes"] = {key: tuple(points) for key, points in values.get("classes", {}).items()}
    values["repeat"] = {
        key: (count,) if isinstance(count, str) else tuple(count) for key, count in values.get("repeat", {}).items()
    }
    return _made(Family, values, name)


def _part(values: dict[str, Any], name: str) -> Part:
    where = f"{name}: the part at {values.get('at', '')!r}"
    for section, entry in _ENTRIES.items():
        found = values.get(section, {})
        values[section] = {key: _made(entry, member, f"{where}, {key}") for key, member in found.items()}
    return _made(Part, values, where)


def _made(cls: type[_Entry], values: Mapping[str, Any], where: str) -> _Entry:
    """The dataclass with these values; lists become tuples."""
    fields = {member.name: member for member in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(fields)):
        raise ModelError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(fields)}")
    needed = {
        key
        for key, member in fields.items()
        if member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING
    }
    if missing := sorted(needed - set(values)):
        raise ModelError(f"{where} lacks the key {missing[0]!r}; add it")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
