"""The files of weights of a folded checkpoint: the place of each tensor in them, and how threads make and hash them.

The places are known before a matrix is read. Any thread makes any tensor of a `Shard`, and the hashes follow in order:
of the source's file and of the file that is written. Bytes that come in order are hashed as they pass. A thread that
makes a later tensor runs ahead of the hashes; each thread that has made one takes both hashes as far as they go, unless
another thread is doing so. These bytes are read again, from the cache of the file system.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.applying import MadeVector, contents
from normkit.checkpoint.matrices import Outcome
from normkit.checkpoint.model_folder import INDEX, WEIGHTS, read_exactly, read_json
from normkit.checkpoint.plan import MEASURED, Edit, FoldPlan, TensorEdit
from normkit.checkpoint.reader import TORCH, CheckpointSource, Located, TensorInfo, header_bytes
from normkit.checkpoint.staging import FinishedFile, new_file, writing
from normkit.files import umask

PIECE = 2**20
"""Bytes that are hashed at a time."""

# Bytes after which the disk is told to write: the end then need not wait for them.
_FLUSHED = 2**27
# The most bytes that the disk is asked to read ahead.
_AHEAD = 2**28


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file of weights of the output; it has the name of one of the source."""

    source: Path
    """The source's file of that name."""
    edits: tuple[Edit, ...]
    """Its tensors, in the order of their bytes."""
    header: bytes
    starts: tuple[int, ...]
    """First byte of each tensor, and the size of the file at the end."""
    read: tuple[int, ...]
    """For each tensor a byte of the source's file before which nothing is needed from there on, in the same order; and
    the size of that file at the end."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.source.name

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.starts[-1]


def lay_out(plan: FoldPlan, source: CheckpointSource) -> tuple[FileLayout, ...]:
    """The files of the output: each tensor stays in its file, created ones go into the last.

    Within a file the tensors keep their order, except that wide dtypes come before narrow ones: readers expect the
    numbers to be aligned.
    """
    tensors = source.tensors
    place = {name: position for position, name in enumerate(tensors)}
    held: dict[Path, list[Edit]] = {file: [] for file in source.files}
    for edit in sorted(plan.edits, key=lambda edit: place.get(edit.name, len(place))):
        held[tensors[edit.name].file if edit.name in tensors else source.files[-1]].append(edit)
    return tuple(_file(file, edits, source) for file, edits in held.items())


def output_info(edit: Edit, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    """Dtype and shape of the tensor that an edit makes of the source's tensors."""
    shape = tensors[edit.source].shape if isinstance(edit, TensorEdit) else (edit.size,)
    return TensorInfo(edit.dtype, shape)


def index(layouts: tuple[FileLayout, ...], source: CheckpointSource) -> dict[str, Any] | None:
    """The index of a sharded checkpoint; None for a single file. Other entries of the source's index are kept."""
    if source.files[0].name == WEIGHTS:
        return None
    document = read_json(source.files[0].parent / INDEX)
    infos = {edit.name: output_info(edit, source.tensors) for layout in layouts for edit in layout.edits}
    metadata = document.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(info.shape) for info in infos.values())
    metadata["total_size"] = sum(info.nbytes for info in infos.values())
    named = {edit.name: layout.name for layout in layouts for edit in layout.edits}
    return {**document, "metadata": metadata, "weight_map": dict(sorted(named.items()))}


def _file(file: Path, edits: list[Edit], source: CheckpointSource) -> FileLayout:
    infos = {edit.name: output_info(edit, source.tensors) for edit in edits}
    # Dtypes that torch does not have are packed, so one byte wide or less.
    edits = sorted(edits, key=lambda edit: -TORCH[edit.dtype].itemsize if edit.dtype in TORCH else -1)
    header = header_bytes({edit.name: infos[edit.name] for edit in edits}, source.metadata[file])
    starts = [len(header)]
    for edit in edits:
        starts.append(starts[-1] + infos[edit.name].nbytes)
    reached = file.stat().st_size
    read = [reached]
    for edit in reversed(edits):
        located = source.tensors.get(edit.name)
        if located is not None and located.file == file:
            reached = min(reached, located.start)
        read.append(reached)
    return FileLayout(source=file, edits=tuple(edits), header=header, starts=tuple(starts), read=tuple(reversed(read)))


