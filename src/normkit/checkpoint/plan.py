"""The steps of folding for each tensor, as data: decided before a matrix is read, executed later, certified last.

An output tensor is made in one of two ways. A `TensorEdit` copies a tensor, multiplies it along one axis by the gain
of a norm, subtracts its mean along another, or both. A `VectorEdit` makes a gain or a bias: in float64, rounded once.
A `BatchNorm` stands where a gain may stand, for the scale and the shift that its four vectors give.
To add an operation: its name in `Operation` and `OPERATIONS`, a file that plans it beside `affine.py`, called in
`planning.make_plan`, and, if no edit expresses it, a field of an edit and its arithmetic in `applying.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from normkit.checkpoint.given import Given
from normkit.errors import InputError

Operation = Literal[
    "gain", "bias", "centre", "rms", "final", "value", "exponent", "migrate", "scale", "rotate", "unoffset", "batchnorm"
]
ALL: tuple[Operation, ...] = ("gain", "bias", "centre", "rms", "final", "value")
"""The operations that `--ops all` asks for."""
OPERATIONS: tuple[Operation, ...] = (*ALL, "exponent", "migrate", "scale", "rotate", "unoffset", "batchnorm")
"""The operations of a checkpoint, in order; "batchnorm" is done alone."""

OPTIONS: dict[str, type] = {
    "halvings": int,
    "fixed_eps": bool,
    "seed": int,
    "matrix": str,
    "scales": str,
    "alpha": float,
    "powers_of_two": bool,
}
"""The choices that operations take, and the SHA-256 of files that they were given."""

DTYPES = ("same", "float32")
"""The choices for the dtype of the written weights."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""The keys of config.json that say what the weights are rounded to on loading; transformers 4 has the second name."""

Relation = Literal["identical", "power", "product", "sum", "constant"]
"""Identical bits (or a cast that loses none); a product with a power of two, which loses no bit short of underflow; one
product, rounded once, that can be derived again bit for bit; exact in the reals and summed in float64; a constant."""

RELATIONS: dict[Relation, str] = {
    "identical": "the source's bits",
    "power": "each element times a power of two",
    "product": "one product or quotient an element, rounded once",
    "sum": "sums in float64, rounded once",
    "constant": "constants",
}
"""How a tensor of the result follows from the source, in words."""

