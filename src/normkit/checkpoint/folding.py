"""`normkit fold`: a checkpoint on disk in, an exactly folded one out, with a certificate beside its weights.

The weights are streamed: no tensor is held whole, and each file is hashed on its way. Threads, not processes: reading,
writing, hashing and arithmetic all let other threads run meanwhile, and a second process would take the memory of a
second torch. What is written depends on the plan and the source alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from normkit.checkpoint.applying import MadeVector, vectors
from normkit.checkpoint.arithmetic import CHUNK, one_thread_an_operation
from normkit.checkpoint.build_model import reload_of
from normkit.checkpoint.certificate import Certificate, Written, certify
from normkit.checkpoint.given_files import GivenTensors
from normkit.checkpoint.migration import asked_scales
from normkit.checkpoint.model_folder import CERTIFICATE, CONFIG, INDEX, copied_files
from normkit.checkpoint.opening import OpenedFolder, folded_config, open_checkpoint
from normkit.checkpoint.orthogonal import BLOCK, TOGETHER, asked_matrices
from normkit.checkpoint.plan import FoldPlan, TensorEdit, VectorEdit
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.reader import TORCH, CheckpointSource
from normkit.checkpoint.rotated_rows import slab_rows
from normkit.checkpoint.shard import PIECE, FileLayout, Shard, index, lay_out, output_info
from normkit.checkpoint.staging import Staging
from normkit.errors import InputError, ModelError
from normkit.files import json_text
from normkit.text import shortened

Progress = Callable[[str, int, int], None]
T = TypeVar("T")

# Float64 arrays of one chunk that a thread may hold at once, with what the allocator keeps.
_ARRAYS = 8


def fold(
    source: Path | str,
    destination: Path | str,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    max_memory: int | None = None,
    threads: int = 1,
    resume: bool = False,
    for_training: bool = False,
    halvings: int = 0,
    fixed_eps: bool = False,
    seed: int | None = None,
    matrix: GivenTensors | None = None,
    scales: GivenTensors | None = None,
    alpha: float | None = None,
    powers_of_two: bool = False,
    progress: Progress | None = None,
) -> Certificate:
    """Fold a checkpoint of transformers, streamed: memory does not grow with it. The source is only read.

    Args:
        source: Its folder, with config.json and safetensors.
        destination: A folder that does not exist yet; it appears when everything is written, and not before.
        operations: As `normkit.fold` takes them.
        untie: Give a tied head a table of its own, if what is done needs one.
        dtype: Dtype of what is written: "same", or "float32".
        max_memory: Bytes that the process may occupy.
        threads: Threads that compute; the bits do not depend on their number.
        resume: Finish a fold that was interrupted; the bits are those of one that was not.
        for_training: The result will be trained further: dropout is then an error.
        halvings: For "scale", how often the residual stream is halved.
        fixed_eps: For "scale": accept norms whose eps cannot follow their input, as it stands in code; a row of
            variance v becomes shorter there, by (4^halvings - 1) eps / 2 v at most.
        seed: For "rotate", the seed of the random signs; None is 0.
        matrix: For "rotate", orthogonal matrices in place of a seed, as `normkit.fold` takes them.
        scales: For "migrate", a safetensors file, as `normkit.fold` takes it.
        alpha: For "migrate": the file holds the largest |x| of each channel, and this is SmoothQuant's alpha.
        powers_of_two: For "migrate": round each scale to a power of two.
        progress: Called with a stage, bytes done, and all bytes.

    Returns:
        What was done to each tensor and how far it is exact; also written beside the weights.

    Raises:
        ModelError: If the source is damaged, quantized, pickled, or of a family or class that is not declared; if
            transformers would load something else from it; or if it changes while it is folded.
        InputError: If nothing of what was asked can be done, or the destination cannot be written.
    """
    with open_checkpoint(Path(source).expanduser()) as opened:
        plan = make_plan(
            opened,
            operations=operations,
            untie=untie,
            dtype=dtype,
            for_training=for_training,
            halvings=halvings,
            fixed_eps=fixed_eps,
            seed=seed,
            matrix=None if matrix is None else asked_matrices(matrix),
            scales=asked_scales(scales, alpha=alpha, powers_of_two=powers_of_two),
        )
        return write_folded(
            plan,
            opened,
            Path(destination).expanduser(),
            untie=untie,
            dtype=dtype,
            max_memory=max_memory,
            threads=threads,
            resume=resume,
            progress=progress,
        )


def write_folded(
    plan: FoldPlan,
    opened: OpenedFolder,
    destination: Path,
    *,
    untie: bool,
    dtype: str,
    max_memory: int | None,
    threads: int,
    resume: bool,
    progress: Progress | None,
) -> Certificate:
    """Carry out the plan of an opened checkpoint; arguments, result and errors of `fold`."""
    if threads < 1:
        raise InputError(f"expected threads of 1 or more, got {threads}")
    plan.require_change()
    folder = opened.folder
    copied = list(copied_files(folder))
    config = folded_config(opened.config, plan)
    with Staging(destination, source=folder, resume=resume) as staging:
        # Before hours are spent on writing: will transformers load the result?
        reload = reload_of(config, {edit.name: output_info(edit, opened.source.tensors) for edit in plan.edits}, folder)
        if astray := (*reload.missing, *reload.unexpected, *reload.mismatched):
            raise ModelError(
                f"{reload.class_name} of transformers would not load all of the result ({shortened(astray)} missing, "
                "left over or of another shape), as in the source; give a checkpoint that it loads whole"
            )
        written = write_shards(plan, opened.source, staging, threads=threads, max_memory=max_memory, progress=progress)
        staging.write(CONFIG, json_text(config).encode(), like=folder / CONFIG)
        for name, path in copied:
            staging.copy(path, name)
        certificate = certify(plan, written, reload, opened, staging.folder, dtype=dtype, untie=untie)
        staging.write(CERTIFICATE, certificate.text().encode(), like=folder / CONFIG)
        opened.require_same({name for each in (copied, copied_files(folder)) for name, _ in each})
        staging.finish()
    return certificate


def write_shards(
    plan: FoldPlan,
    source: CheckpointSource,
    staging: Staging,
    *,
    threads: int = 1,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the weights of a folded checkpoint, and their index if the source has one, into a staging folder.

    Files that an interrupted fold has finished there are kept. Fewer threads are used if they do not fit into
    `max_memory` bytes.

    Raises:
        InputError: If something else is in the staging folder, there is no room, or too little memory is allowed.
        ModelError: If the source cannot be read to its end, changes meanwhile, or holds NaN, infinity or integers where
            folding computes.
    """
    layouts = lay_out(plan, source)
    # The plan and the files of the source decide the bytes that are written.
    identity = {
        "plan": hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest(),
        "source": {file.name: [state.size, state.mtime_ns] for file, state in source.states.items()},
    }
    finished = staging.begin(identity)
    pending = [layout for layout in layouts if layout.name not in finished]
    staging.require_room(sum(layout.size for layout in pending))
    threads = affordable(plan, source, threads, max_memory)
    with one_thread_an_operation():
        workers = Workers(threads, progress)
        made: Mapping[str, MadeVector] = {}
        if any(isinstance(edit, VectorEdit) for layout in pending for edit in layout.edits):
            made = vectors(plan, source, workers)
        workers.begin("writing", sum(layout.size - layout.starts[0] for layout in pending))
        with ExitStack() as opened:
            queue = _Queue(pending, source, staging, made, workers, opened)
            workers.map([queue.work] * threads)
        # Only now it is all on the disk.
        workers.end()
    if (document := index(layouts, source)) is not None:
        staging.write(INDEX, json_text(document).encode(), like=source.files[0].parent / INDEX)
    files = [staging.finished[layout.name] for layout in layouts]
    return Written(
        inputs={file.name: file.source_sha256 for file in files},
        outputs={file.name: file.sha256 for file in files},
        residuals={name: residual for file in files for name, residual in file.residuals.items()},
    )


