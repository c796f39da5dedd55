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
        Measurement("normkit", 2e-4, 0.01, 1e-3, "y", False, False, 1012, 1e9),
        Measurement("torch", 3e-3, 0.2, 0.5, "dresidual", True, False, 4000, 1e9),
    ),
    left_out=(("onnxruntime", "forward only"),),
)
OUT = Cell(
    case=Case("rms_norm", (1, 8), "float32", "forward-out"),
    floor_seconds=1e-6,
    floor_spread=0.0,
    others=None,
    input_bytes=1000,
    measurements=(Measurement("torch", 2.5e-6, 0.0, float("inf"), "y", True, True, None, 1e9),),
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


def test_one_table_per_operation_and_pass_fits_a_small_terminal():
    assert max(map(len, drawn(RUN))) <= 80
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


def test_notes_explain_only_what_is_shown():
    found = notes(RUN)
    assert found[:2] == ("2026-01-02, a CPU, threads 2, torch 2.13", "normkit: C++ kernels, avx2")
    assert found[-1] == "onnxruntime left out of 2 of 3 cases: forward only"
    explained = ["time", "floor", "kept / x", "~", "others", "*", "WRONG"]
    assert [line.partition(":")[0] for line in found[2:-1]] == explained
    quiet = Benchmark(MACHINE, (Cell(OUT.case, 1e-6, 0.0, 0.05, 1000, (), ()),))
    assert [line.partition(":")[0] for line in notes(quiet)[2:]] == ["time", "floor"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.996e-7, "1.00 us"), (9.99e-5, "99.9 us"), (9.996e-4, "1.00 ms"), (0.123456, "123 ms"), (12.34, "12.3 s")],
)
def test_three_digits(seconds, text):
    assert readable(seconds) == text


def test_a_gpu_has_two_times():
    case = Case("rms_norm", (32768, 4096), "bfloat16", "forward+backward")
    measurements = (
        Measurement("normkit", 4e-4, 0.01, 1e-3, "y", False, False, 1012, 3.35e12, 2e-5),
        Measurement("Liger", 2e-4, 0.2, 1e-3, "y", False, False, 4000, 6.7e12, 8e-4),
    )
    machine = Machine("a CPU", 2, "2.13", "Triton kernels", "2026-01-02", "some GPU", (("triton", "3.9"),))
    run = Benchmark(machine, (Cell(case, 3.5e-4, 0.0, 0.0, 2000, measurements, ()),))
    lines = drawn(run)
    found = [line.split() for line in lines]
    assert found[1] == ["time", "host", "/", "floor", "/", "normkit", "kept", "/", "x", "answer"]
    assert found[3] == ["copy", "(floor)", "350", "us", "1.00"]
    assert found[4] == ["normkit", "400", "us", "20.0", "us", "1.14", "1.00", "0.51", "right"]
    assert lines[3].index("1.00") == lines[4].index("1.14")
    # Twice as fast on the GPU, but the host takes twice normkit's time.
    assert found[5] == ["Liger", "200", "us~", "800", "us", "0.57", "2.00", "2.00", "right"]
    assert max(map(len, lines)) <= 80
    told = notes(run)
    assert told[0] == "2026-01-02, some GPU, a CPU, torch 2.13, triton 3.9"
    assert [line.partition(":")[0] for line in told[1:]] == ["normkit", "time", "host", "floor", "kept / x", "~"]
    assert max(map(len, told)) <= 100
