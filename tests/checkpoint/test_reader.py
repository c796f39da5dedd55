"""Rows of a checkpoint or of a module are its very bits; files and an index that disagree are told in one line."""

from __future__ import annotations

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normkit.checkpoint.reader import (
    FLOATS,
    NAME,
    TORCH,
    CheckpointSource,
    ModelSource,
    TensorInfo,
    check_finite,
    found,
    header_bytes,
    vector,
)
from normkit.errors import ModelError

INDEX = "model.safetensors.index.json"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = 1
    for length in shape:
        size *= length
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def sharded(folder: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, str] | None = None) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    named = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": named if weight_map is None else weight_map}))
    return folder


def test_the_dtypes_are_one_to_one():
    assert len(NAME) == len(TORCH)
    for name, dtype in TORCH.items():
        assert TensorInfo(name, (3,)).nbytes == 3 * dtype.itemsize
    assert set(FLOATS) <= set(TORCH)


@pytest.mark.parametrize("name", list(TORCH))
def test_rows_are_the_bits_of_the_file(tmp_path, name):
    tensors = {
        "matrix": drawn(TORCH[name], (5, 3, 4)),
        "vector": drawn(TORCH[name], (7,)),
        "one": drawn(TORCH[name], ()),
    }
    tensors["empty"] = torch.empty(3, 0, dtype=TORCH[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointSource(tmp_path) as source:
        assert source.files == (tmp_path / "model.safetensors",)
        assert source.tensors["matrix"].dtype == name
        rows = source.rows("matrix", 4, 11)
        assert rows.dtype is TORCH[name]
        assert torch.equal(bits(rows), bits(tensors["matrix"].view(15, 4)[4:11]))
        assert torch.equal(bits(source.rows("vector", 0, 1)), bits(tensors["vector"]))
        assert source.rows("one", 0, 1).shape == (1, 1)
        assert torch.equal(bits(source.rows("one", 0, 1)), bits(tensors["one"]))
        assert source.rows("empty", 1, 3).shape == (2, 0)
        assert source.rows("matrix", 3, 3).shape == (0, 4)


def test_rows_of_a_dtype_that_torch_has_not_are_bytes(tmp_path):
    content = bytes(range(12))
    header = header_bytes({"packed": TensorInfo("F4", (6, 4)), "odd": TensorInfo("F4", (0, 3))}, {})
    (tmp_path / "model.safetensors").write_bytes(header + content)
    with CheckpointSource(tmp_path) as source:
        assert source.rows("packed", 2, 4).flatten().tolist() == [4, 5, 6, 7]


def test_rows_come_from_the_shard_that_holds_them(tmp_path):
    shards = {"b.safetensors": {"x": torch.randn(3, 4)}, "a.safetensors": {"y": torch.randn(2), "z": torch.randn(5, 1)}}
    with CheckpointSource(sharded(tmp_path, shards)) as source:
        assert [file.name for file in source.files] == ["a.safetensors", "b.safetensors"]
        for tensors in shards.values():
            for name, tensor in tensors.items():
                assert torch.equal(
                    source.rows(name, 0, source.tensors[name].matrix[0]), tensor.view(-1, tensor.shape[-1])
                )


def test_one_shard_with_an_index(tmp_path):
    with CheckpointSource(sharded(tmp_path, {"only.safetensors": {"x": torch.ones(2)}})) as source:
        assert list(source.tensors) == ["x"]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"x": "b.safetensors", "y": "a.safetensors"}, "'x' is in .*a.safetensors, its index says 'b.safetensors'"),
        ({"x": "a.safetensors", "w": "b.safetensors"}, "'y' is in .*b.safetensors, its index does not name it"),
        (
            {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"},
            "names 'z' in 'b.safetensors', it is not there",
        ),
    ],
)
def test_an_index_that_says_something_else(tmp_path, weight_map, said):
    folder = sharded(
        tmp_path, {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(3)}}, weight_map
    )
    with pytest.raises(ModelError, match=said) as raised:
        CheckpointSource(folder)
    assert str(raised.value).isprintable()


def test_a_tensor_in_two_files(tmp_path):
    folder = sharded(
        tmp_path, {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"x": torch.ones(2), "y": torch.ones(1)}}
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelError, match="expected each tensor in one file, 'x' is in"):
        CheckpointSource(folder)


def test_a_file_that_became_shorter_or_never_was_whole(tmp_path):
    save_file({"x": torch.randn(100, 10)}, tmp_path / "model.safetensors")
    with CheckpointSource(tmp_path) as source:
        os.truncate(tmp_path / "model.safetensors", 2000)
        assert source.rows("x", 0, 10).shape == (10, 10)
        with pytest.raises(ModelError, match="it ends at byte 2000"):
            source.rows("x", 0, 100)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10**9) + b"{}")
    with pytest.raises(ModelError, match="is truncated or corrupt"):
        CheckpointSource(tmp_path)


def test_many_threads_read_at_once_and_no_descriptor_is_left(tmp_path):
    save_file({"x": torch.randn(3)}, tmp_path / "model.safetensors")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with CheckpointSource(tmp_path):
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    tensor = torch.randn(400, 30)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    with CheckpointSource(tmp_path) as source, ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda row: source.rows("x", row, row + 1), range(400)))
    assert torch.equal(torch.cat(read), tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("nothing", torch.empty(0))


def test_a_module_in_memory_and_what_of_it_cannot_be_read():
    model = Tied()
    source = ModelSource(model)
    assert list(source.tensors) == ["turned", "count", "none", "nothing", "table.weight"]
    assert source.tensors["turned"] == TensorInfo("F32", (3, 4))
    assert torch.equal(source.rows("turned", 1, 3), model.turned[1:3])
    assert not source.rows("table.weight", 0, 2).requires_grad
    assert source.rows("table.weight", 0, 5).data_ptr() == model.table.weight.data_ptr()
    assert source.rows("count", 0, 1).tolist() == [[3]]
    with pytest.raises(ModelError, match="weight is on the meta device; load its weights first"):
        ModelSource(nn.Linear(2, 2, device="meta"))
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ModelError, match=r"x is torch\.complex128"):
        ModelSource(model)


def test_a_vector_in_float64_is_finite(tmp_path):
    value = torch.tensor([1.5, -0.0, 3.25], dtype=torch.bfloat16)
    tensors = {"v": value, "m": torch.ones(2, 2), "i": torch.tensor([1, 2])}
    save_file(tensors | {"bad": torch.tensor([1, float("nan")])}, tmp_path / "model.safetensors")
    with CheckpointSource(tmp_path) as source:
        assert torch.equal(vector(source, "v"), value.to(torch.float64))
        assert vector(source, "v").dtype is torch.float64
        with pytest.raises(ModelError, match="expected a vector of floating-point numbers in m, found F32"):
            vector(source, "m")
        with pytest.raises(ModelError, match="in i, found I64"):
            vector(source, "i")
        with pytest.raises(ModelError, match="bad holds a NaN"):
            vector(source, "bad")
        with pytest.raises(ModelError, match="expected the tensor absent, found none"):
            vector(source, "absent")
        assert found(source, "m").shape == (2, 2)
    check_finite("x", torch.tensor([1.0, 2.0]))
    with pytest.raises(ModelError, match="x holds an infinity"):
        check_finite("x", torch.tensor([1.0, float("-inf")]))
    with pytest.raises(ModelError, match="x holds a NaN"):
        check_finite("x", torch.tensor([float("inf"), float("nan")], dtype=torch.bfloat16))
