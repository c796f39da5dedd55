"""Words for what differs, and what a verification comes to."""

from __future__ import annotations

import pytest

from normkit.checkpoint.verification import Checked, Verification, difference, judged

DUE = {"a": {"b": [1, {"c": "x"}], "d": None}, "e": 1.5}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (DUE, None),
        ({"e": 1.5, "a": {"d": None, "b": (1, {"c": "x"})}}, None),
        ({"a": {"b": [1, {"c": "y"}], "d": None}, "e": 1.5}, "at.a.b.1.c is recorded as 'y', 'x' follows"),
        ({"a": {"b": [1], "d": None}, "e": 1.5}, "at.a.b is recorded as [1], [1, {'c': 'x'}] follows"),
        ({"a": {"b": [True, {"c": "x"}], "d": None}, "e": 1.5}, "at.a.b.0 is recorded as True, 1 follows"),
        ({"a": {"b": [1, {"c": "x"}]}, "e": 1.5}, "'at.a.d' is not recorded"),
        ({**DUE, "\n": 1}, r"'at.\n' is recorded and does not follow"),
        ([], "at is recorded as [], {"),
        ({**DUE, "e": 1}, "at.e is recorded as 1, 1.5 follows"),
    ],
)
def test_the_first_difference_is_named(found, said):
    answer = difference(found, DUE, "at")
    assert answer is None if said is None else answer is not None and answer.startswith(said)


def test_the_first_fault_stands_for_all():
    assert judged("x", [], "fine") == Checked(name="x", passed=True, what="fine")
    assert judged("x", ["a"], "fine") == Checked(name="x", passed=False, what="a")
    assert judged("x", ["a", "b", "c"], "fine") == Checked(name="x", passed=False, what="a (and 2 more)")


@pytest.mark.parametrize(
    ("answers", "passed"),
    [((), True), ((True, True), True), ((True, None), True), ((True, False), False), ((None, False), False)],
)
def test_what_was_not_tried_does_not_fail(answers, passed):
    checks = tuple(Checked(name=f"{at}", passed=answer, what="w") for at, answer in enumerate(answers))
    found = Verification(source="A", result="B", checks=checks)
    assert found.passed is passed
    document = found.to_json()
    assert (document["schema_version"], document["passed"], document["source"]) == (1, passed, "A")
    assert [each["passed"] for each in document["checks"].values()] == list(answers)
