import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tiny_study
from forks import Fork, is_running, until
from normkit.errors import InputError
from normkit.study import running
from normkit.study.ranks import Ranks
from normkit.study.running import describe_machine, not_run, require_device, run


@pytest.fixture(autouse=True)
def _text_of_this_machine(monkeypatch):
    """Reading the whole library takes most of a second."""
    monkeypatch.setattr(running, "_digest_of_text", lambda: "text")


def settings(**changes):
    return {**tiny_study.STUDY.quick, **changes}


def results(folder):
    return (folder / "tiny" / "results.json").read_bytes()


def test_arms_and_seeds_are_measured_and_judged():
    found = run(tiny_study.STUDY)
    assert list(found.measured) == [0, 1]
    assert all(tuple(paired) == tiny_study.NAMES for paired in found.measured.values())
    assert found.decided[0].verdict == "reproduced"
    assert (found.trouble, found.where["threads"]) == ({}, "1")
    assert found.seconds > 0
    (chart,) = found.charts
    assert [len(values) for _, values in chart.values] == [2, 2, 2]


def test_nothing_is_written_where_nothing_is_asked_for_or_a_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tiny_study.STUDY)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError) as refused:
        run(tiny_study.renamed("digits", needs=("sklearn",)), out=tmp_path)
    assert str(refused.value) == ('digits needs scikit-learn, which is not installed: pip install "normkit[study]"')
    assert list(tmp_path.iterdir()) == []


def test_seeds_are_those_of_the_settings_and_the_longest_arm_is_begun_first():
    assert list(run(tiny_study.STUDY, settings(seeds=1)).measured) == [0]
    found = run(tiny_study.STUDY, seeds=3)
    assert (list(found.measured), found.settings["seeds"]) == ([0, 1, 2], 3)
    with pytest.raises(InputError, match="seeds must be a whole number from 1, got 0"):
        run(tiny_study.STUDY, seeds=0)
    begun = []
    measure = tiny_study.measure
    run(tiny_study.renamed("t", measure=lambda lab, arm: begun.append(arm.name) or measure(lab, arm)))
    assert begun == ["left, slow"] * 2 + ["left/slow", "right"] * 2


def test_a_folder_holds_everything(tmp_path):
    found = run(tiny_study.STUDY, out=tmp_path)
    folder = tmp_path / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == ["arms", "configuration.json", "log.jsonl", "results.json"]
    assert len(list((folder / "arms").iterdir())) == len((folder / "log.jsonl").read_text().splitlines()) == 6
    configuration = json.loads((folder / "configuration.json").read_text())
    assert configuration["settings"] == {**tiny_study.STUDY.quick, "rates": [0.1, 1], "widths": [2, 4]}
    assert configuration["packages"].keys() == {"numpy"}
    content = json.loads(results(tmp_path))
    assert content["measurements"]["0"] == found.measured[0]
    assert content["claims"][0]["verdict"] == "reproduced"


def test_finished_arms_are_read_and_not_measured_again(tmp_path):
    first = run(tiny_study.STUDY, out=tmp_path)
    whole = results(tmp_path)
    (tmp_path / "tiny" / "results.json").unlink()
    (tmp_path / "tiny" / "arms" / "right-1.json").unlink()
    begun = []
    measure = tiny_study.measure
    counted = tiny_study.renamed(
        "tiny", measure=lambda lab, arm: begun.append((arm.name, lab.seed)) or measure(lab, arm)
    )
    again = run(counted, out=tmp_path, resume=True)
    assert begun == [("right", 1)]
    assert results(tmp_path) == whole
    assert again.measured == first.measured
    assert again.seconds == pytest.approx(first.seconds, abs=1.0)


def test_another_configuration_is_not_resumed(tmp_path):
    run(tiny_study.STUDY, out=tmp_path)
    for changes, words in [
        ({"settings": settings(steps=3)}, "settings.steps 2, and this run has 3"),
        ({"threads": 2}, 'where.threads "1", and this run has "2"'),
        ({"dtype": torch.float64}, 'where.dtype "float32", and this run has "float64"'),
        ({"seeds": 3}, "settings.seeds 2, and this run has 3"),
    ]:
        with pytest.raises(InputError, match=words):
            run(tiny_study.STUDY, **{"out": tmp_path, "resume": True, **changes})
    with pytest.raises(InputError, match="holds results already; go on with --resume"):
        run(tiny_study.STUDY, out=tmp_path)
    run(tiny_study.STUDY, out=tmp_path, resume=True)


def test_a_failing_arm_is_told_and_tried_again(tmp_path):
    found = run(tiny_study.STUDY, settings(fault="input"), out=tmp_path)
    assert found.trouble == {f"right [seed {seed}]": "expected a better setting; choose another" for seed in (0, 1)}
    assert found.decided[0].verdict == "not run"
    assert [tuple(paired) for paired in found.measured.values()] == [tiny_study.NAMES[:2]] * 2
    # A chart shows seeds with all arms.
    assert found.charts == ()
    assert json.loads(results(tmp_path))["trouble"] == dict(found.trouble)
    again = run(tiny_study.STUDY, settings(fault="input"), out=tmp_path, resume=True)
    assert again.trouble == found.trouble


