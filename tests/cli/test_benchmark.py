"""`normkit bench`: the table, the document, and one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from click.testing import Result

from normkit.bench import allocation, cases, devices, running
from normkit.bench.cases import Case
from normkit.bench.devices import Device
from normkit.bench.peers import PEERS
from normkit.bench.results import Benchmark
from normkit.cli import benchmark

Run = Callable[..., Result]
TINY = ("bench", "--shape", "4x16", "--op", "rms_norm", "--dtype", "float32", "--pass", "forward", "--seconds", "0")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is set, and nothing is compiled."""
    for name, value in allocation.SETTINGS.items():
        monkeypatch.setenv(name, value)
    without_compiler = tuple(peer for peer in PEERS if peer.name != "torch.compile")
    monkeypatch.setattr(
        running.measure, "__kwdefaults__", {**running.measure.__kwdefaults__, "peers": without_compiler}
    )


@pytest.mark.slow
def test_the_table(run: Run) -> None:
    done = run(*TINY, "--threads", 1)
    assert (done.exit_code, done.stderr) == (0, "")
    for word in ("rms_norm forward", "4x16 float32", "copy (floor)", "normkit", "LlamaRMSNorm", "threads 1, torch"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_json_is_one_document(run: Run) -> None:
    done = run(*TINY, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["schema_version"], len(document["cells"])) == (0, 2, 1)
    assert {found["peer"] for found in document["cells"][0]["measurements"]} >= {"normkit", "torch"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "axb"), "normkit: a shape is rows x features, such as 64x4096, got 'axb'\n"),
        (("--op", "softmax"), "'softmax' is not one of 'layer_norm'"),
        (("--threads", "0"), "0 is not in the range x>=1"),
        (("--threads", "99999"), "normkit: --threads 99999: this machine has "),
        (("--shape", "9999999x999999", "--quick"), "GiB and this machine has "),
        (("--seconds", "-1"), "-1.0 is not in the range 0<=x<=3600"),
        (("--device", "gpu"), "'gpu' is not one of 'cpu', 'cuda'"),
        (("--device", "cuda", "--threads", "1"), "normkit: --threads is of the CPU: a GPU has its own; leave it out"),
    ],
)
def test_wrong_options(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("bench", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_choices_are_those_that_are_measured() -> None:
    assert (benchmark._OPS, benchmark._PASSES) == (cases.OPS, cases.PASSES)


def test_without_a_gpu_one_line_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("bench", "--device", "cuda")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("normkit: device cuda: torch ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "cases"), [((), 56), (("--quick",), 16), (("--shape", "2x8", "--op", "rms_norm"), 4)]
)
def test_what_a_gpu_measures(given: tuple[str, ...], cases: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(grid: Sequence[Case], *, device: Device, **_options: object) -> Benchmark:
        asked.append((device.name, len(grid)))
        return Benchmark(devices.CPU.machine(), ())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running, "measure", measure)
    assert run("bench", "--device", "cuda", *given).exit_code == 0
    assert asked == [("cuda", cases)]
