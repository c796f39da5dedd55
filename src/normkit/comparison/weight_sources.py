"""Weights of anything that stores tensors: a model's folder, safetensors, named arrays, a module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS, read_json, shard_names
from normkit.checkpoint.reader import NAME, CheckpointSource, ModelSource, Source, TensorInfo
from normkit.comparison.mlx_weights import MlxSource, is_mlx
from normkit.comparison.weights import Weights
from normkit.errors import InputError, KindError, ModelError
from normkit.text import quoted

EPS_KEYS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_epsilon"),
    *("layernorm_epsilon", "layer_norm_epsilion", "rmsnorm_eps", "eps"),
)
"""The keys of eps in configurations of transformers and of others."""

# The parts of a configuration of several models that hold that of the language model.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def weights_of(given: Any, *, name: str = "") -> Weights:
    """The parameters of a model as they are stored; nothing is run and nothing is unpickled.

    Args:
        given: A model's folder, a .safetensors file, an index of several, a mapping from names to arrays (of torch,
            numpy, MLX or JAX; mappings in it are joined with dots), or a module.
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
        return _of_module(given, name)
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
                    # Of arrays that must not be written to; nothing here writes.
                    warnings.simplefilter("ignore")
                    tensor = torch.as_tensor(array)
            else:
                tensor = torch.utils.dlpack.from_dlpack(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise ModelError(f"expected arrays of numbers, {quoted(name)} is {type(array).__name__}: {error}") from None
    if tensor.is_meta or tensor.dtype not in NAME or tensor.layout is not torch.strided:
        raise ModelError(f"expected dense arrays with values, {quoted(name)} is {tensor.dtype}; convert it first")
    return tensor


def _of_module(model: nn.Module, name: str) -> Weights:
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    found = {path: value for path, module in model.named_modules() if (value := eps_of_module(module)) is not None}
    return Weights(
        name=name or type(model).__name__,
        runtime="transformers" if settings else "",
        source=ModelSource(model),
        architecture=str(settings.get("model_type", "")),
        settings={**settings, "architectures": [type(model).__name__]} if settings else {},
        eps=found,
    )


def eps_of_module(module: nn.Module) -> float | None:
    """The eps of a norm's module, by the names that norms of torch and transformers have for it; None without one."""
    for key in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        value = getattr(module, key, None)
        if isinstance(value, float):
            return value
    return None


def eps_in(settings: Mapping[str, Any]) -> dict[str, float]:
    """The eps of a configuration under "", if there is one: that of the language model where there are several."""
    for part in (settings, *(settings[key] for key in _TEXT if isinstance(settings.get(key), Mapping))):
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
    folder = path if path.is_dir() else path.parent
    source: Source = (opened := CheckpointSource(folder, _files(path)))
    settings = read_json(folder / CONFIG, infinity=True) if (folder / CONFIG).is_file() else {}
    architecture, quantization = settings.get("model_type"), settings.get("quantization")
    runtime, notes = "transformers" if architecture else "", []
    if is_mlx(settings, opened.metadata[opened.files[0]]):
        runtime = "MLX"
        source = made = MlxSource(opened, quantization if isinstance(quantization, dict) else {})
        if made.left:
            reasons = sorted({*made.left.values()})
            notes.append(f"{len(made.left)} of the matrices stay packed: {'; '.join(reasons)}")
    return Weights(
        name=name or path.resolve().name,
        runtime=runtime,
        source=source,
        architecture=architecture if isinstance(architecture, str) else "",
        settings=settings,
        eps=eps_in(settings),
        notes=tuple(notes),
    )


def _files(path: Path) -> list[Path]:
    """The files to read: none in particular where a folder has those of transformers."""
    if path.is_dir():
        has_usual = (path / WEIGHTS).is_file() or (path / INDEX).is_file()
        return [] if has_usual else sorted(path.glob("*.safetensors"))
    if not path.is_file():
        raise InputError(f"expected a model's folder or a .safetensors file, there is no {path}; give another path")
    if path.name.endswith(".safetensors.index.json"):
        return [path.parent / name for name in shard_names(path.parent, path.name)]
    if path.suffix != ".safetensors":
        raise InputError(f"expected a model's folder or a .safetensors file, got {path}; give one of these")
    return [path]
