"""Plain text and tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from normkit.cli.entry import verbs

# Calls and names that only a program has: nk.inspect(model), torch.full, head_dim, --intent, normkit rule F1.
_CODE = re.compile(
    r"`[^`]+`"
    r"|(?<![\w.])(?:nk|torch)(?:\.\w+)+(?:\([^()]*\))?(?:\.\w+)*(?:\[[^\]]*\])?"
    r"|(?<![\w./])[A-Za-z][\w.]*_[\w.]*\w(?:\([^()]*\))?(?:=[\w.']+)?"
    r"|(?<!\w)--[a-z][a-z-]+"
    rf"|\bnormkit (?:{'|'.join(verbs.commands)})\b(?: --[a-z-]+| [A-Z][A-Z0-9]*\b)*"
)


def marked(text: str) -> str:
    """A text whose code is marked as such and whose other signs mean nothing to Markdown."""
    parts, end = [], 0
    for found in _CODE.finditer(text):
        code = found.group().strip("`").replace("|", "\\|")
        parts += [_escaped(text[end : found.start()]), f"`{code}`"]
        end = found.end()
    return "".join((*parts, _escaped(text[end:])))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    lines = [headings, ["---"] * len(headings), *([cell.replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_\[\]<>^~|$#])", r"\\\1", text)
