"""The edits of a plan while it is made: what has been decided for each tensor so far, in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from normkit.checkpoint.header import TensorInfo
from normkit.checkpoint.plan import (
    Constant,
    Edit,
    Gain,
    Operation,
    Product,
    Quotient,
    Refusal,
    Rows,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.errors import InputError, ModelError

_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(kw_only=True)
class _Bias:
    terms: list[Product] = field(default_factory=list)
    is_centred: bool = False
    zeroed: Rows | None = None


@dataclass(kw_only=True)
class _Matrix:
    gain: Gain | None = None
    gain_axis: int | None = None
    centred_axis: int | None = None


class Draft:
    """Collects decisions, then gives one edit for each output tensor.

    Args:
        tensors: Of the source, in its order.
        dtype: "same" or "float32".

    Raises:
        InputError: If "float32" would lose bits.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], dtype: str) -> None:
        self._tensors, self._widened = tensors, dtype == "float32"
        if self._widened and (wide := [name for name, info in tensors.items() if info.dtype == "F64"]):
            raise InputError(f"dtype float32 would round {wide[0]}, which is float64; leave it at 'same'")
        self._matrices: dict[str, _Matrix] = {}
        self._biases: dict[str, _Bias] = {}
        self._vectors: dict[str, Constant | Quotient] = {}
        self._created: dict[str, tuple[str, _Matrix]] = {}
        self._constants: dict[str, tuple[int, float, str]] = {}
        self._copied: dict[str, str] = {}
        self._refusals: list[Refusal] = []

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What was asked for and is not done."""
        return tuple(self._refusals)

    def refuse(self, operation: Operation, place: str, reason: str) -> None:
        """Note that something asked for is not done."""
        self._refusals.append(Refusal(operation=operation, place=place, reason=reason))

    def multiply(self, name: str, axis: int, gain: Gain) -> None:
        """Multiply a matrix along one axis by a gain."""
        matrix = self._matrix(name)
        if matrix.gain is not None:
            raise ModelError(f"{name} would be multiplied by two gains; its family's file is wrong")
        matrix.gain, matrix.gain_axis = gain, axis

    def centre(self, name: str, axis: int) -> None:
        """Subtract the mean of a matrix or of a table along one axis."""
        self._matrix(name).centred_axis = axis

    def copy_table(self, name: str, source: str) -> None:
        """A tensor of its own for a head that shared a table; other calls of its name then edit it."""
        self._created[name] = source, _Matrix()

    def copy_bias(self, name: str, source: str) -> None:
        """A bias of its own for a head that shared another's: it becomes what that one becomes."""
        self._copied[name] = source

    def add(self, name: str, product: Product) -> None:
        """Add a matrix times a vector to a bias."""
        self._bias(name).terms.append(product)

    def centre_bias(self, name: str) -> None:
        """Subtract the mean of a bias, after all has been added to it."""
        self._bias(name).is_centred = True

    def zero(self, name: str, rows: Rows | None) -> None:
        """Write a bias with these rows zero, None for all: another has taken them over."""
        self._bias(name).zeroed = rows or Rows(blocks=1, tail=self._size(name))

    def is_touched(self, name: str) -> bool:
        """Whether anything was added to a bias."""
        return name in self._biases

    def set_vector(self, name: str, value: Constant | Quotient) -> None:
        """Make a gain or the bias of a norm something else."""
        self._require_floating(name)
        self._vectors[name] = value

    def create_constant(self, name: str, size: int, value: float, dtype: str) -> None:
        """A new tensor of one number."""
        self._constants[name] = size, value, dtype

    def edits(self) -> tuple[Edit, ...]:
        """One for each tensor of the source, in its order, then the created ones."""
        own: list[Edit] = [self._edit(name, info) for name, info in self._tensors.items() if name not in self._created]
        for name, (source, matrix) in self._created.items():
            own.append(self._tensor_edit(name, source, matrix))
        for name, source in self._copied.items():
            own.append(dataclasses.replace(self._edit(source, self._tensors[source]), name=name))
        for name, (size, value, dtype) in self._constants.items():
            dtype = self._dtype(dtype)
            own.append(VectorEdit(name=name, source=None, size=size, dtype=dtype, value=Constant(value=value)))
        return tuple(own)

    def _edit(self, name: str, info: TensorInfo) -> Edit:
        dtype = self._dtype(info.dtype)
        if name in self._vectors:
            return VectorEdit(name=name, source=name, size=self._size(name), dtype=dtype, value=self._vectors[name])
        if name in self._biases:
            bias = self._biases[name]
            value = Sum(terms=tuple(bias.terms), is_centred=bias.is_centred, zeroed=bias.zeroed)
            return VectorEdit(name=name, source=name, size=self._size(name), dtype=dtype, value=value)
        return self._tensor_edit(name, name, self._matrices.get(name, _Matrix()))

    def _tensor_edit(self, name: str, source: str, matrix: _Matrix) -> TensorEdit:
        return TensorEdit(
            name=name,
            source=source,
            dtype=self._dtype(self._tensors[source].dtype),
            gain=matrix.gain,
            gain_axis=matrix.gain_axis,
            centred_axis=matrix.centred_axis,
        )

    def _matrix(self, name: str) -> _Matrix:
        if name in self._created:
            return self._created[name][1]
        self._require_floating(name)
        return self._matrices.setdefault(name, _Matrix())

    def _bias(self, name: str) -> _Bias:
        self._require_floating(name)
        if len(self._tensors[name].shape) != 1:
            raise ModelError(f"expected one axis in the bias {name}, got the shape {self._tensors[name].shape}")
        return self._biases.setdefault(name, _Bias())

    def _size(self, name: str) -> int:
        return self._tensors[name].shape[0]

    def _dtype(self, dtype: str) -> str:
        return "F32" if self._widened and dtype in _FLOATING else dtype

    def _require_floating(self, name: str) -> None:
        if (dtype := self._tensors[name].dtype) not in _FLOATING:
            raise ModelError(
                f"expected {', '.join(_FLOATING)} in {name}, got {dtype}: quantised weights cannot be folded; "
                "give the model that they were made from"
            )
