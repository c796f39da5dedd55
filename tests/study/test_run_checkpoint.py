import copy
import json
import math
import os
import random
import time

import pytest
import torch
from safetensors import safe_open
from torch import nn

from forks import Fork
from normkit.errors import InputError
from normkit.study.corpus import next_token_loss
from normkit.study.run_checkpoint import RunCheckpoint
from normkit.study.training_run import Recipe, train
from study_runs import LONG, RECIPE, STEPS, Model, batches, run, state


class _EnoughError(Exception):
    """Ends a run in the middle."""


def broken_off(path, step, **choices):
    """A run kept after every step that ends between the update of a step and its keeping."""

    def tell(point):
        if point.step == step:
            raise _EnoughError

    with pytest.raises(_EnoughError):
        run(RunCheckpoint(path, seconds=0.0), tell, **choices)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("step", [1, 2, 7, STEPS])
def test_a_run_broken_off_at_a_step_ends_in_the_same_bits(tmp_path, optimizer, step):
    path = tmp_path / "run.safetensors"
    model, points = run(optimizer=optimizer)
    broken_off(path, step, optimizer=optimizer)
    told = []
    # What a process that begins anew finds in torch's generator is anything.
    torch.manual_seed(99)
    continued, all_points = run(RunCheckpoint(path), told.append, optimizer=optimizer)
    assert state(continued) == state(model)
    assert all_points == points
    assert [point.step for point in told] == list(range(step, STEPS + 1))


@pytest.mark.slow
def test_a_run_broken_off_again_and_again_ends_in_the_same_bits(tmp_path):
    path = tmp_path / "run.safetensors"
    model, points = run()
    for step in (3, 4, 11, 20):
        broken_off(path, step)
    continued, all_points = run(RunCheckpoint(path))
    assert state(continued) == state(model)
    assert all_points == points


def test_a_finished_run_is_read_and_not_run_again(tmp_path):
    path = tmp_path / "run.safetensors"
    model, points = run(RunCheckpoint(path, seconds=math.inf))
    told = []
    again, all_points = run(RunCheckpoint(path, seconds=math.inf), told.append)
    assert (state(again), all_points, told) == (state(model), points, [])


def test_a_run_that_diverged_stays_so(tmp_path):
    path = tmp_path / "run.safetensors"
    recipe = Recipe(steps=5, learning_rate=0.1)
    losses = iter([1.0, float("nan"), 1.0])

    def loss(model, batch):
        return model(*batch).sum() * next(losses)

    supply = [(torch.ones(1, 1),)] * 5
    model = nn.Linear(1, 1)
    again = copy.deepcopy(model)
    points = train(model, recipe, iter(supply), loss, checkpoint=RunCheckpoint(path))
    assert str(train(again, recipe, iter(supply), loss, checkpoint=RunCheckpoint(path))) == str(points)
    assert len(points) == 2
    assert state(again) == state(model)


