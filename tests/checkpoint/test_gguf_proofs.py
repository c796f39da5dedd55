"""A fold written as GGUF is proved from its source: one flipped bit, another seed and another arrangement are found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gguf_cases import saved, written
from normkit.checkpoint.gguf_proofs import verify_gguf
from normkit.cli.verification import verify_fold
from normkit.errors import InputError, ModelError

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


def folded(family: str, folder: Path, dtype: str = "same", **choices: Any) -> tuple[Path, Path, Path]:
    """A model, the GGUF file that gives the metadata, and the one that is folded."""
    source, metadata = saved(family, folder, tied=choices.pop("tied", False))
    written(source, metadata, folder / "out.gguf", dtype, **choices)
    return source, metadata, folder / "out.gguf"


def failed(*paths: Path, **given: Any) -> dict[str, str]:
    """The checks that fail, by name, with their reasons."""
    found = verify_gguf(*paths, **given)
    return {check.name: check.what for check in found.checks if check.passed is False}


@pytest.mark.parametrize(
    ("family", "dtype", "choices"),
    [
        ("llama", "same", {}),
        ("llama_bias", "float32", {"operations": ["gain", "final", "value"]}),
        ("gemma3", "float16", {"tied": True}),
        ("llama", "bfloat16", {"tied": True, "untie": True, "operations": ["rotate"], "seed": 3}),
        ("gemma3", "float32", {"operations": ["exponent"]}),
    ],
)
def test_a_fold_of_each_dtype_and_arrangement_is_proved_with_and_without_its_metadata(family, dtype, choices, tmp_path):
    source, metadata, made = folded(family, tmp_path, dtype, **choices)
    assert not failed(source, made)
    assert not failed(source, made, metadata=metadata)
    found = {check.name: check.what for check in verify_gguf(source, made).checks}
    assert ("1 added" if family == "gemma3" else "rotary halves interleaved") in found["arrangement"]


def test_one_flipped_bit_of_any_kind_of_tensor_is_found_by_its_name(tmp_path):
    source, _, made = folded("llama", tmp_path)
    whole = made.read_bytes()
    for tensor in gguf.GGUFReader(made).tensors:
        for place in (0, int(tensor.n_bytes) - 1):
            changed = bytearray(whole)
            changed[int(tensor.data_offset) + place] ^= 1
            made.write_bytes(changed)
            (what,) = failed(source, made).values()
            assert what.startswith(f"{tensor.name} differs from what follows in 1 byte")


def test_another_seed_operation_source_and_key_are_found(tmp_path):
    source, metadata, made = folded("llama", tmp_path, operations=["rotate"], seed=3)
    whole = made.read_bytes()

    def changed(old: bytes, new: bytes) -> dict[str, str]:
        assert whole.count(old) == 1
        assert len(old) == len(new)
        made.write_bytes(whole.replace(old, new))
        return failed(source, made, metadata=metadata)

    assert "sum" in changed(b'"seed": 3', b'"seed": 4')
    assert changed(b', "final"', b', "value"')
    assert "source files" in changed(re.search(rb'"sha256": "(\w{64})"', whole)[0], b'"sha256": "' + b"0" * 64 + b'"')
    assert "metadata" in changed(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz")
    assert "file type" in changed(
        b"general.file_type" + whole[whole.index(b"general.file_type") + 17 :][:8],
        b"general.file_type" + b"\4\0\0\0" + b"\7\0\0\0",
    )
    with pytest.raises(ModelError, match="is no record of a fold: expected operations of"):
        changed(b', "final"', b', "finaL"')
    with pytest.raises(ModelError, match="no GGUF file that can be read"):
        changed(b"GGUF", b"GGUE")


def test_rows_that_are_arranged_otherwise_in_one_layer_are_found(tmp_path):
    source, metadata, made = folded("llama", tmp_path)
    tensor = next(each for each in gguf.GGUFReader(made).tensors if each.name == "blk.1.attn_q.weight")
    rows = tensor.data.reshape(tensor.data.shape[0], -1)
    # The order of the source.
    plain = rows.reshape(4, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    whole = bytearray(made.read_bytes())
    start = int(tensor.data_offset)
    whole[start : start + int(tensor.n_bytes)] = plain.tobytes()
    made.write_bytes(whole)
    assert failed(source, made) == {"arrangement": "blk.*.attn_q.weight is arranged differently in different layers"}
    (what,) = failed(source, made, metadata=metadata).values()
    assert what.startswith("blk.1.attn_q.weight differs from what follows")


def test_a_missing_file_and_a_file_of_another_maker_are_one_line(tmp_path):
    source, metadata, made = folded("llama", tmp_path)
    with pytest.raises(InputError, match="expected a GGUF file, found none at"):
        verify_gguf(source, tmp_path / "none.gguf")
    with pytest.raises(InputError, match="expected the folder of a checkpoint"):
        verify_gguf(made, made)
    with pytest.raises(ModelError, match=r"expected a GGUF file that normkit fold wrote"):
        verify_gguf(source, metadata)
    with pytest.raises(InputError, match="was folded without --scales; leave it out"):
        verify_gguf(source, made, scales=metadata)
    runner = CliRunner()
    passed = runner.invoke(verify_fold, [str(source), str(made), "--metadata", str(metadata), "--quiet"])
    assert passed.exit_code == 0
    assert "proved" in passed.output
    assert runner.invoke(verify_fold, [str(source), str(made), "--logits"]).exit_code == 2
