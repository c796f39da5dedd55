"""A model family as its TOML file declares it: which tensors read what, and write where.

    model_type = "llama"                 # as in config.json
    prefix = "model."                    # missing in the names of a checkpoint of a class without a head
    source = "..."                       # the code that the file was read from

    [classes]                            # class -> points and spaces that it returns: nothing may be moved out of them
    LlamaForCausalLM = []
    LlamaModel = ["model.norm"]

    [config]                             # keys of config.json, and the values of missing ones
    [requires]                           # their values in all checkpoints that this file describes
    [repeat]                             # placeholder in names -> the key that counts it
    [tie]                                # a head that may share its table

    extends = "llama"                    # all that follows is as in llama.toml, but for what this file says itself:
    rename = { Llama = "Mistral" }       # words in all its names, and what replaces them
    without = ["model.layers.{layer}"]   # places whose parts are left out; a part here takes the place of those there

    [[include]]                          # a part of the model is a model of another family
    family = "siglip_vision_model"
    classes = { ... }                    # class here -> class there
    config = "vision_config"             # key of config.json that holds its settings
    flat = true                          # in older checkpoints they are at the top of config.json
    names = { "" = "model.vision_tower." }  # beginning of its names -> what stands in its place here
    word = "vision"                      # begins the names of its sums; without it they are this model's own
    taken_by = "the projector"           # what takes its outputs, if that is not the caller ...
    returned = false                     # ... or linear maps of this file, as far as the caller's own outputs go
    when = { ... }                       # the settings with which it is there
    without = ["vision_model.head"]      # places whose parts it lacks here

    [older_names]                        # beginning of names -> other ones that checkpoints have
    "model.vision_tower." = ["vision_tower."]

    [[part]]                             # names below `at`; a reference with a leading dot is below it too
    at = "model.layers.{layer}"
    [part.norm]                          # reads a space or a point, gives a point
    [part.linear]                        # reads a point or a space, writes to a space
    [part.table]                         # writes to a space
    [part.attention]                     # how an attention mixes rows

A space is a sum: the residual stream, or the input of one norm. A point is the output of one norm. Names may contain
`{layer}`, `{layer+1}` and `{layer-1}`; outside a repetition `{layer}` is the number of layers. A part or an entry
may be limited to classes (`only`) and to settings of config.json (`when`). Keys of a section are paths below `at`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from normkit.errors import ModelError
from normkit.models import norm_classes
from normkit.models.inclusion import Document, extended, with_included
from normkit.text import quoted

Condition = Mapping[str, Any]
"""Key of config.json -> the value that it must have, or a list of them; true and false test for truth."""


@dataclass(frozen=True, kw_only=True)
class NormEntry:
    """A norm."""

    kind: Literal["layer", "rms"]
    """A "layer" norm subtracts the mean, an "rms" norm does not."""
    reads: str = ""
    """Space whose rows it normalizes; "" where that does not matter, as for a norm of query heads."""
    joined: str = ""
    """The other vectors of that space with which each row is joined before both are normalized as one, in words."""
    gives: str = ""
    """Point that readers name; "" for the norm's own path."""
    writes: tuple[str, ...] = ()
    """Spaces that its output is added to."""
    opaque: str = ""
    """The other taker of its output, in words; if there is one, neither gain nor bias can leave the norm."""
    of: tuple[str, ...] = ()
    """Linear maps whose outputs it normalizes head by head, before anything else reads them."""
    offset: float = 0.0
    """Added to the stored gain."""
    weight: bool | str = True
    """Whether there is a gain, or the key that says whether."""
    bias: bool | str = False
    """Whether there is a bias, or the key that says whether."""
    eps: str | float = ""
    """Key of config.json, or a number; "" for the family's key."""
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinearEntry:
    """A linear map, whatever module computes it."""

    reads: str = ""
    """Point or space; "" for anything else, such as the mixed values of an attention."""
    writes: str = ""
    """Space; "" for anything else."""
    through: str = ""
    """A nonlinear step between the map and the sum that it writes to, in words."""
    scaled_by: str = ""
    """A factor for each coordinate between the map and the sum, in words; powers of two pass it, a mean does not."""
    axes: tuple[int, int] = (1, 0)
    """Axes of the weight that face its input and its output."""
    joined: bool = False
    """It reads several rows of the point side by side, as one long row."""
    beside: str = ""
    """The linear map whose output its own is added to before anything else reads it; "" for none."""
    turned: bool = False
    """A checkpoint may hold it with both axes exchanged: where the one that faces the stream has another size."""
    weight: str = ".weight"
    """The path plus this is the name of its weight."""
    bias: bool | str = False
    """Whether there is a bias, or the key that says whether."""
    bias_name: str = ".bias"
    """The path plus this is the name of its bias."""
    aliases: tuple[str, ...] = ()
    """Other paths, in full, under which a checkpoint may hold it."""
    is_head: bool = False
    """It computes the scores of the vocabulary or of classes."""
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A tensor whose rows are added to a space: embeddings, positions, a class token. Named in full."""

    writes: str = ""
    """Space; "" for a tensor that is only copied."""
    axis: int = -1
    """Axis of the features."""
    width: str = ""
    """Key of their number; "" for the width of the residual stream."""
    aliases: tuple[str, ...] = ()
    """Other names under which a checkpoint may hold the same table."""
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionEntry:
    """The properties of an attention that decide whether a bias may pass through it."""

    value: str
    """Linear map of the values, or the fused one."""
    output: str
    """Linear map behind the heads."""
    key: str = ""
    """Linear map of the keys, if they have their own."""
    layout: Literal["own", "last", "last of each group"] = "own"
    """The place of the values in the rows of `value`: "own", "last" of a fused map, "last of each group"."""
    heads: str = ""
    """Key that counts query heads; "" for the family's."""
    kv_heads: str | int = ""
    """Key that counts heads of keys and values, or their number; "" for the family's key."""
    rotary: bool = True
    """Queries and keys are rotated by their positions."""
    sinks: str = ""
    """Name of a tensor of sinks, with which the weights of a row do not sum to one."""
    softcap: str = ""
    """Key of a cap on the scores."""
    clip: str = ""
    """Key of a bound to which queries, keys and values are clipped."""
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Entries whose names have the same beginning."""

    at: str = ""
    """The beginning, without the last dot; "" for full names."""
    in_memory: str = ""
    """The beginning of the modules' paths, if it differs from that of the tensors' names on disk."""
    first: int = 0
    """Index that the repetition starts from."""
    either: str = ""
    """Exactly one of the parts with the same word is in the checkpoint at each index; its tensors show which."""
    given: str = ""
    """The part applies only if the checkpoint has this tensor."""
    lacking: str = ""
    """The part applies only if the checkpoint lacks this tensor."""
    only: tuple[str, ...] = ()
    when: Condition = field(default_factory=dict)
    norm: Mapping[str, NormEntry] = field(default_factory=dict)
    linear: Mapping[str, LinearEntry] = field(default_factory=dict)
    table: Mapping[str, TableEntry] = field(default_factory=dict)
    attention: Mapping[str, AttentionEntry] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Keys of config.json, and the values that transformers uses for missing ones."""

    width: str
    """Width of the residual stream."""
    eps: str | float = ""
    """The eps of the norms, or a number that stands in the code of their class."""
    heads: str = ""
    """Number of query heads."""
    kv_heads: str = ""
    """Number of heads of keys and values; "" for `heads`."""
    head_dim: str = ""
    """Width of a head; width / heads if "" or missing."""
    dropout: tuple[str, ...] = ()
    """Rates of dropout, which matter in training only."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Key -> what a missing one means; "=key" is the value of another key."""


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A head that may share the table of the embeddings."""

    head: str
    """Path of the linear map."""
    table: str
    """Name of the table."""
    key: str = "tie_word_embeddings"
    """Key of config.json that says whether head and table are one tensor."""
    unless: Condition = field(default_factory=dict)
    """If this holds they are two tensors, whatever the key says."""
    fixed: str = ""
    """Why they cannot be separated, or ""; if set, a checkpoint without the head's table shares it."""
    bias: str = ""
    """Name of a tensor that is the bias of the head while it shares the table, and unused otherwise."""
    ignored_by: tuple[str, ...] = ()
    """Runtimes that use the table as the head whatever the checkpoint holds, or refuse a checkpoint with both."""
    shared: str = ""
    """Path, with a placeholder, of modules that the key ties too: some are stored, the others are these in turn."""
    user: str = ""
    """Name of a tensor that is stored wherever there is such a module."""
    different: str = ""
    """Key of config.json that counts those that are stored."""


