"""What folding does to each tensor, as data: decided before a matrix is read, executed later, certified last.

An output tensor is made in one of two ways. A `TensorEdit` copies a tensor, multiplies it along one axis by the gain
of a norm, subtracts its mean along another, or both. A `VectorEdit` makes a gain or a bias: in float64, rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from normkit.errors import InputError, ModelError

if TYPE_CHECKING:
    from normkit.checkpoint.reader import TensorInfo

Operation = Literal["gain", "bias", "centre", "rms", "final", "value", "batchnorm"]
OPERATIONS: tuple[Operation, ...] = ("gain", "bias", "centre", "rms", "final", "value")
"""The operations of a checkpoint, in order; "batchnorm" is done in memory, and alone."""

DTYPES = ("same", "float32")
"""The choices for the dtype of the written weights."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""The keys of config.json that say what the weights are rounded to on loading; transformers 4 has the second name."""

Relation = Literal["identical", "product", "sum", "constant"]
"""Identical bits (or a cast that loses none); one product, rounded once, that can be derived again bit for bit;
exact in the reals and summed in float64; a constant."""

RELATIONS: dict[Relation, str] = {
    "identical": "the source's bits",
    "product": "one product or quotient an element, rounded once",
    "sum": "sums in float64, rounded once",
    "constant": "constants",
}
"""How a tensor of the result follows from the source, in words."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that folding computes with."""


LIMITS = (
    "SRC is taken as it is: that it is what its authors published is not checked",
    "the certificate is not signed: whoever can write SRC and DST can make all three anew",
    "sentences in the certificate (reasons, remarks) are not compared, only what they stand beside",
    "hidden files are neither copied nor looked at",
    "code that comes with a model is not copied and never run: what is proved is proved of the stock class",
    "an adapter that was trained on SRC does not fit DST",
    "runtimes other than transformers may read other files or keys: none of them was asked",
)
"""The limits of a passed verification."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The gain of a norm as it acts: weight + offset, and 1 at the coordinates that the norm keeps."""

    weight: str
    """Name of the stored gain, of shape (n,)."""
    offset: float = 0.0
    """Added to the stored gain."""
    kept: tuple[int, ...] = ()
    """Coordinates with a gain of zero that stay in the norm; their factor is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEdit:
    """An output tensor of the shape of one source tensor."""

    name: str
    """Name of the output tensor."""
    source: str
    """Name of the source tensor."""
    dtype: str
    """Dtype of the output, as safetensors writes it, such as "BF16"."""
    gain: Gain | None = None
    """The gain that the tensor is multiplied by."""
    gain_axis: int | None = None
    """Axis of that product, not negative."""
    centred_axis: int | None = None
    """Axis along which the mean is subtracted after the product, not negative."""

    @property
    def relation(self) -> Relation:
        """How the output follows from the source."""
        if self.centred_axis is not None:
            return "sum"
        return "identical" if self.gain is None else "product"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The last `tail` rows of each of `blocks` equal blocks: the rows of the values in a fused projection."""

    blocks: int
    """Number of blocks; 1 if queries, keys and values follow each other."""
    tail: int
    """Rows taken of each block."""


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
    """Source tensor W of two axes, before anything is folded into it."""
    in_axis: int
    """The axis that is summed over, 0 or 1."""
    vector: Reference
    """The vector v."""


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
class Sum:
    """A bias plus matrices times vectors."""

    terms: tuple[Product, ...] = ()
    """Added to the source vector, or to zero if there is none."""
    is_centred: bool = False
    """The mean is subtracted at the end."""
    zeroed: Rows | None = None
    """Rows that are written as zero, because another bias has taken them over."""


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
    value: Constant | Quotient | Sum
    """The new value, or how it follows."""

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
"""The fate of a gain or a bias: moved into the readers; kept in the norm as b / g; it is one or zero, so there is
nothing to fold; the norm has none; left as it is."""


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
    """Coordinates with zero gain that keep (0, b)."""
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
    """One for each output tensor, in the order of the source's tensors; created ones last. None for batch norms."""
    removed: tuple[str, ...] = ()
    """Source tensors that the output does not have."""
    norms: tuple[NormChange, ...] = ()
    """In the order of the model."""
    refusals: tuple[Refusal, ...] = ()
    """The operations that were asked for and are not done."""
    centred: tuple[str, ...] = ()
    """Names of the writers that are centred."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Key of config.json that changes -> its new value; nested keys as "text_config.tie_word_embeddings"."""
    dropped: tuple[str, ...] = ()
    """Keys of config.json that are removed."""
    swaps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Path of each norm that becomes an RMSNorm for which no stock class exists -> its spec as JSON."""
    remarks: tuple[str, ...] = ()
    """Notes for the user, one sentence each, for example that equality holds in evaluation mode."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the same for the same plan."""
        document = dataclasses.asdict(self)
        document["edits"] = [
            {"relation": edit.relation, **written} for edit, written in zip(self.edits, document["edits"], strict=True)
        ]
        return document

    @property
    def num_folded(self) -> int:
        """How many norms give their gain or bias to their readers, whole or in part."""
        return sum(bool({norm.gain, norm.bias} & {"folded", "divided"}) for norm in self.norms)

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


