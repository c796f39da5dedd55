"""What folding does to each tensor, as data: decided before a matrix is read, executed later, certified last.

An output tensor is made in one of two ways. A `TensorEdit` copies a tensor, multiplies it along one axis by the gain
of a norm, subtracts its mean along another, or both. A `VectorEdit` makes a gain or a bias: in float64, rounded once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Operation = Literal["gain", "bias", "centre", "rms", "final", "value"]
OPERATIONS: tuple[Operation, ...] = ("gain", "bias", "centre", "rms", "final", "value")

Relation = Literal["identical", "product", "sum", "constant"]
"""Identical bits (or a cast that loses none); one product, rounded once, that can be derived again bit for bit;
exact in the reals and summed in float64; a constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The gain of a norm as it acts: weight + offset, and 1 at the coordinates that the norm keeps.

    Attributes:
        weight: Name of the stored gain, of shape (n,).
        offset: Added to it.
        kept: Coordinates with a gain of zero that stay in the norm; their factor is 1.
    """

    weight: str
    offset: float = 0.0
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEdit:
    """An output tensor of the shape of one source tensor.

    Attributes:
        name: Of the output tensor.
        source: Of the source tensor.
        dtype: Of the output, as safetensors writes it, as in "BF16".
        gain: What it is multiplied by, or None.
        gain_axis: Axis along which it is, not negative.
        centred_axis: Axis along which the mean is subtracted afterwards, not negative, or None.
    """

    name: str
    source: str
    dtype: str
    gain: Gain | None = None
    gain_axis: int | None = None
    centred_axis: int | None = None

    @property
    def relation(self) -> Relation:
        """How the output follows from the source."""
        if self.centred_axis is not None:
            return "sum"
        return "identical" if self.gain is None else "product"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The last `tail` of each of `blocks` equal blocks: where the values lie in a fused projection.

    Attributes:
        blocks: Number of blocks; 1 where queries, keys and values follow each other.
        tail: Rows taken of each.
    """

    blocks: int
    tail: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A vector that a matrix is multiplied by.

    Attributes:
        name: A 1-D tensor of the source; where `is_folded`, the name of a `Sum`, whose float64 value before any zeroing
            is meant.
        is_folded: Which of the two.
        rows: What is taken of it, or None for all.
        heads: Where heads share values: the number of heads that hold one value each. 0 where nothing is repeated.
        repeat: How many query heads in turn use each of them.
    """

    name: str
    is_folded: bool = False
    rows: Rows | None = None
    heads: int = 0
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """W v, one term of a bias.

    Attributes:
        matrix: Source tensor W of two axes, as it is before anything is folded into it.
        in_axis: The axis that is summed over, 0 or 1.
        vector: v.
    """

    matrix: str
    in_axis: int
    vector: Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A vector of one number, but for the coordinates that a norm keeps as they are.

    Attributes:
        value: The number.
        kept: Coordinates that keep what the source has there.
    """

    value: float
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotient:
    """b / g: the bias of a norm whose gain has left it. Kept coordinates stay as they are; 0 / 0 is 0."""

    gain: Gain


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """A bias plus matrices times vectors.

    Attributes:
        terms: Added to the source vector, or to zero where there is none.
        is_centred: Its mean is subtracted at the end.
        zeroed: Rows set to zero in what is written, as another bias has taken them over.
    """

    terms: tuple[Product, ...] = ()
    is_centred: bool = False
    zeroed: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorEdit:
    """An output tensor of one axis.

    Attributes:
        name: Of the output tensor.
        source: The source vector that `value` starts from; None where there is none, and then `value` is a constant.
        size: Number of elements.
        dtype: Of the output, as safetensors writes it.
        value: What it becomes.
    """

    name: str
    source: str | None
    size: int
    dtype: str
    value: Constant | Quotient | Sum

    @property
    def relation(self) -> Relation:
        """How the output follows from the source."""
        match self.value:
            case Constant():
                return "constant"
            case Quotient():
                return "product"
            case _:
                return "sum"


Edit = TensorEdit | VectorEdit


Fate = Literal["folded", "divided", "identity", "none", "left"]
"""Of a gain or a bias: in the readers; kept in the norm as b / g; nothing to fold; none there; left as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormChange:
    """What becomes of one norm.

    Attributes:
        name: Path of the norm's module.
        gain: What becomes of it.
        bias: What becomes of it.
        becomes_rms: It no longer needs to centre.
        readers: Paths of the linear maps that the gain went into.
        kept: Coordinates with zero gain that keep (0, b).
        reasons: Why anything asked for was left, a sentence each.
    """

    name: str
    gain: Fate
    bias: Fate
    becomes_rms: bool = False
    readers: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Something asked for that is not done.

    Attributes:
        operation: What was asked for.
        place: The norm, the space or the attention that it is about.
        reason: Why not, one sentence; where there is one, with the way out.
    """

    operation: Operation
    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that folding does to one checkpoint.

    Attributes:
        family: Name of the family.
        architecture: Class named in the source's config.
        operations: What was asked for, in the order of `OPERATIONS`.
        untie: Whether a tied head gets a table of its own.
        edits: One for each output tensor, in the order of the source's tensors; created ones last.
        removed: Source tensors that the output does not have.
        norms: What becomes of each norm, in the order of the model.
        refusals: What was asked for and is not done.
        centred: Names of the writers that are centred.
        config: Keys of config.json that change -> their new value; nested keys as "text_config.tie_word_embeddings".
        dropped: Keys of config.json that go.
        swaps: Path of each norm that becomes an RMSNorm which no stock class has -> its spec as JSON.
        remarks: What a user must know, a sentence each, as that equality holds in evaluation mode.
    """

    family: str
    architecture: str
    operations: tuple[Operation, ...]
    untie: bool
    edits: tuple[Edit, ...]
    removed: tuple[str, ...] = ()
    norms: tuple[NormChange, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    centred: tuple[str, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    swaps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the same for the same plan."""
        document = dataclasses.asdict(self)
        document["edits"] = [
            {"relation": edit.relation, **written} for edit, written in zip(self.edits, document["edits"], strict=True)
        ]
        return document