@dataclass(frozen=True, kw_only=True)
class Becomes:
    """The stock family that this one becomes when its norms are RMSNorms without a bias, or its gains plain."""

    model_type: str
    classes: Mapping[str, str]
    """Class -> class of that family."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys to set; a value of "=key" is taken from another key."""
    powers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Key to set -> the key whose value it is a power of, and the power."""
    drop: tuple[str, ...] = ()
    """Keys to remove."""
    when: Condition = field(default_factory=dict)
    otherwise: str = ""
    """The reason to give if `when` does not hold."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The content of a TOML file."""

    model_type: str
    source: str
    """The code that the file was read from."""
    classes: Mapping[str, tuple[str, ...]]
    """Class -> points and spaces that it returns."""
    config: ConfigKeys
    parts: tuple[Part, ...]
    repeat: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Placeholder -> the key that counts it, or the keys to try in turn."""
    prefix: str = ""
    """Missing in all names of a checkpoint of a class without a head."""
    requires: Condition = field(default_factory=dict)
    """The settings of all checkpoints that the file describes."""
    tie: Tie | None = None
    becomes: Becomes | None = None
    """When its norms are RMSNorms without a bias."""
    plain: Becomes | None = None
    """When its gains are stored with their offset."""
    no_plain_class: str = ""
    """Why no stock family with plain gains computes the same, or ""."""
    buffers: tuple[str, ...] = ()
    """Patterns of names in older checkpoints that no model reads."""
    older_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Beginning of names -> others that checkpoints have in its place; the longest that some tensor has is meant."""
    towers: tuple[str, ...] = ()
    """First words of the spaces of models that it includes beside its own residual stream."""
    remarks: tuple[str, ...] = ()
    """Notes for users of the folded model."""


