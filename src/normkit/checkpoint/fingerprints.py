"""Which files a folder holds, and what tells each from any other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from normkit.errors import InputError

LONGEST_NAME = 256
"""Characters of a name that a certificate takes."""

_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells a file from any other.

    Attributes:
        size: Its bytes.
        sha256: Of its content, in hexadecimal digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file does, or when another takes its name; known without reading it.

    Attributes:
        device: That it lies on.
        inode: Its number there.
        size: Its bytes.
        mtime_ns: When its content last changed.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state of the file that a status is of."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def file_states(folder: Path) -> dict[str, FileState]:
    """The states of the files below a folder, by name."""
    return {name: FileState.of((folder / name).stat()) for name in file_names(folder) if (folder / name).is_file()}


def fingerprints(folder: Path, names: Iterable[str], known: Mapping[str, str]) -> dict[str, Fingerprint]:
    """The fingerprints of some files, and of those whose hashes are known already, in the order of names.

    Raises:
        InputError: If one cannot be read.
    """
    hashes = {**{name: sha256(folder / name) for name in names}, **known}
    return {name: Fingerprint((folder / name).stat().st_size, hashes[name]) for name in sorted(hashes)}


def is_sound_name(name: str) -> bool:
    """Whether a file may be called so, below a folder: a path of printable characters that leads nowhere else.

    Files of a checkpoint are named in its certificate, in messages and on terminals.
    """
    path = PurePosixPath(name)
    is_below = bool(path.parts) and str(path) == name and not path.is_absolute() and ".." not in path.parts
    return is_below and "\\" not in name and name.isprintable() and len(name) <= LONGEST_NAME


def file_names(folder: Path) -> list[str]:
    """The files below a folder, sorted; without what is hidden, as the journal of a fold is."""

    def below(inner: Path, above: str) -> Iterator[str]:
        for path in inner.iterdir():
            if path.name.startswith("."):
                continue
            if path.is_dir() and not path.is_symlink():
                yield from below(path, f"{above}{path.name}/")
            else:
                yield above + path.name

    return sorted(below(folder, ""))


def sha256(path: Path, step: Callable[[int], None] | None = None) -> str:
    """Of a file, in hexadecimal digits.

    Args:
        path: Of the file.
        step: Called with the number of bytes just read; raises to end the work.

    Raises:
        InputError: If it cannot be read.
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
