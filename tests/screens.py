"""What a terminal shows."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from normkit.show.parts import Section
from normkit.show.terminal import section


def shown(part: Any, width: int = 100, **options: Any) -> str:
    """A Section, or what rich can draw, as text without the spaces at the ends of lines."""
    console = Console(width=width, markup=False, highlight=False, emoji=False, **options)
    with console.capture() as capture:
        console.print(section(part) if isinstance(part, Section) else part)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().split("\n")[:-1])


def words(part: Any, width: int = 100) -> str:
    """The same with single spaces and no line breaks."""
    return " ".join(shown(part, width).split())
