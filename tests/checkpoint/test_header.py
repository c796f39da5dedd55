"""A header is believed only after it was checked; what is wrong is one line; what is written, safetensors reads."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from normkit.checkpoint.reader import CheckpointSource, TensorInfo, header_bytes, read_header
from normkit.errors import ModelError
from tensor_files import raw


def entry(shape: Any, offsets: Any, dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_where_each_tensor_lies(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "a": torch.arange(4, dtype=torch.int64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(3, 0, 2),
        "flags": torch.tensor([True, False, True]),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    found = read_header(file)
    content = file.read_bytes()
    assert set(found) == set(tensors)
    assert [tensor.start for tensor in found.values()] == sorted(tensor.start for tensor in found.values())
    assert list(found.values())[-1].stop == len(content)
    for name, tensor in tensors.items():
        located = found[name]
        assert (located.file, located.shape, located.nbytes) == (file, tuple(tensor.shape), tensor.nbytes)
        assert content[located.start : located.stop] == bytes(tensor.flatten().view(torch.uint8).tolist())


def test_a_tensor_seen_as_a_matrix():
    assert TensorInfo("F32", (2, 3, 4)).matrix == (6, 4)
    assert TensorInfo("F32", (7,)).matrix == (1, 7)
    assert TensorInfo("F32", ()).matrix == (1, 1)
    assert TensorInfo("F32", (0, 3)).matrix == (0, 3)
    assert TensorInfo("F32", (3, 0)).matrix == (3, 0)
    assert TensorInfo("F4", (3, 4)).matrix == (3, 4)
    assert TensorInfo("F4", (3, 4)).bytes_of(2) == 4
    # A row of three half bytes does not end on a byte.
    assert TensorInfo("F4", (4, 3)).matrix == (1, 12)
    assert TensorInfo("F6_E2M3", (4, 3)).nbytes == 9


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it has 0 bytes"),
        (b"abc", "it has 3 bytes"),
        (raw({}, length=10**12), "its header claims 1000000000000 bytes, the file has 10"),
        (raw({}, length=2**64 - 1), "claims"),
        (raw(b"{}", bytes(8), length=3), "its header: it is not JSON"),
        (raw(b"not JSON"), "its header: it is not JSON"),
        (raw(b"\xff\xfe{}"), "its header: it is not JSON"),
        (raw(b"[" * 100_000), "its header: it is nested more than 100 levels deep"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "its header: it holds an integer of 5,000 digits"),
        (raw([1]), "its header is not a table"),
        (raw({"__metadata__": {"a": 1}}), "its __metadata__ is not a table of texts"),
        (raw({"__metadata__": [1]}), "its __metadata__ is not a table of texts"),
        (raw(b'{"__metadata__": {"a": "\\ud800"}}'), "its header: it holds half a character"),
        (raw({"a": entry([4], [0, 16])}, bytes(12)), "its header speaks of"),
        (raw({"a": entry([4], [0, 16])}, bytes(20)), "its header speaks of"),
        (raw({"a": entry([4], [0, 16]), "b": entry([1], [20, 24])}, bytes(24)), "'b' follows a gap"),
        (raw({"a": entry([4], [4, 20])}, bytes(20)), "'a' follows a gap"),
        (raw({"a": entry([4], [0, 16]), "b": entry([1], [12, 16])}, bytes(16)), "'b' shares bytes"),
        (raw({"a": entry([4], [0, 16]), "b": entry([4], [0, 16])}, bytes(16)), "'b' shares bytes"),
        (raw({"a": entry([5], [0, 16])}, bytes(16)), "'a' is F32 of shape [5] and has 16 bytes"),
        (raw({"a": entry([4], [16, 0])}, bytes(16)), "and has -16 bytes"),
        (raw({"a": entry([-4], [0, 16])}, bytes(16)), "'a' has the shape [-4]"),
        (raw({"a": entry([-2, -2], [0, 16])}, bytes(16)), "'a' has the shape [-2, -2]"),
        (raw({"a": entry([4.0], [0, 16])}, bytes(16)), "'a' has the shape [4.0]"),
        (raw({"a": entry([True], [0, 4])}, bytes(4)), "'a' has the shape [True]"),
        (raw({"a": entry("4", [0, 16])}, bytes(16)), "'a' has the shape '4'"),
        (raw({"a": entry([0, 2**62], [0, 0])}), "'a' has the shape"),
        (raw({"a": entry([2**40, 2**40], [0, 16])}, bytes(16)), "'a' has the shape"),
        (raw({"a": entry([10**4000] * 50, [0, 16])}, bytes(16)), "an integer of 4,001 digits"),
        (raw({"a": entry([1] * 100, [0, 4])}, bytes(4)), "'a' has the shape"),
        (raw({"a": entry([4], [-16, 0])}, bytes(16)), "'a' has the offsets [-16, 0]"),
        (raw({"a": entry([4], [0, 16, 32])}, bytes(16)), "'a' has the offsets [0, 16, 32]"),
        (raw({"a": entry([4], [0, 10**30])}, bytes(16)), "'a' is F32 of shape [4] and has 1000000000000000"),
        (raw({"a": entry([4], None)}, bytes(16)), "'a' has the offsets None"),
        (raw({"a": entry([4], [0, 16], "F33")}, bytes(16)), "'a' has the dtype 'F33'"),
        (raw({"a": entry([4], [0, 16], ["F32"])}, bytes(16)), "'a' has the dtype ['F32']"),
        (raw({"a": entry([3], [0, 1], "F4")}, bytes(1)), "'a' is F4 of shape [3]"),
        (raw({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)), "'a' has no dtype, shape and data_offsets"),
        (raw({"a": 3}), "'a' has no dtype, shape and data_offsets"),
        (raw({"a\nb": entry([1], [0, 4])}, bytes(4)), "'a\\nb' is no name"),
        (raw(b'{"\\ud800": {}}'), "half a character, in '\\ud800'"),
        (
            raw(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', bytes(1)),
            "it holds the key 'a' twice",
        ),
        (
            raw(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "shape": [1]}}', bytes(1)),
            "it holds the key 'shape' twice",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_not_whole(tmp_path, content, said):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        read_header(file)
    message = str(raised.value)
    assert said in message
    assert message.startswith(str(file))
    assert message.isprintable()
    assert len(message) < len(str(file)) + 250


def test_a_header_longer_than_the_format_allows_and_a_file_that_cannot_be_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 100_000_001))
        # Not written out: the file only has that size.
        opened.truncate(100_000_100)
    with pytest.raises(ModelError, match="its header claims 100000001 bytes"):
        read_header(file)
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(ModelError, match="cannot read"):
            read_header(path)


def test_keys_that_are_not_known_do_no_harm(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"a": entry([4], [0, 16], note="x")}, bytes(16)))
    assert list(read_header(file)) == ["a"]


SMALL = raw(
    {
        "__metadata__": {"format": "pt"},
        "a": entry([2, 3], [0, 12], "BF16"),
        "b": entry([], [12, 20], "F64"),
        "c": entry([0, 4], [20, 20]),
        "d": entry([3], [20, 23], "I8"),
    },
    bytes(range(23)),
)
PIECES = [*b'-1 0 1e3 [ ] { } " , : null true "a"'.split(), b"9" * 20, b"\x00", b" "]


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SMALL)), st.integers(0, 12), st.one_of(st.binary(max_size=9), st.sampled_from(PIECES))
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@example([(len(SMALL), 0, b"")], False)
def test_damage_is_one_line_or_a_file_that_safetensors_reads_too(tmp_path, damage, keeps_length):
    content = SMALL
    for place, removed, added in damage:
        content = content[:place] + added + content[place + removed :]
    if keeps_length:
        # The damage then lies in the JSON, not in where it ends.
        content = struct.pack("<Q", max(0, len(content) - 31)) + content[8:]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refusal, found = "", {}
    try:
        found = read_header(file)
    except ModelError as error:
        refusal = str(error)
    assert refusal.isprintable()
    if refusal:
        return
    try:
        with safe_open(file, "pt") as opened:
            assert {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()} == {  # noqa: SIM118
                name: tensor.shape for name, tensor in found.items()
            }
    except SafetensorError as error:
        raise AssertionError(f"safetensors refuses it: {error}") from None


def test_what_is_written_safetensors_reads(tmp_path):
    tensors = {
        "z": torch.randn(3, 5).to(torch.bfloat16),
        "odd": torch.randn(3).to(torch.bfloat16),
        "a": torch.randn(2, 2),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "ünï": torch.tensor([1, 2, 3]),
    }
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    infos = {name: TensorInfo(names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = header_bytes(infos, {"format": "pt", "note": 'two\nlines "and" ü'})
    assert len(header) % 8 == 0
    assert header == header_bytes(dict(infos), {"format": "pt", "note": 'two\nlines "and" ü'})
    file = tmp_path / "model.safetensors"
    data = b"".join(bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for tensor in tensors.values())
    file.write_bytes(header + data)
    loaded = load_file(file)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert list(read_header(file)) == list(tensors)
    with CheckpointSource(tmp_path) as source:
        assert source.metadata == {file: {"format": "pt", "note": 'two\nlines "and" ü'}}
    assert all(TensorInfo(found.dtype, found.shape) == infos[name] for name, found in read_header(file).items())


def test_a_header_without_texts_and_the_name_that_the_format_keeps_for_them(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(header_bytes({}, {}))
    assert load_file(file) == read_header(file) == {}
    with pytest.raises(ModelError, match="safetensors reserves that name"):
        header_bytes({"__metadata__": TensorInfo("F32", (1,))}, {})
