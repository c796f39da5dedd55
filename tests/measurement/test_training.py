"""A watched run as a value."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import imagined_runs
from imagined_inspections import model
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


def test_the_largest_of_several_series_at_each_step():
    nan, inf = math.nan, math.inf
    one = Series(quantity="logit bound", path="a", steps=(0, 1, 2, 3), values=(1.0, 5.0, nan, 1.0))
    other = Series(quantity="logit bound", path="b", steps=(1, 2, 3), values=(2.0, 2.0, inf))
    steps, values = run(series=(one, other)).largest("logit bound")
    assert steps == [0, 1, 2, 3]
    assert values == pytest.approx([1.0, 5.0, nan, inf], nan_ok=True)
    assert run().largest("kurtosis") == ([], [])


def test_the_worst_update_is_the_origins_or_the_highest_of_a_weight():
    inspection = model("six layers", 6)
    calm, spike = imagined_runs.calm(inspection), imagined_runs.spike(inspection, began=400, noticed=401)
    assert calm.worst_update.path == "transformer.h.5.mlp.c_fc.weight"
    bias = imagined_runs.series("update ratio", "transformer.ln_f.bias", range(3), lambda _: 9.0)
    first = calm.of("update ratio")[0].path
    biased = dataclasses.replace(calm, series=(*calm.series, bias))
    assert biased.worst_update.path == "transformer.h.5.mlp.c_fc.weight"
    assert dataclasses.replace(calm, series=(bias,)).worst_update.path == bias.path
    moved = dataclasses.replace(spike, origin=dataclasses.replace(spike.origin, path=first))
    assert moved.worst_update.path == first
    assert dataclasses.replace(calm, series=()).worst_update is None
