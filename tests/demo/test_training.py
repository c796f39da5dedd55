from __future__ import annotations

import functools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from forks import Fork
from normkit.demo import training
from normkit.demo.architecture import build
from normkit.demo.training import Choices, main, train
from normkit.study import corpus
from normkit.study.training_run import learning_rate, parameter_groups

# Trains a small model.
pytestmark = pytest.mark.slow

CHOICES = Choices(steps=200, seed=3, batch=4, learning_rate=1e-2, evaluate_every=100)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, CHOICES.recipe) for step in range(1, 201)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) <= 1e-2
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_only_matrices_are_decayed(name):
    model = build(name)
    decayed, kept = parameter_groups(model, 0.1)
    names = {id(parameter): parameter_name for parameter_name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    # Two projections of attention and two of the MLP in a GPT-2 block, four and three in a Llama's.
    assert len(decayed["params"]) == 6 * (4 if name == "layernorm" else 7)
    assert not any(word in names[id(p)] for p in decayed["params"] for word in ("norm", "ln_", "bias", "wte", "embed"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    for index in range(20):
        body = "".join(f"def function{index}_{line}(value):\n    return value + {line}\n\n\n" for line in range(16))
        (root / f"source{index}.py").write_text(body)
    return root


def options(out, library, name, seed=1):
    values = {"out": out, "corpus": library, "model": name, "seed": seed, "steps": 2, "batch": 2, "threads": 1}
    return [f"--{option}={value}" for option, value in values.items()]


@pytest.fixture
def run(library):
    """Calls the command in this process, as many threads afterwards as before."""
    threads = torch.get_num_threads()
    yield lambda out, name, seed=1: CliRunner().invoke(main, options(out, library, name, seed))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    """`trained(name)`: the folder that a first run leaves; to be read, or copied."""

    @functools.cache
    def folder(name):
        out = tmp_path_factory.mktemp("trained")
        threads = torch.get_num_threads()
        assert CliRunner().invoke(main, options(out, library, name)).exit_code == 0
        torch.set_num_threads(threads)
        return out

    return folder


def started(arguments):
    command = [sys.executable, "-m", "normkit.demo.training", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def forked(arguments):
    program = "import runpy; runpy.run_module('normkit.demo.training', run_name='__main__', alter_sys=True)"
    process = Fork(program, *arguments)
    _, error = process.communicate()
    return process.returncode, error


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "start"), [("layernorm", started), ("rmsnorm", forked)])
def test_a_run_repeats_bit_for_bit_in_another_process(name, start, library, run, trained, tmp_path):
    arguments = options(tmp_path / "first", library, name)
    code, error = start(arguments)
    assert code == 0, error
    assert run(tmp_path / "other", name, seed=2).exit_code == 0
    folders = [tmp_path / "first", trained(name), tmp_path / "other"]
    weights = [(folder / name / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    record = json.loads((tmp_path / "first" / name / "training.json").read_text())
    assert record["command"] == shlex.join(["python", "-m", "normkit.demo.training", *arguments])


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_run_leaves_a_loadable_model_and_nothing_else(name, library, trained):
    out = trained(name)
    folder = out / name
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert AutoTokenizer.from_pretrained(folder)("é")["input_ids"] == list("é".encode())
    listing = json.loads((out / "corpus.json").read_text())
    assert listing == corpus.read(library).to_json()
    assert json.loads((folder / "training.json").read_text())["corpus"] == listing["digest"]
    assert sorted(path.name for path in out.iterdir()) == ["corpus.json", name]
    # Readable for everybody, as the files of an installed package must be.
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())


def test_a_run_that_fails_leaves_the_previous_model(run, trained, tmp_path, monkeypatch):
    shutil.copytree(trained("rmsnorm"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "rmsnorm" / "model.safetensors"
    before = weights.read_bytes()

    def fail(window):
        raise OSError(f"no space left for a window of {window}")

    # The tokenizer is written after the weights: half of the new model is there.
    monkeypatch.setattr(training, "byte_tokenizer", fail)
    result = run(tmp_path, "rmsnorm", seed=2)
    assert isinstance(result.exception, OSError)
    assert weights.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.json", "rmsnorm"]


def test_a_second_run_replaces_the_model(run, trained, tmp_path):
    shutil.copytree(trained("rmsnorm"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "rmsnorm" / "model.safetensors"
    before = weights.read_bytes()
    assert run(tmp_path, "rmsnorm", seed=2).exit_code == 0
    assert weights.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.json", "rmsnorm"]


def plain_training(model, choices, text):
    """The weights' only definition: every line of a run, with nothing of the studies' loop."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "wte" not in n and "wpe" not in n]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(choices.seed)
    stream = torch.tensor(list(text))
    losses = []
    for step in range(1, choices.steps + 1):
        starts = torch.randint(len(text) - 256, (choices.batch,), generator=generator)
        ids = torch.stack([stream[start : start + 257] for start in starts])
        cosine = 0.5 * (1 + math.cos(math.pi * step / choices.steps))
        for group in optimizer.param_groups:
            group["lr"] = choices.learning_rate * min(step / choices.warmup, 0.1 + 0.9 * cosine)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_run_is_the_plain_one_bit_for_bit(library):
    text = corpus.read(library)
    choices = Choices(steps=5, seed=4, batch=2, learning_rate=6e-3, warmup=3, evaluate_every=5)
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(build("layernorm"))
    losses = plain_training(models[0], choices, text.training)
    told = []
    curve = train(models[1], choices, text.training, text.held_out, told.append)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert told == curve
    assert curve[0]["training"] == round(sum(losses) / 5 / math.log(2), 6)


def test_a_short_run_learns_and_reports_its_curve(library):
    text = corpus.read(library)
    torch.manual_seed(0)
    choices = Choices(steps=16, seed=0, batch=2, learning_rate=1e-2, warmup=3, evaluate_every=8)
    points = train(build("rmsnorm"), choices, text.training, text.held_out, lambda _point: None)
    assert [point["step"] for point in points] == [8, 10, 16]
    assert [("held_out" in point) for point in points] == [True, False, True]
    assert points[-1]["held_out"] < points[0]["held_out"] < 8


def test_a_loss_that_is_not_finite_is_one_line_and_leaves_no_model(library, tmp_path):
    arguments = [*options(tmp_path, library, "rmsnorm"), "--learning-rate=1e30", "--steps=200"]
    threads = torch.get_num_threads()
    result = CliRunner().invoke(main, arguments)
    torch.set_num_threads(threads)
    assert result.exit_code == 1
    assert re.search(r"^Error: the loss is (nan|inf) at step \d+; lower --learning-rate$", result.stderr, re.MULTILINE)
    assert not list(tmp_path.iterdir())
