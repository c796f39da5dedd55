"""The initializers of an ONNX model as a source of tensors: checked at opening, read a few rows at a time.

Values lie in the file itself or in a file beside it ("external data"). Nothing outside the model's folder is opened.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.checkpoint.model_folder import damaged, read_exactly
from normkit.checkpoint.reader import TORCH, TensorInfo
from normkit.errors import ModelError
from normkit.text import quoted

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

_NAMES = {
    code: name
    for codes, names in (
        ((1, 10, 11, 14, 16), ("F32", "F16", "F64", "C64", "BF16")),
        ((2, 3, 4, 5, 6, 7, 9, 12, 13), ("U8", "I8", "U16", "I16", "I32", "I64", "BOOL", "U32", "U64")),
        ((17, 18, 19, 20, 24), ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0")),
    )
    for code, name in zip(codes, names, strict=True)
}
"""Number of a dtype in ONNX -> its name in safetensors, for those that both have."""
_BITS = {8: 0, 15: 128, 21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
"""Bits of an element of the other dtypes; texts (8) have no fixed number."""
_FLOAT32, _TEXT = 1, 8
_SIGNED, _UNSIGNED = {22, 26}, {21, 25}

_QUANTIZED = {
    "DequantizeLinear": ((0, 1, 2, 1),),
    "DynamicQuantizeLSTM": ((1, 8, 9, 2), (2, 10, 11, 2)),
    "QLinearMatMul": ((3, 4, 5, 1),),
    "QLinearConv": ((3, 4, 5, 0),),
}
"""Operator -> for each quantized input its position, those of scale and zero point, and the axis of a vector."""
_INTEGER_PRODUCTS = {"MatMulInteger": -1, "ConvInteger": 0}
"""Operator with a quantized second input -> its axis; the scale is multiplied later."""

_MOST_ELEMENTS = 2**50
_MOST_AXES = 64
_CHUNK = 2**24


@dataclass(frozen=True)
class OnnxTensor(TensorInfo):
    """An initializer without its values."""

    encoding: str = ""
    """Its dtype as ONNX names it, such as "INT8"; `dtype` is that in which `rows` gives its values."""
    file: Path | None = None
    """The file with its values; None for the few that were parsed."""
    start: int = 0
    """First byte of its values in the file."""
    data: bytes = field(default=b"", repr=False)
    """Its values, if they are in no file."""
    code: int = _FLOAT32
    """Number of its dtype in ONNX."""

    @property
    def bits(self) -> int:
        """Bits of an element as stored."""
        return TORCH[_NAMES[self.code]].itemsize * 8 if self.code in _NAMES else _BITS[self.code]

    @property
    def stored(self) -> int:
        """Bytes of its values as stored."""
        return (math.prod(self.shape) * self.bits + 7) // 8


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """How a runtime makes numbers of a quantized initializer: (q - zero point) * scale, both constant along blocks."""

    scale: str
    """Name of the initializer with the scales."""
    zero_point: str = ""
    """Name of that with the zero points; "" where they are 0."""
    axis: int = -1
    """The axis along which a vector of scales changes."""


class OnnxSource:
    """The initializers of a model by name.

    Args:
        path: The ONNX file.
        initializers: Those of the main graph.
        places: Position of an initializer -> first byte and number of bytes of its values in the file.

    Raises:
        ModelError: If a name stands twice, a dtype is unknown, a shape is absurd, values are missing or too many, or
            external data lie outside the folder, behind a link out of it, or are too short.
    """

    def __init__(self, path: Path, initializers: Iterable[TensorProto], places: Mapping[int, tuple[int, int]]) -> None:
        self._path = path
        self.stored: dict[str, OnnxTensor] = {}
        """All initializers as they are stored, in the order of the file."""
        self._quantized: dict[str, Quantized] = {}
        for position, tensor in enumerate(initializers):
            if not tensor.name or not tensor.name.isprintable():
                raise ModelError(damaged(path, f"{quoted(tensor.name)} is no name for a tensor"))
            if tensor.name in self.stored:
                raise ModelError(damaged(path, f"it has two tensors named {quoted(tensor.name)}"))
            self.stored[tensor.name] = located(path, tensor, places.get(position))
        self.tensors: dict[str, TensorInfo] = {
            name: tensor for name, tensor in self.stored.items() if tensor.code in _NAMES
        }
        """The initializers that safetensors could hold, and quantized ones as float32."""

    def dequantize(self, graph: GraphProto) -> None:
        """Give the tensors of which a graph makes numbers as float32 numbers from now on."""
        for name, how in _quantized(graph):
            tensor, scale = self.stored.get(name), self.stored.get(how.scale)
            if tensor is None or scale is None or tensor.code not in {2, 3, 4, 5, 6, 12, 17, 19, 21, 22}:
                continue
            if _blocks(tensor.shape, scale.shape, how.axis) is None:
                continue
            self._quantized[name] = how
            self.tensors[name] = replace(tensor, dtype="F32")

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in a new buffer; float32 numbers of a quantized one.

        Raises:
            ModelError: If the file cannot be read to the end.
        """
        columns = self.tensors[name].matrix[1]
        if name not in self._quantized:
            return self.elements(name, start * columns, stop * columns).reshape(stop - start, columns)
        tensor, how = self.stored[name], self._quantized[name]
        # A vector is one row, whichever axis its scales go along.
        sizes = tensor.shape[:-1] or (1,)
        rows = torch.arange(start, stop)
        places = torch.unravel_index(rows, sizes)
        numbers = self.elements(name, start * columns, stop * columns).reshape(stop - start, columns).float()
        for part, is_scale in ((how.zero_point, False), (how.scale, True)):
            if not part or part not in self.stored:
                continue
            own = self.stored[part]
            values = self.elements(part, 0, math.prod(own.shape)).float()
            blocks = _blocks(tensor.shape, own.shape, how.axis)
            assert blocks is not None
            shape, lengths = blocks
            table = values.reshape(shape if len(tensor.shape) > 1 else (1, *shape))
            steps = lengths if len(tensor.shape) > 1 else (1, *lengths)
            index = tuple(place // step for place, step in zip(places, steps[:-1], strict=True))
            picked = table[index].repeat_interleave(steps[-1], dim=-1)[:, :columns]
            numbers = numbers * picked if is_scale else numbers - picked
        return numbers

    def values(self, name: str) -> Tensor:
        """All values of an initializer, in its shape."""
        return self.rows(name, 0, self.tensors[name].matrix[0]).reshape(self.tensors[name].shape)

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Some elements as they are stored, in a new buffer; numbers of fewer than eight bits as int8 or uint8."""
        tensor = self.stored[name]
        first, last = start * tensor.bits // 8, (stop * tensor.bits + 7) // 8
        raw = self.raw(name, first, last)
        if tensor.code in _NAMES:
            return raw.view(TORCH[_NAMES[tensor.code]])
        per_byte = 8 // tensor.bits
        shifts = torch.arange(per_byte, dtype=torch.uint8) * tensor.bits
        numbers = (raw[:, None] >> shifts & (1 << tensor.bits) - 1).flatten()[start % per_byte :][: stop - start]
        if tensor.code not in _SIGNED:
            return numbers
        signed = numbers.to(torch.int8)
        return torch.where(signed >= 1 << (tensor.bits - 1), signed - (1 << tensor.bits), signed)

    def raw(self, name: str, start: int, stop: int) -> Tensor:
        """Some bytes of a tensor, in a new buffer."""
        tensor = self.stored[name]
        if tensor.file is None:
            return torch.tensor(list(tensor.data[start:stop]), dtype=torch.uint8)
        raw = torch.empty(stop - start, dtype=torch.uint8)
        if raw.numel():
            with tensor.file.open("rb", buffering=0) as opened:
                read_exactly(opened.fileno(), raw.numpy().data, tensor.start + start, tensor.file)
        return raw


def located(path: Path, tensor: TensorProto, place: tuple[int, int] | None) -> OnnxTensor:
    """A checked initializer: its dtype, shape and the place of its values.

    Args:
        path: The ONNX file.
        tensor: The parsed part, which lacks the values if there is a `place`.
        place: First byte and number of bytes of the values in the file.

    Raises:
        ModelError: As for `OnnxSource`.
    """
    from onnx import TensorProto, numpy_helper

    name, shape = quoted(tensor.name), tuple(tensor.dims)
    known = {number: word for word, number in TensorProto.DataType.items() if number}
    if tensor.data_type not in known:
        problem = f"{name} has the dtype {tensor.data_type}, which this version of onnx does not know"
        raise ModelError(damaged(path, problem))
    is_possible = len(shape) <= _MOST_AXES and all(size >= 0 for size in shape)
    # Axes of length 0 do not excuse the others.
    if not is_possible or math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise ModelError(damaged(path, f"{name} has the shape {quoted(shape)}"))
    dtype = _NAMES.get(tensor.data_type, "")
    found = OnnxTensor(dtype or "U8", shape, known[tensor.data_type], code=tensor.data_type)
    if tensor.data_type == _TEXT:
        return found
    if tensor.data_location == TensorProto.EXTERNAL:
        file, start = _external(path, tensor, found.stored)
        return replace(found, file=file, start=start)
    if place is not None:
        if place[1] != found.stored:
            raise ModelError(damaged(path, _unequal(name, found, place[1])))
        return replace(found, file=path, start=place[0])
    # Before the values are made an array: of a lie about the shape nothing is allocated.
    held = len(tensor.raw_data) or sum(
        len(getattr(tensor, each)) for each in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    )
    if held == 0 and found.stored:
        raise ModelError(damaged(path, _unequal(name, found, 0)))
    if held > _CHUNK or math.prod(shape) > 8 * held + 8:
        raise ModelError(damaged(path, _unequal(name, found, held)))
    try:
        if tensor.raw_data:
            data = tensor.raw_data
        elif found.bits >= 8:
            data = numpy_helper.to_array(tensor).tobytes()
        else:
            # Unpacked: each element takes a byte, and a float of few bits four.
            code = 3 if found.code in _SIGNED else 2 if found.code in _UNSIGNED else 1
            values = numpy_helper.to_array(tensor).astype({1: "float32", 2: "uint8", 3: "int8"}[code])
            return replace(found, dtype=_NAMES[code], data=values.tobytes(), code=code)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ModelError(damaged(path, _unequal(name, found, held))) from None
    if len(data) != found.stored:
        raise ModelError(damaged(path, _unequal(name, found, len(data))))
    return replace(found, data=data)


def _unequal(name: str, tensor: OnnxTensor, held: int) -> str:
    shape = quoted(tensor.shape)
    return f"{name} is {tensor.encoding} of shape {shape}, {tensor.stored} bytes, and has values of {held}"


def _external(path: Path, tensor: TensorProto, expected: int) -> tuple[Path, int]:
    """The file beside the model with the values of a tensor, and their first byte."""
    name = quoted(tensor.name)
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    relative = PurePosixPath(location)
    if not location or "\0" in location or "\\" in location or relative.is_absolute() or ".." in relative.parts:
        reason = f"{name} is said to lie in {quoted(location)}"
        raise ModelError(f"expected the data of {path} in its own folder, {reason}; nothing was opened")
    file = path.parent / relative
    try:
        resolved = file.resolve(strict=True)
        status = resolved.stat()
    except (OSError, RuntimeError):
        raise ModelError(
            f"{path} keeps its weights in {quoted(location)}, which is not there; put that file beside it"
        ) from None
    # A cache of the Hub holds links to model and data, which lie in one folder.
    if not any(resolved.is_relative_to(folder.resolve()) for folder in (path.parent, path.resolve().parent)):
        raise ModelError(
            f"expected the data of {path} in its own folder, {quoted(location)} is a link out of it; copy it there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"expected a file with the data of {path}, {quoted(location)} is none; nothing was opened")
    numbers = [said.get(key, "0") for key in ("offset", "length")]
    if not all(number.isascii() and number.isdigit() and len(number) < 19 for number in numbers):
        raise ModelError(damaged(path, f"{name} has the offset {quoted(numbers[0])} and length {quoted(numbers[1])}"))
    start, length = map(int, numbers)
    if length not in (0, expected):
        raise ModelError(damaged(path, f"{name} needs {expected} bytes, {quoted(location)} is said to hold {length}"))
    if start + expected > status.st_size:
        problem = f"{name} ends at byte {start + expected} of {quoted(location)}, which has {status.st_size}"
        raise ModelError(damaged(path, problem))
    return file, start


def _blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], axis: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of the scales with all axes, and how many elements share one along each; None if they do not fit."""
    if math.prod(scales) == 1:
        full = (1,) * len(shape)
    elif len(scales) == 1 and shape and -len(shape) <= axis < len(shape):
        full = tuple(scales[0] if place == axis % len(shape) else 1 for place in range(len(shape)))
    else:
        full = scales
    if len(full) != len(shape) or any(size < 1 for size in (*full, *shape)):
        return None
    return full, tuple(-(-size // count) for size, count in zip(shape, full, strict=True))


def _quantized(graph: GraphProto) -> Iterator[tuple[str, Quantized]]:
    """The initializers that the graph itself makes numbers of, and how."""
    initializers = {tensor.name for tensor in graph.initializer}
    consumers: dict[str, list[NodeProto]] = {}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)

    def scale_after(node: NodeProto) -> str | None:
        """The constant factor of the product of integers: of its own Mul, or of the Mul that makes the factor."""
        following = consumers.get(node.output[0], [])
        while following and following[0].op_type in ("Add", "Cast"):
            following = consumers.get(following[0].output[0], [])
        for product in (each for each in following if each.op_type == "Mul"):
            factors = [*product.input]
            for name in product.input:
                if name in makers and makers[name].op_type == "Mul":
                    factors += makers[name].input
            return next((name for name in factors if name in initializers), None)
        return None

    for node in graph.node:
        inputs = [*node.input, *[""] * 12]
        for position, scale, zero_point, axis in _QUANTIZED.get(node.op_type, ()):
            if node.op_type == "DequantizeLinear":
                axis = next((each.i for each in node.attribute if each.name == "axis"), axis)
                # Only the rows of the table that were taken are dequantized.
                taken = makers.get(inputs[0])
                inputs[0] = taken.input[0] if taken is not None and taken.op_type == "Gather" else inputs[0]
            if inputs[position] in initializers and inputs[scale] in initializers:
                yield inputs[position], Quantized(scale=inputs[scale], zero_point=inputs[zero_point], axis=axis)
        if node.op_type in _INTEGER_PRODUCTS and inputs[1] in initializers and (scale_name := scale_after(node)):
            yield inputs[1], Quantized(scale=scale_name, zero_point=inputs[3], axis=_INTEGER_PRODUCTS[node.op_type])
