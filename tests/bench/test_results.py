"""What is told of a measurement beside its numbers."""

from __future__ import annotations

import json

import pytest

from normkit.bench.cases import Case
from normkit.bench.results import Benchmark, Cell, Machine, Measurement


def measurement(**changed):
    given = {"seconds": 2e-5, "error": 1e-3, "host_seconds": None} | changed
    return Measurement(
        "it", spread=0.0, worst="y", is_wrong=False, is_fresh=False, saved_bytes=None, bytes_per_second=1.0, **given
    )


@pytest.mark.parametrize(("host", "latency"), [(None, 2e-5), (1e-5, 2e-5), (9e-5, 9e-5)])
def test_the_slower_of_host_and_device_counts(host, latency):
    assert measurement(host_seconds=host).latency == latency


def test_an_error_that_json_cannot_hold():
    case = Case("rms_norm", (1, 8), "float32", "forward")
    cell = Cell(case, 1e-6, 0.0, None, 32, (measurement(), measurement(error=float("inf"))), (("a", "b"),))
    document = Benchmark(Machine("a CPU", 2, "2.13", "C++", "2026-01-02"), (cell,)).to_json()
    assert [found["error"] for found in document["cells"][0]["measurements"]] == [1e-3, None]
    assert json.loads(json.dumps(document, allow_nan=False))["machine"]["gpu"] is None
