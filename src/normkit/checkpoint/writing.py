"""The files of a folded checkpoint, streamed: no tensor is held whole, and each file is hashed on its way.

Threads, not processes: reading, writing, hashing and arithmetic all let other threads run meanwhile, and a second
process would take the memory of a second torch. What is written depends on the plan and the source alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.checkpoint.applying import MadeVector, Progress, vectors
from normkit.checkpoint.arithmetic import CHUNK, one_thread_an_operation
from normkit.checkpoint.layout import FileLayout, index, lay_out
from normkit.checkpoint.plan import Plan, VectorEdit
from normkit.checkpoint.shard import PIECE, Shard
from normkit.checkpoint.source import CheckpointSource
from normkit.checkpoint.staging import Staging
from normkit.checkpoint.weights import INDEX
from normkit.errors import InputError
from normkit.files import json_text

# Float64 arrays of one chunk that a thread may hold at once, with what the allocator keeps.
_ARRAYS = 8


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was read and written.

    Attributes:
        inputs: File of weights of the source -> its SHA-256.
        outputs: The same of the output.
        residuals: Output tensor that is a sum -> how far rounding left it from its definition, as `MadeVector` and
            `Outcome` say.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]
    residuals: dict[str, float]


def write_shards(
    plan: Plan,
    source: CheckpointSource,
    staging: Staging,
    *,
    threads: int = 1,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the weights of a folded checkpoint, and their index where the source has one, into a staging folder.

    Args:
        plan: What becomes of each tensor.
        source: The checkpoint; only read.
        staging: Where to; files that an interrupted fold has finished there are kept.
        threads: Threads that compute.
        max_memory: Bytes that the process may occupy; threads that do not fit are left out.
        progress: Called with a stage, bytes done, and all bytes.

    Raises:
        InputError: If something else lies in the staging folder, there is no room, or too little memory is allowed.
        ModelError: If the source cannot be read to its end, changes meanwhile, or holds what is not computed with.
    """
    layouts = lay_out(plan, source)
    finished = staging.begin(_identity(plan, source))
    pending = [layout for layout in layouts if layout.name not in finished]
    staging.require_room(sum(layout.size for layout in pending))
    threads = affordable(plan, source, threads, max_memory)
    with one_thread_an_operation():
        made: Mapping[str, MadeVector] = {}
        if any(isinstance(edit, VectorEdit) for layout in pending for edit in layout.edits):
            made = vectors(plan, source, threads=threads, progress=progress)
        _Crew(pending, source, staging, made, progress).work(threads)
    if (document := index(layouts, source)) is not None:
        staging.write(INDEX, json_text(document).encode(), like=source.files[0].parent / INDEX)
    files = [staging.finished[layout.name] for layout in layouts]
    return Written(
        inputs={file.name: file.source_sha256 for file in files},
        outputs={file.name: file.sha256 for file in files},
        residuals={name: residual for file in files for name, residual in file.residuals.items()},
    )


def memory_needed(plan: Plan, source: CheckpointSource, threads: int) -> int:
    """Bytes that the process occupies at most: what it does now, every vector, and the buffers of each thread."""
    widest = max((tensor.matrix[1] for tensor in source.tensors.values()), default=0)
    each = _ARRAYS * 8 * max(CHUNK, widest) + PIECE
    vector_bytes = sum(3 * 8 * edit.size for edit in plan.edits if isinstance(edit, VectorEdit))
    return _occupied() + vector_bytes + threads * each


