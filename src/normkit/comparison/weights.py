"""The parameters of a model as they are stored: in a folder, safetensors, named arrays or a module; nothing is run."""

from __future__ import annotations

import lzma
import math
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normkit.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS, damaged, read_json, shard_names
from normkit.checkpoint.reader import NAME, TORCH, CheckpointSource, ModelSource, Source, TensorInfo
from normkit.comparison.packed import PackedSource
from normkit.comparison.quantized import MlxSource
from normkit.errors import InputError, KindError, ModelError
from normkit.text import counted, first_line, quoted

EPS_KEYS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_epsilon"),
    *("layernorm_epsilon", "layer_norm_epsilion", "rmsnorm_eps", "eps"),
)
"""The keys of eps in configurations of transformers and of others."""

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""The parts of a configuration of several models that hold that of the language model."""

_BAD_ARCHIVE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""The exceptions that a damaged archive may raise."""

_NUMPY = {
    "f8": "F64",
    "f4": "F32",
    "f2": "F16",
    "i8": "I64",
    "i4": "I32",
    "i2": "I16",
    "i1": "I8",
    "u8": "U64",
    "u4": "U32",
    "u2": "U16",
    "u1": "U8",
    "b1": "BOOL",
}
"""Dtype of an array of numpy without its byte order -> its name in safetensors."""

_TENSORRT = {
    "transformer": "model",
    "vocab_embedding": "embed_tokens",
    "ln_f": "norm",
    "attention": "self_attn",
    "dense": "o_proj",
    "fc": "gate_proj",
    "gate": "up_proj",
    "proj": "down_proj",
    "post_layernorm": "post_attention_layernorm",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}
"""Word in a name of TensorRT-LLM -> the word of transformers (TensorRT-LLM, models/model_weights_loader.py at 04a2cac,
which loads Llama, Qwen and others, and models/gemma/convert.py at 65b31db, HfParser: the two agree)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Named tensors, what is written beside them, and the runtime that stores tensors in this way."""

    name: str
    """As the user gave it."""
    runtime: str
    """Who reads this form: "transformers", "llama.cpp", "MLX", "ONNX", or "" for tensors of unknown origin."""
    source: Source
    """The tensors, which are read a few rows at a time."""
    architecture: str = ""
    """The model's architecture as the form names it, such as "gemma3"; "" if nothing names it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The content of config.json, or the metadata of the file."""
    eps: Mapping[str, float] = field(default_factory=dict)
    """Path of a norm -> its eps as stored; under "" that of all others."""
    adds: Mapping[str, float] = field(default_factory=dict)
    """Path of a norm -> what is added to its stored gain, where the file itself says so, as a graph does."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a tensor here -> its possible names in transformers, the likeliest first, where the runtime has a table
    of names; a model has one of them."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor whose numbers are not read, as the file and as transformers have it -> why."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """Name of a matrix of fewer bits that is read as numbers times scales -> how the file holds it."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """Name of a matrix that stays packed, shown with its shape -> how the file holds it."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""


def weights_of(given: Any, *, name: str = "") -> Weights:
    """The parameters of a model as they are stored; nothing is run and nothing is unpickled.

    Args:
        given: A model's folder, a .safetensors file, an index of several, an .npz file, a mapping from names to arrays
            (of torch, numpy, MLX or JAX; mappings in it are joined with dots), or a module.
        name: What messages and reports call it.

    Raises:
        InputError: If there is no such file, or it is of another kind.
        KindError: If it is nothing of these.
        ModelError: If a file is not whole, or an array has a dtype that safetensors does not have.

    Example:
        >>> weights = weights_of({"ln": {"weight": torch.ones(8)}})
        >>> weights.source.tensors
        {'ln.weight': TensorInfo(dtype='F32', shape=(8,))}
    """
    if isinstance(given, nn.Module):
        config: Any = getattr(given, "config", None)
        settings = config.to_dict() if hasattr(config, "to_dict") else {}
        return Weights(
            name=name or type(given).__name__,
            runtime="transformers" if settings else "",
            source=ModelSource(given),
            architecture=str(settings.get("model_type", "")),
            settings={**settings, "architectures": [type(given).__name__]} if settings else {},
            eps={path: eps for path, module in given.named_modules() if (eps := eps_of_module(module)) is not None},
        )
    if isinstance(given, Mapping):
        return Weights(name=name or "arrays", runtime="", source=ArraySource(given))
    if isinstance(given, (str, Path)):
        return _of_path(Path(given).expanduser(), name)
    raise KindError(
        f"expected a folder, a .safetensors file, named arrays or a module, got {type(given).__name__}; "
        "pass one of these"
    )


