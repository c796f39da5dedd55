"""A progress bar over several long tasks of known length, with the time that is left at the pace so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Report = Callable[[str, float, float], None]
"""Called with words, the work that is done, and all the work of a task, in any unit."""


@contextmanager
def paced(lengths: Mapping[str, float], *, shown: bool) -> Iterator[Callable[[str], Report]]:
    """A bar on stderr that leaves nothing behind, or one that says nothing.

    Args:
        lengths: Name of each task -> its expected length, in any unit.
        shown: Whether there is one.

    Yields:
        From the name of the task that begins to what it reports to.
    """
    if not shown:
        yield lambda _name: lambda _words, _done, _work: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    pace = Pace(lengths)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=pace.length, left="")

        def begin(name: str) -> Report:
            pace.begin(name)

            def report(words: str, done: float, work: float) -> None:
                pace.reach(done / work if work else 1.0)
                bar.update(task, description=f"{name}: {words}", completed=pace.reached, left=pace.left())

            return report

        yield begin


class Pace:
    """How long the rest takes. What a task begins with was there before, and tells nothing of the pace.

    Args:
        lengths: Name of each task -> its expected length.

    Attributes:
        length: Of all tasks.
        reached: Of all tasks together.
    """

    def __init__(self, lengths: Mapping[str, float]) -> None:
        self.length, self.reached = sum(lengths.values()), 0.0
        self._lengths, self._start, self._gained = dict(lengths), time.monotonic(), 0.0
        self._before = self._own = 0.0
        self._begins = True

    def begin(self, name: str) -> None:
        """The task of this name is next."""
        self._before += self._own
        self._own = self._lengths[name]
        self.reached, self._begins = self._before, True

    def reach(self, share: float) -> None:
        """The share of the task that is done; the first is what it begins with."""
        now = self._before + share * self._own
        if not self._begins:
            self._gained += now - self.reached
        self.reached, self._begins = now, False

    def left(self) -> str:
        """In words, once there is a pace."""
        if self._gained <= 0:
            return ""
        elapsed = time.monotonic() - self._start
        return f"about {duration((self.length - self.reached) * elapsed / self._gained)} left"


def duration(seconds: float) -> str:
    """A length of time as one says it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
