"""What an interrupted fold has done: a first line that says what is being made, then a line a finished file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FinishedFile:
    """A file of weights that is done with.

    Attributes:
        name: Of the source's file and of what was made of it.
        source_sha256: Of the source's file.
        sha256: Of what was made of it.
        size: Its bytes.
        residuals: Of the tensors in it that are sums, as the certificate gives them.
    """

    name: str
    source_sha256: str
    sha256: str
    size: int
    residuals: Mapping[str, float]


class Journal:
    """The open journal of a fold, to be added to.

    Args:
        path: Of the file; must hold the first line already.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def add(self, file: FinishedFile) -> None:
        """Enter a file, on the disk.

        Raises:
            OSError: If there is no room; a part of the line may stand there, which readers pass over.
        """
        line = _line(asdict(file))
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def journal_bytes(head: Mapping[str, Any], finished: Iterable[FinishedFile]) -> bytes:
    """A whole journal."""
    return b"".join(_line(line) for line in (head, *map(asdict, finished)))


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, FinishedFile]]:
    """The first line, None where there is none; and by name the files that whole lines after it enter."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return None, {}
    entries: list[Any] = []
    with suppress(ValueError, RecursionError):
        # The process may have been killed in the middle of a line.
        entries.extend(json.loads(line) for line in lines)
    if not entries or not isinstance(entries[0], dict):
        return None, {}
    finished: dict[str, FinishedFile] = {}
    with suppress(TypeError):
        finished.update((file.name, file) for file in (FinishedFile(**entry) for entry in entries[1:]))
    return entries[0], finished


def _line(document: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(document, ensure_ascii=False, sort_keys=True)}\n".encode()
