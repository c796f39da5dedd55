"""The folder that a fold writes into: beside its destination, kept if interrupted, renamed to it at the very end.

.DST.normkit-partial/                has the permissions of the source; never entered through a link
.DST.normkit-partial/.journal.jsonl  a first line with what is being made, then one line per finished file of weights
.DST.normkit-partial/NAME.part       an unfinished file of weights; it loses `.part` when all of it is on disk

So DST itself is absent or complete at any moment, whatever ends the process. A folder of that name without a journal
of the same fold belongs to somebody else, and is left alone.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from normkit.checkpoint.model_folder import is_sound_name
from normkit.errors import InputError
from normkit.files import lock, parse_json, umask, write_bytes

# Hidden, as copied files never are: a model may bring a file of that name.
JOURNAL = ".journal.jsonl"

_SCHEMA_VERSION = 1
_ON = "finished files are kept: make room, then go on with --resume"
_AWAY = "nothing in it was touched: move it away, or choose another DST"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class FinishedFile:
    """A finished file of weights, as the journal records it."""

    name: str
    """Name of the source's file and of the output's."""
    source_sha256: str
    sha256: str
    size: int
    """Bytes of the output's file."""
    residuals: Mapping[str, float]
    """For the tensors in it that are sums, as the certificate gives them."""


