"""The files of a model folder: their names, hashes and links; the weights, found and read."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from normkit.checkpoint.model_folder import (
    INDEX,
    Fingerprint,
    code_files,
    copied_files,
    file_names,
    fingerprints,
    read_json,
    read_weights,
    sha256,
    shard_names,
    weight_files,
)
from normkit.errors import InputError, ModelError
from tensor_files import raw


def test_hidden_files_and_what_is_below_a_link_are_none_of_them(tmp_path):
    for name in ("b", "a/c", ".hidden", ".git/config", "a/.d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert file_names(tmp_path) == ["a/c", "b"]
    (tmp_path / "loop").symlink_to(tmp_path)
    assert file_names(tmp_path) == ["a/c", "b", "loop"]
    with pytest.raises(InputError, match="loop"):
        sha256(tmp_path / "loop")


def test_a_hash_is_that_of_the_content_however_long_known_or_of_a_file(tmp_path):
    content = os.urandom(2**21 + 5)
    (tmp_path / "file").write_bytes(content)
    steps = []
    assert sha256(tmp_path / "file", steps.append) == hashlib.sha256(content).hexdigest()
    assert sum(steps) == len(content)
    assert max(steps) <= 2**20
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    found = fingerprints(tmp_path, ["b"], {"a": "known"})
    assert list(found.items()) == [
        ("a", Fingerprint(1, "known")),
        ("b", Fingerprint(1, hashlib.sha256(b"b").hexdigest())),
    ]
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent"):
        with pytest.raises(InputError, match=f"expected a file in .*{name}"):
            sha256(tmp_path / name)


def test_everything_but_weights_configuration_and_what_is_hidden(tmp_path):
    kept = ["tokenizer.json", "README.md", "1_Pooling/config.json", "deep/er/notes.txt"]
    left = [
        *("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx"),
        *("normkit_certificate.json", ".gitattributes", ".cache/refs"),
    ]
    for name in kept + left:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    # A folder's own configuration belongs to it, not to the model.
    assert [name for name, _ in copied_files(tmp_path)] == sorted(kept)
    assert all(path.read_text() == name for name, path in copied_files(tmp_path))


def test_a_link_inside_counts_as_the_file_one_to_a_folder_is_not_followed_and_one_outside_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("a")
    (tmp_path / "again.txt").symlink_to("vocab.txt")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nothing")
    assert [name for name, _ in copied_files(tmp_path)] == ["again.txt", "vocab.txt"]
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_text("a")
    (model / "notes.txt").symlink_to("../secret")
    with pytest.raises(ModelError, match=r"notes.txt is a link to .*secret, outside of its folder, and is not copied"):
        list(copied_files(model))


def test_the_cache_of_the_hub_is_made_of_links(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (tmp_path / "models--org--name" / "blobs").mkdir()
    for name, blob in (("vocab.txt", "../../blobs/a"), ("1_Pooling/config.json", "../../../blobs/b")):
        (snapshot / name).symlink_to(blob)
        (snapshot / name).write_text("a")
    # Given by a link to it, as users do.
    (tmp_path / "mine").symlink_to(snapshot)
    assert [name for name, _ in copied_files(tmp_path / "mine")] == ["1_Pooling/config.json", "vocab.txt"]
    (snapshot / "ref").symlink_to("../../refs")
    (tmp_path / "models--org--name" / "refs").write_text("main")
    with pytest.raises(ModelError, match="ref is a link"):
        list(copied_files(snapshot))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "evil\u202etxt", "a\\b", "d/" * 127 + "abc", b"\xff.txt"])
def test_a_name_that_no_certificate_may_hold_is_refused(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with pytest.raises(ModelError, match="expected file names of at most 256 printable characters") as error:
        list(copied_files(tmp_path))
    assert str(error.value).isprintable()


def test_code_stays_behind(tmp_path):
    names = ["modeling_x.py", "tokenizer.json", "deep/x.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [name for name, _ in copied_files(tmp_path)] == ["tokenizer.json"]
    assert code_files(names) == ["modeling_x.py", "deep/x.py"]


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


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


def test_the_same_bytes_undamaged_are_read_and_a_pointer_or_a_lost_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"a": tensor([4], [0, 16])}, struct.pack("<4f", 1, 2, 3, 4)))
    assert read_weights([file])["a"].tolist() == [1, 2, 3, 4]
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        read_weights([file])
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        read_weights([tmp_path / "absent.safetensors"])


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