_ENTRIES: Mapping[str, type] = MappingProxyType(
    {"norm": NormEntry, "linear": LinearEntry, "table": TableEntry, "attention": AttentionEntry}
)
_Entry = TypeVar("_Entry")


@cache
def declared_types() -> tuple[str, ...]:
    """The model types that have a file, sorted."""
    found = (file.name for file in files("normkit.models").iterdir() if file.name != norm_classes.FILE)
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def declared_family(name: str) -> Family:
    """The family of a model type.

    Raises:
        ModelError: If no file declares it; the message lists the declared ones. It suggests none of them, because a
            similar name says nothing about readers and writers.
    """
    if name not in declared_types():
        raise ModelError(
            f"expected a model of a declared family, got model_type {quoted(name)}: its readers and writers are not "
            f"known, and they are never guessed; declared are {', '.join(declared_types())}"
        )
    return parse(_text(f"{name}.toml"), f"{name}.toml")


def _text(file: str) -> str:
    return (files("normkit.models") / file).read_text(encoding="utf-8")


def document(text: str, name: str) -> Document:
    """The document of a family's file with all that it takes over from other ones.

    Raises:
        ModelError: If it is not TOML, or takes over something that is not there.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{name} is not TOML: {error}") from None

    def other(file: str) -> Document:
        if file.removesuffix(".toml") not in declared_types():
            raise ModelError(f"{name} extends or includes {file}, which is not there; declare that family first")
        return document(_text(file), file)

    if "extends" in values:
        values = extended(values, other(f"{values.pop('extends')}.toml"), name)
    return with_included(values, other, name) if "include" in values else values


def parse(text: str, name: str) -> Family:
    """The family that the text of a TOML file declares; messages give the file's name.

    Raises:
        ModelError: If it is not TOML, or a key is unknown or missing.
    """
    values = document(text, name)
    values["config"] = _made(ConfigKeys, values.get("config", {}), f"{name}: [config]")
    if "tie" in values:
        values["tie"] = _made(Tie, values["tie"], f"{name}: [tie]")
    for table in ("becomes", "plain"):
        if table in values:
            values[table] = _made(Becomes, values[table], f"{name}: [{table}]")
    values["parts"] = tuple(_part(part, name) for part in values.pop("part", []))
    for table in ("classes", "older_names"):
        values[table] = {key: tuple(names) for key, names in values.get(table, {}).items()}
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