class Staging:
    """The folder beside a destination, locked by this process until it is closed or has become the destination.

    As a context manager it closes itself, and removes the folder if an error came before any file was finished. Write
    into `folder`; after `begin`, `finished` holds the files that an interrupted fold has finished, by name.

    Args:
        destination: The destination of the fold; must not exist. Folders above it are made.
        source: A folder that the destination must not be in; its permissions are used.
        resume: Whether an interrupted fold may be there already.

    Raises:
        InputError: If the destination exists or is inside the source, an interrupted fold is there and will not be
            resumed, something else is there, another process works on it, or nothing can be written there.
    """

    def __init__(self, destination: Path, *, source: Path | None = None, resume: bool = False) -> None:
        self.destination = _usable(destination, source)
        self.folder = self.destination.with_name(f".{self.destination.name}.normkit-partial")
        self.finished: dict[str, FinishedFile] = {}
        self._journal: int | None = None
        self._guard = threading.Lock()
        parent = self.destination.parent
        mode = 0o777 if source is None else permissions(source.stat()) | stat.S_IRWXU
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir(mode=mode)
        except OSError as error:
            raise InputError(f"cannot write to {parent}: {error.strerror}; choose another folder") from None
        self._lock: int | None = _locked(self.folder, self.destination)
        # A process may have been killed while it wrote its journal for the first time.
        self._is_new = all(path.name.startswith(f".{JOURNAL}.") for path in self.folder.iterdir())
        if self._is_new:
            return
        if read_journal(self.folder / JOURNAL)[0] is None:
            self.close()
            raise InputError(
                f"{_unexpected(self.folder)}, and not one with the journal of an interrupted fold; {_AWAY}"
            )
        if not resume:
            self.close()
            raise InputError(f"an interrupted fold is in {self.folder}; --resume finishes it, or delete it")

    def begin(self, identity: Mapping[str, Any]) -> Mapping[str, FinishedFile]:
        """Check that the same fold was interrupted here, delete unfinished files, and open the journal.

        The identity holds what decides the bytes, as JSON values. Returns the finished files, by name.

        Raises:
            InputError: If another fold was interrupted here; that is left as it is.
        """
        head = {"schema_version": _SCHEMA_VERSION, **json.loads(json.dumps(identity))}
        there, finished = read_journal(self.folder / JOURNAL)
        if there is not None and there != head:
            differing = sorted(name for name in {*head, *there} if head.get(name) != there.get(name))
            raise InputError(
                f"{self.folder} was begun with another {' and '.join(differing)}; --resume needs the same, or delete it"
            )
        for name, file in finished.items():
            made = self.folder / name
            with suppress(OSError):
                status = made.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size == file.size:
                    self.finished[name] = file
        with writing(self.folder / JOURNAL):
            for path in self.folder.iterdir():
                if path.name in {JOURNAL, *self.finished}:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            # Written anew, so that no torn line is left in the middle.
            self.write(JOURNAL, journal_bytes(head, self.finished.values()))
            self._journal = os.open(self.folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self.finished

    def part(self, name: str) -> Path:
        """The path to write a file of weights to before `keep`."""
        return self.folder / f"{name}.part"

    def keep(self, file: FinishedFile) -> None:
        """Give a file that is complete and on disk its name, and add it to the journal. Any thread may call it.

        Raises:
            InputError: If there is no room.
        """
        with self._guard, writing(self.folder / JOURNAL):
            self.part(file.name).replace(self.folder / file.name)
            _to_disk(self.folder)
            assert self._journal is not None, "begin opens the journal"
            line = _journal_line(asdict(file))
            if os.write(self._journal, line) != len(line):
                # Readers ignore the part of the line that was written.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._journal)
            self.finished[file.name] = file

    def write(self, name: str, content: bytes, *, like: Path | None = None) -> Path:
        """Write a small file whole or not at all, with the permissions of a file of the source; None: a private file.

        Raises:
            InputError: If there is no room.
        """
        try:
            mode = 0o600 if like is None else permissions(like.stat())
            return write_bytes(self.folder / name, content, mode=mode)
        except InputError as error:
            # The cause says whether the disk is full.
            cause = error.__context__
            raise (no_room(self.folder / name, cause) if isinstance(cause, OSError) else error) from None

    def copy(self, file: Path, name: str) -> Path:
        """Copy a file with its permissions; `name` may begin with the folders that the file is in.

        Raises:
            InputError: If it cannot be read, or there is no room.
        """
        target = self.folder / name
        with writing(target):
            inner = list(zip(target.parents, file.parents, strict=False))[: name.count("/")]
            for folder, like in reversed(inner):
                folder.mkdir(mode=permissions(like.stat()) | stat.S_IRWXU, exist_ok=True)
            with file.open("rb") as read, os.fdopen(new_file(target), "wb") as written:
                shutil.copyfileobj(read, written, 1 << 20)
                os.fchmod(written.fileno(), permissions(os.fstat(read.fileno())) & ~umask())
                written.flush()
                os.fsync(written.fileno())
        return target

    def require_room(self, size: int) -> None:
        """Raise InputError if fewer bytes are free than will be written."""
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise InputError(
                f"the fold takes {_amount(size)} in {self.destination.parent}, where {_amount(free)} are free; "
                "make room, or choose a folder on another disk"
            )

    def finish(self) -> Path:
        """Rename the folder to the destination; the journal is removed from it.

        Raises:
            InputError: If something else has the destination's name by now.
        """
        with writing(self.destination):
            for inner in (path for path in self.folder.rglob("*") if path.is_dir()):
                _to_disk(inner)
            _to_disk(self.folder)
            if not _is_same(self._lock, self.folder):
                raise OSError(errno.ESTALE, f"{self.folder} is another folder by now")
            if os.path.lexists(self.destination):
                raise FileExistsError(errno.EEXIST, "it exists by now")
            self.folder.rename(self.destination)
            _to_disk(self.destination.parent)
            # Last: a folder without a journal is not recognised as a fold that can be finished.
            (self.destination / JOURNAL).unlink(missing_ok=True)
        self.close()
        return self.destination

    def close(self) -> None:
        """Unlock the folder for other processes."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_idle = not self.finished and (self._is_new or self._journal is not None)
        if is_idle and _is_same(self._lock, self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise no_room(file, error) from None


def no_room(file: Path, error: OSError) -> InputError:
    """The error for a file that cannot be written, with a full disk named as such."""
    reason = os.strerror(errno.ENOSPC) if error.errno in _FULL else error.strerror
    return InputError(f"cannot write {file}: {reason}; {_ON}")


def permissions(status: os.stat_result) -> int:
    """The permissions to read, write and enter, without special bits."""
    return stat.S_IMODE(status.st_mode) & 0o777


def new_file(path: Path) -> int:
    """A handle of a new file that only its owner may read; a link of that name is not followed."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _usable(destination: Path, source: Path | None) -> Path:
    """The destination as an absolute path; InputError if it exists or is inside the source."""
    resolved = destination.absolute()
    if os.path.lexists(resolved):
        raise InputError(f"expected a new folder to write to, {destination} exists; choose another name, or delete it")
    # Links above it are resolved, so that none leads into the source.
    resolved = resolved.parent.resolve() / resolved.name
    if source is not None and resolved.is_relative_to(source.resolve()):
        raise InputError(f"{destination} is inside {source}, which is only read; choose a folder outside it")
    return resolved


def _locked(folder: Path, destination: Path) -> int | None:
    """A handle of the folder, locked against other processes."""
    ended = InputError(f"another normkit fold to {destination} has just ended; look there, then try again")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ended from None
    except OSError as error:
        reason = "" if error.errno in (errno.ENOTDIR, errno.ELOOP) else f" that can be read ({error.strerror})"
        raise InputError(f"{_unexpected(folder)}, and not a folder of normkit's own{reason}; {_AWAY}") from None
    if not lock(handle):
        os.close(handle)
        raise InputError(f"another normkit fold writes to {destination}; wait for it, or choose another folder")
    # Another process may have ended meanwhile, with a result, or with an error after which it removed the folder.
    is_there = _is_same(handle, folder)
    if os.path.lexists(destination) or not is_there:
        if is_there:
            with suppress(OSError):
                # Only an empty folder is removed.
                folder.rmdir()
        os.close(handle)
        raise ended
    return handle


def _is_same(handle: int | None, folder: Path) -> bool:
    """Whether a path is still the folder of a handle, and not a link to it."""
    with suppress(OSError):
        return handle is not None and os.path.samestat(os.fstat(handle), folder.lstat())
    return False


def _unexpected(folder: Path) -> str:
    kind = "a link" if folder.is_symlink() else "a folder" if folder.is_dir() else "a file"
    return f"expected to write in {folder}, which is {kind}"


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def journal_bytes(head: Mapping[str, Any], finished: Iterable[FinishedFile]) -> bytes:
    """A whole journal."""
    return b"".join(_journal_line(line) for line in (head, *map(asdict, finished)))


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, FinishedFile]]:
    """The first line of a journal, or None; and the finished files of the complete lines after it, by name."""
    try:
        # Somebody may have placed it there: a link leads elsewhere, and a pipe never ends.
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
    """Whether it is a line that `Staging.keep` writes."""
    kinds = {"name": str, "source_sha256": str, "sha256": str, "size": int, "residuals": dict}
    return (
        isinstance(entry, dict)
        and entry.keys() == kinds.keys()
        and all(type(entry[key]) is kind for key, kind in kinds.items())
        and is_sound_name(entry["name"])
        and all(type(residual) is float for residual in entry["residuals"].values())
    )


def _journal_line(document: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(document, ensure_ascii=False, sort_keys=True)}\n".encode()
