"""What a watch says: remarks, each once; lines to whoever runs the training; and the files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from normkit.errors import InputError
from normkit.identification.specimen import first_line
from normkit.inspection.result import Inspection
from normkit.watching.journal import Journal


class Voice:
    """The voice of one watch.

    Args:
        say: Called with each line; prints to stderr by default.
        journal: The files; None writes none.
        speaks: Of several processes this one speaks; remarks are kept by all.

    Attributes:
        remarks: What was remarked so far.
        journal: The files.
        speaks: This process speaks.
    """

    def __init__(self, say: Callable[[str], None] | None, journal: Journal | None, *, speaks: bool) -> None:
        self.remarks: list[str] = []
        self.journal, self.speaks = journal, speaks
        self._say = say or _to_stderr
        self._told: set[str] = set()

    def is_new(self, topic: str) -> bool:
        """Whether a topic comes up for the first time."""
        is_new = topic not in self._told
        self._told.add(topic)
        return is_new

    def remark(self, line: str, topic: str = "") -> None:
        """Say what cannot be watched, and keep it for the report; once for each topic.

        Args:
            line: One line.
            topic: The line itself if none is given.
        """
        if self.is_new(topic or line):
            self.remarks.append(line)
            self.tell(line)

    def tell(self, line: str) -> None:
        """Say one line."""
        if self.speaks:
            self._say(f"normkit: {line}")

    def guarded(self, what: str, run: Callable[..., None], *args: object) -> None:
        """Do what is no part of the training: where it fails, the training goes on and that is said, once."""
        try:
            run(*args)
        # A device that ran out of memory, a disk that is full, a rule that stumbles over what no one foresaw.
        except Exception as error:
            self.remark(f"{what} could not be taken in: {first_line(error)}", what)

    def write(self, inspection: Inspection) -> Path | None:
        """Write the report, where one is wanted and a folder takes it; returns the page's path."""
        try:
            return None if self.journal is None else self.journal.write(inspection)
        except (OSError, InputError) as error:
            self.remark(f"the report is not written: {first_line(error)}", "report")
            return None


def _to_stderr(line: str) -> None:
    # A process without a terminal may have none, or a closed one.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{line}\n")
