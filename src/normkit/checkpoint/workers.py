"""Threads that do many things at once, count their bytes together, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from normkit.checkpoint.applying import Progress

T = TypeVar("T")


class Workers:
    """Threads for work on files.

    Args:
        threads: How many.
        stage: What their work is called.
        progress: Called with the stage, the bytes done, and all bytes.

    Attributes:
        threads: How many.
        total: All bytes; to be set before the first are done.
    """

    def __init__(self, threads: int, stage: str, progress: Progress | None) -> None:
        self.threads, self.total = threads, 0
        self._stage, self._progress = stage, progress
        self._done, self._told, self._is_stopped = 0, 0, False
        self._guard = threading.Lock()

    def step(self, count: int) -> None:
        """So many bytes are done; raises where the work has ended elsewhere."""
        if self._is_stopped:
            raise _StoppedError
        with self._guard:
            self._done += count
            # A thousand times in all.
            if self._progress is not None and 1000 * self._done // self.total > self._told:
                self._told = 1000 * self._done // self.total
                self._progress(self._stage, self._done, self.total)

    def map(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What each of them returns; the first error ends them all."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix=self._stage) as pool:
            futures = [pool.submit(task) for task in tasks]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                errors = [future.exception() for future in futures if future.done()]
                for error in errors:
                    if error is not None:
                        raise error
                return [future.result() for future in futures]
            except BaseException:
                # An interrupt from the keyboard comes out of the wait.
                self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class _StoppedError(Exception):
    """Another thread has failed, so this one ends too."""
