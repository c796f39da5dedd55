"""What the scripts of this folder share: a page is written, or held against what would be written."""

from __future__ import annotations

import sys
from pathlib import Path

from normkit import files


def settle(page: Path, text: str, *, check: bool) -> None:
    """Write a page; with `check`, exit with 1 and one line where it is another."""
    if not check:
        files.write_text(page, text)
    elif page.read_text(encoding="utf-8") != text:
        sys.exit(f"{page.name} is not what is found now; run python {sys.argv[0]}")
