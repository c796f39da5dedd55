"""The tensors that folding reads: of a checkpoint on disk or a module in memory, a few rows at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn

from normkit.checkpoint.header import Located, TensorInfo, read_header
from normkit.checkpoint.model_folder import INDEX, WEIGHTS, FileState, read_exactly, read_json, weight_files
from normkit.errors import ModelError

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

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that folding computes with."""


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

    Nothing is mapped: pages of a mapped file would count as memory of the process. `files` are sorted by name and
    `tensors` are in the order of their bytes, file by file; `states` and `modes` (permissions) are those at opening.

    Raises:
        ModelError: If a file is not whole, or the index and the files disagree on which file holds a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.files = tuple(weight_files(folder))
        self.tensors: dict[str, Located] = {}
        self.states: dict[Path, FileState] = {}
        self.modes: dict[Path, int] = {}
        self._descriptors: dict[Path, int] = {}
        try:
            for file in self.files:
                self._open(file)
            if len(self.files) > 1 or self.files[0].name != WEIGHTS:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, file: Path) -> None:
        # First the handle, then the header: a file that takes the name in between has another state.
        try:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from None
        status = os.fstat(self._descriptors[file])
        self.states[file], self.modes[file] = FileState.of(status), stat.S_IMODE(status.st_mode) & 0o777
        held = read_header(file)
        if twice := next((name for name in held if name in self.tensors), None):
            raise ModelError(
                f"expected each tensor in one file, {twice!r} is in {self.tensors[twice].file} and in {file}; "
                "download it again"
            )
        self.tensors |= held


def changed(file: Path) -> str:
    """The message on a file that changed meanwhile."""
    return f"{file} changed while it was folded; leave the folder alone and start again"


class ModelSource:
    """The state dict of a module, in its order. A tensor with several names is listed under the first.

    Raises:
        ModelError: If a tensor has no values, or a dtype that safetensors does not have.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._matrices: dict[str, Tensor] = {}
        seen = set()
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, Tensor):
                continue
            if tensor.is_meta:
                raise ModelError(f"expected a model with values, {name} is on the meta device; load its weights first")
            if tensor.dtype not in NAME:
                raise ModelError(f"expected tensors that safetensors can hold, {name} is {tensor.dtype}; cast it first")
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            info = TensorInfo(NAME[tensor.dtype], tuple(tensor.shape))
            self.tensors[name] = info
            self._matrices[name] = tensor.detach().reshape(info.matrix)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix: a view, or a copy if the tensor is on another device."""
        return self._matrices[name][start:stop].cpu()


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