class PlanBuilder:
    """Collects decisions and refusals; every tensor that no decision names is copied.

    Args:
        tensors: The tensors of the source, in its order.
        dtype: "same" or "float32".

    Raises:
        InputError: If "float32" would lose bits.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], dtype: str) -> None:
        self.refusals: tuple[Refusal, ...] = ()
        self._tensors, self._is_widened = tensors, dtype == "float32"
        if self._is_widened and (wide := [name for name, info in tensors.items() if info.dtype == "F64"]):
            raise InputError(f"dtype float32 would round {wide[0]}, which is float64; leave it at 'same'")
        self._edits: dict[str, Edit] = {name: self._copy(name, name) for name in tensors}
        self._copied_biases: dict[str, str] = {}

    def edits(self) -> tuple[Edit, ...]:
        """One for each tensor of the source, in its order, then the created ones."""
        for name, source in self._copied_biases.items():
            self._edits[name] = dataclasses.replace(self._edits[source], name=name)
        return tuple(self._edits.values())

    def refuse(self, operation: Operation, place: str, reason: str) -> None:
        """Note that something that was asked for is not done."""
        self.refusals += (Refusal(operation=operation, place=place, reason=reason),)

    def multiply(self, name: str, axis: int, gain: Gain) -> None:
        """Multiply a matrix along one axis by a gain."""
        matrix = self._matrix(name)
        if matrix.gain is not None:
            raise ModelError(f"{name} would be multiplied by two gains; its family's file is wrong")
        self._edits[name] = dataclasses.replace(matrix, gain=gain, gain_axis=axis)

    def centre(self, name: str, axis: int) -> None:
        """Subtract the mean of a matrix or of a table along one axis."""
        self._edits[name] = dataclasses.replace(self._matrix(name), centred_axis=axis)

    def copy_table(self, name: str, source: str) -> None:
        """Create a tensor for a head that shared a table; other calls with its name then edit it."""
        self._edits[name] = self._copy(name, source)

    def copy_bias(self, name: str, source: str) -> None:
        """Create a bias for a head that shared another's; it becomes what that one becomes."""
        self._edits[name], self._copied_biases[name] = self._edits[source], source

    def create_constant(self, name: str, size: int, value: float, dtype: str) -> None:
        """Create a vector of one number."""
        constant = Constant(value=value)
        self._edits[name] = VectorEdit(name=name, source=None, size=size, dtype=self._dtype(dtype), value=constant)

    def add(self, name: str, product: Product) -> None:
        """Add a matrix times a vector to a bias."""
        value = self._sum(name)
        self.set_vector(name, dataclasses.replace(value, terms=(*value.terms, product)))

    def centre_bias(self, name: str) -> None:
        """Subtract the mean of a bias, after everything has been added to it."""
        self.set_vector(name, dataclasses.replace(self._sum(name), is_centred=True))

    def zero(self, name: str, rows: Rows | None) -> None:
        """Write these rows of a bias as zero, None for all of them: another bias has taken them over."""
        rows = rows or Rows(blocks=1, tail=self._tensors[name].shape[0])
        self.set_vector(name, dataclasses.replace(self._sum(name), zeroed=rows))

    def is_changed(self, name: str) -> bool:
        """Whether a bias is already decided to change."""
        return isinstance(self._edits[name], VectorEdit)

    def set_vector(self, name: str, value: Constant | Quotient | Sum) -> None:
        """Replace a gain or a bias."""
        self._require_floating(name)
        info = self._tensors[name]
        dtype = self._dtype(info.dtype)
        self._edits[name] = VectorEdit(name=name, source=name, size=info.shape[0], dtype=dtype, value=value)

    def _copy(self, name: str, source: str) -> TensorEdit:
        return TensorEdit(name=name, source=source, dtype=self._dtype(self._tensors[source].dtype))

    def _matrix(self, name: str) -> TensorEdit:
        self._require_floating(name)
        edit = self._edits[name]
        assert isinstance(edit, TensorEdit), f"{name} is a vector in another decision"
        return edit

    def _sum(self, name: str) -> Sum:
        """The sum that a bias has become so far."""
        self._require_floating(name)
        if len(self._tensors[name].shape) != 1:
            raise ModelError(f"expected one axis in the bias {name}, got the shape {self._tensors[name].shape}")
        edit = self._edits[name]
        return edit.value if isinstance(edit, VectorEdit) and isinstance(edit.value, Sum) else Sum()

    def _dtype(self, dtype: str) -> str:
        return "F32" if self._is_widened and dtype in FLOATS else dtype

    def _require_floating(self, name: str) -> None:
        if name in self._tensors and (dtype := self._tensors[name].dtype) not in FLOATS:
            raise ModelError(
                f"expected {', '.join(FLOATS)} in {name}, got {dtype}: quantized weights cannot be folded; "
                "give the model that they were made from"
            )
