"""One file of weights in the making: any thread makes any of its tensors, and the hashes follow in order.

Bytes that come in order are hashed as they pass. A thread that makes a later tensor runs ahead of the hashes; whoever
has made one takes both, of the file that is read and of the file that is written, as far as they go, unless another
thread is at it. These bytes come back from the cache of the file system, where they have just been.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from normkit.checkpoint.applying import MadeVector, Outcome, contents
from normkit.checkpoint.header import Located
from normkit.checkpoint.journal import FinishedFile
from normkit.checkpoint.layout import FileLayout
from normkit.checkpoint.source import CheckpointSource
from normkit.checkpoint.staging import new_file, no_room
from normkit.errors import ModelError
from normkit.files import umask

PIECE = 2**20
"""Bytes that are hashed at a time."""

# Bytes after which the disk is put to work: what it has by then need not be waited for at the end.
_FLUSHED = 2**27
# Bytes that the disk is asked for ahead of their turn, at most.
_AHEAD = 2**28


class Shard:
    """A file that is being written.

    Args:
        layout: What goes where.
        path: Where to; made anew.
        source: What it is made from.
        vectors: Gains and biases, made already.
        step: Called with the number of bytes just written or hashed; raises to end the work.

    Raises:
        InputError: If the file cannot be made.
    """

    def __init__(
        self,
        layout: FileLayout,
        path: Path,
        source: CheckpointSource,
        vectors: Mapping[str, MadeVector],
        step: Callable[[int], None],
    ) -> None:
        self._layout, self._path = layout, path
        self._vectors, self._step = vectors, step
        self._guard = threading.Lock()
        self._residuals: dict[str, float] = {}
        self._is_made = [False] * len(layout.edits)
        self._unmade = 0
        self._unflushed = 0
        self._is_taken = False
        self._opened = source
        self._read = _Hashed(layout.source, source.descriptor(layout.source))
        self._source = _Overheard(source, layout.source, self._read)
        try:
            with self._writing():
                self._written = _Hashed(path, new_file(path))
                self._written.write(layout.header, 0)
        except BaseException:
            self._read.close()
            raise

    def make(self, position: int) -> None:
        """Make one of its tensors and write it.

        Raises:
            InputError: If there is no room.
            ModelError: If its source cannot be read, or holds what cannot be computed with.
        """
        edit, offset = self._layout.edits[position], self._layout.starts[position]
        outcome = Outcome()
        self._ask_for(position + 1)
        for chunk in contents(edit, self._source, self._vectors, outcome):
            content = _bytes(chunk)
            with self._writing():
                self._written.write(content, offset)
            self._written.hear(content, offset)
            offset += content.nbytes
            self._step(content.nbytes)
        assert offset == self._layout.starts[position + 1], f"{edit.name} has another size than its header says"
        with self._guard:
            if edit.relation == "sum":
                self._residuals[edit.name] = outcome.residual
            self._unflushed += offset - self._layout.starts[position]
            self._is_made[position] = True
            while self._unmade < len(self._is_made) and self._is_made[self._unmade]:
                self._unmade += 1

    def settle(self) -> bool:
        """Take the hashes as far as they go; True for the one call that finds them taken to the end.

        Raises:
            ModelError: If the source's file cannot be read to its end.
        """
        both = ((self._read, self._layout.read), (self._written, self._layout.starts))
        for file, ends in both:
            while file.reached < ends[self._unmade]:
                if not file.guard.acquire(blocking=False):
                    # Who holds it looks again how far it goes, after letting go.
                    break
                try:
                    file.take(ends[self._unmade], self._step)
                finally:
                    file.guard.release()
        with self._guard:
            is_first = not self._is_taken and all(file.reached == ends[-1] for file, ends in both)
            self._is_taken |= is_first
        return is_first

    def flush(self) -> None:
        """Have the disk write what has come together since the last time, if it is much; waits for it.

        Raises:
            InputError: If there is no room.
        """
        with self._guard:
            if self._unflushed < _FLUSHED or self._written.descriptor < 0:
                return
            self._unflushed = 0
        with self._writing():
            os.fdatasync(self._written.descriptor)

    def finish(self) -> FinishedFile:
        """Bring it to disk; the entry for the journal.

        Raises:
            InputError: If there is no room.
            ModelError: If the source's file has changed since.
        """
        with self._writing():
            os.fchmod(self._written.descriptor, self._opened.modes[self._layout.source] & ~umask())
            os.fsync(self._written.descriptor)
        self._opened.require_same(self._layout.source)
        self.close()
        return FinishedFile(
            name=self._layout.name,
            source_sha256=self._read.sha256(),
            sha256=self._written.sha256(),
            size=self._layout.size,
            residuals=dict(sorted(self._residuals.items())),
        )

    def close(self) -> None:
        """Close both files; nothing more can be made."""
        self._read.close()
        self._written.close()

    def _ask_for(self, position: int) -> None:
        """Have the disk read what a tensor is made from, so that it is there when its turn comes."""
        if position < len(self._layout.edits):
            start, stop = self._layout.read[position : position + 2]
            os.posix_fadvise(self._read.descriptor, start, min(stop - start, _AHEAD), os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise no_room(self._path, error) from None


class _Hashed:
    """An open file and the hash of its first bytes.

    Attributes:
        descriptor: Of the file.
        reached: How many bytes the hash is of.
        guard: Held by the thread that goes on with it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.descriptor = descriptor
        self.reached = 0
        self.guard = threading.Lock()
        self._path = path
        self._hash = hashlib.sha256()

    def write(self, content: bytes | memoryview, offset: int) -> None:
        left = memoryview(content)
        while left.nbytes:
            count = os.pwrite(self.descriptor, left, offset)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left, offset = left[count:], offset + count

    def hear(self, content: memoryview, offset: int) -> None:
        """Go on with bytes that are at hand, if it is their turn and no other thread is at it."""
        if self.reached == offset and self.guard.acquire(blocking=False):
            try:
                if self.reached == offset:
                    self._hash.update(content)
                    self.reached += content.nbytes
            finally:
                self.guard.release()

    def take(self, end: int, step: Callable[[int], None]) -> None:
        """Go on up to a byte that is known to be there."""
        piece = memoryview(bytearray(min(PIECE, end - self.reached)))
        while self.reached < end:
            try:
                count = os.preadv(self.descriptor, [piece[: end - self.reached]], self.reached)
            except OSError as error:
                raise ModelError(f"cannot read {self._path}: {error.strerror}; look at the disk") from None
            if count == 0:
                raise ModelError(f"{self._path} became shorter while it was read; leave it alone and start again")
            self._hash.update(piece[:count])
            self.reached += count
            step(0)

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Overheard:
    """A checkpoint whose bytes are hashed as they are read, where they lie in one file of it."""

    def __init__(self, source: CheckpointSource, file: Path, hashed: _Hashed) -> None:
        self.tensors: Mapping[str, Located] = source.tensors
        self._source, self._file, self._hashed = source, file, hashed

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._source.rows(name, start, stop)
        tensor = self.tensors[name]
        if tensor.file == self._file:
            self._hashed.hear(_bytes(rows), tensor.start + tensor.bytes_of(start))
        return rows


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