class Shard:
    """A file of weights that is being written; it is created anew.

    `step` is called with the number of bytes just written, or 0 for bytes hashed, and raises to end the work.

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
        self._source = _HashedReads(source, layout.source, self._read)
        try:
            with writing(self._path):
                self._written = _Hashed(path, new_file(path))
                self._written.write(layout.header, 0)
        except BaseException:
            self._read.close()
            raise

    def make(self, position: int) -> None:
        """Make one of its tensors and write it.

        Raises:
            InputError: If there is no room.
            ModelError: If its source cannot be read, or is not finite.
        """
        edit, offset = self._layout.edits[position], self._layout.starts[position]
        outcome = Outcome()
        if position + 1 < len(self._layout.edits):
            # Have the disk read the bytes of the next tensor ahead.
            start, stop = self._layout.read[position + 1 : position + 3]
            os.posix_fadvise(self._read.descriptor, start, min(stop - start, _AHEAD), os.POSIX_FADV_WILLNEED)
        for chunk in contents(edit, self._source, self._vectors, outcome):
            content = _bytes(chunk)
            with writing(self._path):
                self._written.write(content, offset)
            self._written.pass_by(content, offset)
            offset += content.nbytes
            self._step(content.nbytes)
        assert offset == self._layout.starts[position + 1], f"{edit.name} has another size than its header says"
        with self._guard:
            if edit.relation in MEASURED:
                self._residuals[edit.name] = outcome.residual
            self._unflushed += offset - self._layout.starts[position]
            self._is_made[position] = True
            while self._unmade < len(self._is_made) and self._is_made[self._unmade]:
                self._unmade += 1

    def settle(self) -> bool:
        """Take the hashes as far as they go; True for the one call that finds both complete.

        Raises:
            ModelError: If the source's file cannot be read to its end.
        """
        both = ((self._read, self._layout.read), (self._written, self._layout.starts))
        for file, ends in both:
            while file.reached < ends[self._unmade]:
                if not file.guard.acquire(blocking=False):
                    # The thread holding the guard checks again after releasing it.
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
        """Have the disk write the bytes since the last flush, if they are many; waits for it.

        Raises:
            InputError: If there is no room.
        """
        with self._guard:
            if self._unflushed < _FLUSHED or self._written.descriptor < 0:
                return
            self._unflushed = 0
        with writing(self._path):
            os.fdatasync(self._written.descriptor)

    def finish(self) -> FinishedFile:
        """Bring the file to disk; the entry for the journal.

        Raises:
            InputError: If there is no room.
            ModelError: If the source's file has changed since.
        """
        with writing(self._path):
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


class _Hashed:
    """An open file and the hash of its first `reached` bytes; a thread that continues the hash holds the guard."""

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

    def pass_by(self, content: memoryview, offset: int) -> None:
        """Continue the hash with bytes in memory, if they come next and no other thread holds the guard."""
        if self.reached == offset and self.guard.acquire(blocking=False):
            try:
                if self.reached == offset:
                    self._hash.update(content)
                    self.reached += content.nbytes
            finally:
                self.guard.release()

    def take(self, end: int, step: Callable[[int], None]) -> None:
        """Continue the hash up to a byte, with bytes that are read again."""
        piece = memoryview(bytearray(min(PIECE, end - self.reached)))
        while self.reached < end:
            part = piece[: end - self.reached]
            read_exactly(self.descriptor, part, self.reached, self._path)
            self._hash.update(part)
            self.reached += part.nbytes
            step(0)

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _HashedReads:
    """A checkpoint of which the bytes of one file are hashed as they are read."""

    def __init__(self, source: CheckpointSource, file: Path, hashed: _Hashed) -> None:
        self.tensors: Mapping[str, Located] = source.tensors
        self._source, self._file, self._hashed = source, file, hashed

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._source.rows(name, start, stop)
        tensor = self.tensors[name]
        if tensor.file == self._file:
            self._hashed.pass_by(_bytes(rows), tensor.start + tensor.bytes_of(start))
        return rows


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
