from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from normkit.comparison.onnx_skeleton import read_skeleton
from normkit.errors import InputError, ModelError
from onnx_models import large, layer_norm, written


def varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def part(number: int, content: bytes) -> bytes:
    """A field with its length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def test_values_of_large_initializers_stay_in_the_file(tmp_path):
    model = large()
    path = written(tmp_path, model)
    skeleton, places = read_skeleton(path)
    ((position, (start, length)),) = places.items()
    assert position == 0
    assert path.read_bytes()[start : start + length] == model.graph.initializer[0].raw_data
    model.graph.initializer[0].ClearField("raw_data")
    assert skeleton == model


def test_values_in_typed_fields_stay_in_the_file_too(tmp_path):
    model = large()
    tensor = helper.make_tensor("w", onnx.TensorProto.FLOAT, (64, 64), np.arange(4096.0), raw=False)
    model.graph.initializer[0].CopyFrom(tensor)
    path = written(tmp_path, model)
    ((start, length),) = read_skeleton(path)[1].values()
    assert (np.frombuffer(path.read_bytes()[start : start + length], np.float32) == np.arange(4096)).all()


def test_a_model_without_large_values_is_read_whole(tmp_path):
    assert read_skeleton(written(tmp_path, layer_norm()))[0] == layer_norm()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file(tmp_path, share):
    whole = large().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelError, match=r"is truncated or corrupt \(.*\); download it again$"):
        read_skeleton(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x00" * 40, "there is no ONNX at byte 0"),
        (b"GGUF" * 20, "there is no ONNX at byte 0"),
        (b"\xff" * 40, "there is no ONNX at byte 0"),
        (part(7, b"\x2a\xff\xff\xff\xff\x0f"), "the part at byte 2 ends at byte 4294967303"),
        (part(7, part(1, b"\x0a\x85")), "it ends within the number at byte 5"),
        (part(7, part(2, b"\xff\xfe")), "the text at byte 2 is not UTF-8"),
        (bytes([7 << 3, 5]), "it holds no graph with operators and outputs"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the weights"),
    ],
)
def test_what_is_no_protobuf_message(tmp_path, content, reason):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_skeleton(path)


def test_subgraphs_without_end(tmp_path):
    nested = b""
    for _ in range(40):
        # graph.node.attribute.g
        nested = part(1, part(5, part(6, nested)))
    path = tmp_path / "model.onnx"
    path.write_bytes(part(7, nested))
    with pytest.raises(ModelError, match="nests messages or subgraphs more than 90 deep"):
        read_skeleton(path)


@pytest.mark.slow
def test_millions_of_empty_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("normkit.comparison.onnx_skeleton._MOST_PARTS", 3000)
    path = tmp_path / "model.onnx"
    path.write_bytes(part(7, part(1, b"") * 4000))
    with pytest.raises(ModelError, match="has more than 3,000 parts, which no model needs"):
        read_skeleton(path)


def test_a_skeleton_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("normkit.comparison.onnx_skeleton._LARGEST_SKELETON", 3000)
    path = tmp_path / "model.onnx"
    path.write_bytes(part(7, part(10, b"a" * 4000)))
    with pytest.raises(ModelError, match="without the values of its initializers it has 4006 bytes, at most 3000"):
        read_skeleton(path)


def test_a_file_larger_than_protobuf_allows(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as opened:
        opened.truncate(2**31)
    with pytest.raises(ModelError, match="an ONNX file is smaller than 2 GiB, this has 2147483648 bytes"):
        read_skeleton(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*: No such file or directory; give an ONNX file"):
        read_skeleton(tmp_path / "model.onnx")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"needs the package onnx; pip install normkit\[ports\]"):
        read_skeleton(tmp_path / "model.onnx")
