"""Tensors that the user gives beside a checkpoint: in a safetensors file, or in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from normkit.checkpoint.model_folder import sha256
from normkit.checkpoint.plan import FLOATS
from normkit.checkpoint.reader import NAME, CheckpointSource
from normkit.errors import InputError, ModelError
from normkit.text import quoted

GivenTensors = Path | str | Mapping[str, Tensor]
"""A safetensors file, or tensors by name."""


def tensors_given(
    given: GivenTensors, what: str, *, axes: int, dtypes: Collection[str] = FLOATS
) -> tuple[dict[str, Tensor], str]:
    """The tensors, in their dtypes, and the SHA-256 of the file, or of names and values in memory.

    Args:
        given: Read whole; its header is checked first.
        what: What is expected in it, in words, such as "scales".
        axes: Axes of each tensor.
        dtypes: Those that are taken, as safetensors writes them.

    Raises:
        InputError: If it is no such file, or a tensor has other axes, another dtype, or numbers that are not finite.
    """
    if isinstance(given, Mapping):
        found = {name: value.detach().to("cpu").contiguous() for name, value in given.items()}
        for name, value in found.items():
            _check(name, NAME.get(value.dtype, str(value.dtype)), tuple(value.shape), axes, dtypes, what)
    else:
        path = Path(given).expanduser()
        if not path.is_file():
            raise InputError(f"expected a safetensors file of {what}, got {given}: nothing is there")
        try:
            with CheckpointSource(path.parent, [path]) as source:
                for name, info in source.tensors.items():
                    _check(name, info.dtype, info.shape, axes, dtypes, what)
                found = {
                    name: source.rows(name, 0, info.matrix[0]).view(info.shape) for name, info in source.tensors.items()
                }
        except ModelError as error:
            raise InputError(f"expected a safetensors file of {what}: {error}") from None
    for name, value in found.items():
        if not bool(value.isfinite().all()):
            raise InputError(f"{quoted(name)} of the {what} holds NaN or infinity")
    if not isinstance(given, Mapping):
        return found, sha256(path)
    digest = hashlib.sha256()
    for name, value in found.items():
        digest.update(name.encode() + b"\0")
        digest.update(value.double().numpy().data)
    return found, digest.hexdigest()


def _check(name: str, dtype: str, shape: tuple[int, ...], axes: int, dtypes: Collection[str], what: str) -> None:
    if len(shape) != axes or dtype not in dtypes:
        kind = "a vector" if axes == 1 else "a matrix"
        wanted = f"{kind} of {', '.join(dtypes)}"
        raise InputError(f"expected {wanted} in {quoted(name)} of the {what}, got {dtype} of shape {shape}")
