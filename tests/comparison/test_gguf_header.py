"""A GGUF header is believed only after it was checked; what is wrong is one line; memory stays bounded."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch

from gguf_files import Raw, gguf, text
from normkit.comparison.gguf_file import GgufSource
from normkit.comparison.gguf_header import _ENCODINGS, Header, read_gguf_header
from normkit.errors import ModelError


def header_of(path: Path) -> Header:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_gguf_header(descriptor, path)
    finally:
        os.close(descriptor)


def test_the_encodings_are_those_of_the_package():
    sizes = {kind.value: (kind.name, *package.GGML_QUANT_SIZES[kind]) for kind in package.GGMLQuantizationType}
    assert sizes == _ENCODINGS


SETTINGS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.attention.causal": True,
    "llama.feed_forward_length": [8, 16],
    "general.tags": ["a", "", "tokens"],
    "empty": [],
    "small": Raw(1, struct.pack("<b", -3)),
    "large": Raw(10, struct.pack("<Q", 2**63)),
    "wide": Raw(12, struct.pack("<d", 0.1)),
    "nested": Raw(9, struct.pack("<IQIQI", 9, 2, 4, 1, 7) + struct.pack("<IQ", 8, 1) + text("x")),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "the"],
    "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
}
READ = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.attention.causal": True,
    "llama.feed_forward_length": [8, 16],
    "general.tags": ["a", "", "tokens"],
    "empty": [],
    "small": -3,
    "large": 2**63,
    "wide": 0.1,
    "tokenizer.ggml.model": "gpt2",
}
TENSORS = {
    "token_embd.weight": torch.arange(12.0).view(3, 4),
    "blk.0.attn_norm.weight": torch.linspace(0.5, 2, 5, dtype=torch.bfloat16),
    "scalar": Raw(0, struct.pack("<f", 2.5)),
    "nothing": torch.zeros(3, 0),
    "blk.0.ffn_up.weight": Raw(8, bytes(range(68)), (2, 32)),
}


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 8), (3, 4096)])
def test_what_a_header_says(tmp_path, version, alignment):
    file = tmp_path / "model.gguf"
    settings = SETTINGS | ({"general.alignment": alignment} if alignment != 32 else {})
    file.write_bytes(gguf(settings, TENSORS, version=version, alignment=alignment))
    header = header_of(file)
    assert dict(header.settings) == READ | ({"general.alignment": alignment} if alignment != 32 else {})
    assert list(header.tensors) == list(TENSORS)
    content = file.read_bytes()
    for name, tensor in header.tensors.items():
        assert (tensor.file, tensor.shape, tensor.start % alignment) == (file, tuple(TENSORS[name].shape), 0)
        if isinstance(TENSORS[name], Raw):
            assert content[tensor.start : tensor.stop] == TENSORS[name].data
    assert [tensor.encoding for tensor in header.tensors.values()] == ["F32", "BF16", "F32", "F32", "Q8_0"]
    assert [tensor.dtype for tensor in header.tensors.values()] == ["F32", "BF16", "F32", "F32", "F32"]


@pytest.mark.slow
def test_long_values_are_passed_over(tmp_path):
    file = tmp_path / "model.gguf"
    settings = {
        "long text": "x" * 70_000,
        "long texts": ["y" * 1000] * 100,
        "long numbers": Raw(9, struct.pack("<IQ", 4, 20_000) + bytes(80_000)),
        "tokenizer.ggml.tokens": ["token" * 50] * 10_000,
        "last": 7,
    }
    file.write_bytes(gguf(settings, {"a": torch.ones(2)}))
    assert dict(header_of(file).settings) == {"last": 7}


def one(tensor: Raw, name: str = "a") -> bytes:
    return gguf({}, {name: tensor})


def array(kind: int, count: int, data: bytes = b"") -> Raw:
    return Raw(9, struct.pack("<IQ", kind, count) + data)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its header needs byte 4, it has 0"),
        (b"GGU", "its header needs byte 4, it has 3"),
        (b"GGML" + bytes(40), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 3), "its header needs byte 16, it has 8"),
        (gguf(version=1), "is of version 1; convert the model anew"),
        (gguf(version=4), "is of version 4"),
        (gguf(version=0), "is of version 0"),
        (gguf(num_keys=2**64 - 1), "it claims 18,446,744,073,709,551,615 keys, it has 32 bytes"),
        (gguf(num_tensors=2**63), "it claims 9,223,372,036,854,775,808 tensors"),
        (gguf(num_tensors=1), "it claims 1 tensor, it has 32 bytes"),
        (gguf([(b"k" * 2000, 1)]), "the name of a key has 2000 bytes"),
        (gguf([("", 1), ("b", 1)]), "'' is no name for a key"),
        (gguf([("a\nb", 1)]), "'a\\nb' is no name for a key"),
        (gguf([(b"\xff\xfe", 1)]), "is no name for a key"),
        (gguf([("a", 1), ("b", 2), ("a", 1)]), "the key 'a' occurs twice"),
        (gguf({"a": Raw(13, bytes(8))}), "the value of 'a' has the type 13"),
        (gguf({"a": Raw(8, text("x", length=2**62))}), "its header needs byte 461168601842738"),
        (gguf({"a": array(4, 2**60)}), "its header needs byte"),
        (gguf({"a": array(8, 2**60)}), "its header needs byte"),
        (gguf({"a": array(8, 5, text("x") * 4 + text("x", length=10**9))}), "its header needs byte 1000000"),
        (gguf({"a": array(77, 5)}), "the values of 'a' have the type 77"),
        (gguf({"a": array(9, 1, struct.pack("<IQ", 9, 1) * 50)}), "'a' is nested more than 4 levels deep"),
        (gguf({"a": array(9, 2**62, struct.pack("<IQ", 4, 0) * 2)}), "its header needs byte 97, it has 96"),
        (gguf({"general.alignment": 24}), "its alignment 24 is no power of two"),
        (gguf({"general.alignment": 0}), "its alignment 0 is no power of two"),
        (gguf({"general.alignment": "32"}), "its alignment '32' is no power of two"),
        (gguf({"general.alignment": True}), "its alignment True is no power of two"),
        (gguf([], [("a", torch.ones(2)), ("a", torch.ones(2))]), "the tensor 'a' occurs twice"),
        (one(Raw(0, bytes(4)), "\x1b[31m"), "'\\x1b[31m' is no name for a tensor"),
        (one(Raw(0, bytes(4), (1,) * 5)), "'a' has 5 axes"),
        (one(Raw(0, bytes(4), (2**40, 2**40))), "'a' of shape (1099511627776, 1099511627776) ends at byte"),
        (one(Raw(0, b"", (0, 2**62))), "'a' of shape (0, 4611686018427387904) ends at byte"),
        (one(Raw(0, bytes(4), (16,))), "'a' of shape (16,) ends at byte 128, the file at 96"),
        (one(Raw(0, bytes(32), (8,), offset=32)), "'a' of shape (8,) ends at byte 128, the file at 96"),
        (one(Raw(0, bytes(4), (1,), offset=2**64 - 32)), "'a' of shape (1,) ends at byte 18446744073709551652"),
        (one(Raw(0, bytes(32), (1,), offset=4)), "the offset 4 of 'a' is no multiple of 32"),
        (one(Raw(8, bytes(34), (33,))), "'a' is Q8_0 of shape (33,)"),
        (one(Raw(8, bytes(34), (2, 16))), "'a' is Q8_0 of shape (2, 16)"),
        (one(Raw(8, bytes(34))), "'a' is Q8_0 of shape ()"),
        (
            gguf({}, {"a": torch.ones(16), "b": Raw(0, bytes(64), (8,), offset=32)}),
            "'b' shares bytes with another tensor",
        ),
        (
            gguf({}, {"a": torch.ones(16), "b": Raw(0, bytes(64), (16,), offset=0)}),
            "'b' shares bytes with another tensor",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_not_whole(tmp_path, content, said):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        header_of(file)
    message = str(raised.value)
    assert said in message
    assert str(file) in message
    assert message.isprintable()
    assert len(message) < len(str(file)) + 250


@pytest.mark.parametrize("order", "<>")
def test_a_tensor_of_an_encoding_that_is_not_known_is_left_out_and_the_others_are_read(tmp_path, order):
    # 139 is IQ4_K of ik_llama.cpp: a scale for each 256 numbers, 144 bytes together.
    tensors = {"a": torch.ones(16), "b": Raw(139, bytes(288), (2, 256)), "c": torch.arange(8.0)}
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({}, tensors, order=order))
    header = header_of(file)
    assert dict(header.unread) == {"b": "its encoding 139 is not known"}
    assert header.tensors["c"].start - header.tensors["a"].start == 64 + 288
    assert GgufSource(file).rows("c", 0, 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (Raw(139, bytes(32), (2**40,)), "'a' of shape (1099511627776,) ends at byte"),
        (Raw(139, bytes(32), (512,)), "'a' of shape (512,) ends at byte 128, the file at 96"),
        (Raw(139, b"", (0, 2**62)), "'a' of shape (0, 4611686018427387904) ends at byte"),
        (Raw(139, bytes(32), (8,), offset=2**63), "ends at byte 9223372036854775873"),
        (Raw(139, bytes(32), (8,), offset=4), "the offset 4 of 'a' is no multiple of 32"),
        (Raw(139, bytes(32), (8,), offset=32), "shares bytes with another tensor"),
    ],
)
def test_the_place_of_such_a_tensor_is_checked_as_far_as_it_is_known(tmp_path, tensor, said):
    file = tmp_path / "model.gguf"
    held = {"a": tensor} | ({"b": torch.ones(16)} if tensor.offset == 32 else {})
    content = gguf({}, held if tensor.offset != 32 else dict(reversed(held.items())))
    file.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        header_of(file)
    assert said in str(raised.value)


@pytest.mark.slow
def test_more_metadata_than_any_model_has(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({f"key {number}": "x" * 60_000 for number in range(80)}))
    with pytest.raises(ModelError, match="its metadata take more than 4194304 bytes"):
        header_of(file)


def test_a_header_longer_than_any_model_has(tmp_path):
    file = tmp_path / "model.gguf"
    content = gguf({"a": array(4, 10**9)})
    file.write_bytes(content)
    # Not written out: the file only has that size.
    os.truncate(file, 10**10)
    with pytest.raises(ModelError, match="its header has more than 100000000 bytes"):
        header_of(file)


def test_gaps_between_tensors_and_bytes_behind_them_do_no_harm(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({}, {"a": torch.ones(1), "b": Raw(0, bytes(96), (1,), offset=96)}) + b"more")
    assert list(header_of(file).tensors) == ["a", "b"]


SMALL = gguf(SETTINGS, TENSORS)


def outcome(file: Path, content: bytes) -> str:
    """The refusal of a file, or "" if every row of it can be read."""
    file.write_bytes(content)
    try:
        source = GgufSource(file)
        for name, tensor in source.tensors.items():
            assert source.rows(name, 0, tensor.matrix[0]).shape == tensor.matrix
    except ModelError as error:
        return str(error)
    return ""


def judged_by_the_package(file: Path) -> None:
    """What is read here, the package reads as well."""
    read = package.GGUFReader(file)
    assert {tensor.name: (tuple(tensor.shape.tolist()[::-1]), tensor.data_offset) for tensor in read.tensors} == {
        name: (tensor.shape, tensor.start) for name, tensor in header_of(file).tensors.items()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(60))
def test_damage_is_one_line_or_a_file_that_the_package_reads_too(tmp_path, seed):
    file, drawing, refusals = tmp_path / "model.gguf", random.Random(seed), 0
    tracemalloc.start()
    for _ in range(100):
        content = bytearray(SMALL)
        for _ in range(drawing.choice((1, 1, 2, 3))):
            place = drawing.randrange(len(content))
            match drawing.randrange(4):
                case 0:
                    content[place] ^= 1 << drawing.randrange(8)
                case 1:
                    content[place] = drawing.choice((0, 1, 8, 9, 127, 255))
                case 2:
                    number = drawing.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, len(content)))
                    content[place : place + 8] = struct.pack("<Q", number)
                case 3:
                    content[place : place + drawing.randrange(9)] = drawing.randbytes(drawing.randrange(9))
        refusal = outcome(file, bytes(content))
        assert refusal.isprintable()
        refusals += bool(refusal)
        # The package knows no other encodings either.
        if not refusal and not header_of(file).unread:
            judged_by_the_package(file)
    assert 0 < refusals < 100
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(32))
def test_a_file_cut_anywhere_is_refused(tmp_path, first):
    # The last tensor ends before the padding behind it.
    whole = len(SMALL) - 28
    assert outcome(tmp_path / "model.gguf", SMALL[:whole]) == ""
    for length in range(first, whole, 32):
        assert "is truncated or corrupt" in outcome(tmp_path / "model.gguf", SMALL[:length])


@pytest.mark.exhaustive
def test_a_lying_file_takes_no_memory(tmp_path):
    # Every text is empty: the longest walk for the bytes of a header.
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({"a": array(8, 13_000_000)}))
    os.truncate(file, 2 * 10**8)
    program = """
