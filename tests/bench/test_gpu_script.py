"""benchmarks/gpu.py keeps what it has, ends in time and goes on; its bars and its table say what was not measured."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from helpers import ROOT
from normkit.bench.cases import Case
from normkit.bench.devices import CPU
from normkit.bench.peers import NORMKIT, TORCH
from normkit.bench.results import Cell, Measurement
from normkit.bench.timing import Time

CASES = tuple(Case("rms_norm", (rows, 16), "float32", "forward+backward") for rows in (40, 50, 60))
PRETENDED = replace(
    CPU,
    peers=(NORMKIT, TORCH),
    machine=lambda: replace(CPU.machine(), gpu="some GPU", versions=(("triton", "3.9"),)),
    times=lambda calls, _seconds: {name: Time(2e-6, 0.0, 7e-6) for name in calls},
)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("gpu")
    monkeypatch.setattr(found, "find", lambda _name: PRETENDED)
    monkeypatch.setattr(found, "grid", lambda: CASES)
    monkeypatch.setattr(found, "BITS", ((20, 8),))
    monkeypatch.setattr(found, "START", found.time.monotonic())
    return found


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    """Run it; what is in the file afterwards."""

    def invoke(*options):
        path = tmp_path / "gpu.json"
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(path), *options])
        assert script.main() == 0
        return json.loads(path.read_text())

    return invoke


def test_without_a_gpu(script, monkeypatch, tmp_path, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path / "gpu.json")])
    assert script.main() == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert told.err.startswith("gpu.py: device cuda: torch ")


@pytest.mark.slow
def test_a_whole_run(run, capsys):
    document = run()
    assert (document["schema_version"], document["begun"], document["not_measured"]) == (2, None, {})
    assert [cell["case"]["shape"][0] for cell in document["cells"]] == [40, 50, 60]
    assert set(document["bits"].values()) == {True}
    assert (len(document["bits"]), document["machine"]["gpu"]) == (4, "some GPU")
    out = capsys.readouterr().out
    for text in (
        "rms_norm forward+backward float32 40x16: 2.00 us, 6 GB/s, 250% of the copy, host 7.00 us\n",
        "3 cases measured, 0 not reached in 9 minutes\n",
        "some GPU, torch",
        "not measured",
        "| normkit | GB/s |",
    ):
        assert text in out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_case_is_begun_when_the_time_is_over(run, script, monkeypatch, capsys):
    # A minute between any two looks at the clock: one before each case.
    clock = iter(range(0, 60_000, 60))
    monkeypatch.setattr(script, "START", 0)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    document = run("--minutes", "2")
    assert len(document["cells"]) == 2
    assert "not reached: rms_norm forward+backward float32 60x16\n" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_is_killed_keeps_what_it_has_and_goes_on(run, script, monkeypatch, tmp_path):
    measure_case = script.measure_case

    def killed(case, *rest):
        if case == CASES[1]:
            raise KeyboardInterrupt
        return measure_case(case, *rest)

    monkeypatch.setattr(script, "measure_case", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert (len(document["cells"]), document["begun"]) == (1, str(CASES[1]))
    monkeypatch.setattr(script, "measure_case", measure_case)
    document = run("--resume")
    assert document["not_measured"] == {str(CASES[1]): "the process ended in it"}
    assert [cell["case"]["shape"][0] for cell in document["cells"]] == [40, 60]
    # Nothing is left to be measured, or to be measured again.
    assert run("--resume") == document
    assert len(run()["cells"]) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_case_that_fails_takes_no_other_with_it(run, script, monkeypatch, capsys):
    small = replace(PRETENDED, memory=lambda: CASES[1].bytes * 12, noun="GPU")
    monkeypatch.setattr(script, "find", lambda _name: small)
    document = run()
    assert [cell["case"]["shape"][0] for cell in document["cells"]] == [40, 50]
    assert "this GPU has 0; choose a smaller shape" in document["not_measured"][str(CASES[2])]
    assert f"{CASES[2]}: not measured: InputError" in capsys.readouterr().out


def test_a_gpu_that_a_kernel_left_unusable(run, script, monkeypatch):
    state = SimpleNamespace(is_broken=False, given=None)

    def breaking(case, *_rest):
        state.is_broken = True
        raise RuntimeError(f"illegal access in {case.shape[0]}\nlong story")

    def restarted(program, arguments):
        assert (program, arguments[0]) == (sys.executable, sys.executable)
        state.given = arguments[2:]

    monkeypatch.setattr(script, "is_broken", lambda _device: state.is_broken)
    monkeypatch.setattr(script, "measure_case", breaking)
    monkeypatch.setattr(script.os, "execv", restarted)
    document = run("--minutes", "5")
    assert document["not_measured"] == {str(CASES[0]): "RuntimeError illegal access in 40"}
    assert state.given[0] == "--resume"
    assert 4 < float(state.given[2]) < 5


def test_bits_that_depend_on_the_batch_or_the_run(script, monkeypatch):
    case = Case("rms_norm", (20, 8), "float32", "forward+backward")
    assert script.bits(case, PRETENDED)
    calls = []

    def on_the_batch(case, given):
        call = NORMKIT.prepare(case, given)
        return lambda: (call()[0] + 1e-6 * len(given.x),)

    def on_the_run(case, given):
        call = NORMKIT.prepare(case, given)
        # Only the gradient of the gain.
        return lambda: calls.append(1) or (call()[0] + len(calls) * (given.weight - given.weight.detach()).sum(),)

    for prepare in (on_the_batch, on_the_run):
        monkeypatch.setattr(script, "NORMKIT", replace(NORMKIT, prepare=prepare))
        assert not script.bits(case, PRETENDED)


def test_the_grid(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("gpu")
    cases = script.grid()
    assert len(set(cases)) == len(cases) == 344
    names = {f"{case.op} {case.direction} {case.shape[0]}x{case.shape[1]} {case.dtype}" for case in cases}
    bars = importlib.import_module("gpu_bars")
    nothing = {"cells": [], "bits": {}, "not_measured": {}}
    assert {line.what for line in bars.lines(nothing) if not line.what.startswith("bits")} <= names
    assert set(importlib.import_module("gpu_table").ROWS) <= names
    compiled = [case for case in cases if script.COMPILER in script.peers(case, script.find("cpu"))]
    assert len(compiled) == 26
    assert set(compiled) <= set(cases[:116])


def cell(case, *measured, floor=1e-4):
    """(peer, device seconds, host seconds, is wrong) of each."""
    found = (
        Measurement(peer, seconds, 0.0, 0.0, "dx", is_wrong, False, None, case.moved_bytes / seconds, host)
        for peer, seconds, host, is_wrong in measured
    )
    return Cell(case, floor, 0.0, 0.0, case.bytes, tuple(found), (("quack", "has none"),)).to_json()


@pytest.fixture
def recorded():
    case = Case("layer_norm", (32768, 4096), "bfloat16", "forward")
    machine = asdict(PRETENDED.machine())
    return {
        "machine": machine,
        "bits": {"a": True, "b": True},
        "not_measured": {},
        "cells": [
            cell(case, ("normkit", 1.05e-4, 1e-5, False)),
            cell(replace(case, direction="backward"), ("normkit", 1.3e-4, 1e-5, False)),
            cell(
                replace(case, shape=(128, 4096), direction="forward+backward"),
                ("normkit", 1e-5, 1e-4, False),
                ("torch", 5e-5, 9e-5, False),
                ("Liger", 1e-5, 2e-4, False),
                ("torch.compile", 1e-6, 1e-6, True),
            ),
            cell(
                replace(case, op="rms_norm", direction="forward+backward"),
                ("normkit", 1.0e-4, 1e-5, True),
                ("torch", 2e-4, 1e-5, False),
            ),
        ],
    }


def test_the_bars(recorded, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bars = importlib.import_module("gpu_bars")
    found = {(line.what, line.bar): line for line in bars.lines(recorded) if line.measured is not None}
    assert {key: (round(line.measured, 2), line.is_met, line.note) for key, line in found.items()} == {
        ("layer_norm forward 32768x4096 bfloat16", ">= 90% of the copy"): (0.95, True, ""),
        ("layer_norm backward 32768x4096 bfloat16", ">= 80% of the copy"): (0.77, False, ""),
        # The host decides, and who is wrong is no rival.
        ("layer_norm forward+backward 128x4096 bfloat16", "no slower than torch"): (0.9, False, "torch"),
        ("layer_norm forward+backward 128x4096 bfloat16", ">= 1.3 x faster than the best"): (0.9, False, "torch"),
        ("rms_norm forward+backward 32768x4096 bfloat16", "no slower than the best"): (2.0, False, "torch WRONG dx"),
        ("bits, whatever the run and the batch", "the same in all cases"): (1.0, True, ""),
    }
    bars.show(recorded)
    out = capsys.readouterr().out
    assert "\n2 of 6 met; " in out
    assert any(line.endswith("NO torch WRONG dx") for line in out.splitlines())
    recorded["not_measured"] = {"bits of c": "RuntimeError"}
    assert not next(line for line in bars.lines(recorded) if line.what.startswith("bits")).is_met


def test_the_table(recorded, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = importlib.import_module("gpu_table")
    rows = {
        line.split(" | ")[0]: line.strip("|").split(" | ")[1:]
        for line in table.table(recorded).splitlines()
        if line.startswith("| ")
    }
    missing = "not measured"
    assert [one.strip(" |") for one in rows["| layer_norm forward+backward 128x4096 bfloat16"]] == [
        *("10.0 us", "524", "1000%", "100 us"),
        *("0.90", "0.01, **wrong dx**", "2.0", "-"),
    ]
    assert {one.strip(" |") for one in rows["| rms_norm forward 32768x4096 bfloat16"]} == {missing}
    assert rows.keys() == {line.split(" | ")[0] for line in table.table(None).splitlines() if line.startswith("| ")}
    assert table.table(recorded).endswith(", some GPU, torch " + torch.__version__ + ", triton 3.9.")
