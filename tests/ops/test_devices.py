"""What torch.compile sees of the operators: on a GPU their launches, elsewhere and in an export the call itself."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import normkit
from helpers import ROOT
from normkit.kernels import cpu
from normkit.ops import devices

pytestmark = pytest.mark.slow

OPERATORS = [
    "normalize_rows",
    "normalize_rows_out",
    "normalize_forward",
    "add_normalize_forward",
    "add_normalize_rows_out",
    "normalize_backward",
]
# What the launches of an operator write; nothing else is cloned by the compiler.
WRITTEN = {
    "normalize_rows": [["y"]],
    "normalize_rows_out": [["y"]],
    "normalize_forward": [["y", "statistics"]],
    "add_normalize_forward": [["y", "new_residual", "statistics"]],
    "add_normalize_rows_out": [["y", "new_residual"]],
    "normalize_backward": [["dx", "sums"], ["dweight", "dbias"]],
}


@pytest.fixture(scope="module")
def traces(request):
    """The graphs that the tests of this run ask for: each takes a third of a second."""
    pytest.importorskip("triton")
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    calls = [item.callspec.params for item in own]
    names = {f"{call['operator']} {call.get('name', 'layer_norm')}" for call in calls if "operator" in call}
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "tests")}
    program = [sys.executable, ROOT / "tests" / "imagined_gpu.py", "traces", *sorted(names)]
    result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def launches(found):
    return [node for node in found["nodes"] if "triton_kernel_wrapper" in node]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        *((operator, "layer_norm") for operator in OPERATORS),
        *itertools.product(["normalize_forward", "normalize_backward"], ["llama", "scale_norm"]),
    ],
)
def test_a_compiler_sees_the_launches(traces, operator, name):
    found = traces[f"{operator} {name}"]
    assert not [node for node in found["nodes"] if "normkit" in node]
    expected = [list(names) for names in WRITTEN[operator]]
    if name != "layer_norm" and operator == "normalize_backward":
        # Neither has a bias.
        expected[1] = ["dweight"]
    assert [sorted(names) for names in found["written"]] == [sorted(names) for names in expected]
    assert len(launches(found)) == len(expected)
    assert found["found"] == found["promised"], "shape, dtype or device of the fake is another"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_graph_is_one_of_any_number_of_rows(traces, operator):
    found = traces[f"{operator} layer_norm"]
    # How many programs there are follows from the rows when the graph runs.
    assert "(1, 1, 1)" not in found["grids"][0]
    # No guard holds the number of rows itself.
    assert not [guard for guard in found["guards"] if guard.startswith("Eq(")]


def test_on_the_cpu_the_call_stays_whole(traces):
    for operator in OPERATORS:
        nodes = traces[f"{operator} cpu"]["nodes"]
        assert not launches(traces[f"{operator} cpu"])
        assert [node for node in nodes if f"normkit.{operator}.default" in node or f"normkit::{operator}" in node] or (
            # One that writes is wrapped, with its name among the arguments.
            [node for node in nodes if "auto_functionalized" in node]
        )


def test_an_exported_program_keeps_the_operator(traces):
    assert [node for node in traces["export"] if "normkit.normalize_rows" in node]
    assert not [node for node in traces["export"] if "triton" in node]


USE = """
import torch, normkit
layer = normkit.LayerNorm(8)
layer(torch.randn(3, 8)).sum().backward()
normkit.add_rms_norm(torch.randn(3, 8), torch.randn(3, 8), (8,))
normkit.normalize(torch.randn(3, 8), normkit.specs.NANOCHAT, out=torch.empty(3, 8))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("use", "expected"), [("import triton.language", "True"), (USE, "False")])
def test_norms_on_the_cpu_import_no_triton(use, expected):
    """Forward, backward, added and in place; that it can fail is the first case."""
    if expected == "True":
        pytest.importorskip("triton")
    program = [sys.executable, "-c", f"{use}\nimport sys\nprint('triton' in sys.modules)"]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected


def test_nothing_is_imported_before_it_is_called(monkeypatch):
    called = []
    fake = SimpleNamespace(normalize_rows=lambda *arguments: ("rows", *arguments))
    monkeypatch.setattr(devices, "operators", lambda: called.append(1) or fake)
    implementation = devices.eager("normalize_rows")
    assert not called
    assert implementation(1, 2) == ("rows", 1, 2)
    assert called


def test_the_compiler_is_still_served_on_the_cpu():
    """In a process whose Triton is the interpreter."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: normkit.rms_norm(x * 2.0, (8,)) + 1.0, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 8)
    expected = normkit.rms_norm(x * 2.0, (8,)) + 1.0
    assert torch.equal(compiled(x), expected) or cpu.load() is not None
