"""An ONNX file without the values of its large tensors: read from its protobuf parts, none of which is trusted.

An ONNX file is one protobuf message of at most 2 GiB. Its parts are walked in place, counted and bounded before the
package `onnx` parses anything, because a parsed part takes up to a hundred times the memory of its bytes. The values
of large initializers stay in the file; the place of each is kept.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.checkpoint.model_folder import damaged
from normkit.errors import InputError, ModelError
from normkit.text import first_line

if TYPE_CHECKING:
    from onnx import ModelProto

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
_FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 4, 9, 10
_VALUES = (_FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA)
"""Fields of a tensor whose bytes are the values as they lie in memory."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5

Part = tuple[int, int, int, int, int]
"""Number and kind of a field; its first byte, the first byte of its content, and the byte after it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Skeleton:
    """A parsed model, and where the values are that it lacks."""

    model: ModelProto
    places: Mapping[int, tuple[int, int]]
    """Position of an initializer of the main graph -> first byte and number of bytes of its values in the file."""


def read_skeleton(path: Path) -> Skeleton:
    """Read an ONNX file but for the values of its large initializers.

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
                walk = _Walk(path, data)
                pieces, places = walk.model(onnx.ModelProto.DESCRIPTOR)
                written = b"".join(data[start:stop] if isinstance(start, int) else start for start, stop in pieces)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; give an ONNX file") from None
    try:
        model = onnx.ModelProto.FromString(written)
    except (DecodeError, ValueError) as error:
        raise ModelError(damaged(path, f"its protobuf message: {first_line(error)}")) from None
    return Skeleton(model=model, places=places)


class _Walk:
    """The parts of one file, each looked at once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._count = path, data, 0

    def model(self, descriptor: Any) -> tuple[list[tuple[Any, int]], dict[int, tuple[int, int]]]:
        """Pieces of the skeleton, as (start, stop) in the file or (bytes, 0), and the places of what is left out."""
        pieces: list[tuple[Any, int]] = []
        places: dict[int, tuple[int, int]] = {}
        position = 0
        for part in self._parts(0, len(self._data)):
            number, kind, start, content, stop = part
            if number != _GRAPH or kind != _BYTES:
                self._check(descriptor, part, 1)
                pieces.append((start, stop))
                continue
            graph, length = descriptor.fields_by_number[_GRAPH].message_type, 0
            inner: list[tuple[Any, int]] = []
            for tensor in self._parts(content, stop):
                found = None
                if tensor[:2] == (_INITIALIZER, _BYTES):
                    found = self._large_values(tensor)
                    position += 1
                if found is None:
                    self._check(graph, tensor, 2)
                    inner.append((tensor[2], tensor[4]))
                else:
                    for each in self._parts(tensor[3], tensor[4]):
                        if each != found:
                            self._check(graph.fields_by_number[_INITIALIZER].message_type, each, 3)
                    places[position - 1] = (found[3], found[4] - found[3])
                    kept = tensor[4] - tensor[3] - (found[4] - found[2])
                    inner += [(_tag(_INITIALIZER, kept), 0), (tensor[3], found[2]), (found[4], tensor[4])]
            length = sum(stop - start if isinstance(start, int) else len(start) for start, stop in inner)
            pieces += [(_tag(_GRAPH, length), 0), *inner]
        size = sum(stop - start if isinstance(start, int) else len(start) for start, stop in pieces)
        if size > _LARGEST_SKELETON:
            problem = (
                f"without the values of its initializers it has {size} bytes, at most {_LARGEST_SKELETON} are read"
            )
            raise ModelError(f"{self._path} is no model that normkit reads: {problem}; export it anew")
        return pieces, places

    def _large_values(self, tensor: Part) -> Part | None:
        """The values of an initializer if they are many and lie together as in memory."""
        if tensor[4] - tensor[3] < _LARGE:
            return None
        values = [part for part in self._parts(tensor[3], tensor[4]) if part[0] in _VALUES and part[1] == _BYTES]
        # Values in several parts are joined by the parser.
        return values[0] if len(values) == 1 and values[0][4] - values[0][3] >= _LARGE else None

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


def _tag(number: int, length: int) -> bytes:
    """The bytes before the content of a field."""
    written = bytearray([number << 3 | _BYTES])
    while length > 127:
        written.append(length & 127 | 128)
        length >>= 7
    return bytes([*written, length])
