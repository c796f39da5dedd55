"""An ONNX file without the values of its large tensors: read from its protobuf parts, none of which is trusted.

An ONNX file is one protobuf message of at most 2 GiB. Its parts are walked in place, counted and bounded before the
package `onnx` parses anything, because a parsed part takes up to a hundred times the memory of its bytes. The values
of large initializers stay in the file; the place of each is kept. Then the graph and its functions are checked.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.checkpoint.model_folder import damaged
from normkit.errors import InputError, ModelError
from normkit.text import counted, first_line, quoted

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

_LARGEST_FILE = 2**31
"""A protobuf message is shorter than this; larger models hold their weights in files beside it."""
_LARGEST_SKELETON = 2**27
"""Bytes without the values of large tensors; SmolLM2's 1,860 nodes take 3.4 MB, most of it stack traces."""
_MOST_PARTS = 3_000_000
"""Parts of all messages together; SmolLM2 has 0.1 million."""
_DEEPEST = 90
"""Messages within messages; protobuf itself stops at 100. A subgraph lies three deeper than its node."""
_LARGE = 1024
"""Bytes of values from which an initializer's values stay in the file."""

_GRAPH, _INITIALIZER = 7, 5
_VALUES = (4, 9, 10)
"""Fields of a tensor (float_data, raw_data, double_data) whose bytes are the values as they lie in memory."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5

Part = tuple[int, int, int, int, int]
"""Number and kind of a field; its first byte, the first byte of its content, and the byte after it."""


_MOST_NODES = 500_000
"""Nodes of a graph after its functions are written out; a model of 80 layers has about 5,000."""


def read_skeleton(path: Path) -> tuple[ModelProto, dict[int, tuple[int, int]]]:
    """An ONNX file without the values of its large initializers, and the first byte and number of bytes of these.

    The place of an initializer is found under its position in the main graph.

    Raises:
        InputError: If the package onnx is missing.
        ModelError: If the file cannot be read, is no whole protobuf message of a model, or is larger than a model is.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise InputError(f"{path} needs the package onnx; pip install normkit[ports]") from None
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            if size >= _LARGEST_FILE:
                raise ModelError(damaged(path, f"an ONNX file is smaller than 2 GiB, this has {size} bytes"))
            if size == 0:
                raise ModelError(damaged(path, "it has 0 bytes"))
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                pieces, places = _Walk(path, data).model(onnx.ModelProto.DESCRIPTOR)
                written = b"".join(data[piece] if isinstance(piece, slice) else piece for piece in pieces)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; give an ONNX file") from None
    try:
        model = onnx.ModelProto.FromString(written)
    except (DecodeError, ValueError) as error:
        raise ModelError(damaged(path, f"its protobuf message: {first_line(error)}")) from None
    if not model.HasField("graph") or not model.opset_import or not model.graph.output:
        raise ModelError(damaged(path, "it holds no graph with operators and outputs"))
    return model, places


