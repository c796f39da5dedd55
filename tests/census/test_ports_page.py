"""The page of the catalogue of ports: what it states follows from the recorded runs."""

from __future__ import annotations

import json

import ports_page


def test_the_page_is_that_of_its_runs():
    assert ports_page.PAGE.read_text(encoding="utf-8") == ports_page.page()


def test_the_first_run_is_stated_with_all_its_cases():
    cases = json.loads((ports_page.RESULTS / "first.json").read_text())["cases"].values()
    good = sum(case["verdict"] in ports_page.GOOD for case in cases)
    assert f"**{good} of {len(cases)} answered as they should be on the first run.**" in ports_page.page()
    assert {case["group"] for case in cases} == set(ports_page.GROUPS)
