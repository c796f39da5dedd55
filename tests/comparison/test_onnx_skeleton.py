from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers import ROOT
from normkit.comparison.onnx_skeleton import read_skeleton
from normkit.errors import InputError, ModelError
from onnx_models import graph_of, layer_norm, written


def large() -> onnx.ModelProto:
    """A product with a matrix of 16 KB, and a constant of 8 bytes."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "sizes"], ["y"])]
    rows = np.arange(4096, dtype=np.float32).reshape(64, 64)
    return graph_of(nodes, {"w": rows, "sizes": np.array([-1, 64])}, shape=("rows", 64))


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


FUZZ = """
import random, resource, sys
from pathlib import Path
from normkit.comparison.onnx_file import OnnxModel
from normkit.errors import ModelError
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
whole, draw = path.read_bytes(), random.Random(seed)
refused = 0
for _ in range(count):
    damaged = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(damaged))
        match draw.randrange(4):
            case 0: damaged[at] = draw.randrange(256)
            case 1: damaged[at] ^= 1 << draw.randrange(8)
            case 2: del damaged[at : at + draw.randrange(1, 9)]
            case _: damaged[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    path.write_bytes(damaged)
    try:
        model = OnnxModel.open(path)
        source = model.weights.source
        for name in source.tensors:
            source.rows(name, 0, min(source.tensors[name].matrix[0], 4))
    except ModelError as error:
        refused += 1
        assert str(error).isprintable() and len(str(error)) < 600, str(error)
print(refused)
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
def test_mutated_bytes_are_one_line_or_a_model(tmp_path, seed):
    path = written(tmp_path, large() if seed % 2 else layer_norm())
    program = [sys.executable, "-c", FUZZ, str(path), str(seed), "300"]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) > 100
