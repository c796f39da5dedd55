"""The tensors that folding reads, of a checkpoint on disk or a module in memory: names, shapes, a few rows at a time.

The header of a safetensors file is checked before anything in it is used. The format: eight bytes with the length of
the header, little-endian; the header, a JSON object from the name of each tensor to its dtype, shape and offsets; then
the data, each tensor after the other without a gap.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from normkit.checkpoint.model_folder import (
    INDEX,
    WEIGHTS,
    FileState,
    changed,
    damaged,
    read_exactly,
    read_json,
    weight_files,
)
from normkit.checkpoint.plan import FLOATS
from normkit.errors import InputError, ModelError
from normkit.files import parse_json
from normkit.identification.offloading import Stored
from normkit.text import quoted

METADATA = "__metadata__"

TORCH: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""The dtypes that both safetensors and torch have."""

NAME = {dtype: name for name, dtype in TORCH.items()}

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
    return whole_header(path)[0]


def whole_header(path: Path) -> tuple[dict[str, Located], dict[str, str]]:
    """The tensors of a file, and its metadata: names and texts."""
    entries, metadata, start, size = _document(path)
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
    return dict(found), metadata


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
    # Axes of length 0 do not excuse the others.
    is_possible = _naturals(shape) and len(shape) <= _MOST_AXES
    if not is_possible or math.prod(max(length, 1) for length in shape) > _MOST_ELEMENTS:
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


class Source(Protocol):
    """Named tensors that are read a few rows at a time.

    A tensor is seen as a matrix: all its axes but the last, and the last. A vector is one row, a scalar is one by one.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name -> dtype and shape, in the source's order."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in its dtype; the caller must not change them."""


class CheckpointSource:
    """The safetensors of a model folder, every header checked, read with `pread` from any number of threads.

    Given `files`, it reads these in place of the folder's, without an index.

    Nothing is mapped: pages of a mapped file would count as memory of the process. `files` are sorted by name and
    `tensors` are in the order of their bytes, file by file; `metadata` is that of each file; `states` and `modes`
    (permissions) are those at opening.

    Raises:
        ModelError: If a file is not whole, or the index and the files disagree on which file holds a tensor.
    """

    def __init__(self, folder: Path, files: Sequence[Path] = ()) -> None:
        self.files = tuple(files or weight_files(folder))
        self.tensors: dict[str, Located] = {}
        self.states: dict[Path, FileState] = {}
        self.modes: dict[Path, int] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        self._descriptors: dict[Path, int] = {}
        try:
            for file in self.files:
                self._open(file)
            if not files and (len(self.files) > 1 or self.files[0].name != WEIGHTS):
                _check_index(folder / INDEX, self.tensors)
        except BaseException:
            self.close()
            raise

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in a new buffer; as bytes if torch does not have the dtype.

        Raises:
            ModelError: If the file cannot be read to the end.
        """
        tensor = self.tensors[name]
        dtype = TORCH.get(tensor.dtype)
        columns = tensor.matrix[1] if dtype else tensor.bytes_of(1)
        rows = torch.empty(stop - start, columns, dtype=dtype or torch.uint8)
        if rows.numel():
            buffer = rows.view(torch.uint8).numpy().reshape(-1).data
            read_exactly(self._descriptors[tensor.file], buffer, tensor.start + tensor.bytes_of(start), tensor.file)
        return rows

    def descriptor(self, file: Path) -> int:
        """Another handle of the file that was opened, even if another has its name now; the caller closes it."""
        return os.dup(self._descriptors[file])

    def require_same(self, file: Path) -> None:
        """Raise ModelError if a file has changed since it was opened, or another has taken its name."""
        if not file.is_file() or FileState.of(file.stat()) != self.states[file]:
            raise ModelError(changed(file))

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _open(self, file: Path) -> None:
        # First the handle, then the header: a file that takes the name in between has another state.
        try:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from None
        status = os.fstat(self._descriptors[file])
        self.states[file], self.modes[file] = FileState.of(status), stat.S_IMODE(status.st_mode) & 0o777
        held, self.metadata[file] = whole_header(file)
        if twice := next((name for name in held if name in self.tensors), None):
            raise ModelError(
                f"expected each tensor in one file, {twice!r} is in {self.tensors[twice].file} and in {file}; "
                "download it again"
            )
        self.tensors |= held


class ModelSource:
    """The state dict of a module; a tensor with several names is listed under the first that its class does not tie.

    `stored` are those of its parameters that have no values now, as `normkit.identification.offloading` finds them.

    Raises:
        ModelError: If a tensor has no values, or a dtype that safetensors does not have.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Stored] = MappingProxyType({})) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, Callable[[], Tensor]] = {}
        seen = set[Hashable]()
        tied: Any = getattr(model, "all_tied_weights_keys", getattr(model, "_tied_weights_keys", None)) or ()
        for name, tensor in sorted(model.state_dict().items(), key=lambda item: item[0] in tied):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.is_meta and name not in stored:
                raise ModelError(f"expected a model with values, {name} is on the meta device; load its weights first")
            if tensor.dtype not in NAME:
                raise ModelError(f"expected tensors that safetensors can hold, {name} is {tensor.dtype}; cast it first")
            place: Hashable = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            place = stored[name].place if name in stored else place
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            info = TensorInfo(NAME[tensor.dtype], tuple(tensor.shape))
            self.tensors[name] = info
            self._values[name] = stored[name].read if name in stored else tensor.detach

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix: a view, or a copy if the tensor is on another device."""
        return self._values[name]().reshape(self.tensors[name].matrix)[start:stop].cpu()


def vector(source: Source, name: str) -> Tensor:
    """A tensor of one axis in float64.

    Raises:
        ModelError: If the tensor is missing, has another number of axes or another kind of dtype, or is not finite.
    """
    info = found(source, name)
    if len(info.shape) != 1 or info.dtype not in FLOATS:
        raise ModelError(f"expected a vector of floating-point numbers in {name}, found {info.dtype} {info.shape}")
    value = source.rows(name, 0, 1)[0].to(torch.float64)
    check_finite(name, value)
    return value


def found(source: Source, name: str) -> TensorInfo:
    """Dtype and shape of a tensor; ModelError if there is none of that name."""
    if name not in source.tensors:
        raise ModelError(f"expected the tensor {name}, found none; the checkpoint is not whole or not of this family")
    return source.tensors[name]


def check_finite(name: str, values: Tensor) -> None:
    """Raise ModelError, with the name of the tensor, if there is a NaN or an infinity among some of its values."""
    if not bool(values.isfinite().all()):
        found = "a NaN" if bool(values.isnan().any()) else "an infinity"
        raise ModelError(
            f"{name} holds {found}, and nothing is folded into or out of it; give a checkpoint that is whole"
        )


def _check_index(index: Path, tensors: Mapping[str, Located]) -> None:
    """Raise ModelError if the index and the headers disagree on which file holds a tensor."""
    named = read_json(index)["weight_map"]
    assert isinstance(named, dict)
    for name, tensor in tensors.items():
        if named.get(name) != tensor.file.name:
            said = f"says {named[name]!r}" if name in named else "does not name it"
            raise ModelError(f"{name!r} is in {tensor.file}, its index {said}; download the folder again")
    if absent := next((name for name in named if name not in tensors), None):
        raise ModelError(f"{index} names {absent!r} in {named[absent]!r}, it is not there; download the folder again")
