"""Who measures the arms of a study: this process, or several beside it that end when it does.

Each arm with each seed is a trial of its own. Processes with few threads each, as many as there are cores, give the
same bits as one after another: nothing that a trial computes depends on what is computed beside or before it.
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
from normkit.study.trial import Outcome, Trial, in_a_line

Tell = Callable[[Trial, float], None]
"""Called with a trial and the share of it that is done."""


class Crew:
    """Measures trials, several at a time where it has several jobs; the processes stay for the next study.

    Args:
        jobs: Trials at a time; one is measured in this process.
        threads: Torch's, of each trial.
    """

    def __init__(self, jobs: int = 1, threads: int = 1) -> None:
        self.jobs, self.threads = jobs, threads
        self._idle: list[_Worker] = []

    def __enter__(self) -> Crew:
        """Begin; a process is started when there is work for it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().stop()

    def perform(self, trials: Sequence[Trial], tell: Tell) -> Generator[tuple[Trial, Outcome]]:
        """Each trial with what became of it, as they end; a trial that fails is no reason for others to.

        Args:
            trials: In the order in which they are begun.
            tell: Called with a trial and the share of it that is done.

        Raises:
            InputError: If a trial cannot be sent to another process.
            LostRankError: If another process of the trial's ranks has ended.
        """
        return self._here(trials, tell) if self.jobs == 1 else self._beside(trials, tell)

    def _here(self, trials: Sequence[Trial], tell: Tell) -> Generator[tuple[Trial, Outcome]]:
        for trial in trials:
            with _settled(self.threads):
                # Where one of several processes fails, the others wait for it: it must end, and they with it.
                outcome = (trial.attempt if trial.ranks.size == 1 else trial.perform)(partial(tell, trial))
            yield trial, outcome

    def _beside(self, trials: Sequence[Trial], tell: Tell) -> Generator[tuple[Trial, Outcome]]:
        waiting = deque(trials)
        busy: dict[Connection, tuple[_Worker, Trial]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.jobs:
                    worker = self._idle.pop() if self._idle else _Worker(self.threads)
                    busy[worker.connection] = worker, waiting[0]
                    worker.send(waiting.popleft())
                for ready in connection.wait(list(busy)):
                    assert isinstance(ready, Connection)
                    worker, trial = busy[ready]
                    told = worker.receive()
                    if isinstance(told, float):
                        tell(trial, told)
                        continue
                    del busy[ready]
                    if worker.is_alive:
                        self._idle.append(worker)
                    yield trial, told
        finally:
            for worker, _ in busy.values():
                worker.stop()


class _Worker:
    """A process that measures one trial after another, and a line to it."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(theirs, threads), daemon=True)
        with _interrupts_held():
            self._process.start()
        theirs.close()
        self.is_alive = True

    def send(self, trial: Trial) -> None:
        """Begin a trial.

        Raises:
            InputError: If what it is made of has no name by which another process finds it.
        """
        try:
            # A process that has ended is noticed when its outcome is received.
            with suppress(BrokenPipeError):
                self.connection.send(trial)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"an arm cannot be sent to another process ({error}); put the study's functions in a module, or "
                "choose one job"
            ) from None

    def receive(self) -> float | Outcome:
        """The share that is done, or what became of the trial, also where the process has ended with it."""
        try:
            told: float | Outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.is_alive = False
            self.stop()
            return Outcome(error=_ending(self._process.exitcode or 0))
        return told

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.terminate()
        self._process.join()
        self.connection.close()


def _work(line: Connection, threads: int) -> None:
    """What a process does: wait for a trial, perform it, say what became of it, until nobody is there to be told."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            try:
                trial: Trial = line.recv()
            except (ImportError, AttributeError) as error:
                # What was sent names a function that is not found here.
                line.send(Outcome(error=in_a_line(error)))
            else:
                line.send(trial.attempt(line.send))


def _end_with_parent() -> None:
    """End this process at once when the one that started it is no more, even if that was killed."""
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
def _settled(threads: int) -> Iterator[None]:
    """So many threads inside; outside, threads and random numbers as they were."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """What is started inside never sees Ctrl-C, which is for this process alone; it is not lost meanwhile."""
    # Where it is started only now, it lets interrupts through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