@pytest.mark.slow
def test_it_is_saved_after_so_many_seconds_and_at_the_end(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("normkit.study.run_checkpoint.write_bytes", lambda path, _content: written.append(path))
    run(RunCheckpoint(tmp_path / "end", seconds=math.inf))
    run(RunCheckpoint(tmp_path / "seconds", seconds=0.0))
    counts = {name: sum(path.name == name for path in written) for name in ("end", "seconds")}
    assert counts == {"end": 1, "seconds": STEPS}


def test_the_file_is_safetensors_and_json_alone(tmp_path):
    path = tmp_path / "run.safetensors"
    run(RunCheckpoint(path))
    with safe_open(path, framework="pt") as file:
        names, document = set(file.keys()), json.loads(file.metadata()["normkit"])
    # The tied weight once, under one name, and the batch norm's buffers.
    assert "model.embedding.weight" in names
    assert "model.unembedding.weight" not in names
    assert {"model.norm.running_var", "optimizer.mixing.weight.exp_avg_sq", "random.cpu"} <= names
    assert document["recipe"]["steps"] == STEPS
    assert len(document["points"]) == STEPS
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "run.safetensors"
    broken_off(path, 6)
    return path.read_bytes()


def refused(path, *, model=None, recipe=RECIPE, supply=None):
    with pytest.raises(InputError) as caught:
        train(model or Model(), recipe, supply or batches(), next_token_loss, checkpoint=RunCheckpoint(path))
    line = str(caught.value)
    assert line.startswith(f"cannot continue the run kept in {path}: ")
    assert line.endswith("; delete the file to begin that run anew")
    assert "\n" not in line
    return line.removeprefix(f"cannot continue the run kept in {path}: ").removesuffix(
        "; delete the file to begin that run anew"
    )


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _content: b"", id="empty"),
        pytest.param(lambda content: content[:5], id="no header"),
        pytest.param(lambda content: content[:3000], id="half a header"),
        pytest.param(lambda content: content[:-1], id="cut off"),
        pytest.param(lambda content: b"\xff" * 8 + content[8:], id="a header without end"),
        pytest.param(lambda content: flipped(content, len(content) - 100), id="one bit of a weight"),
        pytest.param(lambda content: content.replace(rb"step\": 3", rb"step\": 4", 1), id="one digit of a point"),
        pytest.param(lambda _content: b"\x02\x00\x00\x00\x00\x00\x00\x00{}", id="another program's"),
        pytest.param(lambda _content: b"\x02\x00\x00\x00\x00\x00\x00\x00[]", id="no safetensors"),
        pytest.param(lambda _content: os.urandom(4000), id="noise"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, kept, damage):
    path = tmp_path / "run.safetensors"
    assert damage(kept) != kept
    path.write_bytes(damage(kept))
    assert refused(path) in ("it is damaged", "it is damaged, or another program's")


def test_a_file_of_another_run_is_one_line(tmp_path, kept):
    path = tmp_path / "run.safetensors"
    path.write_bytes(kept)
    faster = Recipe(steps=STEPS, learning_rate=0.5, warmup=5, weight_decay=0.1)
    assert refused(path, recipe=faster) == "it is of another run, with learning_rate 0.01 where this one has 0.5"
    assert refused(path, supply=batches(seed=1)) == "its batches are not those of this run"
    assert refused(path, supply=iter([next(batches())])) == "its batches are not those of this run"
    assert refused(path, model=Model().double()) == "it is of another model, with another embedding.weight"
    other = Model()
    with torch.no_grad():
        other.mixing.bias[0] += 1e-6
    assert refused(path, model=other) == "it began from other weights"
    wider = Model()
    wider.final_norm.extra = nn.Parameter(torch.ones(3))
    assert refused(path, model=wider) == "it is of another model, with another final_norm.extra"


def test_a_refused_file_is_one_line_and_leaves_the_model_alone(tmp_path, kept):
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path / "folder") == "it cannot be read (Is a directory)"
    path = tmp_path / "run.safetensors"
    path.write_bytes(kept)
    model = Model()
    refused(path, model=model, supply=batches(seed=1))
    assert state(model) == state(Model())


PROGRAM = "import sys, pathlib, study_runs; study_runs.keep(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_a_run_that_ends_in_the_same_bits(tmp_path):
    model, points = run(steps=LONG)
    chance = random.Random(time.time_ns())
    first = 1
    for last in (20, 40, LONG):
        process = Fork(PROGRAM, tmp_path, last)
        # From the first line on, the process is in its steps; it is killed before, in or after a write.
        while "\n" not in process.told():
            assert process.poll() is None
            time.sleep(0.005)
        step = int(process.told().split()[0])
        assert step >= first
        first = step
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.communicate()
    assert not (tmp_path / "end.json").exists()
    process = Fork(PROGRAM, tmp_path, 0)
    assert process.communicate()[1] == ""
    end = json.loads((tmp_path / "end.json").read_text())
    assert end["state"] == state(model)
    assert end["points"] == [vars(point) for point in points]
