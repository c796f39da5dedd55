"""docs/explanation/claims.md is complete: in order, each verdict in the vocabulary, each check a test that exists."""

from __future__ import annotations

import ast
import re

import pytest

from helpers import ROOT

NOTES = {"000", "001", "002", "003", "004"}
STUDIES = {
    *("depth", "warmup", "learning-rate", "batch-vs-layer", "centring", "gradients", "affine", "initialisation"),
    *("final-norm", "noise", "census", "watch"),
}


def test_the_rows_are_numbered_in_order(claims):
    assert list(claims) == [f"C{number:02d}" for number in range(1, len(claims) + 1)]
    assert len(claims) >= 70


def test_every_verdict_is_one_of_four(claims):
    wrong = {
        number: row["verdict"]
        for number, row in claims.items()
        if not re.fullmatch(r"\*\*(true|false as written)\*\*|\*\*true if\*\* .+|\*\*open\*\*: .+", row["verdict"])
    }
    assert wrong == {}


def test_every_open_row_names_what_will_decide_it(claims):
    for row in claims.values():
        if row["verdict"].startswith("**open**"):
            assert set(re.findall(r"`([a-z-]+)`", row["verdict"])) & STUDIES, row


def measuring_tests(path: str) -> list[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name.split("_")[1].upper() for name in names if re.match(r"test_c\d\d_", name)]


@pytest.mark.slow
def test_every_other_row_is_measured_by_a_test_or_a_command_that_exists(claims):
    for number, row in claims.items():
        if row["verdict"].startswith("**open**"):
            continue
        assert row["measured"], number
        check = row["check"].strip("`")
        if check.startswith("python "):
            assert (ROOT / check.split()[1]).exists(), number
        else:
            assert measuring_tests(check).count(number) == 1, number


def test_every_measuring_test_has_its_row(claims):
    for path in sorted((ROOT / "tests" / "claims").glob("test_*.py")):
        for number in measuring_tests(f"claims/{path.name}"):
            assert claims[number]["check"] == f"`claims/{path.name}`"


def test_every_row_names_its_notes(claims):
    legend = (ROOT / "docs" / "explanation" / "claims.md").read_text(encoding="utf-8")
    for number, row in claims.items():
        named = set(row["notes"].split(", "))
        assert named, number
        assert named <= NOTES, number
    for note in NOTES:
        assert re.search(rf"`{note}_[0-9a-f]{{16}}\.txt`", legend)


def test_the_page_counts_the_verdicts(claims):
    verdicts = [re.match(r"\*\*(.+?)\*\*", row["verdict"])[1] for row in claims.values()]
    kinds = ("true", "true if", "false as written", "open")
    words = "{} are true, {} true under a condition, {} false as written, {} wait for training or a count."
    page = " ".join((ROOT / "docs" / "explanation" / "claims.md").read_text(encoding="utf-8").split())
    assert words.format(*map(verdicts.count, kinds)) in page
    assert f"takes {len(claims)} statements" in page
    assert set(re.findall(r"\((C\d\d)\)", page)) == {
        number for number, row in claims.items() if row["verdict"] == "**false as written**"
    }