class ArraySource:
    """Named arrays in memory, of any library that shares them with torch.

    Raises:
        ModelError: If an array has no dtype of safetensors.
    """

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._matrices: dict[str, Tensor] = {}
        for name, array in _leaves(arrays, ""):
            tensor = _tensor(name, array)
            info = TensorInfo(NAME[tensor.dtype], tuple(tensor.shape))
            self.tensors[name], self._matrices[name] = info, tensor.detach().reshape(info.matrix)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor seen as a matrix: a view, or a copy if the tensor is on another device."""
        return self._matrices[name][start:stop].cpu()


class NpzSource:
    """Arrays in a file of `numpy.savez`, as JAX users and older MLX write them; read a few rows at a time.

    `unread` holds the reasons by the names of arrays that are left out: stored column by column, or of another dtype.

    Raises:
        ModelError: If the file is no such archive, or an array does not fit its member. Nothing is unpickled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[str, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.unread: dict[str, str] = {}
        try:
            self._archive = zipfile.ZipFile(path)
            headers = [(member, *self._header(member)) for member in self._archive.infolist()]
        except _BAD_ARCHIVE as error:
            raise ModelError(damaged(path, first_line(error))) from None
        for member, (shape, is_by_column, dtype), start in headers:
            name = member.filename.removesuffix(".npy")
            if not name.isprintable() or name in self._members or name in self.unread:
                raise ModelError(damaged(path, f"{quoted(name)} is no name for an array, or stands twice"))
            # numpy has no bfloat16: arrays of JAX are written as two bytes without a meaning.
            kind = "BF16" if dtype.str in ("|V2", "<V2") else _NUMPY.get(dtype.str.lstrip("<|"))
            if kind is None or (is_by_column and sum(size > 1 for size in shape) > 1):
                self.unread[name] = "it is stored column by column" if kind else f"its dtype is {dtype.str}"
                continue
            if math.prod(shape) * dtype.itemsize != member.file_size - start or min(shape, default=0) < 0:
                raise ModelError(damaged(path, f"{quoted(name)} is not of the shape {quoted(shape)} that it claims"))
            self.tensors[name], self._members[name] = TensorInfo(kind, shape), (member.filename, start)

    def _header(self, member: zipfile.ZipInfo) -> tuple[tuple[tuple[int, ...], bool, Any], int]:
        """Shape, order and dtype of an array, and the first byte of its numbers in its member."""
        with self._archive.open(member) as opened:
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            version = np.lib.format.read_magic(opened)[0]
            if version not in read:
                raise ValueError(f"{quoted(member.filename)} is of version {version}")
            return read[version](opened), opened.tell()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of an array seen as a matrix, in a new buffer.

        Raises:
            ModelError: If the file cannot be read to the end.
        """
        info, (member, begin) = self.tensors[name], self._members[name]
        rows = torch.empty(stop - start, info.matrix[1], dtype=TORCH[info.dtype])
        try:
            with self._archive.open(member) as opened:
                opened.seek(begin + info.bytes_of(start))
                content = opened.read(info.bytes_of(stop - start))
            rows.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(content, np.uint8)
        except _BAD_ARCHIVE as error:
            raise ModelError(damaged(self._path, first_line(error))) from None
        return rows


def _leaves(arrays: Mapping[Any, Any], above: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in arrays.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            found += _leaves(value, f"{path}.")
        elif isinstance(value, (list, tuple)):
            found += _leaves(dict(enumerate(value)), f"{path}.")
        else:
            found.append((path, value))
    return found


def _tensor(name: str, array: Any) -> Tensor:
    """An array as a tensor; without a copy where the library allows it."""
    if isinstance(array, Tensor):
        tensor = array
    else:
        try:
            # numpy has no bfloat16 of its own, and other libraries have none in numpy.
            wide = str(getattr(array, "dtype", "")).removeprefix("mlx.core.")
            if wide == "bfloat16" and hasattr(array, "tobytes"):
                tensor = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.bfloat16).reshape(array.shape)
            elif hasattr(array, "__array_interface__") or not hasattr(array, "__dlpack__"):
                with warnings.catch_warnings():
                    # torch warns of arrays that must not be written to; nothing here writes.
                    warnings.simplefilter("ignore")
                    tensor = torch.as_tensor(array)
            else:
                tensor = torch.utils.dlpack.from_dlpack(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise ModelError(f"expected arrays of numbers, {quoted(name)} is {type(array).__name__}: {error}") from None
    if tensor.is_meta or tensor.dtype not in NAME or tensor.layout is not torch.strided:
        raise ModelError(f"expected dense arrays with values, {quoted(name)} is {tensor.dtype}; convert it first")
    return tensor


def eps_of_module(module: nn.Module) -> float | None:
    """The eps of a norm's module, by the names that norms of torch and transformers have for it; None without one."""
    for key in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        value = getattr(module, key, None)
        if isinstance(value, float):
            return value
    return None


def eps_in(settings: Mapping[str, Any]) -> dict[str, float]:
    """The eps of a configuration under "", if there is one: that of the language model where there are several."""
    for part in (settings, *(settings[key] for key in TEXT_PARTS if isinstance(settings.get(key), Mapping))):
        for key in EPS_KEYS:
            value = part.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return {"": float(value)}
    return {}


def is_quantized(folder: Path) -> bool:
    """Whether a folder's config.json says that its weights are quantized, by MLX or another: nothing here runs them."""
    if not (folder / CONFIG).is_file():
        return False
    settings = read_json(folder / CONFIG, infinity=True)
    return any(isinstance(settings.get(key), dict) for key in ("quantization", "quantization_config"))


def _of_path(path: Path, name: str) -> Weights:
    if path.suffix == ".npz" and path.is_file():
        arrays = NpzSource(path)
        reasons = [*arrays.unread.values()]
        notes = [f"{counted(reasons.count(why), 'array')} not read: {why}" for why in dict.fromkeys(reasons)]
        return Weights(name=name or path.name, runtime="", source=arrays, unread=arrays.unread, notes=tuple(notes))
    folder = path if path.is_dir() else path.parent
    opened = CheckpointSource(folder, _files(path))
    source: Source = opened
    settings = read_json(folder / CONFIG, infinity=True) if (folder / CONFIG).is_file() else {}
    architecture, quantization = settings.get("model_type"), settings.get("quantization")
    runtime, names, notes = "transformers" if architecture else "", {}, []
    is_quantized_by_mlx = isinstance(quantization, Mapping) and {"group_size", "bits"} <= quantization.keys()
    if is_quantized_by_mlx or opened.metadata[opened.files[0]].get("format") == "mlx":
        runtime = "MLX"
        source = made = MlxSource(opened, quantization if isinstance(quantization, Mapping) else {})
        if made.left:
            notes.append(f"{len(made.left)} of the matrices stay packed: {'; '.join(sorted({*made.left.values()}))}")
    unpacked = PackedSource(opened) if source is opened else None
    if unpacked is not None and (unpacked.forms or unpacked.left or unpacked.tensors.keys() != opened.tensors.keys()):
        source = unpacked
    mapping = settings.get("mapping")
    if isinstance(mapping, Mapping) and "tp_size" in mapping and isinstance(settings.get("architecture"), str):
        runtime, architecture = "TensorRT-LLM", settings["architecture"]
        names = {each: (".".join(_TENSORRT.get(word, word) for word in each.split(".")),) for each in source.tensors}
        if mapping.get("world_size", 1) != 1:
            notes.append(f"the first of {quoted(mapping['world_size'])} ranks is read: it has parts of the matrices")
    return Weights(
        name=name or path.resolve().name,
        runtime=runtime,
        source=source,
        architecture=architecture if isinstance(architecture, str) else "",
        settings=settings,
        eps=eps_in(settings),
        names=names,
        forms={} if unpacked is None else unpacked.forms,
        packed={} if unpacked is None else unpacked.left,
        notes=tuple(notes),
    )


def _files(path: Path) -> list[Path]:
    """The files to read: none in particular where a folder has those of transformers."""
    if path.is_dir():
        has_usual = (path / WEIGHTS).is_file() or (path / INDEX).is_file()
        first_rank = path / "rank0.safetensors"
        others = [first_rank] if first_rank.is_file() else sorted(path.glob("*.safetensors"))
        return [] if has_usual else others
    if not path.is_file():
        raise InputError(f"expected a model's folder or a .safetensors file, there is no {path}; give another path")
    if path.name.endswith(".safetensors.index.json"):
        return [path.parent / name for name in shard_names(path.parent, path.name)]
    if path.suffix != ".safetensors":
        raise InputError(f"expected a model's folder or a .safetensors file, got {path}; give one of these")
    return [path]
