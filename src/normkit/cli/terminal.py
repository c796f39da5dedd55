"""Helpers of all verbs: results go to stdout, progress and notes to stderr; some options need a model."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, float, float], None]
"""Called with the stage, the work that is done, and all the work of the stage or task; 0 if that is unknown."""

_LONGEST = 2000


class _Trimmed:
    """A text stream that writes lines without blanks at their ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def results() -> Console:
    """The console for results: at most 100 columns, without colours if NO_COLOR is set or stdout is a pipe."""
    from rich.console import Console

    from normkit.show.terminal import WIDTH

    stream = cast("TextIO", _Trimmed(sys.stdout))
    console = Console(file=stream, color_system=None if plain() else "auto", highlight=False, markup=False, emoji=False)
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.width = min(console.width, WIDTH) if has_width else WIDTH
    return console


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of a verb on stdout."""
    from normkit.files import json_text

    click.echo(json_text(document), nl=False)


def plain() -> bool:
    """Whether NO_COLOR is set: then no colour and no other escape code is written."""
    return bool(os.environ.get("NO_COLOR"))


def shows_progress(*, quiet: bool) -> bool:
    """Whether stderr is a terminal that wants to see progress."""
    return not quiet and not plain() and os.environ.get("TERM") != "dumb" and sys.stderr.isatty()


@contextmanager
def progress(*, shown: bool) -> Iterator[Progress]:
    """A progress bar on stderr that is erased at the end, or one that shows nothing."""
    if not shown:
        yield lambda _stage, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(stage: str, done: float, total: float) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield report


@contextmanager
def progress_of_tasks(lengths: Mapping[str, float], *, shown: bool) -> Iterator[Callable[[str], Progress]]:
    """A progress bar over several long tasks, with the time that is left at the pace so far.

    Args:
        lengths: Name of each task -> its expected length, in any unit, in the order of the tasks.
        shown: Whether there is a bar.

    Yields:
        A function from the name of the task that begins to what it reports its progress to.
    """
    if not shown:
        yield lambda _name: lambda _stage, _done, _total: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.percentage:>3.0f} %"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("left"),
    )
    console = Console(stderr=True)
    # Single steps may take minutes, so the pace is that of the whole run.
    with bars.Progress(*columns, console=console, transient=True, speed_estimate_period=math.inf) as bar:
        task = bar.add_task("", total=sum(lengths.values()))
        before = dict(zip(lengths, accumulate(lengths.values(), initial=0.0), strict=False))

        def begin(name: str) -> Progress:
            reports = count()

            def report(stage: str, done: float, total: float) -> None:
                reached = before[name] + lengths[name] * (done / total if total else 1.0)
                if next(reports) == 0:
                    # Work that a task begins with was done in an earlier run, and says nothing about the pace.
                    bar.tasks[0].completed = reached
                bar.update(task, description=f"{name}: {stage}", completed=reached)

            return report

        yield begin


def given_parameters(ctx: click.Context) -> list[click.Parameter]:
    """The arguments and options of a verb that the user has given."""
    typed = click.core.ParameterSource.COMMANDLINE
    return [each for each in ctx.command.params if ctx.get_parameter_source(each.name or "") is typed]


def refuse_options_but(ctx: click.Context, allowed: set[str]) -> None:
    """Refuse options that need a MODEL, if none was given."""
    for parameter in given_parameters(ctx):
        if parameter.name not in allowed:
            raise click.UsageError(f"{parameter.opts[0]} needs a MODEL.", ctx)


def note(message: str) -> None:
    """Print a remark on stderr."""
    click.echo(f"normkit: note: {one_line(message)}", err=True)


def one_line(message: str) -> str:
    """A message without line breaks and control characters; the middle of a very long one is left out.

    A message may quote a file that was made to flood a terminal.
    """
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    return "".join(character if character.isprintable() else " " for character in message)


def shell_word(path: Path | str) -> str:
    """A path quoted for a shell, on one line: unprintable characters become bytes in $'...'."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_spelled, text)) + "'"


def _spelled(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
