"""The safetensors of a model folder: found, checked and read, with one line for whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from normkit.checkpoint.fingerprints import is_sound_name
from normkit.errors import InputError, ModelError
from normkit.files import parse_json
from normkit.text import quoted, shortened

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ADAPTER = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: `model.safetensors`, or the shards that its index names.

    Raises:
        ModelError: If there are none, or an index that names what is not beside it.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = [folder / name for name in shard_names(folder)]
        if absent := [shard.name for shard in shards if not shard.is_file()]:
            raise ModelError(
                f"expected all {len(shards)} shards named in {folder / INDEX}, {shortened(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} missing; download the rest"
            )
        return shards
    raise ModelError(_without_weights(folder))


def shard_names(folder: Path) -> list[str]:
    """The files named in the index of a folder, sorted; each lies in that folder itself.

    Raises:
        ModelError: If the index is not one, or names a file elsewhere.
    """
    index = read_json(folder / INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise ModelError(f"expected a weight_map from weights to files in {folder / INDEX}, found none; download again")
    names = sorted(set(named.values()))
    for name in names:
        if "/" in name or not is_sound_name(name) or not name.endswith(".safetensors"):
            raise ModelError(
                f"expected {folder / INDEX} to name safetensors beside it, got {quoted(name)}; do not use this "
                "checkpoint"
            )
    return names


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """All weights by name, mapped into memory rather than copied; nothing is unpickled.

    safetensors itself checks the length of the header, that it is JSON, and that the tensors it names fill
    the rest of the file without gap or overlap.

    Raises:
        ModelError: If a file is not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ModelError(damaged(file, str(error))) from None
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror or error}") from None
    return weights


def read_json(path: Path, *, infinity: bool = False) -> dict[str, object]:
    """A JSON file that holds an object; arguments and strictness of `parse_json`.

    Raises:
        ModelError: If it cannot be read or holds something else.
    """
    try:
        document = parse_json(path.read_bytes(), infinity=infinity)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except InputError as error:
        raise ModelError(f"expected JSON in {path}: {error}; correct it, or download it again") from None
    if not isinstance(document, dict):
        raise ModelError(f"expected a JSON object in {path}, found a {type(document).__name__}; download it again")
    return document


def damaged(file: Path, problem: str) -> str:
    """The one line about a file that is not whole."""
    with file.open("rb") as opened:
        start = opened.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        return f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
    problem = problem.removeprefix("Error while deserializing header: ")
    return f"{file} is truncated or corrupt ({problem}); download it again"


def _without_weights(folder: Path) -> str:
    pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
    if pickles:
        return (
            f"expected {WEIGHTS} in {folder}, found only {shortened(pickles)}; pickled weights are never loaded: load "
            "them with transformers where you trust them, and `model.save_pretrained(folder)` writes safetensors"
        )
    if (folder / ADAPTER).is_file():
        return f"{folder} holds an adapter without its model; merge it into the model with peft and give that folder"
    if others := sorted(file.name for file in _other_weights(folder)):
        return f"expected {WEIGHTS} in {folder}, found {shortened(others)}; rename it or convert it to safetensors"
    return f"expected {WEIGHTS} in {folder}, found no weights; download them, or convert them to safetensors"


def _other_weights(folder: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "*.gguf", "*.h5", "*.msgpack"):
        yield from folder.glob(pattern)
