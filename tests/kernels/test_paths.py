"""Every instruction set of this machine, and plain torch, keep the numbers contract; no argument crashes one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from contract import Calls, draw, outcome
from normkit import specs
from normkit.errors import InputError
from normkit.kernels import cpu

FOLDER = Path(__file__).parent
CONTRACT = ["forward_numbers", "backward_numbers", "added_numbers", "subnormal_numbers"]
CONTRACT += ["degenerate_rows", "row_groups", "layouts", "conventions"]

# Plain torch is itself what outputs in 16 bits are held against, and has no groups of rows that it computes together:
# of these one norm is asked. Of the mixtures of dtypes those with float32 and bfloat16.
PLAIN = "not test_16_bit and not (row_groups and not deberta) and not (mixture and (fp64 or fp16))"


def has(name):
    """Whether the kernels can run on this instruction set here."""
    before = cpu.instructions()
    try:
        cpu.select(name)
    except InputError:
        return False
    cpu.select(before)
    return True


PATHS = ["off", *(name for name in ("portable", "avx2", "avx512") if cpu.load() is None and has(name))]


OTHERS = [path for path in PATHS if path != ("off" if cpu.load() else cpu.instructions())]


def run(path, *arguments):
    """A Python program of its own on one path; a crash is a negative return code."""
    environment = {
        **os.environ,
        "NORMKIT_CPU": path,
        # Beside other test processes a second thread would wait for a core more than it works.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["TORCH_LAYER_NORM", "TORCH_RMS_NORM", "LLAMA", "GEMMA", "DEBERTA"])
def test_every_instruction_set_gives_the_same_bits(name, dtype):
    spec = getattr(specs, name)
    found = []
    before = cpu.instructions() if len(PATHS) > 1 else None
    for path in PATHS[1:]:
        cpu.select(path)
        for rows, n in ((1, 1), (5, 33), (17, 100), (9, 1025)):
            torch.manual_seed(n)
            with Calls() as calls:
                results = outcome(spec, draw(spec, rows, n, dtype=dtype, mean=1.0))
            assert calls.names == ["normalize_forward", "normalize_backward"]
            found.append((path, rows, results))
    if before is not None:
        cpu.select(before)
    for path, rows, results in found:
        first = next(others for _, same, others in found if same == rows)
        for ours, theirs in zip(results, first, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), path


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHERS)
def test_the_contract_holds_on_every_path(path):
    """The one in use is what the files themselves run on; what gives its bits need not be asked everything again."""
    names = CONTRACT if path == "off" else ["forward_numbers", "degenerate_rows", "subnormal_numbers"]
    files = [str(FOLDER / f"test_{name}.py") for name in names]
    chosen = ["-k", PLAIN] if path == "off" else []
    result = run(path, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *chosen, *files)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.slow
def test_no_arguments_crash_or_are_computed_wrong():
    """On the path in use; the next test asks every path."""
    result = run("auto", str(FOLDER / "argument_fuzz.py"), "100")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "seed"), [(path, str(seed)) for seed, path in enumerate(PATHS, 1)])
def test_no_arguments_of_many_crash_or_are_computed_wrong(path, seed):
    """Others on each path: together three thousand calls."""
    result = run(path, str(FOLDER / "argument_fuzz.py"), "750", seed)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_crash_would_be_seen():
    assert run("auto", "-c", "import ctypes; ctypes.string_at(0)").returncode < 0
