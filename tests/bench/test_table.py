"""What the tables say of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from normkit.bench.cases import Case
from normkit.bench.results import Benchmark, Cell, Machine, Measurement
from normkit.bench.table import notes, readable, tables

BOTH = Cell(
    case=Case("add_layer_norm", (16384, 4096), "bfloat16", "forward+backward"),
    floor_seconds=1e-4,
    floor_spread=0.02,
    others=0.5,
    input_bytes=1000,
    measurements=(
        Measurement("normkit", 2e-4, 0.01, 1e-3, "y", False, False, 1012),
        Measurement("torch", 3e-3, 0.2, 0.5, "dresidual", True, False, 4000),
    ),
    left_out=(("onnxruntime", "forward only"),),
)
OUT = Cell(
    case=Case("rms_norm", (1, 8), "float32", "forward-out"),
    floor_seconds=1e-6,
    floor_spread=0.0,
    others=None,
    input_bytes=1000,
    measurements=(Measurement("torch", 2.5e-6, 0.0, float("inf"), "y", True, True, None),),
    left_out=(),
)
MACHINE = Machine("a CPU", 2, "2.13", "C++ kernels, avx2", "2026-01-02")
RUN = Benchmark(MACHINE, (BOTH, BOTH, OUT))


def drawn(run):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for table in tables(run):
        console.print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_one_table_an_operation_and_pass():
    lines = [line.split() for line in drawn(RUN)]
    assert lines[:6] == [
        ["add_layer_norm", "forward+backward"],
        ["time", "/", "floor", "/", "normkit", "kept", "/", "x", "answer"],
        ["16384x4096", "bfloat16", "others", "50%"],
        ["copy", "(floor)", "100", "us", "1.00"],
        ["normkit", "200", "us", "2.00", "1.00", "1.01", "right"],
        ["torch", "3.00", "ms~", "30.00", "15.00", "4.00", "WRONG", "dresidual", "50%"],
    ]
    assert lines[10] == ["rms_norm", "forward-out"]
    # Without normkit there is nothing to be compared with.
    assert lines[-1] == ["torch", "*", "2.50", "us", "2.50", "WRONG", "y", "NaN"]


def test_the_widest_line_fits_a_small_terminal():
    assert max(map(len, drawn(RUN))) <= 80


def test_notes():
    found = notes(RUN)
    assert found[:2] == ("2026-01-02, a CPU, threads 2, torch 2.13", "normkit: C++ kernels, avx2")
    assert found[-1] == "onnxruntime left out of 2 of 3 cases: forward only"
    explained = ["time", "floor", "kept / x", "~", "others", "*", "WRONG"]
    assert [line.partition(":")[0] for line in found[2:-1]] == explained


def test_only_what_is_shown_is_explained():
    quiet = Benchmark(MACHINE, (Cell(OUT.case, 1e-6, 0.0, 0.05, 1000, (), ()),))
    assert [line.partition(":")[0] for line in notes(quiet)[2:]] == ["time", "floor"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.996e-7, "1.00 us"), (9.99e-5, "99.9 us"), (9.996e-4, "1.00 ms"), (0.123456, "123 ms"), (12.34, "12.3 s")],
)
def test_three_digits(seconds, text):
    assert readable(seconds) == text
