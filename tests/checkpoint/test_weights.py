"""Weights that are absent, elsewhere, pickled or damaged give one line that says what to do."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from normkit.checkpoint.weights import read_json, read_weights, shard_names, weight_files
from normkit.errors import ModelError

INDEX = "model.safetensors.index.json"


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file byte by byte: the header's length, the header, the data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        raw({}, length=10**12),
        raw(b"not JSON"),
        raw(b"[1]"),
        raw({"a": tensor([4], [0, 16])}, bytes(12)),
        raw({"a": tensor([4], [0, 16])}, bytes(20)),
        raw({"a": tensor([4], [0, 16]), "b": tensor([1], [20, 24])}, bytes(24)),
        raw({"a": tensor([4], [0, 16]), "b": tensor([1], [12, 16])}, bytes(16)),
        raw({"a": tensor([5], [0, 16])}, bytes(16)),
        raw({"a": tensor([4], [0, 16], "F33")}, bytes(16)),
    ],
    ids=[
        "empty",
        "shorter than a length",
        "header past the end",
        "no JSON",
        "no object",
        "truncated",
        "trailing bytes",
        "gap",
        "overlap",
        "shape",
        "dtype",
    ],
)
def test_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="is truncated or corrupt") as caught:
        read_weights([file])
    assert "\n" not in str(caught.value)


def test_the_same_bytes_undamaged_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"a": tensor([4], [0, 16])}, struct.pack("<4f", 1, 2, 3, 4)))
    assert read_weights([file])["a"].tolist() == [1, 2, 3, 4]


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        read_weights([file])


def test_a_file_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        read_weights([tmp_path / "model.safetensors"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "found no weights"),
        (["pytorch_model.bin"], "found only pytorch_model.bin; pickled weights are never loaded.*save_pretrained"),
        (["a.bin", "b.pt", "c.pth", "d.ckpt"], "found only a.bin, b.pt, c.pth and 1 more"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter without its model"),
        (["weights.safetensors"], "found weights.safetensors; rename it"),
        (["model.gguf"], "found model.gguf"),
    ],
)
def test_no_weights_to_read(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=message):
        weight_files(tmp_path)


def shard(folder: Path) -> None:
    """Split the weights of a folder into two shards with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    half = len(names) // 2
    files = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, members in files.items():
        save_file({name: weights[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_together(gpt2: Path) -> None:
    whole = load_file(gpt2 / "model.safetensors")
    shard(gpt2)
    files = weight_files(gpt2)
    assert [file.name[:11] for file in files] == ["model-00001", "model-00002"]
    found = read_weights(files)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_missing_shard_is_named(gpt2: Path) -> None:
    shard(gpt2)
    (gpt2 / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"all 2 shards .*model-00002-of-00002.safetensors is missing"):
        weight_files(gpt2)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "x.bin", ".."])
def test_a_shard_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="to name safetensors beside it, got"):
        shard_names(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": [1]}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="expected a weight_map"):
        weight_files(tmp_path)


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*: Is a directory"):
        read_json(tmp_path)
