"""Models of llama.cpp: the tensors of a GGUF file, read a few rows at a time, and what its metadata say of norms."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.checkpoint.model_folder import damaged, read_exactly
from normkit.checkpoint.reader import TORCH
from normkit.comparison.gguf_header import GgufTensor, Header, read_gguf_header
from normkit.comparison.weights import Weights
from normkit.errors import ModelError
from normkit.text import quoted, shortened

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"\.(\d+)\.")
_NEEDED = 'needs the package gguf, which is not installed: pip install "normkit[ports]"'


def read_gguf(path: str | Path) -> Weights:
    """The parameters of a model in a GGUF file, as they are stored; of a split file all parts, whichever is named.

    Values are read when rows are asked for, never mapped. Rows of a quantized tensor are dequantized by the package
    `gguf`, into float32; other rows need no package. `names` come from the table of the package, and are empty without
    it or for an architecture that it does not know.

    Raises:
        ModelError: If the file is not whole or of an unknown kind (`read_gguf_header` says when), or a part is missing.
    """
    source = GgufSource(Path(path))
    settings = source.settings
    architecture = settings.get("general.architecture", "")
    if not isinstance(architecture, str) or not architecture.isprintable():
        raise ModelError(damaged(source.files[0], f"its architecture is {quoted(architecture)}"))
    names, note = names_in_transformers(architecture, source.tensors)
    return Weights(
        name=str(path),
        runtime="llama.cpp",
        source=source,
        architecture=architecture,
        settings=settings,
        eps=_eps(source.files[0], architecture, settings),
        names=names,
        notes=(note,) if note else (),
    )


class GgufSource:
    """The tensors of a GGUF file, or of all parts of a split one, read with `pread` from any number of threads.

    `files` are the parts in their order, `settings` those of the first part.

    Raises:
        ModelError: If a file is not whole or cannot be read, or the parts do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self._descriptors: dict[Path, int] = {}
        self.close = weakref.finalize(self, _close, self._descriptors)
        """Close the files; nothing can be read afterwards."""
        self.files: tuple[Path, ...] = (path,)
        self.tensors: dict[str, GgufTensor] = {}
        try:
            header = self._open(path)
            if header.settings.get("split.count", 1) not in (0, 1):
                header = self._open_parts(path, header)
        except BaseException:
            self.close()
            raise
        self.settings = header.settings

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix, in a new buffer; of a quantized tensor in float32.

        Raises:
            ModelError: If the file cannot be read to the end, or the rows cannot be dequantized.
        """
        tensor = self.tensors[name]
        descriptor, begin = self._descriptors[tensor.file], tensor.start + tensor.stored_bytes(start)
        if tensor.encoding not in TORCH:
            blocks = np.empty((stop - start, tensor.stored_bytes(1)), dtype=np.uint8)
            read_exactly(descriptor, blocks.reshape(-1).data, begin, tensor.file)
            return torch.from_numpy(_dequantized(blocks, name, tensor))
        rows = torch.empty(stop - start, tensor.matrix[1], dtype=TORCH[tensor.encoding])
        if rows.numel():
            stored = rows.view(torch.uint8).numpy().reshape(-1)
            read_exactly(descriptor, stored.data, begin, tensor.file)
            if tensor.is_big_endian:
                numbers = stored.reshape(-1, tensor.block_bytes)
                numbers[:] = numbers[:, ::-1].copy()
        return rows

    def _open(self, file: Path) -> Header:
        """Open a file and take its tensors."""
        # A pipe would be waited for.
        if not file.is_file():
            raise ModelError(f"cannot read {file}: it is no file")
        try:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from None
        header = read_gguf_header(self._descriptors[file], file)
        if twice := next((name for name in header.tensors if name in self.tensors), None):
            raise ModelError(damaged(file, f"{quoted(twice)} is in {self.tensors[twice].file.name} too"))
        self.tensors |= header.tensors
        return header

    def _open_parts(self, path: Path, header: Header) -> Header:
        """Open all parts of the split file of which `path` is one, and give the first one's header."""
        named, count = _PART.fullmatch(path.name), header.settings["split.count"]
        if not named or int(named[3]) != count:
            raise ModelError(
                f"expected a name such as NAME-00001-of-{quoted(count).zfill(5)}.gguf for one of {quoted(count)} parts "
                f"of a model, got {path}; give the parts the names that they had"
            )
        self.files = tuple(path.with_name(f"{named[1]}-{part:05}-of-{named[3]}.gguf") for part in range(1, count + 1))
        if absent := [file.name for file in self.files if not file.is_file()]:
            raise ModelError(f"expected all {count} parts beside {path}, missing: {shortened(absent)}; download them")
        # In the order of the parts, not beginning with the one that was named.
        _close(self._descriptors)
        self.tensors = {}
        headers = [self._open(file) for file in self.files]
        for number, (file, part) in enumerate(zip(self.files, headers, strict=True)):
            said = part.settings.get("split.no"), part.settings.get("split.count")
            if said != (number, count):
                raise ModelError(damaged(file, f"it says that it is part {quoted(said[0])} of {quoted(said[1])}"))
        total = headers[0].settings.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelError(damaged(path, f"its parts hold {len(self.tensors)} tensors, it claims {quoted(total)}"))
        return headers[0]


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _dequantized(stored: np.ndarray[Any, Any], name: str, tensor: GgufTensor) -> np.ndarray[Any, Any]:
    """Rows of blocks in float32."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(f"{tensor.encoding}, in which {tensor.file} holds {name}, {_NEEDED}") from None
    if tensor.is_big_endian:
        raise ModelError(
            f"expected {name} in {tensor.file} as little-endian {tensor.encoding}, found big-endian blocks; convert "
            "the file with gguf-convert-endian"
        )
    with suppress(NotImplementedError, AttributeError), np.errstate(all="ignore"):
        values: np.ndarray[Any, Any] = dequantize(stored, getattr(GGMLQuantizationType, tensor.encoding))
        return values
    raise ModelError(f"the package gguf cannot dequantize {tensor.encoding}, in which {tensor.file} holds {name}")


def _eps(file: Path, architecture: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """The eps of all norms. Of an architecture with norms of both kinds, that of its RMSNorms."""
    # A file of encoders for images and sound has one for each.
    for part in ("", "vision.", "audio."):
        for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
            eps = settings.get(f"{architecture}.{part}attention.{key}")
            if eps is not None:
                if not isinstance(eps, float) or not np.isfinite(eps):
                    raise ModelError(damaged(file, f"its {key} is {quoted(eps)}"))
                return {"": eps}
    return {}


def names_in_transformers(architecture: str, tensors: Iterable[str]) -> tuple[dict[str, tuple[str, ...]], str]:
    """Name of a tensor -> its names in transformers, the likeliest first; and a remark if they are not known."""
    try:
        from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
        from gguf.tensor_mapping import TensorNameMap
    except ImportError:
        return {}, f"to pair tensors by name {_NEEDED}"
    known = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if known is None:
        return {}, f"the package gguf knows no names of tensors for the architecture {quoted(architecture)}"
    # Not an instance of TensorNameMap: it makes an entry per block for as many as a file claims, and one for Arctic
    # changes those for every other architecture. As there, the last tensor that claims a name has it.
    owners: dict[str, Any] = {}
    cfg = TensorNameMap.mappings_cfg | TensorNameMap.block_mappings_cfg
    cfg |= TensorNameMap.arch_block_mappings_cfg.get(known, {})
    for tensor, claimed in cfg.items():
        if tensor in MODEL_TENSORS[known]:
            owners |= dict.fromkeys(claimed, tensor)
    templates: dict[str, list[str]] = {}
    for template, tensor in owners.items():
        templates.setdefault(TENSOR_NAMES[tensor], []).append(template)
    for alternatives in templates.values():
        alternatives.sort(key=lambda template: not template.startswith("model."))
    names = {}
    for name in tensors:
        stem, dot, parameter = name.rpartition(".")
        block = _BLOCK.search(f"{stem}.")
        found = templates.get(_BLOCK.sub(".{bid}.", f"{stem}.", count=1)[:-1], ())
        bid = block[1] if block else ""
        if found:
            names[name] = tuple(template.replace("{bid}", bid) + dot + parameter for template in found)
    return names, ""
