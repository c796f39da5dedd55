"""`normkit env`: every version that decides a result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest
import torch
from click.testing import CliRunner

from helpers import ROOT
from normkit.cli import environment
from normkit.cli.entry import verbs
from normkit.kernels import cpu
from normkit.kernels.triton import loading


def shown_text() -> str:
    return CliRunner().invoke(verbs, ["env"]).output


def test_text() -> None:
    shown = CliRunner().invoke(verbs, ["env"])
    assert shown.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in shown.output.splitlines() if not line.startswith("extra"))
    assert lines["torch"] == torch.__version__
    assert lines["normkit"] == version("normkit")
    assert lines["threads"] == str(torch.get_num_threads())
    assert "extra study     installed" in shown.output


def test_json_is_one_document() -> None:
    shown = CliRunner().invoke(verbs, ["env", "--json"])
    document = json.loads(shown.output)
    assert (document["schema_version"], document["torch"]) == (1, torch.__version__)
    assert set(document["norms"]["cpu"]) == {"float32", "bfloat16", "float16", "float64"}
    assert set(document["norms"]["cpu"]["float32"]) == {"implementation", "why"}
    assert document["extras"]["lightning"] == {"lightning": version("lightning")}


def test_what_computes_norms_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda: None)
    monkeypatch.setattr(cpu, "instructions", lambda: "avx2")
    monkeypatch.setenv("NORMKIT_CPU", "auto")
    assert "bfloat16 norms  C++ kernels, avx2 on cpu (the best this CPU has)" in shown_text()
    monkeypatch.setenv("NORMKIT_CPU", "avx2")
    assert "float64 norms   C++ kernels, avx2 on cpu (NORMKIT_CPU=avx2)" in shown_text()
    monkeypatch.setattr(cpu, "load", lambda: "NORMKIT_CPU=off")
    assert "float32 norms   plain torch on cpu (no C++ kernels: NORMKIT_CPU=off)" in shown_text()


def test_what_computes_norms_on_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMKIT_CUDA", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    reason = loading.load.__wrapped__()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "device_reason", lambda _: None)
    assert "bfloat16 norms  Triton kernels on cuda (NVIDIA H200)" in shown_text()
    assert "float64 norms   plain torch on cuda (the Triton kernels have no float64)" in shown_text()
    monkeypatch.setattr(loading, "device_reason", lambda _: reason)
    assert (
        "float32 norms   plain torch on cuda (no Triton kernels: they have not run on a GPU yet; NORMKIT_CUDA=on uses "
        "them, each kind of call after a self-check)" in shown_text()
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_unknown_choice_of_kernels_is_one_line() -> None:
    program = [sys.executable, "-m", "normkit", "env"]
    shown = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "NORMKIT_CPU": "x"}, check=False)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "normkit: NORMKIT_CPU must be auto, avx512, avx2, portable or off, got 'x'\n"


def test_a_missing_extra_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed_version", lambda package: None if package == "scipy" else "1.0")
    assert 'extra study     missing scipy: pip install "normkit[study]"' in shown_text()


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        extra: tuple(re.split("[<>=]", package)[0] for package in packages)
        for extra, packages in project["optional-dependencies"].items()
        if extra != "all"
    }
    assert declared == environment.EXTRAS
    assert project["optional-dependencies"]["all"] == [f"normkit[{','.join(declared)}]"]


def test_cpu_flags_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert environment._cpu_flags() == []
