"""The kernels compile for three architectures, within the registers, in whole vectors: docs/explanation/gpu-kernels.md.

Machine code is looked at, none is run. Everything is compiled in one process, without Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys

import pytest

from helpers import ROOT
from normkit.kernels.triton import configuration

BENCHMARKS = ROOT / "benchmarks"
# Norm, rows, n, and architectures, in bfloat16.
COMPILED = [
    ("layer_norm", 4096, 4096, (80, 90, 100)),
    ("rms_norm", 8192, 8192, (90,)),
    ("layer_norm", 8192, 8192, (90,)),
    ("layer_norm", 32768, 16384, (80,)),
    ("layer_norm", 512, 1001, (90,)),
]
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import compiled_kernels
found = {}
for norm, rows, n, architectures in json.loads(sys.argv[2]):
    case = compiled_kernels.Case(norm, "bfloat16", "bfloat16", (rows, n))
    for call in compiled_kernels.calls(case):
        for arch in architectures:
            # Takes no row: the lines of sums of all widths are added in the same way.
            if call.launch.kernel.__name__ != "add_partial_sums" or n == 16384:
                place = f"{norm} {n} sm_{arch} {call.launch.kernel.__name__}"
                found[place] = compiled_kernels.compiled(call, arch)._asdict()
print(json.dumps(found))
"""
# What `make test` compiles of it: a vector of rows at a time, and one number at a time.
QUICK = [("layer_norm", 512, 1024, (90,)), ("layer_norm", 512, 1001, (90,))]
# What each kernel reads and writes of rows.
OF_ROWS = {"normalize_rows": ("x", "y"), "differentiate": ("dy", "x", "dx"), "sum_gradient_rows": ("dy", "x")}


@pytest.fixture(scope="module", params=[QUICK, pytest.param(COMPILED, marks=pytest.mark.exhaustive)], ids=len)
def figures(request, tmp_path_factory):
    """What each kernel takes, by norm, n, architecture and name."""
    if importlib.util.find_spec("triton") is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("Triton's compiler is not here")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCHMARKS), json.dumps(request.param)],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("figures", [COMPILED], indirect=True, ids=len)
def test_all_kernels_of_whole_rows_compile_for_each_architecture(figures):
    for arch in (80, 90, 100):
        assert {f"layer_norm 4096 sm_{arch} {name}" for name in ("normalize_rows", "differentiate")} <= figures.keys()
    assert "layer_norm 16384 sm_80 add_partial_sums" in figures
    assert "layer_norm 16384 sm_80 sum_gradient_rows" in figures


@pytest.mark.exhaustive
def test_rows_that_are_taken_whole_fit_into_registers(figures):
    for place, found in figures.items():
        assert found["stack"] == 0, place


@pytest.mark.slow
def test_rows_are_read_and_written_in_vectors(figures):
    """Every access to a row of a multiple of 16 bytes moves 16 bytes; one number at a time where rows may begin odd."""
    for place, found in figures.items():
        expected = {"16"} if " 1001 " in place else {"128"}
        for argument in OF_ROWS.get(place.split()[-1], ()):
            assert set(found["widths"][argument]) == expected, f"{place} {argument}"


@pytest.mark.exhaustive
def test_rows_of_several_tiles_are_copied_ahead(figures):
    for place, found in figures.items():
        if place.endswith("differentiate") and " 1001 " not in place:
            assert found["copies"] > 0, place


@pytest.mark.slow
def test_shared_memory_is_what_the_configuration_promises(figures):
    for place, found in figures.items():
        assert found["shared"] <= configuration._MOST_BYTES_AHEAD + 4096, place


def test_page_shows_what_is_recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("compiled_table")
    recorded = json.loads((BENCHMARKS / "results" / "compiled_kernels.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "explanation" / "gpu-kernels.md").read_text(encoding="utf-8")
    assert table.with_part(page, table.page_part(recorded)) == page
