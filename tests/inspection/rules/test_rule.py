"""The words that all rules share."""

from __future__ import annotations

from normkit.inspection.rules.rule import evidence_lines, worst


def test_the_worst_severity():
    assert worst(["note", "error", "warning"]) == "error"
    assert worst(["note", "warning"]) == "warning"


def test_many_lines_are_shortened():
    lines = [str(number) for number in range(9)]
    assert evidence_lines(lines[:6]) == tuple(lines[:6])
    assert evidence_lines(lines) == (*lines[:6], "and 3 more norms")
    assert evidence_lines(lines[:7])[-1] == "and 1 more norm"
    assert evidence_lines(lines, "block")[-1] == "and 3 more blocks"
