"""Each verb reports what the golden record holds."""

from __future__ import annotations

import pytest

from golden import record


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", record.RECORDED)
def test_a_verb_reports_what_is_recorded(name):
    assert record.checked(name, any_cpu=True) == []


def test_a_difference_is_told_with_its_place():
    kept, found = {"a": [1, {"b": 0.5, "units": 1.5}], "c": "1.5 rows"}, {"a": [1, {"b": 0.6, "units": 2.5}], "d": 1}
    assert list(record.compared(kept, found, any_cpu=True)) == [
        " / a / 1 / b: 0.5 is now 0.6",
        " / c: gone",
        " / d: new",
    ]
    assert " / a / 1 / units: 1.5 is now 2.5" in record.compared(kept, found, any_cpu=False)


def test_rounding_errors_are_those_of_a_cpu():
    assert record.alike("matched to 5e-08", "matched to 7e-08")
    assert not record.alike("matched to 5e-08", "matches to 5e-08")
    assert record.alike(1.0, 1.0005)
    assert not record.alike(1.0, 1.01)
