"""The README's Python runs, and prints what the comments behind its print calls say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import build_site
from helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {number}" for number in range(len(BLOCKS))])
def test_an_example_prints_what_it_says(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files where they are.
    monkeypatch.chdir(tmp_path)
    printed, threads = io.StringIO(), torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), {})
    finally:
        torch.set_num_threads(threads)
    expected = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    assert printed.getvalue().splitlines() == expected


def test_the_measured_table_has_its_place() -> None:
    assert len(re.findall(r"^<!-- bench -->\n(?:.*\n)*?<!-- /bench -->$", README, flags=re.MULTILINE)) == 1


def test_every_file_that_the_readme_shows_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src(?:set)?="([^":]+)"', README):
        assert (ROOT / target).exists(), target


DOCS = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = {ROOT / "docs" / name for name in build_site.generated()}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_what_a_page_of_the_docs_names_exists(page) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists() or (page.parent / target).resolve() in GENERATED, target
    for target in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w/.]+\.py)`", text):
        assert (ROOT / target).exists(), target
