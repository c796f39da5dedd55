"""Every instruction set of this machine, and plain torch, keep the numbers contract; no argument crashes one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from contract import Calls, draw, outcome
from forks import Fork
from normkit import specs
from normkit.errors import InputError
from normkit.kernels import cpu

pytestmark = pytest.mark.slow

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


def run(path, program, *arguments):
    """A program of its own on one path, to its end; a crash is a negative return code."""
    # Beside other test processes a second thread would wait for a core more than it works.
    environment = {**os.environ, "NORMKIT_CPU": path, "OMP_NUM_THREADS": "1"}
    process = Fork(program, *arguments, environment=environment, ours=False)
    return process, *process.communicate(600.0)


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


TESTS = """
import sys, pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", OTHERS)
def test_the_contract_holds_on_every_path(path):
    """The one in use is what the files themselves run on, every case of them; on the others a case for each value.

    What gives its bits need not be asked everything again.
    """
    names = CONTRACT if path == "off" else ["forward_numbers", "degenerate_rows", "subnormal_numbers"]
    files = [FOLDER / f"test_{name}.py" for name in names]
    chosen = ["-k", PLAIN] if path == "off" else []
    # Hypothesis is there before pytest is, which has nothing to rewrite in it.
    plugins = ["-p", "thinned", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
    process, out, error = run(path, TESTS, "-q", "-m", "not slow", *plugins, *chosen, *files)
    assert process.returncode == 0, out[-3000:] + error[-3000:]


FUZZ = """
import faulthandler, sys, runpy
faulthandler.enable()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("path", PATHS)
def test_no_arguments_crash_or_are_computed_wrong(path, seed):
    """Others on each path, and most where there are kernels to crash."""
    process, out, error = run(path, FUZZ, FOLDER / "argument_fuzz.py", 60 if path == "off" else 120, seed)
    assert process.returncode == 0, out[-3000:] + error[-3000:]


def test_a_crash_would_be_seen():
    assert run("auto", "import ctypes; ctypes.string_at(0)")[0].returncode < 0


@pytest.mark.exhaustive
def test_a_path_is_the_one_that_is_asked_for():
    """The process that is forked has not chosen one before."""
    program = "from normkit.kernels import cpu; print(cpu.choice(), cpu.load() or cpu.instructions())"
    for path in PATHS:
        expected = cpu.load() if cpu.load() and path != "off" else path
        shown = run(path, program)[1]
        assert shown.startswith(f"{path} {'' if path == 'off' else expected}"), shown
