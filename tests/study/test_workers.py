import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_study
from forks import is_running, until
from normkit.errors import InputError
from normkit.study import workers
from normkit.study.workers import ArmRun, Crew, in_a_line


def run_of(arm=0, seed=0, measure=tiny_study.measure, **changes):
    settings = {**tiny_study.STUDY.quick, **changes}
    return ArmRun(measure=measure, arm=tiny_study.arms(settings)[arm], seed=seed, settings=settings)


def test_a_measurement_is_what_json_reads_back_and_follows_from_its_seed():
    outcome = run_of().perform(lambda _: None)
    found = json.loads(outcome.text)
    assert (found["steps"], found["nothing"], outcome.error) == ([1, 2], None, "")
    assert outcome.seconds > 0
    texts = [run_of(seed=seed).perform(lambda _: None).text for seed in (3, 4, 3)]
    assert texts[0] == texts[2] != texts[1]


def test_shares_are_told_seldom(monkeypatch):
    now = iter([0.0, 0.05, 0.11, 0.12])
    monkeypatch.setattr(workers.time, "monotonic", lambda: next(now))
    told = []
    run_of(steps=4).perform(told.append)
    assert told == [0.25, 0.75]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("input", "expected a better setting; choose another"),
        ("bug", "this is a bug of normkit: KeyError: 'of nowhere\\nat all'; NORMKIT_TRACEBACK=1 shows where"),
        ("disk", "checkpoint: No space left on device"),
        ("memory", "out of memory (no more is known); choose smaller settings, or fewer --jobs"),
        ("device memory", "out of memory (CUDA out of memory.); choose smaller settings, or fewer --jobs"),
    ],
)
def test_a_failure_is_told_in_a_line(fault, expected):
    outcome = run_of(arm=2, fault=fault).attempt(lambda _: None)
    assert (outcome.text, outcome.error) == ("", expected)


def test_a_bug_is_one_line():
    outcome = run_of(measure=lambda _lab, _arm: {"value": torch.zeros(())}).attempt(lambda _: None)
    assert outcome.error.startswith("this is a bug of normkit: TypeError")
    assert in_a_line(RuntimeError("one\ntwo")).startswith("this is a bug of normkit: RuntimeError: one;")
    assert in_a_line(RuntimeError()) == "this is a bug of normkit: RuntimeError: ; NORMKIT_TRACEBACK=1 shows where"


def test_a_traceback_is_shown_where_it_is_wanted(monkeypatch, capsys):
    run_of(arm=2, fault="bug").attempt(lambda _: None)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("NORMKIT_TRACEBACK", "1")
    run_of(arm=2, fault="bug").attempt(lambda _: None)
    assert "tiny_study.py" in capsys.readouterr().err


