"""The header of a GGUF file, checked before anything in it is used; no tensor is read.

The format, versions 2 and 3: four bytes "GGUF"; the version; the number of tensors and of keys; each key with the type
of its value and the value; each tensor with its name, its axes (the last one of torch first), the number of its
encoding and its offset; padding; then the values of the tensors. All numbers are in the byte order of the file.
Source: `ggml/src/gguf.cpp` of llama.cpp, and `gguf/gguf_reader.py` of the package `gguf`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normkit.checkpoint.model_folder import damaged, read_exactly
from normkit.checkpoint.reader import TORCH, Located
from normkit.errors import ModelError
from normkit.text import counted, quoted

_ENCODINGS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Number of an encoding -> its name, the elements of one block, and the bytes of one block."""

_U32, _U64, _BOOL, _TEXT, _ARRAY = 4, 10, 7, 8, 9
# Type of a value -> its code in `struct`.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", _U32: "I", 5: "i", 6: "f", _BOOL: "B", _U64: "Q", 11: "q", 12: "d"}

_LONGEST = 100_000_000
_MOST_ENTRIES = 2**16
_LONGEST_NAME = 1024
_LONGEST_KEPT = 2**16
_MOST_KEPT = 2**22
_DEEPEST = 4
_MOST_AXES = 4
_SMALLEST_KEY, _SMALLEST_TENSOR = 14, 25
_PIECE = 2**20


@dataclass(frozen=True)
class GgufTensor(Located):
    """A tensor of a GGUF file. Its dtype and `nbytes` are those of its rows when they are read, dequantized."""

    encoding: str
    """The type in the file, such as "Q4_K" or "F32"."""
    block: int
    """Elements of one block; a row is whole blocks."""
    block_bytes: int
    """Bytes of one block in the file."""
    is_big_endian: bool

    def stored_bytes(self, rows: int) -> int:
        """Bytes of this many rows of the matrix in the file."""
        return rows * self.matrix[1] // self.block * self.block_bytes


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file, in front of the values of its tensors."""

    settings: Mapping[str, Any]
    """Key -> value. Arrays of the tokenizer are left out, and what takes more than 64 KiB. A 32-bit number is given as
    the shortest decimal number that stands for it: 1e-06, as a config.json has it."""
    tensors: Mapping[str, GgufTensor]
    """In the order of the file's list."""
    unread: Mapping[str, str]
    """Name of a tensor whose numbers nothing here can read -> why: a fork's encoding, blocks in big-endian order."""