def affordable(plan: Plan, source: CheckpointSource, threads: int, max_memory: int | None) -> int:
    """How many threads fit into the memory, of those asked for.

    Raises:
        InputError: If not even one does; with the least that would do.
    """
    if max_memory is None:
        return threads
    fixed, first = (memory_needed(plan, source, count) for count in (0, 1))
    if first > max_memory:
        least = -(-first // 10**7) / 100
        raise InputError(f"this fold takes {least:.2f} GB of memory, {max_memory / 1e9:.2f} GB are allowed; allow more")
    return min(threads, (max_memory - fixed) // (first - fixed))


class _StoppedError(Exception):
    """Another thread has failed, so this one ends too."""


class _Crew:
    """Threads that make the tensors of all files: each has a file of its own, and where none is left helps another.

    One more thread waits for the disk, so that no other has to.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        source: CheckpointSource,
        staging: Staging,
        made: Mapping[str, MadeVector],
        progress: Progress | None,
    ) -> None:
        self._layouts, self._source, self._staging, self._made = iter(layouts), source, staging, made
        self._progress = progress
        self._done, self._all = 0, sum(layout.size - layout.starts[0] for layout in layouts)
        self._guard, self._count = threading.Lock(), threading.Lock()
        self._begun: list[tuple[Shard, Iterator[int]]] = []
        self._error: BaseException | None = None
        self._is_stopped = False
        self._opened = ExitStack()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="fold-disk")

    def work(self, threads: int) -> None:
        """Make all of it; the first error of any thread ends it."""
        with self._opened, self._disk, ThreadPoolExecutor(threads, thread_name_prefix="fold") as pool:
            try:
                wait([pool.submit(self._try, self._take_turns) for _ in range(threads)])
            except BaseException:
                # An interrupt from the keyboard.
                self._is_stopped = True
                raise
        if self._error is not None:
            raise self._error
        if self._progress is not None:
            # Only now it is all on the disk.
            self._progress("writing", self._all, self._all)

    def _try(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except _StoppedError:
            pass
        except BaseException as error:
            self._error, self._is_stopped = self._error or error, True

    def _take_turns(self) -> None:
        own = None
        while (task := self._next(own)) is not None:
            own, position = task
            shard = own[0]
            shard.make(position)
            self._disk.submit(self._try, shard.flush)
            self._settle(shard)

    def _next(self, own: tuple[Shard, Iterator[int]] | None) -> tuple[tuple[Shard, Iterator[int]], int] | None:
        """The next tensor of a thread's own file, of a new one, or of another thread's."""
        with self._guard:
            if own is not None and (position := next(own[1], None)) is not None:
                return own, position
            for layout in self._layouts:
                own = self._begin(layout)
                if (position := next(own[1], None)) is not None:
                    return own, position
            for other in self._begun:
                if (position := next(other[1], None)) is not None:
                    return other, position
        return None

    def _begin(self, layout: FileLayout) -> tuple[Shard, Iterator[int]]:
        part = self._staging.part(layout.name)
        # Once the file is kept there is nothing under this name.
        self._opened.callback(part.unlink, missing_ok=True)
        shard = Shard(layout, part, self._source, self._made, self._step)
        self._opened.callback(shard.close)
        self._begun.append((shard, iter(range(len(layout.edits)))))
        self._settle(shard)
        return self._begun[-1]

    def _settle(self, shard: Shard) -> None:
        if shard.settle():
            self._disk.submit(self._try, self._keep, shard)

    def _keep(self, shard: Shard) -> None:
        self._staging.keep(shard.finish())

    def _step(self, count: int) -> None:
        if self._is_stopped:
            raise _StoppedError
        with self._count:
            before, self._done = self._done, self._done + count
            if self._progress is not None and 1000 * before // self._all < 1000 * self._done // self._all:
                self._progress("writing", self._done, self._all)


def _identity(plan: Plan, source: CheckpointSource) -> dict[str, Any]:
    """What decides the bytes that are written: what is asked for, and the files that it is asked of."""
    text = json.dumps(plan.to_json(), sort_keys=True)
    return {
        "plan": hashlib.sha256(text.encode()).hexdigest(),
        "source": {file.name: [state.size, state.mtime_ns] for file, state in source.states.items()},
    }


def _occupied() -> int:
    """Bytes of memory that the process takes now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
