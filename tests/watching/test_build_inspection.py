"""A run as far as it was measured, as an inspection."""

from __future__ import annotations

import json

import pytest

from normkit.watching.watcher import watch
from small_training import Run


@pytest.mark.slow
def test_a_run_is_an_inspection_with_json():
    run = Run().go(steps=3, name="a run")
    inspection = run.watch.inspection()
    document = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
    assert document["training"]["steps"] == 3
    assert (inspection.model.name, len(inspection.sites), inspection.final_norm) == ("a run", 9, "norm")
    assert inspection.walk is None
    assert {check.rule for check in inspection.checks}


def test_before_the_first_call_there_is_nothing_to_judge():
    run = Run()
    with watch(run.model, run.optimizer) as seen:
        inspection = seen.inspection()
    assert (inspection.sites, inspection.training.steps, inspection.training.reports) == ((), 0, 0)
    assert seen.findings == ()