import resource, sys
from pathlib import Path
from normkit.comparison.gguf_file import GgufSource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_DATA, (before * 1024 + 2**29,) * 2)
try:
    GgufSource(Path(sys.argv[1]))
except ValueError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=True)
    said, grown = done.stdout.splitlines()
    assert "more than 100000000 bytes" in said
    assert int(grown) < 64e6


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma3", "smollm2", "qwen05"])
def test_real_files_read_as_the_package_reads_them(real_models, name):
    file = real_models / f"{name}.gguf"
    read, header, source = package.GGUFReader(file), header_of(file), GgufSource(file)
    judged_by_the_package(file)
    for key, value in header.settings.items():
        expected = read.fields[key].contents()
        assert value == (float(str(np.float32(expected))) if isinstance(expected, float) else expected)
    left_out = {key for key in read.fields if key not in header.settings and not key.startswith("GGUF.")}
    assert all(key.startswith("tokenizer.") and isinstance(read.fields[key].contents(), list) for key in left_out)
    for tensor in read.tensors:
        rows = min(7, source.tensors[tensor.name].matrix[0])
        expected = package.quants.dequantize(np.atleast_2d(tensor.data)[:rows], tensor.tensor_type)
        assert np.array_equal(source.rows(tensor.name, 0, rows).numpy(), expected)
