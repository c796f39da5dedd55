"""The files of a model folder: which there are, what tells one from another, and which hold the weights."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from normkit.errors import InputError, ModelError
from normkit.files import parse_json
from normkit.text import quoted, shortened

if TYPE_CHECKING:
    from torch import Tensor

_SNAPSHOT = re.compile(r"/models--(?P<id>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
HUB_SOURCE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?@[0-9a-f]{40}", re.ASCII)
"""The name of a model of the Hub, with a commit."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
CERTIFICATE = "normkit_certificate.json"

LONGEST_NAME = 256
"""The most characters of a file name that a certificate accepts."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OTHER_WEIGHTS = ("*.safetensors", "*.gguf", "*.h5", "*.msgpack")
# Weights in any form are not copied: those of the source would contradict the folded ones.
_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".ot"),
    ".npz",
}
_CODE_SUFFIXES = {".py", ".pyc", ".so"}
_LFS_POINTER = b"version https://git-lfs"
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The size of a file in bytes and the SHA-256 of its content, in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileState:
    """The identity of a file: it changes when the file changes or another takes its name. The file is not read."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state of the file that a status describes."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def file_names(folder: Path) -> list[str]:
    """The files below a folder, sorted, without hidden ones such as the journal of a fold."""

    def below(inner: Path, above: str) -> Iterator[str]:
        for path in inner.iterdir():
            if path.name.startswith("."):
                continue
            if path.is_dir() and not path.is_symlink():
                yield from below(path, f"{above}{path.name}/")
            else:
                yield above + path.name

    return sorted(below(folder, ""))


def file_states(folder: Path) -> dict[str, FileState]:
    """The states of the files below a folder, by name."""
    return {name: FileState.of((folder / name).stat()) for name in file_names(folder) if (folder / name).is_file()}


def fingerprints(folder: Path, names: Iterable[str], known: Mapping[str, str]) -> dict[str, Fingerprint]:
    """The fingerprints of files of a folder, sorted by name; of further ones the SHA-256 is known already.

    Raises:
        InputError: If a file cannot be read.
    """
    hashes = {**{name: sha256(folder / name) for name in names}, **known}
    return {name: Fingerprint((folder / name).stat().st_size, hashes[name]) for name in sorted(hashes)}


def is_sound_name(name: str) -> bool:
    """Whether a name is a relative path of printable characters that stays below its folder.

    Names of files from a checkpoint appear in certificates, in messages and on terminals.
    """
    path = PurePosixPath(name)
    is_below = bool(path.parts) and str(path) == name and not path.is_absolute() and ".." not in path.parts
    return is_below and "\\" not in name and name.isprintable() and len(name) <= LONGEST_NAME


def sha256(path: Path, step: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal digits.

    `step` is called with the number of bytes just read, and may raise to stop.

    Raises:
        InputError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    if not path.is_file():
        raise InputError(f"expected a file in {path}, found none that can be read")
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                if step:
                    step(len(piece))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer with the bytes of an open file from an offset; any number of threads may read at once.

    Raises:
        ModelError: If the file cannot be read or ends before the buffer is full; the message names `path`.
    """
    while buffer.nbytes:
        try:
            count = os.preadv(descriptor, [buffer], offset)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}; check the disk") from None
        if count == 0:
            raise ModelError(
                f"{path} became shorter while it was read: it ends at byte {offset}; leave it alone and start again"
            )
        buffer, offset = buffer[count:], offset + count


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: `model.safetensors`, or the shards that the index names.

    Raises:
        ModelError: If there are none, or the index names a file that is not there.
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
    if pickles := sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)}):
        raise ModelError(
            f"expected {WEIGHTS} in {folder}, found only {shortened(pickles)}; pickled weights are never loaded: load "
            "them with transformers if you trust them, and `model.save_pretrained(folder)` writes safetensors"
        )
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder} holds an adapter without its model; merge it into the model with peft and give that folder"
        )
    if others := sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)):
        raise ModelError(
            f"expected {WEIGHTS} in {folder}, found {shortened(others)}; rename it or convert it to safetensors"
        )
    raise ModelError(f"expected {WEIGHTS} in {folder}, found no weights; download them, or convert them to safetensors")


def shard_names(folder: Path, index: str = INDEX) -> list[str]:
    """The files that an index in a folder names, sorted; all are in the folder itself.

    Raises:
        ModelError: If the file is not an index, or names a file elsewhere.
    """
    named = read_json(folder / index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise ModelError(f"expected a weight_map from weights to files in {folder / index}, found none; download again")
    names = sorted(set(named.values()))
    for name in names:
        if "/" in name or not is_sound_name(name) or not name.endswith(".safetensors"):
            raise ModelError(
                f"expected {folder / index} to name safetensors beside it, got {quoted(name)}; do not use this "
                "checkpoint"
            )
    return names


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """All weights by name, mapped into memory rather than copied; nothing is unpickled.

    safetensors itself checks the length of the header, that it is JSON, and that the tensors it names fill
    the rest of the file without gap or overlap.

    Raises:
        ModelError: If a file is truncated or corrupt.
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
    """The object in a JSON file, read as strictly as `parse_json` reads.

    Raises:
        ModelError: If the file cannot be read or holds something else.
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
    """The message on a file of weights that is truncated, corrupt or a Git LFS pointer."""
    with file.open("rb") as opened:
        start = opened.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        return f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
    problem = problem.removeprefix("Error while deserializing header: ")
    return f"{file} is truncated or corrupt ({problem}); download it again"


def copied_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files that are copied unchanged beside folded weights, as (name below the folder, path), sorted by name.

    Not copied: weights in any form and their index, code, config.json (it is written anew), an older certificate, and
    hidden files. A link to a file is copied as the file; a link to a folder is not followed, as it may lead anywhere.

    Raises:
        ModelError: If a certificate cannot name a file, or a file is a link that leads out of the folder and of the
            Hub's cache around it.
    """
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        # models--org--name/snapshots/COMMIT/config.json -> ../../blobs/HASH
        roots.append(roots[0].parents[1] / "blobs")
    for name in file_names(folder):
        path = folder / name
        is_weights = path.suffix in _WEIGHT_SUFFIXES or name.endswith(".index.json")
        if not path.is_file() or is_weights or path.suffix in _CODE_SUFFIXES or name in (CONFIG, CERTIFICATE):
            continue
        if not is_sound_name(name):
            raise ModelError(
                f"expected file names of at most {LONGEST_NAME} printable characters in {folder}, found "
                f"{quoted(name)}; rename it, or remove it"
            )
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise ModelError(
                f"{path} is a link to {target}, outside of its folder, and is not copied; replace the link by the "
                "file, or remove it"
            )
        yield name, path


def code_files(names: Iterable[str]) -> list[str]:
    """The names that are files of code. Code is not copied: it was not folded, and nothing is proved about it."""
    return [name for name in names if Path(name).suffix in _CODE_SUFFIXES]


def changed(file: Path) -> str:
    """The message on a file that changed meanwhile."""
    return f"{file} changed while it was folded; leave the folder alone and start again"


def snapshot_of(folder: Path) -> str:
    """The "org/name@commit" whose files a folder of the Hub's cache holds; "" for another folder."""
    found = _SNAPSHOT.search(folder.expanduser().absolute().as_posix())
    return f"{found['id'].replace('--', '/', 1)}@{found['commit']}" if found else ""