MEASURED: tuple[Relation, ...] = ("power", "sum")
"""The relations whose tensors have a residual in the certificate."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that folding computes with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The gain of a norm as it acts: weight + offset, and 1 at the coordinates that the norm keeps."""

    weight: str
    """Name of the stored gain, of shape (n,)."""
    offset: float = 0.0
    """Added to the stored gain."""
    kept: tuple[int, ...] = ()
    """Coordinates that stay in the norm; their factor is 1."""
    is_power: bool = False
    """Only the power of two nearest to each gain acts, 1 for a gain of zero; or the scales are powers of two."""
    scales: Given | None = None
    """They act in place of the gain; null if the gain itself does."""
    times: int | None = None
    """How often they follow each other along an axis that faces several rows side by side; null for once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNorm:
    """A batch norm in evaluation mode, y = scale x + shift, in float64.

    scale = weight / sqrt(var + eps), shift = bias - mean scale.
    """

    weight: str | None
    """Name of its stored gain; null if it has none."""
    bias: str | None
    """Name of its stored bias; null if it has none."""
    mean: str
    """Name of its running mean."""
    var: str
    """Name of its running variance."""
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The last `tail` rows of each of `blocks` equal blocks: the rows of the values in a fused projection."""

    blocks: int
    """Number of blocks; 1 if queries, keys and values follow each other."""
    tail: int
    """Rows taken of each block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """An orthogonal matrix times each run of `size` numbers along an axis: H D / sqrt(size), or one of a file."""

    axis: int
    """The axis, not negative."""
    size: int
    """Order of the matrix; it divides the length of the axis, or of the rows taken."""
    seed: str
    """Seed of the signs D, as `hadamard.signs` takes it; "" for a matrix of a file."""
    construction: str
    """The way that the Hadamard matrix H is made, as `hadamard.construction` says it; "" for a matrix of a file."""
    rows: Rows | None = None
    """The part of the axis that is rotated, or null for all of it."""
    matrix: Given | None = None
    """R, if it is a matrix of a file: a run v becomes R^T v."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEdit:
    """An output tensor of the shape of one source tensor."""

    name: str
    """Name of the output tensor."""
    source: str
    """Name of the source tensor."""
    dtype: str
    """Dtype of the output, as safetensors writes it, such as "BF16"."""
    gain: Gain | BatchNorm | None = None
    """The gain, or scale of a batch norm, that the tensor is multiplied by."""
    gain_axis: int | None = None
    """Axis of that product, not negative."""
    centred_axis: int | None = None
    """Axis along which the mean is subtracted after the product, not negative."""
    exponent: int | None = None
    """The result is multiplied by 2 to this power; null for 0."""
    rotations: tuple[Rotation, ...] = ()
    """Applied after all else, one after the other."""

    @property
    def relation(self) -> Relation:
        """How the output follows from the source."""
        if self.centred_axis is not None or self.rotations:
            return "sum"
        if self.gain is None:
            return "identical" if self.exponent is None else "power"
        return "power" if isinstance(self.gain, Gain) and self.gain.is_power else "product"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A vector that a matrix is multiplied by."""

    name: str
    """A 1-D tensor of the source, or, if `is_folded`, the output tensor that a `Sum` makes."""
    is_folded: bool = False
    """Take the float64 value of that `Sum`, before any rows are set to zero."""
    rows: Rows | None = None
    """The part that is taken, or null for all of it."""
    heads: int = 0
    """Number of heads with values of their own, if query heads share them; 0 if nothing is repeated."""
    repeat: int = 1
    """How many consecutive query heads share one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """W v, one term of a bias."""

    matrix: str
    """Source tensor W of two axes, or the weight of a convolution, before anything is folded into it."""
    in_axis: int
    """The axis that is summed over, 0 or 1; with 1 the taps of a convolution are summed over too."""
    vector: Reference | BatchNorm
    """The vector v; the shift of a batch norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A vector of one number, except at the coordinates that a norm keeps."""

    value: float
    """The number."""
    kept: tuple[int, ...] = ()
    """Coordinates that keep the value of the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotient:
    """b / g: the bias of a norm whose gain has left it. Kept coordinates stay as they are; 0 / 0 is 0."""

    gain: Gain
    """The gain g."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mantissa:
    """(weight + offset) / f - offset: the stored gain of a norm whose powers of two, or scales, have left it."""

    gain: Gain
    """The gain, with the powers of two or the scales f."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """A bias plus matrices times vectors."""

    terms: tuple[Product, ...] = ()
    """Added to the source vector, or to zero if there is none."""
    is_centred: bool = False
    """The mean is subtracted at the end."""
    zeroed: Rows | None = None
    """Rows that are written as zero, because another bias has taken them over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """(b - mean) scale + bias: the bias of a map that took the batch norm behind it."""

    norm: BatchNorm
    """The norm."""
    added: str | None
    """The bias b that the map had; null for 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorEdit:
    """An output tensor of one axis."""

    name: str
    """Name of the output tensor."""
    source: str | None
    """The source vector that `value` starts from; null if there is none, and then `value` is a constant."""
    size: int
    """Number of elements."""
    dtype: str
    """Dtype of the output, as safetensors writes it."""
    value: Constant | Quotient | Mantissa | Sum | Shift
    """The new value, or how it follows."""
    exponent: int | None = None
    """(value + offset) times 2 to this power, - offset, is written; null for 0."""
    offset: float | None = None
    """The offset of a stored gain; null for 0."""
    added: float | None = None
    """Added to what is written, after the exponent: the offset of a gain that becomes plain, or of one that is scaled
    and rounded; null for 0."""
    rotations: tuple[Rotation, ...] = ()
    """Applied to what is written, after all else."""

    @property
    def relation(self) -> Relation:
        """How the output follows from the source."""
        if self.rotations or (self.added and not isinstance(self.value, Constant)):
            return "sum"
        if self.value == Sum():
            return "power"
        match self.value:
            case Constant():
                return "constant"
            case Quotient(gain=gain) | Mantissa(gain=gain) if not gain.is_power:
                return "product"
            case Quotient() | Mantissa():
                return "power"
            case _:
                return "sum"


Edit = TensorEdit | VectorEdit


Fate = Literal["folded", "mantissa", "scaled", "divided", "shift", "plain", "identity", "none", "left"]
"""The fate of a gain or a bias: moved into the readers; its power of two moved; divided by scales that the readers
take; kept in the norm as b / g; kept in a batch norm that only adds it; stored with its offset; there is nothing to
fold, as it is one or zero; the norm has none; left as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormChange:
    """The change of one norm."""

    name: str
    """Path of the norm's module."""
    gain: Fate
    """The fate of its gain."""
    bias: Fate
    """The fate of its bias."""
    becomes_rms: bool = False
    """The norm no longer needs to centre."""
    readers: tuple[str, ...] = ()
    """Paths of the linear maps that the gain or bias went into."""
    kept: tuple[int, ...] = ()
    """Coordinates that stay as they are: with zero gain, (0, b); for "mantissa" those that would lose a bit."""
    reasons: tuple[str, ...] = ()
    """Why something that was asked for was left, one sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Something that was asked for and is not done."""

    operation: Operation
    """The operation that was asked for."""
    place: str
    """The norm, the space or the attention concerned."""
    reason: str
    """Why it is not done, one sentence; with the way out, if there is one."""


