"""The tensors of a safetensors file, from its header alone; the header is checked before anything in it is used.

The format: eight bytes with the length of the header, little-endian; the header, a JSON object from the name of each
tensor to its dtype, shape and offsets; then the data, each tensor after the other without a gap.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.checkpoint.model_folder import damaged
from normkit.errors import InputError, ModelError
from normkit.files import parse_json
from normkit.text import quoted

METADATA = "__metadata__"

# Bits of one element of every dtype of the format.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_LENGTH = struct.Struct("<Q")
_LONGEST = 100_000_000
_MOST_ELEMENTS = 2**60
_MOST_AXES = 64


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its values."""

    dtype: str
    """As safetensors writes it, such as "BF16"."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def matrix(self) -> tuple[int, int]:
        """The tensor as (rows, columns): all axes but the last, and the last. A vector is one row.

        A tensor of packed numbers whose rows do not end on whole bytes is one row too.
        """
        if not self.shape:
            return 1, 1
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        return (rows, columns) if columns * _BITS[self.dtype] % 8 == 0 else (1, rows * columns)

    def bytes_of(self, rows: int) -> int:
        """Bytes of this many rows of the matrix."""
        return rows * self.matrix[1] * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class Located(TensorInfo):
    """A tensor and the place of its values: a file, the first byte, and the byte after the last."""

    file: Path
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Located]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        ModelError: If the file is not whole: it is truncated, its header is not JSON, a dtype is unknown, a name stands
            twice, a shape does not fit its bytes, or bytes belong to two tensors or to none.
    """
    entries, _, start, size = _document(path)
    found = [(name, _located(path, name, entry, start)) for name, entry in entries.items()]
    found.sort(key=lambda item: (item[1].start, item[1].stop))
    reached = start
    for name, tensor in found:
        if tensor.start != reached:
            problem = "shares bytes with another tensor" if tensor.start < reached else "follows a gap"
            raise ModelError(damaged(path, f"{quoted(name)} {problem}"))
        reached = tensor.stop
    if reached != size:
        problem = f"its header speaks of {reached} bytes, it has {size}"
        raise ModelError(damaged(path, problem))
    return dict(found)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file: names and texts.

    Raises:
        ModelError: If the header is damaged, or a value is not a text.
    """
    return _document(path)[1]


def header_bytes(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The start of a file with these tensors in this order, up to the first byte of the first tensor.

    The same tensors and metadata give the same bytes. Their number is a multiple of eight.

    Raises:
        ModelError: If a tensor has the name that the format reserves for metadata.
    """
    if METADATA in tensors:
        raise ModelError(f"expected no tensor called {METADATA}: safetensors reserves that name; rename the tensor")
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    return _LENGTH.pack(len(written)) + written


def _document(path: Path) -> tuple[dict[str, Any], dict[str, str], int, int]:
    """The entries of the header, the metadata, the first byte after the header, and the size of the file."""
    try:
        with path.open("rb") as opened:
            size = path.stat().st_size
            first = opened.read(_LENGTH.size)
            if len(first) < _LENGTH.size:
                raise ModelError(damaged(path, f"it has {size} bytes"))
            (length,) = _LENGTH.unpack(first)
            if length > min(_LONGEST, size - _LENGTH.size):
                raise ModelError(damaged(path, f"its header claims {length} bytes, the file has {size}"))
            text = opened.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) < length:
        raise ModelError(damaged(path, "it became shorter while it was read"))
    try:
        header = parse_json(text)
    except InputError as error:
        raise ModelError(damaged(path, f"its header: {error}")) from None
    if not isinstance(header, dict):
        raise ModelError(damaged(path, "its header is not a table"))
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ModelError(damaged(path, f"its {METADATA} is not a table of texts"))
    return header, metadata, _LENGTH.size + length, size


def _located(path: Path, name: str, entry: Any, data: int) -> Located:
    """The tensor that an entry of the header describes, with offsets from the start of the file."""
    if not name.isprintable() or not name:
        raise ModelError(damaged(path, f"{quoted(name)} is no name for a tensor"))
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ModelError(damaged(path, f"{quoted(name)} has no dtype, shape and data_offsets"))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelError(
            damaged(path, f"{quoted(name)} has the dtype {quoted(dtype)}, which safetensors does not know")
        )
    if not _naturals(shape) or not _is_possible(shape):
        raise ModelError(damaged(path, f"{quoted(name)} has the shape {quoted(shape)}"))
    if not _naturals(offsets) or len(offsets) != 2:
        raise ModelError(damaged(path, f"{quoted(name)} has the offsets {quoted(offsets)}"))
    start, stop = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        problem = f"{quoted(name)} is {dtype} of shape {quoted(shape)} and has {quoted(stop - start)} bytes"
        raise ModelError(damaged(path, problem))
    return Located(dtype, tuple(shape), path, data + start, data + stop)


def _naturals(value: Any) -> bool:
    """Whether it is a list of integers that are not negative; booleans are not integers here."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _is_possible(shape: list[int]) -> bool:
    """Whether a tensor of that shape could exist; axes of length 0 do not excuse the others."""
    elements = 1
    for length in shape:
        elements *= max(length, 1)
        if elements > _MOST_ELEMENTS:
            return False
    return len(shape) <= _MOST_AXES
