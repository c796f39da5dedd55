"""What an interrupted fold has done: a first line that says what is being made, then a line a finished file."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from normkit.checkpoint.fingerprints import is_sound_name
from normkit.errors import InputError
from normkit.files import parse_json


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
        # It may have been planted: a link leads elsewhere, and a pipe never ends.
        is_file = stat.S_ISREG(path.lstat().st_mode)
        lines = path.read_bytes().split(b"\n")[:-1] if is_file else []
    except OSError:
        return None, {}
    entries: list[Any] = []
    with suppress(InputError):
        # The process may have been killed in the middle of a line.
        entries.extend(parse_json(line) for line in lines)
    if not entries or not isinstance(entries[0], dict):
        return None, {}
    finished = {entry["name"]: FinishedFile(**entry) for entry in takewhile(_is_entry, entries[1:])}
    return entries[0], finished


def _is_entry(entry: Any) -> bool:
    """Whether it is what `Journal.add` writes."""
    kinds = {"name": str, "source_sha256": str, "sha256": str, "size": int, "residuals": dict}
    return (
        isinstance(entry, dict)
        and entry.keys() == kinds.keys()
        and all(type(entry[key]) is kind for key, kind in kinds.items())
        and is_sound_name(entry["name"])
        and all(type(residual) is float for residual in entry["residuals"].values())
    )


def _line(document: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(document, ensure_ascii=False, sort_keys=True)}\n".encode()
