"""setup.py: where the C++ kernels cannot be built, the package installs without them and says why on one line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow

WITHOUT_TORCH = """
import runpy, sys, sysconfig
sys.modules["torch"], sysconfig.get_path = None, lambda _: "nowhere"
runpy.run_path("setup.py", run_name="__main__")
"""


def build(folder: Path, *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build what a wheel would hold of C++ into a folder."""
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    command = [sys.executable, *program, "-q", "build_ext", *places]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False
    )


def test_without_a_compiler(tmp_path: Path) -> None:
    built = build(tmp_path, "setup.py", CXX="no-such-compiler -pthread")
    assert built.returncode == 0
    assert built.stderr == (
        "normkit: installed without its C++ kernels: there is no C++ compiler 'no-such-compiler -pthread'; "
        "install one (Debian: g++) or name it in CXX\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_without_torch(tmp_path: Path) -> None:
    built = build(tmp_path, "-c", WITHOUT_TORCH)
    assert built.returncode == 0
    assert built.stderr == (
        "normkit: installed without its C++ kernels: torch is not installed where the package is built; "
        "install it first, then use --no-build-isolation\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_with_a_compiler_that_fails(tmp_path: Path) -> None:
    built = build(tmp_path, "setup.py", CXX="false")
    assert built.returncode == 0
    assert 'building extension "normkit.kernels._cpu" failed' in built.stderr
    assert not list(tmp_path.rglob("_cpu*"))


def test_the_name_of_a_wheel_without_kernels_says_so(tmp_path: Path) -> None:
    folders = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "build"]
    command = [sys.executable, "setup.py", "-q", *folders, "bdist_wheel", "--bdist-dir", tmp_path / "wheel"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    subprocess.run([*command, "--dist-dir", tmp_path / "dist"], cwd=ROOT, env=environment, check=True)
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [
        f"normkit-{version('normkit')}-0_without_kernels-py3-none-any.whl"
    ]
