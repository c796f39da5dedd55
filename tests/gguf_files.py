"""GGUF files written byte by byte: right ones, and wrong ones that no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30, torch.float64: 28, torch.int8: 24, torch.int32: 26}


@dataclass(frozen=True)
class Raw:
    """A value of a key with any type, or a tensor with any encoding, shape, offset and bytes."""

    kind: int
    data: bytes
    shape: tuple[int, ...] = ()
    offset: int | None = None


def text(value: str | bytes, order: str = "<", length: int | None = None) -> bytes:
    """A text with its length, or with another length."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack(f"{order}Q", len(content) if length is None else length) + content


def value(given: Any, order: str = "<") -> tuple[int, bytes]:
    """The type of a value and its bytes."""
    match given:
        case Raw():
            return given.kind, given.data
        case bool():
            return 7, bytes([given])
        case int():
            return 4, struct.pack(f"{order}I", given)
        case float():
            return 6, struct.pack(f"{order}f", given)
        case str():
            return 8, text(given, order)
        case list():
            written = [value(each, order) for each in given]
            kind = written[0][0] if written else 4
            return 9, struct.pack(f"{order}IQ", kind, len(given)) + b"".join(data for _, data in written)
    raise TypeError(given)


def gguf(
    settings: Mapping[str, Any] | Sequence[tuple[str | bytes, Any]] = (),
    tensors: Mapping[str, Tensor | Raw] | Sequence[tuple[str | bytes, Tensor | Raw]] = (),
    *,
    version: int = 3,
    order: str = "<",
    alignment: int = 32,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A GGUF file; each count, length and offset is right unless it is given."""
    keys = list(settings.items()) if isinstance(settings, Mapping) else list(settings)
    named = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
    header = b"GGUF" + struct.pack(
        f"{order}IQQ",
        version,
        len(named) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    for key, given in keys:
        kind, data = value(given, order)
        header += text(key, order) + struct.pack(f"{order}I", kind) + data
    values, reached = [], 0
    for name, tensor in named:
        raw = tensor if isinstance(tensor, Raw) else _raw(tensor, order)
        offset = reached if raw.offset is None else raw.offset
        header += text(name, order) + struct.pack(f"{order}I{len(raw.shape)}Q", len(raw.shape), *raw.shape[::-1])
        header += struct.pack(f"{order}IQ", raw.kind, offset)
        values += [raw.data, bytes(-len(raw.data) % alignment)]
        reached += sum(map(len, values[-2:]))
    return b"".join([header, bytes(-len(header) % alignment), *values])


def _raw(tensor: Tensor, order: str) -> Raw:
    data = tensor.contiguous().reshape(-1, 1).view(torch.uint8)
    data = data.flip(1) if order == ">" else data
    return Raw(NUMBERS[tensor.dtype], bytes(data.flatten().tolist()), tuple(tensor.shape))
