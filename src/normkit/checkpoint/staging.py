"""The folder that a fold writes into: beside its destination, kept when interrupted, renamed to it at the very end.

.DST.normkit-partial/                readable to whom the source is; never entered through a link
.DST.normkit-partial/.journal.jsonl  what is being made, and which files of weights are finished
.DST.normkit-partial/NAME.part       a file of weights in the making; its name loses `.part` when all of it is on disk

So DST itself is absent or complete at any moment, whatever ends the process. A folder of that name without a journal
of the same fold is somebody else's, and left alone.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from normkit.checkpoint.journal import FinishedFile, Journal, journal_bytes, read_journal
from normkit.errors import InputError
from normkit.files import lock, umask, write_bytes

# Hidden, as what is carried over never is: a model may bring a file of that name.
JOURNAL = ".journal.jsonl"
PART = ".part"

_SCHEMA_VERSION = 1
_ON = "finished files are kept: make room, then go on with --resume"
_AWAY = "nothing in it was touched: move it away, or choose another DST"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Staging:
    """The folder beside a destination, held by this process alone until it is closed or has become the destination.

    As a context manager it closes itself, and removes the folder if an error came before any file was finished.

    Args:
        destination: Of the fold; must not exist. Folders above it are made.
        source: Folder that it must not lie in; it gets the permissions of that.
        resume: Whether an interrupted fold may be there already.

    Attributes:
        folder: What to write into.
        finished: What an interrupted fold has left, by name, once `begin` has looked.

    Raises:
        InputError: If the destination exists or lies in the source, an interrupted fold is there and is not to be
            resumed, something else is there, another process works on it, or nothing can be written there.
    """

    def __init__(self, destination: Path, *, source: Path | None = None, resume: bool = False) -> None:
        self.destination = _usable(destination, source)
        self.folder = self.destination.with_name(f".{self.destination.name}.normkit-partial")
        self.finished: dict[str, FinishedFile] = {}
        self._journal: Journal | None = None
        self._guard = threading.Lock()
        self._make(source)
        self._lock: int | None = _locked(self.folder, self.destination)
        # A process may have been killed while it wrote its journal for the first time.
        self._is_new = all(path.name.startswith(f".{JOURNAL}.") for path in self.folder.iterdir())
        if self._is_new:
            return
        if read_journal(self.folder / JOURNAL)[0] is None:
            self.close()
            raise InputError(f"{_strange(self.folder)}, and not one with the journal of an interrupted fold; {_AWAY}")
        if not resume:
            self.close()
            raise InputError(f"an interrupted fold lies in {self.folder}; --resume finishes it, or delete it")

    def begin(self, identity: Mapping[str, Any]) -> Mapping[str, FinishedFile]:
        """Hold what is there against what is to be made, drop what is not finished, and go on writing the journal.

        Args:
            identity: What decides the bytes, as JSON values; the same for the same fold.

        Returns:
            The files that are finished already, by name.

        Raises:
            InputError: If something else is being made here; that is left as it is.
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
        with self._writing(self.folder / JOURNAL):
            _sweep(self.folder, {JOURNAL, *self.finished})
            # Anew, so that no torn line is left in the middle.
            self.write(JOURNAL, journal_bytes(head, self.finished.values()))
            self._journal = Journal(self.folder / JOURNAL)
        return self.finished

    def part(self, name: str) -> Path:
        """Where the file of weights of this name is to be written before `keep`."""
        return self.folder / f"{name}{PART}"

    def keep(self, file: FinishedFile) -> None:
        """Give a file that is whole, and on disk, its name, and enter it in the journal. Any thread may call it.

        Raises:
            InputError: If there is no room.
        """
        with self._guard, self._writing(self.folder / JOURNAL):
            self.part(file.name).replace(self.folder / file.name)
            _to_disk(self.folder)
            assert self._journal is not None, "begin opens the journal"
            self._journal.add(file)
            self.finished[file.name] = file

    def write(self, name: str, content: bytes, *, like: Path | None = None) -> Path:
        """Write a small file whole or not at all.

        Args:
            name: Of the file.
            content: All of it.
            like: A file of the source whose permissions it gets; without one it is private.

        Raises:
            InputError: If there is no room.
        """
        try:
            mode = 0o600 if like is None else permissions(like.stat())
            return write_bytes(self.folder / name, content, mode=mode)
        except InputError as error:
            # What it was made of says whether the disk is full.
            cause = error.__context__
            raise (no_room(self.folder / name, cause) if isinstance(cause, OSError) else error) from None

    def copy(self, file: Path, name: str) -> Path:
        """Carry a file over as it is, with its permissions; `name` may hold folders, those that the file lies in.

        Raises:
            InputError: If it cannot be read, or there is no room.
        """
        target = self.folder / name
        with self._writing(target):
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
        """Refuse to begin what cannot end.

        Args:
            size: Bytes that will be written.

        Raises:
            InputError: If fewer are free.
        """
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise InputError(
                f"the fold takes {_amount(size)} in {self.destination.parent}, where {_amount(free)} are free; "
                "make room, or choose a folder on another disk"
            )

    def finish(self) -> Path:
        """Make the folder the destination; nothing of the staging is left in it.

        Raises:
            InputError: If something has taken the destination's place meanwhile.
        """
        with self._writing(self.destination):
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            for inner in (path for path in self.folder.rglob("*") if path.is_dir()):
                _to_disk(inner)
            _to_disk(self.folder)
            if not _is_same(self._lock, self.folder):
                raise OSError(errno.ESTALE, f"{self.folder} is another folder by now")
            if os.path.lexists(self.destination):
                raise FileExistsError(errno.EEXIST, "it exists by now")
            self.folder.rename(self.destination)
            _to_disk(self.destination.parent)
            # Last: a folder without it would not be known for a fold that can be finished.
            (self.destination / JOURNAL).unlink(missing_ok=True)
        self.close()
        return self.destination

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        """The folder, closed when the block ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; remove it if nothing in it is worth keeping."""
        is_idle = not self.finished and (self._is_new or self._journal is not None)
        if is_idle and _is_same(self._lock, self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def _make(self, source: Path | None) -> None:
        parent = self.destination.parent
        mode = 0o777 if source is None else permissions(source.stat()) | stat.S_IRWXU
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir(mode=mode)
        except OSError as error:
            raise InputError(f"cannot write to {parent}: {error.strerror}; choose another folder") from None

    @contextmanager
    def _writing(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise no_room(file, error) from None


def no_room(file: Path, error: OSError) -> InputError:
    """What to say when a file cannot be written, be the disk full or not."""
    reason = os.strerror(errno.ENOSPC) if error.errno in _FULL else error.strerror
    return InputError(f"cannot write {file}: {reason}; {_ON}")


def permissions(status: os.stat_result) -> int:
    """Who may read, write and enter."""
    return stat.S_IMODE(status.st_mode) & 0o777


def new_file(path: Path) -> int:
    """A handle of a file that nobody else may read yet; a link in its place is not followed."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _usable(destination: Path, source: Path | None) -> Path:
    """The destination as an absolute path, not there yet, and outside the source."""
    resolved = destination.absolute()
    if os.path.lexists(resolved):
        raise InputError(f"expected a new folder to write to, {destination} exists; choose another name, or delete it")
    # Links above it are followed, so that none leads into the source.
    resolved = resolved.parent.resolve() / resolved.name
    if source is not None and resolved.is_relative_to(source.resolve()):
        raise InputError(f"{destination} lies in {source}, which is only read; choose a folder outside it")
    return resolved


def _locked(folder: Path, destination: Path) -> int | None:
    """A handle of the folder that no other process holds."""
    ended = InputError(f"another normkit fold to {destination} has just ended; look there, then try again")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ended from None
    except OSError as error:
        reason = "" if error.errno in (errno.ENOTDIR, errno.ELOOP) else f" that can be read ({error.strerror})"
        raise InputError(f"{_strange(folder)}, and not a folder of normkit's own{reason}; {_AWAY}") from None
    if not lock(handle):
        os.close(handle)
        raise InputError(f"another normkit fold writes to {destination}; wait for it, or choose another folder")
    # Another process may have ended meanwhile: with a result, or with an error and without the folder.
    is_there = _is_same(handle, folder)
    if os.path.lexists(destination) or not is_there:
        if is_there:
            with suppress(OSError):
                # Only an empty one goes.
                folder.rmdir()
        os.close(handle)
        raise ended
    return handle


def _is_same(handle: int | None, folder: Path) -> bool:
    """Whether a folder is still the one of a handle, and no link to it."""
    with suppress(OSError):
        return handle is not None and os.path.samestat(os.fstat(handle), folder.lstat())
    return False


def _strange(folder: Path) -> str:
    kind = "a link" if folder.is_symlink() else "a folder" if folder.is_dir() else "a file"
    return f"expected to write in {folder}, which is {kind}"


def _sweep(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
