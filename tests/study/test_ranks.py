import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forks
from helpers import ROOT
from normkit.errors import InputError, LostRankError
from normkit.study.corpus import next_token_loss
from normkit.study.ranks import ALONE, Ranks, joined
from normkit.study.training_run import train
from study_runs import RECIPE, Model, batches, run, shared_runs, state

LOST = (
    "expected 2 processes to the end of the run, and another one has ended; what was finished is kept: "
    "start the same command with --resume"
)


def torchrun(folder):
    """Two processes of tests/study_runs.py, to their end."""
    program = [str(ROOT / "tests" / "study_runs.py"), str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, "1"])
def test_one_process_is_the_plain_loop_bit_for_bit(monkeypatch, size):
    if size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", size)
    plain, points = run()
    model = Model()
    with joined() as ranks:
        assert ranks == ALONE
        assert not dist.is_initialized()
        shared = train(model, RECIPE, batches(), next_token_loss, ranks=ranks)
    assert state(model) == state(plain)
    assert [point.loss for point in shared] == [point.loss for point in points]


def test_a_process_takes_its_rows_and_alone_nothing_is_sent():
    batch = (torch.arange(6), torch.arange(12).view(6, 2))
    parts = [Ranks(rank=rank, size=3).part(batch) for rank in range(3)]
    assert [part[0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(torch.cat([part[1] for part in parts]), batch[1])
    assert ALONE.part(batch) is batch
    with pytest.raises(InputError, match=r"^4 processes do not divide a batch of 6; choose a batch that they divide$"):
        Ranks(rank=3, size=4).part((torch.ones(6, 2),))
    model = nn.Linear(1, 1)
    assert ALONE.replica(model) is model
    assert ALONE.mean(torch.tensor(2.5)) == 2.5
    assert ALONE.shared(b"x") == b"x"
    assert [Ranks(rank=rank, size=2).writes for rank in range(2)] == [True, False]


def test_only_what_tells_of_a_lost_process_is_taken_for_one():
    with pytest.raises(LostRankError, match="expected 2 processes"), Ranks(size=2).together():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30639.")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(LostRankError), Ranks(size=2).together():
        raise dist.DistBackendError("NCCL communicator was aborted")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as other, Ranks(size=2).together():
        nn.Linear(2, 2)(torch.ones(1, 3))
    assert not isinstance(other.value, LostRankError)
    with pytest.raises(RuntimeError, match="gloo") as alone, ALONE.together():
        raise RuntimeError("gloo")
    assert not isinstance(alone.value, LostRankError)


SHARE = "import sys, pathlib, study_runs; study_runs.share(pathlib.Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two processes did together, each one's, and the folder; and the same runs in this process."""
    folder, threads = tmp_path_factory.mktemp("shared"), torch.get_num_threads()
    first, second = forks.pair(SHARE, folder)
    assert second.communicate()[1] == ""
    # As torchrun does to those that are left.
    os.kill(first.pid, signal.SIGTERM)
    assert first.communicate()[1] == ""
    found = [folder / f"{rank}.json" for rank in range(2)]
    torch.set_num_threads(1)
    alone = shared_runs(ALONE)
    torch.set_num_threads(threads)
    return [json.loads(path.read_text()) for path in found], alone, folder


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("float64", torch.float64), ("float32", torch.float32), ("batched", torch.float64)]
)
def test_two_processes_are_one_but_for_the_order_of_sums(shared, name, dtype):
    (first, second), alone, _ = shared
    assert first[name] == second[name]
    # AdamW divides a gradient by its own size, and so carries rounding errors into the smallest weights: 16 units seen.
    tolerance = 100 * torch.finfo(dtype).eps
    assert first[name]["losses"] == pytest.approx(alone[name]["losses"], rel=tolerance)
    for path, expected in alone[name]["state"].items():
        # The same for all keys, a key's bias moves no score: its gradient is nothing but rounding.
        if not path.endswith("key.bias"):
            largest = max(map(abs, expected))
            assert first[name]["state"][path] == pytest.approx(expected, rel=0, abs=tolerance * largest), path


@pytest.mark.slow
def test_two_processes_find_keep_and_refuse_what_one_does(shared):
    (first, _), alone, _ = shared
    assert first["float64"]["findings"] == alone["float64"]["findings"]
    (first, second), _, _ = shared
    assert first["kept"] == {"files": ["run.safetensors"], "first": 0.625, "same": True}
    assert second["kept"] == {"files": [], "first": 0.625, "same": True}
    results, _, _ = shared
    line = "2 processes do not divide a batch of 3; choose a batch that they divide"
    assert [result["indivisible"] for result in results] == [line, line]
    _, _, folder = shared
    assert (folder / "ended.txt").read_text() == LOST


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pooled_running_statistics_and_gradients_are_those_of_all_rows(shared):
    (first, _), alone, _ = shared
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert first["batched"]["state"][name] == pytest.approx(alone["batched"]["state"][name], rel=1e-12)
    assert first["batched"]["gradient_norms"] == pytest.approx(alone["batched"]["gradient_norms"], rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_torchrun_starts_the_same_two_and_ends_the_one_that_is_left(shared, tmp_path):
    before = threading.active_count()
    done = torchrun(tmp_path)
    found = [tmp_path / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), done.stderr
    assert [json.loads(path.read_text()) for path in found] == shared[0]
    assert (tmp_path / "ended.txt").read_text() == LOST
    assert threading.active_count() == before


LOSE = "import sys, pathlib, study_runs; study_runs.lose(pathlib.Path(sys.argv[1]))"


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_line_in_one_that_waits_for_it(tmp_path):
    """Nobody but the broken line tells it: torchrun would also send it a signal."""
    first, second = forks.pair(LOSE, tmp_path)
    assert first.communicate()[1] == ""
    second.communicate()
    assert second.returncode == -signal.SIGKILL
    assert (tmp_path / "lost.txt").read_text() == LOST
