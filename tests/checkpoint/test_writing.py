from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import folding_runs
from checkpoint.test_batch_norm_files import model_of
from folding_runs import contents, fold
from forks import Fork
from normkit.checkpoint import folding
from normkit.checkpoint.activations import measure_activations
from normkit.checkpoint.folding import affordable
from normkit.checkpoint.hadamard import rotate_columns
from normkit.checkpoint.plan import FoldPlan
from normkit.checkpoint.reader import CheckpointSource
from normkit.errors import InputError, ModelError
from tiny_models import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folding_runs.save(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """What a fold that nothing disturbs makes of the source, with one job."""
    fold(source, source.with_name("whole"))
    return source.with_name("whole")


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A copy of the source to damage."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def partial_of(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.normkit-partial")


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def definition(dtype: torch.dtype) -> dict[str, Tensor]:
    """The plan worked out on whole tensors in float64, rounded to a dtype."""
    before = {name: value.double() for name, value in folding_runs.tensors().items()}
    after = {name: before[name] for name in ("table", "one.kept.weight", "two.kept.weight")}
    for block in ("one", "two"):
        gain, bias = before[f"{block}.norm.weight"], before[f"{block}.norm.bias"]
        read, turned, write = (before[f"{block}.{name}.weight"] for name in ("read", "turned", "write"))
        turned = turned * gain[:, None]
        after |= {
            f"{block}.norm.weight": torch.ones_like(gain),
            f"{block}.norm.bias": bias / gain,
            f"{block}.read.weight": read * gain,
            f"{block}.read.bias": before[f"{block}.read.bias"] + read @ bias,
            f"{block}.turned.weight": turned - turned.mean(1, keepdim=True),
            f"{block}.write.weight": write - write.mean(0),
        }
    after["two.kept.weight"] = 4 * after["two.kept.weight"]
    down, across = (torch.from_numpy(rotate_columns(np.eye(size), "0/x")) for size in (folding_runs.FEATURES, 64))
    heads = (down @ after["two.write.weight"] / 8).view(folding_runs.FEATURES, -1, 64)
    after["two.write.weight"] = (heads @ across.T).reshape(folding_runs.FEATURES, -1)
    after = {name: value.to(dtype) for name, value in after.items()}
    table = before["table"]
    kept = {name: folding_runs.tensors()[name] for name in ("ids", "mask")}
    return after | kept | {"created.table": (table - table.mean(1, keepdim=True)).float()}


