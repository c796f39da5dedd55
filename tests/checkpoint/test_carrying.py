"""Which files go along with the weights."""

from __future__ import annotations

import os

import pytest

from normkit.checkpoint.carrying import carried, code
from normkit.errors import ModelError


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
    assert [name for name, _ in carried(tmp_path)] == sorted(kept)
    assert all(path.read_text() == name for name, path in carried(tmp_path))


def test_a_link_to_a_file_inside_counts_as_the_file_and_one_to_a_folder_leads_nowhere(tmp_path):
    (tmp_path / "vocab.txt").write_text("a")
    (tmp_path / "again.txt").symlink_to("vocab.txt")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nothing")
    assert [name for name, _ in carried(tmp_path)] == ["again.txt", "vocab.txt"]


def test_a_link_that_leads_outside_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_text("a")
    (model / "notes.txt").symlink_to("../secret")
    with pytest.raises(ModelError, match=r"notes.txt is a link to .*secret, outside of its folder, and is not copied"):
        list(carried(model))


def test_the_cache_of_the_hub_is_made_of_links(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (tmp_path / "models--org--name" / "blobs").mkdir()
    for name, blob in (("vocab.txt", "../../blobs/a"), ("1_Pooling/config.json", "../../../blobs/b")):
        (snapshot / name).symlink_to(blob)
        (snapshot / name).write_text("a")
    # Given by a link to it, as users do.
    (tmp_path / "mine").symlink_to(snapshot)
    assert [name for name, _ in carried(tmp_path / "mine")] == ["1_Pooling/config.json", "vocab.txt"]
    (snapshot / "ref").symlink_to("../../refs")
    (tmp_path / "models--org--name" / "refs").write_text("main")
    with pytest.raises(ModelError, match="ref is a link"):
        list(carried(snapshot))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "evil\u202etxt", "a\\b", "d/" * 127 + "abc", b"\xff.txt"])
def test_a_name_that_no_certificate_may_hold_is_refused(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with pytest.raises(ModelError, match="expected files that are called by at most 256 printable characters") as error:
        list(carried(tmp_path))
    assert str(error.value).isprintable()


def test_code_stays_behind(tmp_path):
    names = ["modeling_x.py", "tokenizer.json", "deep/x.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [name for name, _ in carried(tmp_path)] == ["tokenizer.json"]
    assert code(names) == ["modeling_x.py", "deep/x.py"]
