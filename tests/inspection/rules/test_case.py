"""Many deviating places as one hit."""

from __future__ import annotations

from normkit.inspection.rules.case import Case, hit


def test_sites_keep_their_order_and_lines_come_by_effect():
    cases = [
        Case("a", "note", 0.1, "a: little"),
        Case("b", "warning", 0.9, "b: much"),
        Case("a", "note", 0.5, "a: more"),
    ]
    found = hit(cases, "three")
    assert (found.severity, found.sites, found.measured) == ("warning", ("a", "b"), "three")
    assert found.evidence == ("b: much", "a: more", "a: little")


def test_no_case_is_no_hit():
    assert hit([], "none") is None


def test_many_lines_are_counted():
    found = hit([Case(str(index), "note", 0.0, f"{index}: x") for index in range(9)], "many", "parameter")
    assert found.evidence[-1] == "and 3 more parameters"
