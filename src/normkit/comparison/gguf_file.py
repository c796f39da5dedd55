"""Models of llama.cpp: the tensors of a GGUF file, read a few rows at a time, and what its metadata say of norms."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.checkpoint.model_folder import damaged, read_exactly
from normkit.checkpoint.reader import TORCH, Source, TensorInfo
from normkit.comparison.gguf_header import GgufTensor, Header, read_gguf_header
from normkit.comparison.weights import Weights
from normkit.errors import ModelError
from normkit.text import counted, quoted, shortened

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"\.(\d+)\.")
_NEEDED = 'needs the package gguf, which is not installed: pip install "normkit[ports]"'

_RELATIVES: Mapping[str, tuple[str, ...]] = {
    "bert": ("jina-bert-v2",),
    "gemma3": ("gemma-embedding",),
    "llama": ("llama-embed", "eagle3"),
    "mistral3": ("llama", "mistral4"),
    "nemotron_h": ("nemotron_h_moe",),
    "nomic-bert": ("nomic-bert-moe",),
    "t5": ("t5encoder",),
}
"""Architecture -> others that llama.cpp's converter writes for some models of the same model_type (llama.cpp,
conversion/bert.py at 2ca8afc, gemma.py at 061b8c5, llama.py at 0274f0f, mistral3.py at 32e9e04, nemotron.py at 003ebfc,
t5.py at 5535795; Mistral 3 was a "llama" before it had its own)."""

_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n")
_LACKING = {("llama", each): "no scale of the embeddings, SiLU in place of GELU" for each in _GEMMAS}
"""Architecture in the file and the reference's own -> what llama.cpp then computes otherwise (src/models/llama.cpp)."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the metadata that is no norm's own."""

    label: str
    """The subject: "eps" or "architecture"."""
    words: str
    """The fault, without the name of the file."""
    sentence: str
    """The fault, with the name of the file."""
    remedy: str
    """The remedy, in a few words."""

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def read_gguf(path: str | Path) -> Weights:
    """The parameters of a model in a GGUF file, as they are stored; of a split file all parts, whichever is named.

    Values are read when rows are asked for, never mapped. Rows of a quantized tensor are dequantized by the package
    `gguf`, into float32; other rows need no package. `names` come from the table of the package, and are empty without
    it or for an architecture that it does not know. Tensors of an encoding that is not known are left out, and `notes`
    say so.

    Raises:
        ModelError: If the file is not whole or of an unknown kind (`read_gguf_header` says when), or a part is missing.
    """
    source = GgufSource(Path(path))
    settings = source.settings
    architecture = settings.get("general.architecture", "")
    if not isinstance(architecture, str) or not architecture.isprintable():
        raise ModelError(damaged(source.files[0], f"its architecture is {quoted(architecture)}"))
    eps: dict[str, float] = {}
    # One number for all norms, of an architecture with both kinds that of its RMSNorms; encoders of images and sound
    # have one each.
    for part in ("", "vision.", "audio."):
        for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
            value = settings.get(f"{architecture}.{part}attention.{key}")
            if value is not None and (not isinstance(value, float) or not np.isfinite(value)):
                raise ModelError(damaged(source.files[0], f"its {key} is {quoted(value)}"))
            if value is not None:
                eps.setdefault("", value)
    names, note = names_in_transformers(architecture, [*source.tensors, *source.unread])
    reasons = [
        f"{counted(list(source.unread.values()).count(why), 'tensor')} not read: {why}"
        for why in dict.fromkeys(source.unread.values())
    ]
    return Weights(
        name=str(path),
        runtime="llama.cpp",
        source=source,
        architecture=architecture,
        settings=settings,
        eps=eps,
        names={name: found for name, found in names.items() if name in source.tensors},
        unread={each: why for name, why in source.unread.items() for each in (name, *names.get(name, ()))},
        notes=(*reasons, *([note] if note else [])),
    )


class GgufSource:
    """The tensors of a GGUF file, or of all parts of a split one, read with `pread` from any number of threads.

    `files` are the parts in their order, `settings` those of the first part, `unread` the reasons by the names of
    tensors that are not in `tensors`.

    Raises:
        ModelError: If a file is not whole or cannot be read, or the parts do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self._descriptors: dict[Path, int] = {}
        self.close = weakref.finalize(self, _close, self._descriptors)
        """Close the files; nothing can be read afterwards."""
        self.files: tuple[Path, ...] = (path,)
        self.tensors: dict[str, GgufTensor] = {}
        self.unread: dict[str, str] = {}
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
            try:
                from gguf import GGMLQuantizationType
                from gguf.quants import dequantize
            except ImportError:
                raise ModelError(f"{tensor.encoding}, in which {tensor.file} holds {name}, {_NEEDED}") from None
            blocks = np.empty((stop - start, tensor.stored_bytes(1)), dtype=np.uint8)
            read_exactly(descriptor, blocks.reshape(-1).data, begin, tensor.file)
            with suppress(NotImplementedError, AttributeError), np.errstate(all="ignore"):
                return torch.from_numpy(dequantize(blocks, getattr(GGMLQuantizationType, tensor.encoding)))
            raise ModelError(
                f"the package gguf cannot dequantize {tensor.encoding}, in which {tensor.file} holds {name}"
            )
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
        if twice := (header.tensors.keys() | header.unread) & (self.tensors.keys() | self.unread):
            raise ModelError(damaged(file, f"{quoted(min(twice))} is in another part too"))
        self.tensors |= header.tensors
        self.unread |= header.unread
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
        self.tensors, self.unread = {}, {}
        headers = [self._open(file) for file in self.files]
        for number, (file, part) in enumerate(zip(self.files, headers, strict=True)):
            said = part.settings.get("split.no"), part.settings.get("split.count")
            if said != (number, count):
                raise ModelError(damaged(file, f"it says that it is part {quoted(said[0])} of {quoted(said[1])}"))
        count = len(self.tensors) + len(self.unread)
        total = headers[0].settings.get("split.tensors.count", count)
        if total != count:
            raise ModelError(damaged(path, f"its parts hold {count} tensors, it claims {quoted(total)}"))
        return headers[0]


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


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


