"""Which files a folder holds, and what tells each from any other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from normkit.errors import InputError

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


def fingerprints(folder: Path, names: Iterable[str], known: Mapping[str, str]) -> dict[str, Fingerprint]:
    """The fingerprints of some files, and of those whose hashes are known already, in the order of names.

    Raises:
        InputError: If one cannot be read.
    """
    hashes = {**{name: sha256(folder / name) for name in names}, **known}
    return {name: Fingerprint((folder / name).stat().st_size, hashes[name]) for name in sorted(hashes)}


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
