"""The README and the pages of docs/: their code runs and prints what they say, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import build_site
from helpers import ROOT
from page_blocks import blocks, matches, parse, run_page, shown_commands

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [
    page
    for page in PAGES
    if any(block.language in ("python", "console") for block in blocks(page.read_text(encoding="utf-8")))
    and "archive" not in page.parts
]
# More than eight seconds, or commands that the tests of the command line run on smaller models.
EXHAUSTIVE = {
    "a-port-gone-wrong",
    "a-run-that-breaks",
    "declare-intent",
    "first-inspection",
    "gate-a-model-in-ci",
    "record-a-run",
    "rerun-the-studies",
    "test-your-norm",
    "watch-training",
}
GENERATED = {ROOT / "docs" / name for name in build_site.generated()}


def test_the_readme_is_one_page() -> None:
    assert (ROOT / "README.md").stat().st_size <= 9000


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.exhaustive] * (page.stem in EXHAUSTIVE)) for page in RUN],
    ids=[name(page) for page in RUN],
)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files where they are.
    monkeypatch.chdir(tmp_path)
    for block, expected, printed in run_page(page):
        assert matches(expected, printed), f"{block.text}\n-- prints --\n{printed}\n-- and not --\n{expected}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    for words in shown_commands(page.read_text(encoding="utf-8")):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'src(?:set)?="([^"#:]+)', text):
        assert (page.parent / target).exists() or (page.parent / target).resolve() in GENERATED, target
    for target in re.findall(r"`((?:src|tests|benchmarks|examples|census)/[\w/.]+\.py)`", text):
        assert (ROOT / target).exists(), target


def test_the_measured_table_has_its_place() -> None:
    page = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^<!-- bench -->\n(?:.*\n)*?<!-- /bench -->$", page, flags=re.MULTILINE)) == 1
