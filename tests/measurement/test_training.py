"""A watched run as a value."""

from __future__ import annotations

import json
import math

from normkit.inspection.result import Inspection
from normkit.measurement.facts import ModelFacts
from normkit.measurement.training import Series, Training


def run(**changes) -> Training:
    values = {
        "steps": 3,
        "every": 1,
        "reports": 3,
        "reason": "asked",
        "reason_step": 2,
        "ranks": 1,
        "observer": "",
        "remarks": (),
        "optimizers": (),
        "series": (
            Series(quantity="loss", path="", steps=(0, 1, 2), values=(1.0, math.nan, math.inf)),
            Series(quantity="stream rms", path="a", steps=(0,), values=(2.0,)),
            Series(quantity="stream rms", path="b", steps=(), values=()),
        ),
        "parameters": (),
        "vocabulary": 256,
    }
    return Training(**(values | changes))


def test_series_are_found_by_their_quantity():
    assert [series.path for series in run().of("stream rms")] == ["a", "b"]
    assert run().of("kurtosis") == ()


def test_the_newest_value():
    first, second, empty = run().series
    assert first.last == math.inf
    assert second.last == 2.0
    assert math.isnan(empty.last)


def test_json_has_no_number_that_json_lacks():
    facts = ModelFacts(
        name="m", class_name="M", architecture="", parameters=0, dtype="none", width=0, source="", tokens=0, padding=0
    )
    inspection = Inspection(
        model=facts,
        sites=(),
        blocks=(),
        attentions=(),
        final_norm=None,
        recurring_outliers=(),
        walk=None,
        findings=(),
        checks=(),
        unrecognised=(),
        training=run(),
    )
    plain = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
    assert plain["training"]["series"][0]["values"] == [1.0, "nan", "inf"]
    assert plain["training"]["origin"] is None
