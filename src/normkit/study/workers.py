"""The processes that measure the arms of a study: this one, or several others that end when it does.

A run of one arm with one seed computes nothing that depends on other runs, so several processes with few threads each
give the same bits as one process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType

import torch

from normkit.errors import InputError
from normkit.study.arm_run import ArmRun, Outcome, in_a_line

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
            with _threads_and_random_state(self.threads):
                # If one of several ranks fails, the others wait for it: it must end, so that they end too.
                outcome = (run.attempt if run.ranks.size == 1 else run.perform)(partial(report, run))
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
        with _interrupts_blocked():
            self._process.start()
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
            return Outcome(error=_ending(self._process.exitcode or 0))
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


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed, as the system does where memory runs out; fewer --jobs need less"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"its process {how}"


@contextmanager
def _threads_and_random_state(threads: int) -> Iterator[None]:
    """Set the number of threads inside; restore it and torch's random state afterwards."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, so that a process started inside never receives it; this process receives it afterwards."""
    # Started only inside, the tracker would unblock interrupts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
