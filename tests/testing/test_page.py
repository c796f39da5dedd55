"""The page on testing: its table has every check. Its files and snippets are run with those of the other pages."""

from __future__ import annotations

import re

from helpers import ROOT
from normkit.testing.violation import CHECKS


def test_the_table_lists_every_check() -> None:
    page = (ROOT / "docs" / "how-to" / "test-your-norm.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert dict(rows) == CHECKS
