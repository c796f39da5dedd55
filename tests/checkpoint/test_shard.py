"""The files of a folded checkpoint: where each tensor goes, and how threads make and hash them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import folding_runs
from normkit.checkpoint import shard as module
from normkit.checkpoint.applying import vectors
from normkit.checkpoint.folding import Workers
from normkit.checkpoint.plan import MEASURED, FoldPlan, TensorEdit
from normkit.checkpoint.reader import TORCH, CheckpointSource
from normkit.checkpoint.shard import FileLayout, Shard, index, lay_out
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
        self.shard = Shard(self.layout, path, self.source, vectors(plan, self.source, Workers()), self.step)

    def step(self, count: int) -> None:
        self.written += count

    def check(self) -> None:
        """The entry holds the hashes of both files."""
        entry = self.shard.finish()
        assert entry.source_sha256 == hashlib.sha256(self.file.read_bytes()).hexdigest()
        assert entry.sha256 == hashlib.sha256(self.path.read_bytes()).hexdigest()
        assert entry.size == self.path.stat().st_size
        assert entry.name == self.file.name
        assert list(entry.residuals) == sorted(edit.name for edit in self.layout.edits if edit.relation in MEASURED)

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


@pytest.mark.sampled(2)
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


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return folding_runs.save(tmp_path / "model")


def layouts(sharded: Path, plan: FoldPlan) -> tuple[FileLayout, ...]:
    with CheckpointSource(sharded) as source:
        return lay_out(plan, source)


def names(layout: FileLayout) -> list[str]:
    return [edit.name for edit in layout.edits]


def test_tensors_stay_in_their_files_wide_ones_first_and_else_in_the_order_of_the_source(sharded):
    made = layouts(sharded, folding_runs.plan())
    assert [layout.name for layout in made] == sorted(path.name for path in sharded.glob("*.safetensors"))
    for layout in made:
        with safe_open(sharded / layout.name, "pt") as held:
            there = set(held.keys()) - {"gone"}
        assert set(names(layout)) - {"created.table"} == there
    assert "created.table" in names(made[-1])
    for layout in layouts(sharded, folding_runs.plan()):
        for edit, start in zip(layout.edits, layout.starts, strict=False):
            assert start % TORCH[edit.dtype].itemsize == 0
    # The float32 table is created last; behind thirteen bytes of a mask it would not be aligned.
    last = layouts(sharded, folding_runs.plan())[-1]
    assert names(last)[0] == "created.table"
    assert names(last)[-1] == "mask"
    with CheckpointSource(sharded) as source:
        order = [name for name, tensor in source.tensors.items() if tensor.dtype == "BF16" and name != "gone"]
    kept = [name for layout in layouts(sharded, folding_runs.plan()) for name in names(layout) if name in order]
    assert kept == order
    plan = folding_runs.plan()
    assert layouts(sharded, replace(plan, edits=plan.edits[::-1])) == layouts(sharded, plan)
    with CheckpointSource(sharded) as source:
        for layout in lay_out(folding_runs.plan(), source):
            assert layout.read[-1] == (sharded / layout.name).stat().st_size
            for position, reached in enumerate(layout.read[:-1]):
                left = [source.tensors[name] for name in names(layout)[position:] if name in source.tensors]
                assert reached == min(tensor.start for tensor in left if tensor.file.name == layout.name)


def test_starts_and_texts_are_those_that_safetensors_reads(sharded):
    layout = layouts(sharded, folding_runs.plan("float32"))[0]
    length = int.from_bytes(layout.header[:8], "little")
    header = json.loads(layout.header[8:])
    assert len(layout.header) == 8 + length == layout.starts[0]
    assert header.pop("__metadata__") == {"format": "pt", "by": "a test"}
    assert list(header) == names(layout)
    for entry, start, stop in zip(header.values(), layout.starts, layout.starts[1:], strict=False):
        assert [layout.starts[0] + offset for offset in entry["data_offsets"]] == [start, stop]
    assert header["table"] == {"dtype": "F32", "shape": [2048, 384], "data_offsets": header["table"]["data_offsets"]}
    assert layout.size == layout.starts[-1]


def test_a_file_may_end_up_empty(sharded):
    plan = folding_runs.plan()
    with CheckpointSource(sharded) as source:
        first = {name for name, tensor in source.tensors.items() if tensor.file == source.files[0]}
        plan = replace(plan, edits=tuple(edit for edit in plan.edits if edit.name not in first))
        made = lay_out(plan, source)
        named = index(made, source)["weight_map"]
    assert made[0].edits == ()
    assert made[0].size == len(made[0].header)
    assert set(named.values()) == {layout.name for layout in made[1:]}


def test_the_index_names_every_tensor_keeps_the_rest_and_counts_parameters_where_they_were(sharded):
    with CheckpointSource(sharded) as source:
        made = lay_out(folding_runs.plan(), source)
        document = index(made, source)
    assert document["metadata"] == {
        "total_size": sum(layout.size - layout.starts[0] for layout in made),
        "kept": "as it is",
    }
    assert document["weight_map"] == dict(sorted((name, layout.name) for layout in made for name in names(layout)))
    file = sharded / folding_runs.INDEX
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metadata": {"total_parameters": 1}}))
    with CheckpointSource(sharded) as source:
        edits = (
            TensorEdit(name="table", source="table", dtype="BF16"),
            TensorEdit(name="mask", source="mask", dtype="BOOL"),
        )
        document = index(lay_out(replace(folding_runs.plan(), edits=edits), source), source)
    assert document["metadata"] == {"total_parameters": 2048 * 384 + 13, "total_size": 2 * 2048 * 384 + 13}


@pytest.mark.parametrize("metadata", [None, [1], "absent"])
def test_an_index_without_metadata_gains_its_size(sharded, metadata):
    file = sharded / folding_runs.INDEX
    document = json.loads(file.read_text()) | {"metadata": metadata}
    if metadata == "absent":
        del document["metadata"]
    file.write_text(json.dumps(document))
    with CheckpointSource(sharded) as source:
        assert list(index(lay_out(folding_runs.plan(), source), source)["metadata"]) == ["total_size"]


def test_one_file_has_no_index(tmp_path):
    with CheckpointSource(folding_runs.save(tmp_path / "one", shards=1)) as source:
        made = lay_out(folding_runs.plan(), source)
        assert [layout.name for layout in made] == ["model.safetensors"]
        assert index(made, source) is None