@pytest.mark.parametrize("dtype", ["same", "float32"])
def test_every_tensor_is_what_its_edit_says(source, tmp_path, dtype):
    fold(source, tmp_path / "out", made=folding_runs.plan(dtype))
    expected = definition(torch.float32 if dtype == "float32" else torch.bfloat16)
    found = loaded(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        if name.endswith(("read.bias", "turned.weight", "write.weight")) or name == "created.table":
            # Sums in another order may fall on the other side of a tie, and differ by more where little is left.
            unit = torch.finfo(value.dtype).eps
            torch.testing.assert_close(found[name], value, rtol=unit, atol=1e-12)
        else:
            assert torch.equal(found[name], value)


def test_texts_of_the_headers_and_the_index_come_along(whole):
    for file in whole.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "by": "a test"}
    document = json.loads((whole / folding_runs.INDEX).read_text())
    for name, file in document["weight_map"].items():
        with safe_open(whole / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_hashes_are_those_of_the_files(source, whole):
    written = json.loads((whole / "written.json").read_text())
    for folder, hashes in ((source, written["inputs"]), (whole, written["outputs"])):
        files = sorted(folder.glob("*.safetensors"))
        assert hashes == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_residuals_are_told_of_sums_and_are_small(whole):
    residuals = json.loads((whole / "written.json").read_text())["residuals"]
    sums = {f"{block}.{name}" for block in ("one", "two") for name in ("read.bias", "turned.weight", "write.weight")}
    assert residuals.keys() == {*sums, "created.table", "two.kept.weight"}
    assert residuals.pop("two.kept.weight") == 0.0
    for name, residual in residuals.items():
        # Half a unit of the dtype, and for means of rounded numbers far less.
        assert 0 < residual < (2**-23 if name == "created.table" else 2**-8)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_bytes_do_not_depend_on_the_number_of_threads(source, whole, tmp_path, threads):
    fold(source, tmp_path / "out", threads=threads)
    assert contents(tmp_path / "out") == contents(whole)


def test_bytes_do_not_depend_on_memory(source, whole, tmp_path):
    fold(source, tmp_path / "out", threads=4, max_memory=2 * 10**9)
    assert contents(tmp_path / "out") == contents(whole)


def test_one_file_is_shared_by_all_jobs_and_has_no_index(tmp_path):
    model = folding_runs.save(tmp_path / "model", shards=1)
    for threads in (1, 4):
        fold(model, tmp_path / f"out{threads}", threads=threads)
    assert sorted(contents(tmp_path / "out1")) == ["model.safetensors", "written.json"]
    assert contents(tmp_path / "out1") == contents(tmp_path / "out4")
    assert loaded(tmp_path / "out4").keys() == definition(torch.bfloat16).keys()


def test_files_that_are_links_are_read(source, whole, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).symlink_to(file)
    fold(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(whole)


def test_a_file_of_which_nothing_is_left_is_still_hashed(source, tmp_path):
    with CheckpointSource(source) as opened:
        first = {name for name, tensor in opened.tensors.items() if tensor.file == opened.files[0]}
    plan = folding_runs.plan()
    plan = replace(plan, edits=tuple(edit for edit in plan.edits if edit.name not in first))
    written = fold(source, tmp_path / "out", made=plan, threads=2)
    assert loaded(tmp_path / "out").keys() == {edit.name for edit in plan.edits}
    name = min(written.inputs)
    assert written.inputs[name] == hashlib.sha256((source / name).read_bytes()).hexdigest()


KILLED = "import runpy; runpy.run_module('folding_runs', run_name='__main__', alter_sys=True)"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(source, whole, tmp_path, threads):
    seeds = [str(seed) for seed in range(3)]
    out, error = Fork(KILLED, source, tmp_path, threads, *seeds).communicate()
    assert error == ""
    told = json.loads(out)
    # The moments are right: the kills came, and some of them after a file was finished.
    assert all(kills >= 3 for kills, _ in told)
    assert any(kept for _, kept in told)
    for seed in seeds:
        assert contents(tmp_path / seed) == contents(whole)
        assert not partial_of(tmp_path / seed).exists()


OPERATIONS = {
    "exponent": {},
    "scale": {"halvings": 2},
    "rotate": {"seed": 0, "untie": True},
    "migrate": {"alpha": 0.5},
    "batchnorm": {},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_any_moment_every_operation_ends_with_the_same_bits(tmp_path, operation):
    source, options = tmp_path / "model", {**OPERATIONS[operation]}
    model = model_of("ResNet") if operation == "batchnorm" else tiny("llama")[0]
    if operation == "migrate":
        options["scales"] = measure_activations(model, [{"input_ids": torch.arange(16)[None]}]).largest
    model.save_pretrained(source, max_shard_size="20KB")
    run = partial(folding.fold, operations=[operation], **options)
    steps = folding_runs.steps_of(source, tmp_path / "whole", run)
    told = [folding_runs.killed(source, tmp_path / f"{seed}", 1 + seed % 2, seed, steps, run) for seed in range(4)]
    assert all(kills >= 3 for kills, _ in told)
    # The ResNet is one file.
    assert any(kept for _, kept in told) == (operation != "batchnorm")
    assert all(contents(tmp_path / f"{seed}") == contents(tmp_path / "whole") for seed in range(4))


def test_killed_just_before_its_end_it_can_be_resumed(source, whole, tmp_path, monkeypatch):
    def killed(_path, _target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        fold(source, tmp_path / "out")
    monkeypatch.undo()
    fold(source, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(whole)


def test_finished_files_are_not_made_again(source, whole, tmp_path, monkeypatch):
    def stop(_name, done, total):
        if done > total / 2:
            raise KeyError

    with pytest.raises(KeyError):
        fold(source, tmp_path / "out", progress=lambda *state: state[0] == "writing" and stop(*state))
    staging = partial_of(tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in staging.glob("*.safetensors")}
    assert before
    assert list(staging.glob("*.part")) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=10**7))
    fold(source, tmp_path / "out", resume=True)
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in before} == before
    assert contents(tmp_path / "out") == contents(whole)


@pytest.mark.parametrize("change", ["plan", "source"])
def test_another_fold_is_not_resumed(own, tmp_path, change):
    def stop(name, done, total):
        if name == "writing" and done > total / 2:
            raise KeyError

    with pytest.raises(KeyError):
        fold(own, tmp_path / "out", progress=stop)
    made = folding_runs.plan()
    if change == "plan":
        made = replace(made, edits=made.edits[:-1])
    else:
        (own / "model-00001-of-00003.safetensors").touch()
    with pytest.raises(InputError, match=f"was begun with another {change}; --resume needs the same, or delete it"):
        fold(own, tmp_path / "out", made=made, resume=True)


FULL = """
import resource, signal, sys
from pathlib import Path
import folding_runs
from normkit.errors import InputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
try:
    folding_runs.fold(Path({source!r}), Path({out!r}), threads={threads})
except InputError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_full_disk_is_one_line_and_a_resume_finishes(source, whole, tmp_path, threads):
    # The last file is the largest, and the only one that does not fit.
    size = max(file.stat().st_size for file in whole.glob("*.safetensors")) - 1000
    out = tmp_path / "out"
    program = FULL.format(size=size, source=str(source), out=str(out), threads=threads)
    told = Fork(program).communicate()
    last = partial_of(out) / "model-00003-of-00003.safetensors.part"
    message = (
        f"cannot write {last}: No space left on device; finished files are kept: make room, then go on with --resume"
    )
    assert told == (message, "")
    assert not out.exists()
    # What it had of that file goes, as it may be what filled the disk.
    assert not last.exists()
    fold(source, out, resume=True)
    assert contents(out) == contents(whole)


def test_too_little_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=10**6))
    with pytest.raises(InputError, match=r"the fold takes 9\.45 MB in .*, where 1\.00 MB are free"):
        fold(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_that_is_no_number_ends_all_and_leaves_nothing(own, tmp_path, threads):
    file = own / "model-00001-of-00003.safetensors"
    held = load_file(file)
    held["one.read.weight"][5, 7] = torch.nan
    save_file(held, file)
    with pytest.raises(ModelError, match=r"one\.read\.weight"):
        fold(own, tmp_path / "out", threads=threads)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("change", ["touched", "shorter", "replaced"])
def test_a_source_that_changes_meanwhile_is_told(own, tmp_path, change):
    file = own / "model-00003-of-00003.safetensors"
    content = file.read_bytes()
    changed = []

    def meddle(stage, done, total):
        # Of the last file, with one job.
        if stage == "writing" and done > 0.8 * total and not changed:
            changed.append(True)
            match change:
                case "touched":
                    file.write_bytes(content)
                case "shorter":
                    with file.open("r+b") as opened:
                        opened.truncate(len(content) // 2)
                case _:
                    file.unlink()
                    file.write_bytes(content)

    with pytest.raises(ModelError, match=file.name):
        fold(own, tmp_path / "out", progress=meddle)
    assert changed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_all_threads_and_keeps_finished_files(source, whole, tmp_path, threads):
    sent = []

    def interrupt(stage, done, total):
        # In the middle of the last file.
        if stage == "writing" and done > 0.7 * total and not sent:
            sent.append(True)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.2)

    with pytest.raises(KeyboardInterrupt):
        fold(source, tmp_path / "out", threads=threads, progress=interrupt)
    assert not (tmp_path / "out").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("writing")]
    assert not (partial_of(tmp_path / "out") / "model-00003-of-00003.safetensors").exists()
    fold(source, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(whole)


def test_progress_rises_to_the_end_in_known_stages(source, tmp_path):
    told: list[tuple[str, int, int]] = []
    fold(source, tmp_path / "out", threads=2, progress=lambda *state: told.append(state))
    writing_states = [state[1:] for state in told if state[0] == "writing"]
    assert {total for _, total in writing_states} == {writing_states[-1][0]}
    assert writing_states == sorted(writing_states)
    assert len(writing_states) > 10


def test_threads_of_torch_are_as_they_were(source, tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        fold(source, tmp_path / "out")
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            fold(source, tmp_path / "other", progress=lambda *_: 1 / 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_memory_decides_how_many_threads_there_are(source, monkeypatch):
    monkeypatch.setattr(folding, "_occupied", lambda: 300_000_000)
    plan = folding_runs.plan()
    with CheckpointSource(source) as opened:

        def threads(memory: int | None, plan: FoldPlan = plan) -> int:
            return affordable(plan, opened, 64, memory)

        assert threads(None) == threads(10**12) == 64
        fitting = [threads(memory) for memory in range(400_000_000, 900_000_000, 50_000_000)]
        assert fitting == sorted(fitting)
        assert 1 < fitting[0] < fitting[-1]
        with pytest.raises(InputError) as error:
            threads(250_000_000)
        least = float(str(error.value).split()[3])
        assert str(error.value) == (f"this fold takes {least:.2f} GB of memory, 0.25 GB are allowed; allow more")
        assert threads(round(least * 1e9)) == 1