def test_progress_begins_with_what_is_finished_and_ends_whole(tmp_path):
    told = []
    run(tiny_study.STUDY, out=tmp_path, progress=lambda *report: told.append(report))
    assert told[0] == ("0 of 6 arms", 0.0, 8.0)
    assert told[-1] == ("6 of 6 arms", 8.0, 8.0)
    assert any(words == "0 of 6 arms, left, slow [seed 0]" and 0 < done < 2 for words, done, _ in told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    (tmp_path / "tiny" / "arms" / "right-1.json").unlink()
    told.clear()
    run(tiny_study.STUDY, out=tmp_path, resume=True, progress=lambda *report: told.append(report))
    assert told[0] == ("5 of 6 arms", 7.0, 8.0)


def test_without_room_finished_arms_are_kept(tmp_path, monkeypatch):
    fsync, left = os.fsync, iter(range(3))

    def full(handle):
        if next(left, None) is None:
            raise OSError(28, os.strerror(28))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = "No space left on device; finished arms are kept: make room, then go on with"
        with pytest.raises(InputError, match=message):
            run(tiny_study.STUDY, out=tmp_path)
    # The first of the three was the configuration.
    assert len(list((tmp_path / "tiny" / "arms").iterdir())) == 2
    run(tiny_study.STUDY, out=tmp_path, resume=True)
    run(tiny_study.STUDY, out=tmp_path / "whole")
    assert results(tmp_path) == results(tmp_path / "whole")


def test_what_was_not_run_says_why():
    found = not_run(tiny_study.STUDY, tiny_study.STUDY.quick, "no reason")
    assert (found.measured, found.trouble, found.decided[0].verdict) == ({}, {"every arm": "no reason"}, "not run")
    assert found.charts == ()


PROGRAM = """
import multiprocessing, sys
from pathlib import Path
import tiny_study
from normkit.study import running, workers
# Like this process its workers are forks; how they end with it where they are spawned is asked of them themselves.
fork = multiprocessing.get_context("fork")
workers.multiprocessing.get_context = lambda kind: fork
running._digest_of_text = lambda: "text"
if __name__ == "__main__":
    settings = {**tiny_study.STUDY.quick, "seeds": 1, "steps": 8, "pause": 0.02, "trains": True}
    running.run(tiny_study.STUDY, settings, out=Path(sys.argv[1]), jobs=int(sys.argv[2]), resume=True)
"""


def started(folder: Path, jobs: int) -> Fork:
    return Fork(PROGRAM, folder, jobs)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def in_training(folder: Path) -> set[str]:
    """Arms of which a run is kept that is not done."""
    return {path.parent.name for path in folder.glob("tiny/runs/*/run.safetensors")}


def is_midway(folder: Path) -> bool:
    """Whether a run is kept of which steps are left."""
    for path in folder.glob("tiny/runs/*/run.safetensors"):
        with safe_open(path, "pt") as kept:
            if len(json.loads(kept.metadata()["normkit"])["points"]) < 8:
                return True
    return False


def killed(folder: Path, jobs: int, spared: set[str], delay: float) -> set[str] | None:
    """Kill a study a while after an arm has begun to train that is not to be spared; these, or None if it is done."""
    process = started(folder, jobs)
    until(lambda: process.poll() is not None or in_training(folder) - spared)
    time.sleep(delay)
    if process.poll() is not None:
        assert (process.returncode, process.communicate()[1]) == (0, "")
        return None
    beside = children(process.pid)
    assert bool(beside) == (jobs > 1)
    process.kill()
    process.communicate()
    # What it had started ends with it.
    until(lambda: not any(map(is_running, beside)), 20.0)
    return in_training(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """What a study leaves that nobody has killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert started(folder, 1).communicate()[1] == ""
    assert json.loads(results(folder))["measurements"]["0"]["right"]["losses"][7] > 0
    return results(folder)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "kills"), [(1, 10), (2, 1)])
def test_killed_at_any_time_it_goes_on_to_the_same_bytes(tmp_path, whole, jobs, kills):
    """In one process it is killed in each of its arms; in two, where it is in two arms at a time, once."""
    chance, is_caught = random.Random(jobs), False
    for attempt in range(20):
        folder, caught = tmp_path / f"killed {attempt}", set()
        while len(caught) < kills and (now := killed(folder, jobs, caught, 0.1 * chance.random())) is not None:
            caught |= now
            is_caught |= is_midway(folder)
        # A run may be done before it is killed.
        if is_caught:
            break
    assert is_caught
    if jobs == 2:
        assert started(folder, jobs).communicate()[1] == ""
    assert not (folder / "tiny" / "runs").exists()
    assert results(folder) == whole


def test_a_place_in_words_has_no_time_and_no_path():
    words = describe_machine("cpu", torch.bfloat16, 3, Ranks())
    assert words.keys() == {"normkit", "torch", "python", "device", "cpu", "dtype", "threads"}
    assert (words["device"], words["dtype"], words["threads"]) == ("cpu", "bfloat16", "3")
    assert words["torch"] == torch.__version__
    assert describe_machine("cpu", torch.float32, 1, Ranks(rank=1, size=4))["processes"] == "4"


@pytest.mark.parametrize("device", ["warp", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_not_here_is_refused_in_a_line(device):
    with pytest.raises(InputError) as refused:
        require_device(device)
    assert str(refused.value).startswith(f"cannot compute on the device {device!r}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta"])
def test_a_device_that_is_here_is_not(device):
    require_device(device)