@pytest.fixture
def begun_at_once(monkeypatch):
    """Processes that are forks of one that has imported torch, in place of spawned ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["normkit.study.workers", "tiny_study"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _kind: context)


def trials(seeds=2, **changes):
    settings = {**tiny_study.STUDY.quick, **changes}
    return [
        ArmRun(measure=tiny_study.measure, arm=arm, seed=seed, settings=settings)
        for seed in range(seeds)
        for arm in tiny_study.arms(settings)
    ]


def quiet(trial, share):
    del trial, share


def outcomes(crew, given, tell=quiet):
    return {(trial.seed, trial.arm.name): outcome for trial, outcome in crew.perform(given, tell)}


def test_one_job_works_here_and_leaves_threads_and_random_numbers_alone():
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    with Crew(threads=2) as crew:
        found = outcomes(crew, trials())
    assert all('"threads": 2' in outcome.text for outcome in found.values())
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["begun_at_once", pytest.param("spawned", marks=pytest.mark.exhaustive)])
def test_several_jobs_give_the_same_bytes_as_one(begun, request, tmp_path):
    if begun == "begun_at_once":
        request.getfixturevalue(begun)
    told = []
    with Crew() as one, Crew(jobs=2) as two:
        here = outcomes(one, trials())
        beside = outcomes(two, trials(), lambda trial, share: told.append((trial.seed, share)))
        again = outcomes(two, trials())
        # Each of two trials waits until the other has begun.
        meeting = outcomes(two, trials(fault=f"meets in {tmp_path}"))
    texts = {key: outcome.text for key, outcome in here.items()}
    assert {key: outcome.text for key, outcome in beside.items()} == texts
    assert {key: outcome.text for key, outcome in again.items()} == texts
    assert {seed for seed, _ in told} == {0, 1}
    assert {outcome.error for outcome in meeting.values()} == {""}


@pytest.mark.slow
@pytest.mark.usefixtures("begun_at_once")
def test_a_process_that_ends_takes_no_other_trial_with_it():
    faulty = [trials(fault=fault)[2] for fault in ("killed", "ended", "bug")]
    with Crew(jobs=2) as crew:
        found = {
            trial.settings["fault"]: outcome.error for trial, outcome in crew.perform([*faulty, *trials(1)], quiet)
        }
    assert found == {
        "killed": "its process was killed, as the system does where memory runs out; fewer --jobs need less",
        "ended": "its process ended with code 3",
        "bug": "this is a bug of normkit: KeyError: 'of nowhere\\nat all'; NORMKIT_TRACEBACK=1 shows where",
        "none": "",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("begun_at_once")
def test_processes_end_with_their_crew_and_with_who_asks_no_more():
    with Crew(jobs=2) as crew:
        with contextlib.closing(crew.perform(trials(pause=0.01), quiet)) as found:
            next(found)
        (idle,) = crew._idle
        process = idle._process
        assert process.is_alive()
    # Joined and not left behind.
    assert process.exitcode is not None
    # A crew may be asked again, also after it was interrupted.
    assert len(outcomes(crew, trials(seeds=1))) == 3
    crew.__exit__(None, None, None)


@pytest.mark.slow
def test_what_has_no_name_elsewhere_cannot_be_sent():
    (first, *_) = trials()
    nameless = ArmRun(measure=lambda _lab, _arm: {}, arm=first.arm, seed=0, settings=first.settings)
    with Crew(jobs=2) as crew, pytest.raises(InputError, match="put the study's functions in a module, or choose one"):
        outcomes(crew, [nameless])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_is_not_found_elsewhere_is_an_error_of_its_trial(monkeypatch, tmp_path):
    (tmp_path / "passing_module.py").write_text("def measure(lab, arm):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    from passing_module import measure

    (first, *_) = trials()
    elsewhere = ArmRun(measure=measure, arm=first.arm, seed=0, settings=first.settings)
    with Crew(jobs=2) as crew:
        # The process exists before the module can be found by it, and after it cannot.
        outcomes(crew, [first])
        (tmp_path / "passing_module.py").unlink()
        for kept in tmp_path.rglob("*.pyc"):
            kept.unlink()
        (outcome,) = outcomes(crew, [elsewhere]).values()
    assert outcome.error.startswith("this is a bug of normkit: ModuleNotFoundError")


PROGRAM = """
import tiny_study
from normkit.study.workers import ArmRun
from normkit.study.workers import Crew
settings = {**tiny_study.STUDY.quick, "fault": "asleep"}
right = tiny_study.arms(settings)[2]
trials = [ArmRun(measure=tiny_study.measure, arm=right, seed=seed, settings=settings) for seed in (0, 1)]
list(Crew(jobs=2).perform(trials, print))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_processes_end_with_one_that_is_killed_whatever_they_do(tmp_path):
    tests = str(Path(__file__).resolve().parent.parent)
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path, env={**os.environ, "PYTHONPATH": tests})
    until(lambda: len(list(tmp_path.iterdir())) == 2, 120.0)
    asleep = [int(path.stem) for path in tmp_path.iterdir()]
    assert all(map(is_running, asleep))
    parent.kill()
    parent.wait()
    # Ten minutes before they would.
    until(lambda: not any(map(is_running, asleep)), 30.0)
