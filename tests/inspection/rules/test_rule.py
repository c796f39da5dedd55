"""The words that all rules share."""

from __future__ import annotations

import pytest

from normkit.inspection.rules.rule import counted, percent, shortened, worst


def test_the_worst_severity():
    assert worst(["note", "error", "warning"]) == "error"
    assert worst(["note", "warning"]) == "warning"


def test_many_lines_are_shortened():
    lines = [str(number) for number in range(9)]
    assert shortened(lines[:6]) == tuple(lines[:6])
    assert shortened(lines) == (*lines[:6], "and 3 more norms")
    assert shortened(lines[:7])[-1] == "and 1 more norm"
    assert shortened(lines, "block")[-1] == "and 3 more blocks"


def test_numbers_with_nouns():
    assert counted(1, "norm") == "1 norm"
    assert counted(2, "norm") == "2 norms"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.951, "95.1 %"), (0.01, "1 %"), (0.00794, "0.794 %"), (1.5, "150 %"), (12.345, "1234 %"), (0.0, "0 %")],
)
def test_shares_in_per_cent(share, words):
    assert percent(share) == words
