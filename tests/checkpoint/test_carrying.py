"""Which files go along with the weights."""

from __future__ import annotations

from normkit.checkpoint.carrying import carried


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


def test_links_to_files_count_as_files_and_links_to_folders_lead_nowhere(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "vocab.txt").write_text("a")
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").symlink_to(tmp_path / "elsewhere" / "vocab.txt")
    (model / "outside").symlink_to(tmp_path / "elsewhere")
    (model / "broken").symlink_to(tmp_path / "nothing")
    assert [name for name, _ in carried(model)] == ["vocab.txt"]
