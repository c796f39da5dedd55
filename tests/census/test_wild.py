"""The survey of other people's norms: the page is what was recorded, and no verdict says more than a row does."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

import normkit as nk
import wild
import wild_page
from wild_libraries import rows
from wild_libraries.rows import AGREES, CHOICE, LAYER, NOT_RUN, OWN_SOURCE, UNDECIDED, Row

RECORDED = wild_page.documents()
ALL = [row for document in RECORDED.values() for row in document["rows"]]


def survey(text):
    """The page without the lines of the reports, which are written beside it."""
    return [line for line in text.splitlines() if not line.startswith("- [")]


def test_the_page_is_what_was_recorded():
    assert survey(wild_page.PAGE.read_text(encoding="utf-8")) == survey(wild_page.page())


def test_the_page_lists_every_report():
    listed = wild_page.finds()
    assert len(listed) == len(list(wild_page.REPORTS.glob("*.md")))
    assert all(line.startswith("- [") and "](wild/reports/" in line for line in listed)


def test_the_counts_are_those_of_the_rows():
    lines = wild_page.PAGE.read_text(encoding="utf-8").splitlines()
    counted = Counter(row["verdict"] for row in ALL)
    for verdict in rows.VERDICTS:
        assert any(line.startswith(f"| {verdict} | {counted[verdict]} |") for line in lines)
    assert f"**{counted[AGREES]} agree.**" in "\n".join(lines)
    # A row that was not run is neither run nor transcribed, and was held against nothing.
    missing = counted[NOT_RUN]
    assert f"| {NOT_RUN} | {missing} | 0 | 0 |" in lines
    assert sum("| not run |" in line for line in lines) == missing
    assert f"{len(ALL) - missing} were called" in "\n".join(lines)


def test_every_group_is_recorded_with_its_pins():
    assert set(RECORDED) == set(wild.GROUPS)
    for group in wild.GROUPS:
        pins = (wild.LIBRARIES / "requirements" / f"{group}.txt").read_text().split()
        assert all("==" in pin for pin in pins)


def test_no_row_stands_twice_and_each_has_its_source():
    keys = [(row["library"], row["origin"], row["name"], row["variant"]) for row in ALL]
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    assert [row["name"] for row in ALL if not row["source"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "differs", "verdict", "remark"),
    [
        (nn.LayerNorm(64), None, AGREES, ""),
        (nn.LayerNorm(64, eps=1e-6), None, UNDECIDED, "eps: 1e-06, expected 1e-05"),
        (nn.LayerNorm(64, eps=1e-6), (OWN_SOURCE, "Its page says 1e-5."), OWN_SOURCE, "Its page says 1e-5."),
        (
            nn.RMSNorm(64, eps=1e-5),
            (CHOICE, "Its page says so."),
            CHOICE,
            "mean subtracted: False, expected True",
        ),
        (nn.LayerNorm(64), (CHOICE, "Its page says so."), UNDECIDED, "identify finds no difference"),
        (nn.GELU(), None, UNDECIDED, "elementwise, expected norm"),
    ],
)
def test_a_verdict_needs_a_difference_and_a_difference_a_source(norm, differs, verdict, remark):
    row = Row(path="a:B", source="a paper", expected=LAYER, differs=differs)
    found = rows.judged(row, nk.identify(norm, (2, 64)))
    assert found[0] == verdict
    assert remark in found[1]


@pytest.mark.slow
def test_what_a_source_does_not_state_is_not_compared():
    stated = {"centre_numerator": True}
    assert rows.compared(stated, nk.identify(nn.LayerNorm(64, eps=0.1), (2, 64))) == ([], [])


def test_what_is_missing_or_does_not_run_is_a_row():
    absent = rows.answer(Row(path="absent_library:Norm", source="a paper", expected=LAYER), {"absent_library": "it"})
    assert absent["verdict"] == NOT_RUN
    assert "absent_library" in absent["remark"]
    broken = Row(path="torch.nn:LayerNorm", make=lambda kind: kind(), source="a paper", expected=LAYER)
    assert rows.answer(broken, {"torch": "torch"})["verdict"] == NOT_RUN