def read_gguf_header(descriptor: int, path: Path) -> Header:
    """The metadata and the tensors of an open GGUF file.

    Raises:
        ModelError: If the file is not whole or not GGUF 2 or 3: it is cut, a count, a length or an offset does not fit
            its size, bytes belong to two tensors, or a key or a tensor occurs twice.
    """
    header = _Reading(descriptor, path)
    if header.take(4) != b"GGUF":
        raise ModelError(damaged(path, "it does not begin with GGUF"))
    (version,) = struct.unpack("<I", header.take(4))
    if version & 0xFFFF == 0:
        # A version is a small number: its bytes are the other way round.
        header.order = ">"
        (version,) = struct.unpack(">I", struct.pack("<I", version))
    if version not in (2, 3):
        raise ModelError(f"expected GGUF of version 2 or 3, {path} is of version {version}; convert the model anew")
    num_tensors, num_keys = header.number(_U64), header.number(_U64)
    for count, smallest, what in ((num_keys, _SMALLEST_KEY, "key"), (num_tensors, _SMALLEST_TENSOR, "tensor")):
        if count > min(_MOST_ENTRIES, header.left // smallest):
            raise ModelError(damaged(path, f"it claims {counted(count, what)}, it has {counted(header.size, 'byte')}"))
    settings: dict[str, Any] = {}
    seen = set()
    for _ in range(num_keys):
        key = header.name("key")
        if key in seen:
            raise ModelError(damaged(path, f"the key {quoted(key)} occurs twice"))
        seen.add(key)
        value = header.value(key)
        if value is not None:
            settings[key] = value
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = header.name("tensor")
        if name in entries:
            raise ModelError(damaged(path, f"the tensor {quoted(name)} occurs twice"))
        num_axes = header.number(_U32)
        if num_axes > _MOST_AXES:
            raise ModelError(damaged(path, f"{quoted(name)} has {num_axes} axes"))
        axes = tuple(header.number(_U64) for _ in range(num_axes))
        entries[name] = axes[::-1], header.number(_U32), header.number(_U64)
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(damaged(path, f"its alignment {quoted(alignment)} is no power of two"))
    tensors = _located(header, entries, alignment)
    unread = {name: f"its {each.encoding} is not known" for name, each in tensors.items() if not each.block_bytes}
    if header.order == ">":
        unread |= {
            name: f"its blocks of {each.encoding} are big-endian; convert the file with gguf-convert-endian"
            for name, each in tensors.items()
            if each.block > 1
        }
    return Header(settings, {name: each for name, each in tensors.items() if name not in unread}, unread)


def _located(
    header: _Reading, entries: Mapping[str, tuple[tuple[int, ...], int, int]], alignment: int
) -> dict[str, GgufTensor]:
    """The tensors with their places, each inside the file and none over another.

    Where a tensor of an encoding that is not known ends cannot be told: it takes at least a bit for each number, and
    at most what is left before the next tensor.
    """
    path = header.path
    data = -(-header.place // alignment) * alignment
    starts = sorted({data + offset for _, _, offset in entries.values()})
    ends = dict(zip(starts, [*starts[1:], header.size], strict=False))
    tensors = {}
    for name, (shape, number, offset) in entries.items():
        encoding, block, block_bytes = _ENCODINGS.get(number, ("", 1, 0))
        num_elements, start = math.prod(shape), data + offset
        if num_elements % block or (shape and shape[-1] % block):
            raise ModelError(damaged(path, f"{quoted(name)} is {encoding} of shape {quoted(shape)}"))
        if offset % alignment:
            raise ModelError(damaged(path, f"the offset {offset} of {quoted(name)} is no multiple of {alignment}"))
        stop = start + (num_elements // block * block_bytes if encoding else -(-num_elements // 8))
        # Axes of length 0 do not excuse the others.
        if stop > header.size or any(length > header.size * max(block, 8) for length in shape):
            problem = f"{quoted(name)} of shape {quoted(shape)} ends at byte {stop}, the file at {header.size}"
            raise ModelError(damaged(path, problem))
        tensors[name] = GgufTensor(
            dtype=encoding if encoding in TORCH else "F32",
            shape=shape,
            file=path,
            start=start,
            stop=stop if encoding else max(stop, ends[start]),
            encoding=encoding or f"encoding {number}",
            block=block,
            block_bytes=block_bytes,
            is_big_endian=header.order == ">",
        )
    reached = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < reached and tensor.stop > tensor.start:
            raise ModelError(damaged(path, f"{quoted(name)} shares bytes with another tensor"))
        reached = max(reached, tensor.stop)
    return tensors


class _Reading:
    """The bytes of the header, one after the other; none is taken that the file does not have."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self.order = "<"
        self.place = 0
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._piece, self._first = b"", 0
        self._kept = 0

    @property
    def left(self) -> int:
        """Bytes of the file after this place."""
        return self.size - self.place

    def take(self, count: int) -> bytes:
        """The next bytes."""
        at = self.place - self._first
        if not 0 <= at <= len(self._piece) - count:
            self._fetch(count)
            at = 0
        self.place += count
        return self._piece[at : at + count]

    def skip(self, count: int) -> None:
        """Go past bytes without reading them."""
        if self.place + count > min(self.size, _LONGEST):
            self._refuse(count)
        self.place += count

    def number(self, kind: int) -> Any:
        """The next number."""
        code = _CODES[kind]
        (number,) = struct.unpack(self.order + code, self.take(struct.calcsize(f"={code}")))
        if kind == _BOOL:
            return bool(number)
        return float(str(np.float32(number))) if code == "f" else number

    def name(self, what: str) -> str:
        """The next text, which names a key or a tensor."""
        length = self.number(_U64)
        if length > min(_LONGEST_NAME, self.left):
            raise ModelError(damaged(self.path, f"the name of a {what} has {length} bytes"))
        text = self.take(length).decode(errors="replace")
        if not text.isprintable() or not text or "\ufffd" in text:
            raise ModelError(damaged(self.path, f"{quoted(text)} is no name for a {what}"))
        return text

    def value(self, key: str) -> Any:
        """The value of a key, or None if it is not kept."""
        kind = self.number(_U32)
        if kind in _CODES:
            return self.number(kind)
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ModelError(damaged(self.path, f"the value of {quoted(key)} has the type {kind}"))
        return self._array(key, is_kept=not key.startswith("tokenizer."), depth=1)

    def _text(self) -> str | None:
        length = self.number(_U64)
        if length > _LONGEST_KEPT:
            self.skip(length)
            return None
        self._keep(length)
        return self.take(length).decode(errors="replace")

    def _array(self, key: str, is_kept: bool, depth: int) -> list[Any] | None:
        kind, count = self.number(_U32), self.number(_U64)
        if kind in _CODES:
            num_bytes = count * struct.calcsize(f"={_CODES[kind]}")
            if not is_kept or num_bytes > _LONGEST_KEPT:
                self.skip(num_bytes)
                return None
            self._keep(num_bytes)
            return [self.number(kind) for _ in range(count)]
        if kind == _TEXT:
            before = self.place
            self._skip_texts(count)
            after = self.place
            if not is_kept or after - before > _LONGEST_KEPT:
                return None
            self.place = before
            return [self._text() for _ in range(count)]
        if kind != _ARRAY:
            raise ModelError(damaged(self.path, f"the values of {quoted(key)} have the type {kind}"))
        if depth == _DEEPEST:
            raise ModelError(damaged(self.path, f"{quoted(key)} is nested more than {_DEEPEST} levels deep"))
        for _ in range(count):
            self._array(key, is_kept=False, depth=depth + 1)
        return None

    def _skip_texts(self, count: int) -> None:
        """Go past texts, of which a tokenizer has a quarter of a million."""
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        place, piece, first = self.place, self._piece, self._first
        last = first + len(piece) - 8
        for _ in range(count):
            if not first <= place <= last:
                self.place = place
                self._fetch(8)
                piece, first = self._piece, self._first
                last = first + len(piece) - 8
            place += 8 + length_at(piece, place - first)[0]
        self.place = self._first
        self.skip(place - self._first)

    def _keep(self, count: int) -> None:
        self._kept += count
        if self._kept > _MOST_KEPT:
            raise ModelError(damaged(self.path, f"its metadata take more than {_MOST_KEPT} bytes"))

    def _fetch(self, count: int) -> None:
        """Read a piece from this place on, of at least so many bytes."""
        if self.place + count > min(self.size, _LONGEST):
            self._refuse(count)
        piece = bytearray(max(count, min(_PIECE, self.size - self.place)))
        read_exactly(self._descriptor, memoryview(piece), self.place, self.path)
        self._piece, self._first = bytes(piece), self.place

    def _refuse(self, count: int) -> None:
        if self.place + count > self.size:
            raise ModelError(damaged(self.path, f"its header needs byte {self.place + count}, it has {self.size}"))
        raise ModelError(damaged(self.path, f"its header has more than {_LONGEST} bytes"))