def faults_of(port: Weights, reference: Weights) -> Iterator[Fault]:
    """The faults of a GGUF file's metadata; none of another form, or of a file of vision or sound alone.

    Args:
        port: The parameters of the port.
        reference: Those of the reference, of transformers.
    """
    if port.runtime != "llama.cpp" or port.architecture in ("", "clip"):
        return
    own = expected_architecture(port, reference)
    if own != port.architecture:
        lacking = _LACKING.get((port.architecture, own), "")
        computes = f"llama.cpp computes what it computes for {port.architecture}"
        computes = f"{computes}: {lacking}" if lacking else computes
        yield Fault(
            label="architecture",
            words=f"{port.architecture} instead of {own}; {computes}",
            sentence=f"{port.name} names the architecture {port.architecture} instead of {own}; {computes}.",
            remedy=f"write {own} into general.architecture, and its keys, or convert the reference anew",
        )
    if not port.eps:
        rms = any("rms" in key for key in reference.settings)
        layer = any(re.search(r"layer_?norm", key) for key in reference.settings)
        names = [f"layer_norm_{'rms_' if each else ''}epsilon" for each in (True, False) if rms is each or layer is rms]
        keys = " or ".join(f"{port.architecture}.attention.{name}" for name in names)
        yield Fault(
            label="eps",
            words=f"none; llama.cpp refuses a file without {keys}",
            sentence=f"{port.name} states no eps: llama.cpp refuses a file without {keys}.",
            remedy="write the reference's eps into the metadata of the file",
        )


def expected_architecture(port: Weights, reference: Weights) -> str:
    """The architecture that a GGUF file should name: its own, where nothing speaks against it."""
    own = own_architecture(str(reference.settings.get("model_type", "")))
    is_right = not own or port.architecture in (own, *_RELATIVES.get(own, ()))
    return port.architecture if is_right else own


def with_reference_names(weights: Weights, reference: Weights) -> Weights:
    """A GGUF file with the names of the reference, and with the norms of single heads that the reference has.

    A file that names another architecture has the names of the reference's own. StableLM 2 12B has a query and a key
    norm for each head; llama.cpp stores the gains of all heads as one matrix (conversion/stablelm.py, _stack_qk_norm).
    """
    if weights.runtime != "llama.cpp" or weights.architecture in ("", "clip"):
        return weights
    expected = expected_architecture(weights, reference)
    if expected != weights.architecture:
        weights = replace(weights, names=names_in_transformers(expected, weights.source.tensors)[0])
    held, tensors, names = reference.source.tensors, weights.source.tensors, dict(weights.names)
    rows: dict[str, tuple[str, int]] = {}
    for name, alternatives in weights.names.items():
        stem = next((each[: -len("weight")] for each in alternatives if f"{each[:-6]}norms.0.weight" in held), None)
        if stem is not None and name.endswith(".weight") and len(tensors[name].shape) == 2:
            for head in range(tensors[name].shape[0]):
                rows[row := f"{name[:-6]}{head}.weight"] = name, head
                names[row] = (f"{stem}norms.{head}.weight",)
    return replace(weights, source=RowSource(weights.source, rows), names=names) if rows else weights


class RowSource:
    """Tensors of another source, some of its matrices as one vector for each row.

    Args:
        source: The other source.
        rows: Name of a vector -> the matrix and the row that it is.
    """

    def __init__(self, source: Source, rows: Mapping[str, tuple[str, int]]) -> None:
        self._source, self._rows = source, rows
        matrices = {name for name, _ in rows.values()}
        self.tensors = {name: info for name, info in source.tensors.items() if name not in matrices}
        for row, (name, _) in rows.items():
            self.tensors[row] = TensorInfo(source.tensors[name].dtype, source.tensors[name].shape[1:])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix; a vector is one row."""
        if name not in self._rows:
            return self._source.rows(name, start, stop)
        matrix, row = self._rows[name]
        return self._source.rows(matrix, row, row + 1)[start:stop]


def own_architecture(model_type: str) -> str:
    """The architecture of llama.cpp with the name of a model type of transformers; "" if none has its name.

    Example:
        >>> own_architecture("gemma3_text"), own_architecture("mistral")
        ('gemma3', '')
    """
    try:
        from gguf.constants import MODEL_ARCH_NAMES
    except ImportError:
        return ""
    known = {re.sub("[^a-z0-9]", "", name.lower()): name for name in MODEL_ARCH_NAMES.values()}
    letters = re.sub("[^a-z0-9]", "", model_type.lower())
    return known.get(letters) or known.get(letters.removesuffix("text"), "")
