"""Threads that do many things at once, count their bytes together, and all end at the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class Workers:
    """Threads for work on files, and one more that waits for the disk so that the others need not.

    Args:
        threads: How many.
        stage: Name of their work.
        progress: Called with the stage, the bytes done, and all bytes.
    """

    def __init__(self, threads: int, stage: str, progress: Progress | None) -> None:
        self.threads, self.total = threads, 0
        self._stage, self._progress = stage, progress
        self._done, self._reported = 0, 0
        self._error: BaseException | None = None
        self._is_stopped = False
        self._guard = threading.Lock()

    def step(self, count: int) -> None:
        """Count bytes that are done, of `total`; raises if the work has ended elsewhere."""
        if self._is_stopped:
            raise _StoppedError
        with self._guard:
            self._done += count
            # A thousand times in all.
            if self._progress is not None and count and 1000 * self._done // self.total > self._reported:
                self._reported = 1000 * self._done // self.total
                self._progress(self._stage, self._done, self.total)

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
