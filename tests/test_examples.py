"""The scripts of examples/ run as they stand, in seconds, and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def output(path: Path) -> str:
    """What a script prints, in an interpreter of its own, with warnings as errors and no network."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_each_example_is_run_below() -> None:
    assert [path.name for path in EXAMPLES] == [
        *("attribution.py", "record_flax.py", "record_mlx.py", "record_onnxruntime.py", "record_serving.py"),
        *("use_kernels.py", "watch_training.py"),
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


# What the attribution prints is asked below.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["use_kernels.py", "watch_training.py"])
def test_an_example_runs(name: str) -> None:
    assert output(ROOT / "examples" / name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_attribution_sums_to_the_logit() -> None:
    lines = output(ROOT / "examples" / "attribution.py").splitlines()
    assert lines[0].startswith("logit of the next byte 'n'")
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:]}
    shares = [float(values[-2]) for name, values in rows.items() if "hook" in name or name == "bias"]
    assert len(shares) == 2 + 2 * 6 + 1
    # 15 numbers printed to four decimals.
    assert sum(shares) == pytest.approx(float(rows["logit"][0]), abs=15 * 0.5e-4)
    assert abs(float(rows["residual"][0])) < 1e-13
    # Parts at scales of their own are another question: they miss the logit.
    assert abs(float(rows["sum"][1]) - float(rows["logit"][0])) > 5
    assert all(len(line) == len(lines[2]) for line in lines[3:-3])