@dataclass(frozen=True, kw_only=True)
class FoldPlan:
    """All that folding does to one checkpoint."""

    family: str
    """Model type of the family."""
    architecture: str
    """Class named in the source's config.json."""
    operations: tuple[Operation, ...]
    """The operations asked for, in the order of `OPERATIONS`."""
    untie: bool
    """Whether a tied head gets a table of its own."""
    edits: tuple[Edit, ...]
    """One for each output tensor, in the order of the source's tensors; created ones last. None for batch norms in
    memory."""
    removed: tuple[str, ...] = ()
    """Source tensors that the output does not have."""
    norms: tuple[NormChange, ...] = ()
    """In the order of the model."""
    refusals: tuple[Refusal, ...] = ()
    """The operations that were asked for and are not done."""
    centred: tuple[str, ...] = ()
    """Names of the writers that are centred."""
    rotated_sums: tuple[str, ...] = ()
    """The sums of the residual stream that are rotated; not in JSON, where the edits say it."""
    rotated_values: tuple[str, ...] = ()
    """Paths of the attentions whose values are rotated; not in JSON."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Key of config.json that changes -> its new value; nested keys as "text_config.tie_word_embeddings"."""
    dropped: tuple[str, ...] = ()
    """Keys of config.json that are removed."""
    swaps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Path of each norm that becomes an RMSNorm for which no stock class exists -> its spec as JSON."""
    acts_as: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Path of each norm whose eps cannot follow its input -> the spec as JSON with which SRC computes what DST does."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The numbers that operations were given, by the names of `make_plan`'s arguments."""
    remarks: tuple[str, ...] = ()
    """Notes for the user, one sentence each, for example that equality holds in evaluation mode."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the same for the same plan."""
        document = dataclasses.asdict(
            self,
            dict_factory=lambda pairs: {key: each.sha256 if isinstance(each, Given) else each for key, each in pairs},
        )
        for name in ("options", "acts_as", "rotated_sums", "rotated_values"):
            if name.startswith("rotated") or not document[name]:
                del document[name]
        document["edits"] = [
            {"relation": edit.relation, **written} for edit, written in zip(self.edits, document["edits"], strict=True)
        ]
        return document

    @property
    def num_folded(self) -> int:
        """How many norms give their gain or bias to their readers, whole or in part."""
        return sum(bool({norm.gain, norm.bias} & {"folded", "mantissa", "scaled", "divided"}) for norm in self.norms)

    @property
    def num_rms(self) -> int:
        """How many LayerNorms become RMSNorms."""
        return sum(norm.becomes_rms for norm in self.norms)

    def require_change(self) -> None:
        """Raise InputError, with the first refusal, if the plan changes nothing because everything was refused."""
        if (
            self.refusals
            and not self.swaps
            and all(path.rpartition(".")[2] in DTYPE_KEYS for path in self.config)
            and all(edit.relation == "identical" for edit in self.edits)
        ):
            first, more = self.refusals[0], len(self.refusals) - 1
            rest = f" (and {more} more)" if more else ""
            raise InputError(f"nothing of what was asked can be done: {first.place}: {first.reason}{rest}")
