from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import folding_runs
from normkit.checkpoint import shard as module
from normkit.checkpoint.applying import vectors
from normkit.checkpoint.layout import lay_out
from normkit.checkpoint.shard import Shard
from normkit.checkpoint.source import CheckpointSource
from normkit.errors import InputError, ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folding_runs.save(tmp_path_factory.mktemp("source") / "model", shards=1)


class Making:
    """A shard of the one file of a checkpoint, and what it told."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.source, self.path = CheckpointSource(folder), path
        self.file = self.source.files[0]
        plan = folding_runs.plan()
        (self.layout,) = lay_out(plan, self.source)
        self.written = 0
        self.positions = range(len(self.layout.edits))
        self.shard = Shard(self.layout, path, self.source, vectors(plan, self.source), self.step)

    def step(self, count: int) -> None:
        self.written += count

    def check(self) -> None:
        """The entry holds the hashes of both files."""
        entry = self.shard.finish()
        assert entry.source_sha256 == hashlib.sha256(self.file.read_bytes()).hexdigest()
        assert entry.sha256 == hashlib.sha256(self.path.read_bytes()).hexdigest()
        assert entry.size == self.path.stat().st_size
        assert entry.name == self.file.name
        assert list(entry.residuals) == sorted(edit.name for edit in self.layout.edits if edit.relation == "sum")

    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes of each later read for a hash alone."""
        counts: list[int] = []
        preadv = os.preadv

        def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            count = preadv(descriptor, buffers, offset)
            if descriptor in (self.shard._read.descriptor, self.shard._written.descriptor):
                counts.append(count)
            return count

        monkeypatch.setattr(os, "preadv", counted)
        return counts


@pytest.fixture
def making(folder: Path, tmp_path: Path) -> Iterator[Making]:
    made = Making(folder, tmp_path / "made")
    yield made
    made.shard.close()
    made.source.close()


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folding_runs.fold(folder, tmp_path_factory.mktemp("whole") / "out")
    return next(tmp_path_factory.getbasetemp().glob("whole*/out/model.safetensors")).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_tensors_may_be_made_in_any_order(making, expected, seed):
    order = list(making.positions)
    random.Random(seed).shuffle(order)
    ends = []
    for position in order:
        making.shard.make(position)
        ends.append(making.shard.settle())
    assert ends == [False] * (len(order) - 1) + [True]
    assert not making.shard.settle()
    making.check()
    assert making.path.read_bytes() == expected
    assert making.written == making.layout.size - making.layout.starts[0]


@pytest.mark.slow
def test_what_comes_in_order_is_not_read_again(making, monkeypatch):
    making.shard.settle()
    counts = making.reads(monkeypatch)
    for position in making.positions:
        making.shard.make(position)
        making.shard.settle()
    making.check()
    # Norms and what is removed do not pass by when matrices are made.
    passing = {edit.name for edit in making.layout.edits if edit.relation != "constant"}
    unseen = sum(
        tensor.nbytes for name, tensor in making.source.tensors.items() if name not in passing or "bias" in name
    )
    assert sum(counts) == unseen


@pytest.mark.slow
def test_what_comes_out_of_order_is_read_again(making, monkeypatch):
    making.shard.settle()
    counts = making.reads(monkeypatch)
    for position in reversed(making.positions):
        making.shard.make(position)
        making.shard.settle()
    making.check()
    first = making.layout.starts[1] - making.layout.starts[0]
    assert sum(counts) >= making.layout.size - making.layout.starts[0] - first


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_a_file(making, expected, threads):
    tasks, ends, guard = iter(making.positions), [], threading.Lock()

    def work() -> None:
        while True:
            with guard:
                position = next(tasks, None)
            if position is None:
                return
            making.shard.make(position)
            ends.append(making.shard.settle())

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert ends.count(True) == 1
    making.check()
    assert making.path.read_bytes() == expected


def test_nothing_is_taken_before_it_is_made(making):
    assert not making.shard.settle()
    making.shard.make(1)
    assert not making.shard.settle()
    assert making.shard._written.reached == making.layout.starts[0]
    making.shard.make(0)
    assert not making.shard.settle()
    assert making.shard._written.reached == making.layout.starts[2]


def test_the_disk_is_put_to_work_once_there_is_much(making, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    monkeypatch.setattr(module, "_FLUSHED", 10**6)
    for position in making.positions:
        making.shard.make(position)
        making.shard.flush()
    assert 3 <= len(flushed) < len(making.positions)
    making.shard.close()
    making.shard.flush()
    assert set(flushed) == {flushed[0]}


def test_the_disk_is_asked_for_the_next_tensor(making, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _handle, *wanted: asked.append(wanted))
    monkeypatch.setattr(module, "_AHEAD", 500_000)
    for position in making.positions:
        making.shard.make(position)
    starts = making.layout.read
    assert asked == [
        (start, min(stop - start, 500_000), os.POSIX_FADV_WILLNEED) for start, stop in itertools.pairwise(starts[1:])
    ]


def test_an_error_of_the_disk_is_one_line(making, monkeypatch):
    def full(_handle, _content, _offset):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        InputError, match=f"cannot write {making.path}: No space left on device; finished files are kept"
    ):
        making.shard.make(0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(InputError, match="No space left on device"):
        making.shard.make(0)


@pytest.mark.slow
def test_a_write_may_take_a_part(making, expected, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, content, offset: pwrite(handle, content[:99_991], offset))
    for position in making.positions:
        making.shard.make(position)
        making.shard.settle()
    making.check()
    assert making.path.read_bytes() == expected


def test_a_source_that_cannot_be_read_is_one_line(making, folder, tmp_path, monkeypatch):
    def broken(_handle, _buffers, _offset):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelError, match=f"cannot read {folder / 'model.safetensors'}: Input/output error"):
        making.shard.settle()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ModelError, match=f"{folder / 'model.safetensors'} became shorter while it was read"):
        making.shard.settle()
    with pytest.raises(InputError, match=r"cannot write .*: No such file or directory"):
        Shard(making.layout, tmp_path / "absent" / "made", making.source, {}, making.step)
