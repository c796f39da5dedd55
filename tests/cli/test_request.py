"""What is asked of `normkit study`: jobs, and how long it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tiny_study
from normkit.cli.request import Request, jobs_of, requested
from normkit.errors import InputError


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_study.install(monkeypatch.setattr)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def request_of(*names: str, out: Path, **changes: object) -> Request:
    given = {"budget": "quick", "seeds": None, "changed": (), "resume": False, "device": "cpu", "dtype": "float32"}
    return requested(names, out=out, **{**given, **changes})


def test_each_study_gets_its_settings_and_its_length(tmp_path: Path) -> None:
    request = request_of("tiny", "other", "tiny", out=tmp_path, seeds=3, changed=("steps=7",))
    assert [(study.name, settings["steps"], settings["seeds"]) for study, settings in request.studies] == [
        ("tiny", 7, 3),
        ("other", 7, 3),
    ]
    # Four seconds for two seeds.
    assert request.seconds == {"tiny": 6.0, "other": 6.0}


def test_no_names_are_all_of_them(tmp_path: Path) -> None:
    assert [study.name for study, _ in request_of(out=tmp_path).studies] == ["tiny", "other", "needy"]


def test_only_who_is_alone_looks_at_folder_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "results.json").touch()
    with pytest.raises(InputError, match="holds results already"):
        request_of("tiny", out=tmp_path)
    request_of("tiny", out=tmp_path, resume=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    request_of("tiny", out=tmp_path, device="warp")


def test_so_many_jobs_as_cores_but_one_where_processes_share_the_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    assert jobs_of(None, 1, "cpu") == 8
    assert jobs_of(None, 3, "cpu") == 2
    assert jobs_of(None, 16, "cpu") == 1
    assert jobs_of(None, 1, "cuda:1") == 1
    assert jobs_of(4, 1, "cuda") == 4
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert jobs_of(None, 1, "cpu") == jobs_of(1, 1, "cpu") == 1


def test_jobs_and_torchrun_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InputError, match="--jobs 2: the processes of torchrun share every arm; leave --jobs out"):
        jobs_of(2, 1, "cpu")
