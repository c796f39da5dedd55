"""Tables as an inspection's parts."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.watching.readings import Reading
from normkit.watching.tables import Tables
from normkit.watching.tallies import TAP_SUMS, row_tables, tap_tables
from small_training import Run


def test_what_counted_nothing_is_not_known():
    tables = Tables([*row_tables(1), *tap_tables(1)], torch.device("cpu"))
    reading = Reading(step=0, tables=tables.unpacked(tables.packed()))
    rows = reading.rows(0, 8)
    assert (rows.rows, rows.absmax, rows.histogram) == (0, 0.0, ())
    for value in (rows.rms_min, rows.rms_max, *rows.rms_quantiles, rows.kurtosis, rows.mean_energy):
        assert math.isnan(value)
    assert math.isnan(reading.gradient(0))


def test_a_gradient_that_is_not_finite_is_not_known():
    tables = Tables(tap_tables(1), torch.device("cpu"))
    tables["taps"][0] = torch.tensor([4.0, 1.0, 0.0])
    reading = Reading(step=0, tables=tables.unpacked(tables.packed()))
    assert reading.gradient(0) == 0.5
    reading.tables["taps"][0, TAP_SUMS.index("nonfinite")] = 1
    assert math.isnan(reading.gradient(0))


def test_blocks_follow_each_other_and_attentions_have_their_heads():
    inspection = Run().go(steps=1).watch.inspection()
    first, second = inspection.blocks
    assert second.stream_in == first.stream_out
    assert first.stream_in.rows == first.stream_out.rows == 16
    assert [(each.path, each.block, each.heads, len(each.bounds)) for each in inspection.attentions] == [
        ("blocks.0.attention", 0, 2, 2),
        ("blocks.1.attention", 1, 2, 2),
    ]
    for each in inspection.attentions:
        assert each.bound >= each.sampled_max > 0
        assert each.sampled_rows == 2 * 2 * 8
        assert 0 < each.entropy < each.uniform_entropy
        assert each.uniform_entropy == pytest.approx(sum(math.log(keys) for keys in range(1, 9)) / 8)
