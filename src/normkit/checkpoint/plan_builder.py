"""The decisions about a checkpoint while its plan is made: what is known of it, and the edits so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.checkpoint.plan import (
    FLOATS,
    BatchNorm,
    Constant,
    Edit,
    Gain,
    Mantissa,
    Operation,
    Product,
    Quotient,
    Refusal,
    Rotation,
    Rows,
    Shift,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.reader import TORCH, Source, TensorInfo, check_finite
from normkit.errors import InputError, ModelError
from normkit.models.graph import Graph, Linear
from normkit.models.settings import Settings


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldContext:
    """A checkpoint and what is asked of it. Of its tensors only vectors are read."""

    graph: Graph
    settings: Settings
    source: Source
    operations: tuple[Operation, ...]
    untie: bool
    """A tied head gets a table of its own."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """For "migrate": path of a norm -> scales for its channels, in float64."""
    has_powers: bool = False
    """Scales are powers of two."""
    _read: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, name: str) -> Tensor:
        """A gain or a bias in float64, read once; one for each of several heads is flattened.

        Raises:
            ModelError: If it holds NaN or infinity, or no floating-point numbers.
        """
        if name not in self._read:
            info = self.source.tensors[name]
            if info.dtype not in FLOATS:
                raise ModelError(f"expected {', '.join(FLOATS)} in {name}, got {info.dtype}; give an unquantized model")
            values = self.source.rows(name, 0, info.matrix[0]).flatten().to(torch.float64)
            check_finite(name, values)
            self._read[name] = values
        return self._read[name]


def fits(values: Tensor, dtype: str) -> Tensor:
    """Whether each float64 value is a number of a dtype, named as safetensors does."""
    return values.to(TORCH[dtype]).to(torch.float64) == values


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
        self._followers: dict[str, str] = {}

    def edits(self) -> tuple[Edit, ...]:
        """One for each tensor of the source, in its order, then the created ones."""
        for name, source in self._followers.items():
            self._edits[name] = dataclasses.replace(self._edits[source], name=name)
        return tuple(self._edits.values())

    def refuse(self, operation: Operation, place: str, reason: str) -> None:
        """Note that something that was asked for is not done."""
        self.refusals += (Refusal(operation=operation, place=place, reason=reason),)

    def multiply(self, name: str, axis: int, gain: Gain | BatchNorm) -> None:
        """Multiply a matrix along one axis by a gain."""
        matrix = self._matrix(name)
        if matrix.gain is not None:
            raise ModelError(f"{name} would be multiplied by two gains; its family's file is wrong")
        self._edits[name] = dataclasses.replace(matrix, gain=gain, gain_axis=axis)

    def centre(self, name: str, axis: int) -> None:
        """Subtract the mean of a matrix or of a table along one axis."""
        self._edits[name] = dataclasses.replace(self._matrix(name), centred_axis=axis)

    def shift(self, name: str, exponent: int, offset: float = 0.0) -> None:
        """Multiply a tensor by 2^exponent once more; a stored gain has an offset, which is added before."""
        self._require_floating(name)
        edit = self._edits[name]
        if offset and isinstance(edit, TensorEdit):
            self.set_vector(name, Sum())
            edit = self._edits[name]
        if isinstance(edit, VectorEdit):
            edit = dataclasses.replace(edit, offset=offset or None)
        self._edits[name] = dataclasses.replace(edit, exponent=(edit.exponent or 0) + exponent or None)

    def add_offset(self, name: str, offset: float) -> None:
        """Write a gain with an offset more, after all other decisions about it."""
        if isinstance(self._edits[name], TensorEdit):
            self.set_vector(name, Sum())
        edit = self._edits[name]
        assert isinstance(edit, VectorEdit), f"{name} is no vector"
        self._edits[name] = dataclasses.replace(edit, added=(edit.added or 0.0) + offset)

    def rotate(self, name: str, rotation: Rotation) -> None:
        """Rotate a tensor along an axis, after all other decisions about it; along one axis only once."""
        self._require_floating(name)
        edit = self._edits[name]
        if all(rotation.axis != other.axis for other in edit.rotations):
            self._edits[name] = dataclasses.replace(edit, rotations=(*edit.rotations, rotation))

    def has_plain_gain(self, name: str, values: Tensor, offset: float) -> bool:
        """Whether a stored gain is written as one: its `values` are, or it has left."""
        edit = self._edits[name]
        if isinstance(edit, VectorEdit):
            return isinstance(edit.value, Constant) and not edit.value.kept
        return bool((values + offset == 1).all())

    def copy_table(self, name: str, source: str) -> None:
        """Create a tensor for a head that shared a table; other calls with its name then edit it."""
        self._edits[name] = self._copy(name, source)

    def follow(self, name: str, source: str) -> None:
        """Create a tensor where another one was shared; it becomes what that one becomes."""
        self._edits[name], self._followers[name] = self._edits[source], source

    def part(self, place: str, stored: str) -> None:
        """Create the tensors of a module that shared all those of another."""
        for name in self._tensors:
            if name.startswith(f"{stored}."):
                self.follow(place + name.removeprefix(stored), name)

    def take_back_copy(self, head: Linear) -> bool:
        """Share the table again that a head was given for itself, if both become the same; whether they do."""
        table = self._matrix(str(head.tied_to))
        if dataclasses.replace(self._matrix(head.weight), name=table.name, source=table.source) != table:
            return False
        for name in {head.weight, *self._followers} - self._tensors.keys():
            del self._edits[name]
        self._followers = {}
        return True

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

    def set_vector(self, name: str, value: Constant | Quotient | Mantissa | Sum | Shift) -> None:
        """Replace a gain or a bias."""
        self._require_floating(name)
        size = self._tensors[name].shape[0]
        self._edits[name] = VectorEdit(name=name, source=name, size=size, dtype=self.written_dtype(name), value=value)

    def written_dtype(self, name: str) -> str:
        """The dtype in which a tensor of the source is written."""
        return self._dtype(self._tensors[name].dtype)

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