def memory_needed(plan: FoldPlan, source: CheckpointSource, threads: int) -> int:
    """Bytes that the process occupies at most: what it does now, every vector, and the buffers of each thread."""
    widest = max((tensor.matrix[1] for tensor in source.tensors.values()), default=0)
    has_matrix = any(rotation.matrix is not None for edit in plan.edits for rotation in edit.rotations)
    each = _ARRAYS * 8 * max(TOGETHER if has_matrix else CHUNK, widest) + PIECE
    # Blocks of a matrix of a file, cut in three.
    if has_matrix:
        each += 4 * 8 * max(CHUNK, BLOCK * widest)
    # The numbers that a rotation along another axis than the last mixes are held in both dtypes.
    each += max(
        (
            slab_rows(edit, info := source.tensors[edit.source]) * info.matrix[1] * 2 * TORCH[edit.dtype].itemsize
            for edit in plan.edits
            if isinstance(edit, TensorEdit) and edit.rotations
        ),
        default=0,
    )
    vector_bytes = sum(3 * 8 * edit.size for edit in plan.edits if isinstance(edit, VectorEdit))
    return _occupied() + vector_bytes + threads * each


def affordable(plan: FoldPlan, source: CheckpointSource, threads: int, max_memory: int | None) -> int:
    """How many of the threads fit into the memory.

    Raises:
        InputError: If not even one fits; the message says how much memory is needed.
    """
    if max_memory is None:
        return threads
    fixed, first = (memory_needed(plan, source, count) for count in (0, 1))
    if first > max_memory:
        least = -(-first // 10**7) / 100
        raise InputError(f"this fold takes {least:.2f} GB of memory, {max_memory / 1e9:.2f} GB are allowed; allow more")
    return min(threads, (max_memory - fixed) // (first - fixed))


def _occupied() -> int:
    """Bytes of memory that the process takes now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Queue:
    """The tensors of all files: each thread makes those of a file of its own; when no file is left, it helps another.

    `opened` closes and removes what is unfinished at the end.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        source: CheckpointSource,
        staging: Staging,
        made: Mapping[str, MadeVector],
        workers: Workers,
        opened: ExitStack,
    ) -> None:
        self._layouts, self._source, self._staging, self._made = iter(layouts), source, staging, made
        self._workers, self._opened = workers, opened
        self._guard = threading.Lock()
        self._begun: list[tuple[Shard, Iterator[int]]] = []

    def work(self) -> None:
        """Make tensors until none is left."""
        own = None
        while (task := self._next(own)) is not None:
            own, position = task
            shard = own[0]
            shard.make(position)
            self._workers.on_disk(shard.flush)
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
        # A file that was kept has another name by then.
        self._opened.callback(part.unlink, missing_ok=True)
        shard = Shard(layout, part, self._source, self._made, self._workers.step)
        self._opened.callback(shard.close)
        self._begun.append((shard, iter(range(len(layout.edits)))))
        self._settle(shard)
        return self._begun[-1]

    def _settle(self, shard: Shard) -> None:
        if shard.settle():
            self._workers.on_disk(lambda: self._staging.keep(shard.finish()))


class Workers:
    """Threads that work on the tasks of one stage after another, count what they do, and all end at the first error.

    One more thread waits for the disk, so that the others need not.

    Args:
        threads: How many.
        progress: Called with the stage, what is done of it (bytes, or vectors), and all of it.
    """

    def __init__(self, threads: int = 1, progress: Progress | None = None) -> None:
        self.threads = threads
        self._progress = progress
        self.begin("", 0)
        self._error: BaseException | None = None
        self._is_stopped = False
        self._guard = threading.Lock()

    def begin(self, stage: str, total: int) -> None:
        """Count anew, for a stage with this much work."""
        self._stage, self._total = stage, total
        self._done, self._reported = 0, 0

    def step(self, count: int) -> None:
        """Count work that is done; raises if the work has ended elsewhere."""
        if self._is_stopped:
            raise _StoppedError
        with self._guard:
            self._done += count
            # A thousand times in all.
            if self._progress is not None and count and 1000 * self._done // self._total > self._reported:
                self._reported = 1000 * self._done // self._total
                self._progress(self._stage, self._done, self._total)

    def end(self) -> None:
        """Report the stage as done, if nothing has."""
        if self._progress is not None:
            self._progress(self._stage, self._total, self._total)

    def map(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the tasks, in their order; the first error of any thread ends all of them and is raised."""
        with (
            ThreadPoolExecutor(1, thread_name_prefix=f"{self._stage}-disk") as self._disk,
            ThreadPoolExecutor(self.threads, thread_name_prefix=self._stage) as pool,
        ):
            futures = [pool.submit(self._begin, task) for task in tasks]
            try:
                wait(futures)
            except BaseException:
                # An interrupt from the keyboard.
                self._is_stopped = True
                raise
        if self._error is not None:
            raise self._error
        return [future.result() for future in futures]  # type: ignore[misc]

    def on_disk(self, action: Callable[[], None]) -> None:
        """Have the thread for the disk do something, even after an error elsewhere; only tasks may call it."""
        self._disk.submit(self._run, action)

    def _begin(self, task: Callable[[], T]) -> T | None:
        return None if self._is_stopped else self._run(task)

    def _run(self, task: Callable[[], T]) -> T | None:
        try:
            return task()
        except _StoppedError:
            pass
        except BaseException as error:
            self._error, self._is_stopped = self._error or error, True
        return None


class _StoppedError(Exception):
    """Another thread has failed, so this one ends too."""
