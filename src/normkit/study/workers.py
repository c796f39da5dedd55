"""Runs of arms, each with one seed, and the processes that measure them: this one, or others that end when it does.

A run computes nothing that depends on other runs, so several processes with few threads each give the same bits as one
process.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from normkit.errors import InputError, NormkitError
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.ranks import ALONE, Ranks
from normkit.study.result import Arm, plain
from normkit.study.statistics import Measurement

# At most one report of progress in so many seconds.
_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm with one seed; it can be sent to another process."""

    measure: Callable[[ArmContext, Arm], Measurement]
    """`Study.measure`."""
    arm: Arm
    seed: int
    settings: Settings
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    checkpoints: Path | None = None
    """Folder for the checkpoints of its training runs; None saves none."""
    curves: Path | None = None
    """Folder for the curves of its finished training runs; None leaves none."""
    ranks: Ranks = ALONE
    """The processes that share each batch."""

    def perform(self, report: Callable[[float], None]) -> Outcome:
        """Measure the arm, with torch's random numbers from the seed; `report` is called with the share that is done.

        The measurement is passed on as JSON, so that it equals the one that is read back later.
        """
        start, last = time.perf_counter(), -math.inf

        def seldom(share: float) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= _BETWEEN_REPORTS:
                last = now
                report(float(share))

        torch.manual_seed(self.seed)
        context = ArmContext(
            settings=self.settings,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
            report=seldom,
            checkpoints=self.checkpoints,
            curves=self.curves,
            ranks=self.ranks,
        )
        text = json.dumps(plain(self.measure(context, self.arm), lambda _: None), allow_nan=False)
        return Outcome(text=text, seconds=time.perf_counter() - start)

    def attempt(self, report: Callable[[float], None]) -> Outcome:
        """Measure the arm; any exception becomes the outcome's error."""
        try:
            return self.perform(report)
        except Exception as error:
            if os.environ.get("NORMKIT_TRACEBACK"):
                traceback.print_exc()
            return Outcome(error=in_a_line(error))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurement of an arm, or the reason that there is none."""

    text: str = ""
    """The measurement as JSON; empty if there is none."""
    seconds: float = 0.0
    error: str = ""
    """Why there is no measurement, in one line."""


def in_a_line(error: Exception) -> str:
    """The line that tells a user about an exception."""
    if isinstance(error, NormkitError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory ({first or 'no more is known'}); choose smaller settings, or fewer --jobs"
    return f"this is a bug of normkit: {type(error).__name__}: {first}; NORMKIT_TRACEBACK=1 shows where"


Report = Callable[[ArmRun, float], None]
"""Called with a run and the share of it that is done."""


class Crew:
    """Measures runs of arms, several at a time if it has several jobs; its processes are kept for the next study.

    Args:
        jobs: Runs at a time; a single one is measured in this process.
        threads: Torch's, for each run.
    """

    def __init__(self, jobs: int = 1, threads: int = 1) -> None:
        self.jobs, self.threads = jobs, threads
        self._idle: list[_Worker] = []

    def __enter__(self) -> Crew:
        """Begin; processes are started when there is work for them."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().stop()

    def perform(self, runs: Sequence[ArmRun], report: Report) -> Generator[tuple[ArmRun, Outcome]]:
        """Each run with its outcome, as they end; a run that fails does not stop the others.

        Args:
            runs: In the order in which they are begun.
            report: Called with a run and the share of it that is done.

        Raises:
            InputError: If a run cannot be sent to another process.
            LostRankError: If another process of the run's ranks has ended.
        """
        return self._here(runs, report) if self.jobs == 1 else self._beside(runs, report)

    def _here(self, runs: Sequence[ArmRun], report: Report) -> Generator[tuple[ArmRun, Outcome]]:
        for run in runs:
            threads = torch.get_num_threads()
            with torch.random.fork_rng(devices=[]):
                torch.set_num_threads(self.threads)
                try:
                    # If one of several ranks fails, the others wait for it: it must end, so that they end too.
                    outcome = (run.attempt if run.ranks.size == 1 else run.perform)(partial(report, run))
                finally:
                    torch.set_num_threads(threads)
            yield run, outcome

    def _beside(self, runs: Sequence[ArmRun], report: Report) -> Generator[tuple[ArmRun, Outcome]]:
        waiting = deque(runs)
        busy: dict[Connection, tuple[_Worker, ArmRun]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.jobs:
                    worker = self._idle.pop() if self._idle else _Worker(self.threads)
                    busy[worker.connection] = worker, waiting[0]
                    worker.send(waiting.popleft())
                for ready in connection.wait(list(busy)):
                    assert isinstance(ready, Connection)
                    worker, run = busy[ready]
                    message = worker.receive()
                    if isinstance(message, float):
                        report(run, message)
                        continue
                    del busy[ready]
                    if worker.is_alive:
                        self._idle.append(worker)
                    yield run, message
        finally:
            for worker, _ in busy.values():
                worker.stop()


class _Worker:
    """A process that measures one run after another, and the connection to it."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(theirs, threads), daemon=True)
        # Ctrl-C is blocked while it starts, so that it never receives one. The tracker would unblock it if it started
        # only then.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.is_alive = True

    def send(self, run: ArmRun) -> None:
        """Begin a run.

        Raises:
            InputError: If it cannot be pickled.
        """
        try:
            # A process that has ended is noticed when its outcome is received.
            with suppress(BrokenPipeError):
                self.connection.send(run)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"an arm cannot be sent to another process ({error}); put the study's functions in a module, or "
                "choose one job"
            ) from None

    def receive(self) -> float | Outcome:
        """The share that is done, or the outcome of the run; also if the process has ended."""
        try:
            message: float | Outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.is_alive = False
            self.stop()
            code = self._process.exitcode or 0
            if code == -signal.SIGKILL:
                why = "was killed, as the system does where memory runs out; fewer --jobs need less"
            else:
                why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return Outcome(error=f"its process {why}")
        return message

    def stop(self) -> None:
        """End the process at once."""
        self._process.terminate()
        self._process.join()
        self.connection.close()


def _work(line: Connection, threads: int) -> None:
    """Receive runs, perform them and send their outcomes, until the other end of the connection is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            try:
                run: ArmRun = line.recv()
            except (ImportError, AttributeError) as error:
                # The run names a function that this process does not find.
                line.send(Outcome(error=in_a_line(error)))
            else:
                line.send(run.attempt(line.send))


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
