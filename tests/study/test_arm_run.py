import json

import pytest
import torch

import tiny_study
from normkit.study import arm_run
from normkit.study.arm_run import ArmRun, in_a_line


def run_of(arm=0, seed=0, measure=tiny_study.measure, **changes):
    settings = {**tiny_study.STUDY.quick, **changes}
    return ArmRun(measure=measure, arm=tiny_study.arms(settings)[arm], seed=seed, settings=settings)


def test_a_measurement_is_what_json_reads_back():
    outcome = run_of().perform(lambda _: None)
    found = json.loads(outcome.text)
    assert (found["steps"], found["nothing"], outcome.error) == ([1, 2], None, "")
    assert outcome.seconds > 0


def test_random_numbers_follow_from_the_seed_alone():
    texts = [run_of(seed=seed).perform(lambda _: None).text for seed in (3, 4, 3)]
    assert texts[0] == texts[2] != texts[1]


def test_shares_are_told_seldom(monkeypatch):
    now = iter([0.0, 0.05, 0.11, 0.12])
    monkeypatch.setattr(arm_run.time, "monotonic", lambda: next(now))
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


def test_what_is_no_json_is_a_bug():
    outcome = run_of(measure=lambda _lab, _arm: {"value": torch.zeros(())}).attempt(lambda _: None)
    assert outcome.error.startswith("this is a bug of normkit: TypeError")


def test_a_traceback_is_shown_where_it_is_wanted(monkeypatch, capsys):
    run_of(arm=2, fault="bug").attempt(lambda _: None)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("NORMKIT_TRACEBACK", "1")
    run_of(arm=2, fault="bug").attempt(lambda _: None)
    assert "tiny_study.py" in capsys.readouterr().err


def test_only_the_first_line_of_a_message_is_told():
    assert in_a_line(RuntimeError("one\ntwo")).startswith("this is a bug of normkit: RuntimeError: one;")
    assert in_a_line(RuntimeError()) == "this is a bug of normkit: RuntimeError: ; NORMKIT_TRACEBACK=1 shows where"
