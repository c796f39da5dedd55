"""setup.py: where the C++ kernels cannot be built, the package installs without them and says why on one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers import ROOT

WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py', run_name='__main__')"


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