class _Walk:
    """The parts of one file, each looked at once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._count = path, data, 0

    def model(self, descriptor: Any) -> tuple[list[bytes | slice], dict[int, tuple[int, int]]]:
        """Pieces of the skeleton, as bytes or places in the file, and the places of what is left out."""
        graph = descriptor.fields_by_number[_GRAPH].message_type
        pieces: list[bytes | slice] = []
        places: dict[int, tuple[int, int]] = {}
        position = -1
        for part in self._parts(0, len(self._data)):
            number, kind, start, content, stop = part
            if number != _GRAPH or kind != _BYTES:
                self._check(descriptor, part, 1)
                pieces.append(slice(start, stop))
                continue
            inner: list[bytes | slice] = []
            for entry in self._parts(content, stop):
                number, kind, start, begin, end = entry
                values: list[Part] = []
                if number == _INITIALIZER and kind == _BYTES:
                    position += 1
                    values = [each for each in self._parts(begin, end) if each[0] in _VALUES and each[1] == _BYTES]
                # Values in several parts are joined by the parser.
                if len(values) != 1 or values[0][4] - values[0][3] < _LARGE:
                    self._check(graph, entry, 2)
                    inner.append(slice(start, end))
                    continue
                for each in self._parts(begin, end):
                    if each != values[0]:
                        self._check(graph.fields_by_number[_INITIALIZER].message_type, each, 3)
                _, _, first, content, last = values[0]
                places[position] = content, last - content
                inner += [_tag(_INITIALIZER, end - begin - (last - first)), slice(begin, first), slice(last, end)]
            pieces += [_tag(_GRAPH, _size(inner)), *inner]
        if _size(pieces) > _LARGEST_SKELETON:
            problem = f"without the values of its initializers it has {_size(pieces)} bytes"
            reason = f"{problem}, at most {_LARGEST_SKELETON} are read"
            raise ModelError(f"{self._path} is no model that normkit reads: {reason}; export it anew")
        return pieces, places

    def _check(self, descriptor: Any, part: Part, depth: int) -> None:
        """Walk through a part that is a message, and all messages in it; a text must be UTF-8."""
        waiting = [(descriptor, part, depth)]
        while waiting:
            descriptor, (number, kind, start, content, stop), depth = waiting.pop()
            inner = _inner(descriptor).get(number)
            if inner is None or kind != _BYTES:
                continue
            if inner is str:
                try:
                    self._data[content:stop].decode()
                except UnicodeDecodeError:
                    raise ModelError(damaged(self._path, f"the text at byte {start} is not UTF-8")) from None
                continue
            if depth > _DEEPEST:
                raise ModelError(damaged(self._path, f"it nests messages or subgraphs more than {_DEEPEST} deep"))
            waiting += [(inner, each, depth + 1) for each in self._parts(content, stop)]

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        """The fields of the message between two bytes."""
        at = start
        while at < stop:
            self._count += 1
            if self._count > _MOST_PARTS:
                raise ModelError(
                    f"{self._path} has more than {_MOST_PARTS:,} parts, which no model needs; export it anew"
                )
            tag, content = self._varint(at, stop)
            number, kind = tag >> 3, tag & 7
            if kind == _BYTES:
                length, content = self._varint(content, stop)
                end = content + length
            elif kind == _VARINT:
                _, end = self._varint(content, stop)
            elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
                end = content + (8 if kind == _EIGHT_BYTES else 4)
            else:
                raise ModelError(damaged(self._path, f"there is no ONNX at byte {at}"))
            if end > stop or number == 0:
                reason = f"the part at byte {at} ends at byte {end}, what holds it ends at {stop}"
                raise ModelError(damaged(self._path, reason if number else f"there is no ONNX at byte {at}"))
            yield number, kind, at, content, end
            at = end

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        """A number of one to ten bytes, and the byte after it."""
        value = 0
        for place in range(10):
            if at + place >= stop:
                raise ModelError(damaged(self._path, f"it ends within the number at byte {at}"))
            byte = self._data[at + place]
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value, at + place + 1
        raise ModelError(damaged(self._path, f"there is no ONNX at byte {at}"))


@cache
def _inner(descriptor: Any) -> dict[int, Any]:
    """Number of each field that is a message -> its descriptor; of each that is a text -> str."""
    fields = descriptor.fields_by_number.items()
    return {
        number: str if field.type == field.TYPE_STRING else field.message_type
        for number, field in fields
        if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)
    }


def _size(pieces: list[bytes | slice]) -> int:
    return sum(piece.stop - piece.start if isinstance(piece, slice) else len(piece) for piece in pieces)


def _tag(number: int, length: int) -> bytes:
    """The bytes before the content of a field."""
    written = bytearray([number << 3 | _BYTES])
    while length > 127:
        written.append(length & 127 | 128)
        length >>= 7
    return bytes([*written, length])


def check_model(path: Path, model: ModelProto) -> None:
    """Refuse a graph, a function or an operator that nothing here may run; no library of operators is loaded.

    Raises:
        InputError: If the package onnxruntime is missing.
        ModelError: If something is refused.
    """
    _check_graph(path, model.graph)
    _check_functions(path, model)
    try:
        known = dict(_operators())
    except ImportError:
        raise InputError(f"{path} needs the package onnxruntime; pip install normkit[ports]") from None
    known |= {(each.domain, each.name): (0, 0) for each in model.functions}
    for holder in (model.graph, *model.functions):
        for node in _all_nodes(holder):
            domain = "" if node.domain == "ai.onnx" else node.domain
            name = f"{domain}.{node.op_type}" if domain else node.op_type
            if (fewest := known.get((domain, node.op_type))) is None:
                raise ModelError(
                    f"{path} has the operator {quoted(name)}, which this onnxruntime does not have; normkit loads no "
                    "library of operators: export the model without it"
                )
            if len(node.input) < fewest[0] or len(node.output) < fewest[1]:
                counts = f"{counted(len(node.input), 'input')} and {counted(len(node.output), 'output')}"
                raise ModelError(damaged(path, f"a node {quoted(name)} has only {counts}"))


def _check_graph(path: Path, graph: GraphProto) -> None:
    """Refuse values that are made twice, names that cannot be printed, and subgraphs with data in other files."""
    made: set[str] = {tensor.name for tensor in graph.initializer}
    given = {value.name for value in graph.input}
    if not all(value.name.isprintable() for value in (*graph.input, *graph.output)):
        raise ModelError(damaged(path, "an input or output has no printable name"))
    if len(given) != len(graph.input):
        raise ModelError(damaged(path, "two inputs of a graph have one name"))
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output)
        if strange := next((text for text in texts if not text.isprintable()), None):
            raise ModelError(damaged(path, f"{quoted(strange)} is no name"))
        for name in node.output:
            if name and (name in made or name in given):
                raise ModelError(damaged(path, f"two nodes make the value {quoted(name)}"))
            made.add(name)
        for inner in _subgraphs(node):
            if external := next((each.name for each in inner.initializer if each.data_location), None):
                raise ModelError(f"{path} keeps {quoted(external)} of a subgraph in another file; export it anew")
            _check_graph(path, inner)
        for attribute in node.attribute:
            if any(each.data_location for each in (attribute.t, *attribute.tensors)):
                raise ModelError(f"{path} keeps an attribute of {quoted(node.name)} in another file; export it anew")


def _check_functions(path: Path, proto: ModelProto) -> None:
    """Refuse functions that call themselves, and those that grow without bound when they are written out."""
    functions = {(each.domain, each.name): each for each in proto.functions}
    sizes: dict[tuple[str, str], int] = {}
    calling: list[tuple[str, str]] = []

    def size(nodes: Iterator[NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in functions and key not in sizes:
                if key in calling or len(calling) > 100:
                    raise ModelError(damaged(path, f"its function {quoted(node.op_type)} calls itself"))
                calling.append(key)
                sizes[key] = size(_all_nodes(functions[key]))
                calling.pop()
            total += sizes.get(key, 1)
        return total

    count = size(_all_nodes(proto.graph))
    if count > _MOST_NODES:
        raise ModelError(f"{path} has {count:,} nodes with its functions, at most {_MOST_NODES:,} are read")


@cache
def _operators() -> dict[tuple[str, str], tuple[int, int]]:
    """Domain and name of every operator that onnx or onnxruntime has -> fewest inputs and outputs of its versions."""
    from onnx import defs
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found: dict[tuple[str, str], tuple[int, int]] = {}
    for schema in (*defs.get_all_schemas_with_history(), *get_all_operator_schema()):
        inputs, outputs = found.get((schema.domain, schema.name), (99, 99))
        found[schema.domain, schema.name] = min(inputs, schema.min_input), min(outputs, schema.min_output)
    return found


def _all_nodes(holder: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of all graphs inside it."""
    for node in holder.node:
        yield node
        for inner in _subgraphs(node):
            yield from _all_nodes(inner)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
