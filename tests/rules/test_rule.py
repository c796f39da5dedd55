"""Findings in words, and many deviating places as one hit."""

from __future__ import annotations

from normkit.rules.rule import Case, evidence_lines, hit, worst


def test_the_worst_severity():
    assert worst(["note", "error", "warning"]) == "error"
    assert worst(["note", "warning"]) == "warning"


def test_many_lines_are_shortened():
    lines = [str(number) for number in range(9)]
    assert evidence_lines(lines[:6]) == tuple(lines[:6])
    assert evidence_lines(lines) == (*lines[:6], "and 3 more norms")
    assert evidence_lines(lines[:7])[-1] == "and 1 more norm"
    assert evidence_lines(lines, "block")[-1] == "and 3 more blocks"


def test_sites_keep_their_order_and_lines_come_by_effect():
    cases = [
        Case("a", "note", "little", 0.1),
        Case("b", "warning", "much", 0.9),
        Case("a", "note", "more", 0.5, name="c"),
    ]
    found = hit(cases, "three")
    assert (found.severity, found.sites, found.measured) == ("warning", ("a", "b"), "three")
    assert found.evidence == ("b: much", "c: more", "a: little")


def test_no_case_is_no_hit():
    assert hit([], "none") is None


def test_many_lines_are_counted():
    found = hit([Case(str(index), "note", "x") for index in range(9)], "many", "parameter")
    assert found.evidence[-1] == "and 3 more parameters"
