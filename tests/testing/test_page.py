"""The page on testing runs: its files under pytest with the output that it shows, its snippets, its table of checks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from helpers import ROOT
from normkit.testing.violation import CHECKS

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))
SNIPPETS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if block not in FILES.values()]


def without_times(text: str) -> str:
    return re.sub(r" in \d+\.\d+s", " in a while", text).rstrip()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pytest_says_what_the_page_shows(tmp_path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    [(command, shown)] = re.findall(r"```console\n\$ pytest (.*?)\n(.*?)```", PAGE, flags=re.DOTALL)
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command.split()]
    # On a build server pytest shortens nothing, and elsewhere to the width of the terminal.
    surroundings = {key: value for key, value in os.environ.items() if key not in ("CI", "BUILD_NUMBER")}
    done = subprocess.run(
        arguments,
        cwd=tmp_path,
        env={**surroundings, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert without_times(done.stdout) == without_times(shown)


@pytest.mark.slow
def test_the_snippets_print_what_they_say() -> None:
    names: dict[str, object] = {}
    for block in SNIPPETS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "docs/testing.md", "exec"), names)
        expected = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
        assert printed.getvalue().splitlines() == expected


def test_the_table_lists_every_check() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, flags=re.MULTILINE)
    assert dict(rows) == CHECKS


def test_the_page_has_files_and_snippets() -> None:
    assert set(FILES) == {"their_norms.py", "test_norms.py"}
    assert len(SNIPPETS) == 3
