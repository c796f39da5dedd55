"""`normkit study`: the list, the table, the document, files, and one line for every bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import forks
import tiny_study
from forks import Fork, until
from helpers import refused
from normkit.cli.study import Request, jobs_of, requested
from normkit.errors import InputError
from normkit.study import catalogue, report, running


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
    asked = ((None, 1, "cpu"), (None, 3, "cpu"), (None, 16, "cpu"), (None, 1, "cuda:1"), (4, 1, "cuda"))
    assert [jobs_of(*each) for each in asked] == [8, 2, 1, 1, 4]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert jobs_of(None, 1, "cpu") == jobs_of(1, 1, "cpu") == 1
    with pytest.raises(InputError, match="--jobs 2: the processes of torchrun share every arm; leave --jobs out"):
        jobs_of(2, 1, "cpu")


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiny studies, measured in this process."""
    tiny_study.install(monkeypatch.setattr)
    monkeypatch.setattr(running, "_digest_of_text", lambda: "text")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0})
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("arguments", [(), ("--list",)])
def test_the_list(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("study", *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny               4 s  asks of tiny"
    assert lines[-2] == (
        "Seconds of one core, with --budget quick (3 seeds, indicative); all take 12 s on the 1 core here."
    )
    assert "normkit study --all" in lines[-1]
    assert max(map(len, lines)) <= 100
    document = json.loads(run("study", *arguments, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["studies"][0] == {"name": "tiny", "asks": "asks of tiny", "seconds": 4}
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--list", "--resume"), "--list stands alone."),
        (("--resume",), "give NAMEs, or --all."),
        (("--out", "x"), "give NAMEs, or --all."),
        (("tiny", "--all"), "give NAMEs or --all, not both."),
        (("tiny", "--budget", "huge"), "'huge' is not one of 'quick', 'standard', 'full'"),
        (("tiny", "--seeds", "0"), "0 is not in the range x>=1"),
        (("tiny", "--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("study", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tinny",), "no study is called 'tinny'; did you mean tiny?"),
        (("tiny", "--set", "step=3"), "tiny has no setting 'step'; did you mean steps?"),
        (("--all", "--set", "step=3"), "these studies have no setting 'step'; did you mean steps?"),
        (("tiny", "--set", "steps=few"), "steps takes a whole number, got 'few'"),
        (("tiny", "--device", "warp"), "cannot compute on the device 'warp': "),
        (("needy",), 'needy needs no_such_package, which is not installed: pip install "normkit[study]"'),
        (("tiny", "--out", "file"), "cannot write to file/study: file is a file; choose another folder with --out"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    Path("file").touch()
    assert refused(run("study", *arguments)).startswith(message)
    assert [path.name for path in Path().iterdir()] == ["file"]


@pytest.mark.slow
def test_the_table_the_page_and_the_numbers(run: Run) -> None:
    done = run("study", "tiny", "--set", "steps=3", "--set", "widths=5,6", "--seeds", 3, "--budget", "full")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "+ reproduced" in done.stdout
    assert done.stdout.splitlines()[-1] == "page: normkit-out/study/tiny/index.html"
    assert max(map(len, done.stdout.splitlines())) <= 100
    folder = Path("normkit-out/study/tiny")
    names = {"arms", "configuration.json", "index.html", "log.jsonl", "results.json", "values.svg"}
    assert {path.name for path in folder.iterdir()} == names
    settings = json.loads((folder / "results.json").read_text())["settings"]
    assert (settings["seeds"], settings["steps"], settings["widths"]) == (3, 3, [5, 6])
    again = run(
        "study", "tiny", "--set", "steps=3", "--set", "widths=5,6", "--seeds", 3, "--budget", "full", "--resume"
    )
    assert (again.exit_code, again.stdout) == (0, done.stdout)


@pytest.mark.slow
def test_json_is_one_document_of_what_the_folder_holds(run: Run) -> None:
    done = run("study", "other", "tiny", "other", "--json", "--out", "here")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, document["schema_version"], document["folder"]) == (0, "", 1, "here/study")
    assert [each["study"] for each in document["studies"]] == ["other", "tiny"]
    for each in document["studies"]:
        assert each == json.loads((Path("here/study") / each["study"] / "results.json").read_text())


@pytest.mark.slow
def test_results_are_not_written_over(run: Run) -> None:
    run("study", "other")
    before = Path("normkit-out/study/other/results.json").stat().st_mtime_ns
    message = "normkit-out/study/other holds results already; go on with --resume, or choose another folder with --out"
    assert refused(run("study", "tiny", "other")) == message
    # Before the first of them was begun.
    assert not Path("normkit-out/study/tiny").exists()
    assert "with settings.steps 2, and this run has 5" in refused(run("study", "other", "--resume", "--set", "steps=5"))
    assert Path("normkit-out/study/other/results.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_one_study_that_cannot_be_run_keeps_none_from_running(run: Run) -> None:
    done = run("study", "--all")
    assert done.exit_code == 2
    assert done.stderr == "normkit: not run, or not all of it: needy; --resume tries again\n"
    assert "not run: every arm: needy needs no_such_package" in " ".join(done.stdout.split())
    assert "3 claims: 2 reproduced, 1 not run" in done.stdout
    assert done.stdout.splitlines()[-1] == "page: normkit-out/study/index.html"
    assert {path.name for path in Path("normkit-out/study").iterdir()} == {"index.html", "tiny", "other"}
    document = json.loads(run("study", "--all", "--resume", "--json").stdout)
    assert [each["claims"][0]["verdict"] for each in document["studies"]] == ["reproduced", "reproduced", "not run"]
    assert document["studies"][2]["trouble"]["every arm"].startswith("needy needs no_such_package")


def test_an_arm_that_fails_is_told_and_the_others_are_kept(run: Run) -> None:
    done = run("study", "tiny", "--set", "fault=input")
    assert (done.exit_code, done.stderr) == (2, "normkit: not run, or not all of it: tiny; --resume tries again\n")
    assert "not run: right [seed 1]: expected a better setting; choose another" in " ".join(done.stdout.split())
    assert len(list(Path("normkit-out/study/tiny/arms").iterdir())) == 4


@pytest.mark.slow
def test_a_bug_in_one_of_several_studies_is_told_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise KeyError("gone")

    studies = {"tiny": tiny_study.renamed("tiny", arms=broken), "other": tiny_study.renamed("other")}
    monkeypatch.setattr(catalogue, "load", studies.__getitem__)
    done = run("study", "tiny", "other")
    assert done.exit_code == 101
    assert "this is a bug of normkit: KeyError: 'gone'" in " ".join(done.stdout.split())
    assert Path("normkit-out/study/other/results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("names", "page"), [(("tiny",), "tiny/"), (("tiny", "other"), "")])
def test_a_page_that_cannot_be_written_costs_no_numbers(
    run: Run, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], page: str
) -> None:
    def full(_results: object, folder: Path) -> Path:
        raise InputError(f"cannot write {folder}/index.html: no room")

    monkeypatch.setattr(report, "write", full if page else report.write)
    monkeypatch.setattr(report, "write_index", full)
    done = run("study", *names)
    assert (done.exit_code, done.stderr) == (2, f"normkit: cannot write normkit-out/study/{page}index.html: no room\n")
    assert "+ reproduced" in done.stdout
    assert "page:" not in done.stdout


PROGRAM = """
import tiny_study
from normkit.study import running
tiny_study.install()
running._digest_of_text = lambda: "text"
from normkit.cli.entry import main
main()
"""


def started(*arguments: object) -> Fork:
    """The command in a process of its own, which knows the tiny studies."""
    return Fork(PROGRAM, "study", *arguments)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("jobs", [2, 1])
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path: Path, jobs: int) -> None:
    process = started("tiny", "--out", tmp_path, "--jobs", jobs, "--set", "pause=0.1")
    until(lambda: list(tmp_path.glob("study/tiny/arms/*.json")))
    # A terminal sends it to all processes of the group.
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert error == f"normkit: interrupted; finished arms are kept in {tmp_path}/study: --resume goes on from there\n"
    assert not (tmp_path / "study" / "tiny" / "results.json").exists()
    # The same in one process: others need seconds to begin.
    out, error = started("tiny", "--out", tmp_path, "--jobs", 1, "--set", "pause=0.1", "--resume").communicate()
    assert "+ reproduced" in out
    assert error == ""
    assert len((tmp_path / "study" / "tiny" / "log.jsonl").read_text().splitlines()) == 6


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_share_every_arm_and_the_first_speaks(tmp_path: Path) -> None:
    both = forks.pair(PROGRAM, "study", "tiny", "--out", tmp_path, "--set", "trains=yes")
    (out, error), silent = (process.communicate(timeout=300) for process in both)
    assert [process.returncode for process in both] == [0, 0], error
    assert "+ reproduced" in out
    assert silent[0] == ""
    content = json.loads((tmp_path / "study" / "tiny" / "results.json").read_text())
    assert content["where"]["processes"] == "2"
    alone = running.run(tiny_study.STUDY, {**tiny_study.STUDY.quick, "trains": True})
    for seed in (0, 1):
        losses = content["measurements"][f"{seed}"]["right"]["losses"]
        # Sums of 16 squares in another order.
        assert losses == pytest.approx(alone.measured[seed]["right"]["losses"], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_where_one_of_two_processes_dies_the_other_says_so_in_a_line(tmp_path: Path) -> None:
    both = forks.pair(
        PROGRAM, "study", "tiny", "--out", tmp_path, "--set", "trains=yes", "--set", "pause=0.1", "--set", "steps=8"
    )
    until(lambda: list(tmp_path.glob("study/tiny/arms/*.json")))
    both[1].kill()
    out, error = both[0].communicate(timeout=300)
    both[1].communicate()
    assert (both[0].returncode, out) == (2, "")
    assert error.splitlines()[-1].startswith("normkit: expected 2 processes to the end of the run, and another")
    assert list(tmp_path.glob("study/tiny/arms/*.json"))


@pytest.mark.slow
def test_where_the_folder_cannot_be_used_one_of_two_processes_says_so(tmp_path: Path) -> None:
    (tmp_path / "study" / "tiny").mkdir(parents=True)
    (tmp_path / "study" / "tiny" / "photo.jpg").touch()
    both = forks.pair(PROGRAM, "study", "tiny", "--out", tmp_path)
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [2, 2]
    message = (
        f"normkit: {tmp_path / 'study' / 'tiny'} holds results already; go on with --resume, or choose another folder"
    )
    assert told[0][1].splitlines()[-1].startswith(message)
    assert "normkit:" not in told[1][1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_study_as_one_starts_it(tmp_path: Path) -> None:
    sizes = ("steps=3", "layers=1", "width=16", "batch=2", "window=8")
    smaller = [part for size in sizes for part in ("--set", size)]
    command = [sys.executable, "-m", "normkit", "study", "warmup", *smaller, "--seeds", "2", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert "Post-LN transformers need warm-up" in done.stdout
    arms = json.loads((tmp_path / "normkit-out" / "study" / "warmup" / "results.json").read_text())["measurements"]["1"]
    slow, fast = arms["post, warm-up"]["losses"], arms["post, no warm-up"]["losses"]
    assert len(slow) == len(fast) == 3
    assert slow[0] == fast[0]
    assert slow[2] != fast[2]
