"""The page of planted families holds what each draw of the catalogue found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "census" / "planted"


def test_the_page_has_the_tables_of_all_draws() -> None:
    page = (ROOT / "docs" / "explanation" / "planted-families.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(PLANTED / "table.py"))["draws"]() in page


@pytest.mark.parametrize("draw", ["first", "second", "third", "fourth"])
def test_verdicts_that_a_reader_set_are_those_of_the_results(draw: str) -> None:
    verdicts = json.loads((PLANTED / "results" / f"{draw}.json").read_text())
    overrides = json.loads((PLANTED / "overrides.json").read_text())[draw]
    assert {each: verdicts[each]["verdict"] for each in overrides} == {
        each: one for each, (one, _) in overrides.items()
    }
