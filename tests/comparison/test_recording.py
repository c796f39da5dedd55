"""Recordings: what any runtime may write, what is told of a file that is none, and what its norms are found to be."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

import normkit as nk
from normkit.cli.entry import verbs
from normkit.comparison.recording import RecordedNorm, Recording, opened
from normkit.errors import InputError, NormkitError
from tiny_models import tiny


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", dtype=torch.float32)[0]


@pytest.fixture(scope="module")
def file(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "llama.safetensors"
    with torch.no_grad(), nk.record(llama, path, rows=40):
        for _ in range(2):
            llama(torch.arange(32).reshape(2, 16))
    return path


def test_what_is_written_is_read(file, tmp_path):
    read = Recording.read(file)
    assert read.tokens == (*(tuple(range(at, at + 16)) for at in (0, 16)), tuple(range(8)))
    assert read.order == tuple(read.norms)
    assert read.order[0] == "model.layers.0.input_layernorm"
    assert read.order[-1] == "model.norm"
    assert read.runtime == f"torch {torch.__version__}"
    assert read.outputs.shape == (40, 97)
    again = Recording.read(read.write(tmp_path / "llama.safetensors"))
    assert (tmp_path / "llama.safetensors").read_bytes() == file.read_bytes()
    assert again.name == "llama"
    with safe_open(file, "pt") as opened_file:
        metadata = opened_file.metadata()
    assert (metadata["format"], metadata["version"]) == ("normkit-recording", "1")


def test_the_norms_of_a_recording_are_identified(file):
    book = Recording.read(file).book
    assert book.left_out == {}
    for entry in book.entries:
        spec = entry.passport.spec
        assert (spec.centre_numerator, spec.has_bias, spec.weight_offset) == (False, False, 0.0)
        assert "gain" not in entry.passport.undecidable


def test_another_runtime_writes_the_file_with_its_residual(tmp_path):
    x, residual, weight = torch.randn(64, 32), torch.randn(64, 32), torch.rand(32) + 0.5
    y, _ = nk.add_rms_norm(x, residual, (32,), weight, eps=1e-6)
    save_file(
        {"norm.input": x, "norm.residual": residual, "norm.output": y, "norm.weight": weight},
        tmp_path / "a.safetensors",
    )
    (entry,) = Recording.read(tmp_path / "a.safetensors").book.entries
    assert str(entry.passport.spec).startswith("y = weight * x / ")


def test_the_sum_with_a_residual_is_the_reference_s():
    x, residual = torch.randn(9, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    norm = RecordedNorm(input=x, output=x, residual=residual)
    _, expected = nk.reference.add_forward(x, residual, nk.specs.LLAMA.replace(has_weight=False))
    assert torch.equal(norm.normalized, expected)


def test_layer_ten_comes_after_layer_nine_where_the_order_is_not_told(tmp_path):
    tensors = {f"h.{layer}.{key}": torch.randn(9, 4) for layer in range(12) for key in ("input", "output")}
    save_file(tensors, tmp_path / "a.safetensors")
    read = Recording.read(tmp_path / "a.safetensors")
    assert list(read.norms) == [f"h.{layer}" for layer in range(12)]
    assert (read.order, read.tokens, read.outputs) == ((), (), None)


@pytest.mark.slow
def test_the_command_tells_what_the_rows_show(file, tmp_path):
    result = CliRunner().invoke(verbs, ["identify", str(file), "--out", str(tmp_path)], prog_name="normkit")
    assert result.exit_code == 0, result.output
    assert "weight * x / " in result.output
    found = json.loads((tmp_path / "llama" / "passports.json").read_text())
    assert len(found["sites"]) == len(Recording.read(file).norms)


ROWS = torch.randn(9, 4)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"weight": ROWS}, "tensors named <norm path>.input and .output in .*, found none"),
        ({"a.input": ROWS}, r"a.input must have shape \(rows, n\), and a.output beside it"),
        ({"a.input": ROWS[0], "a.output": ROWS[0].clone()}, r"a.input must have shape \(rows, n\)"),
        ({"a.input": ROWS, "a.output": ROWS[:, :3].clone()}, r"a.output must have shape \(9, 4\), got \(9, 3\)"),
        ({"a.input": ROWS, "a.output": ROWS.clone(), "a.weight": ROWS.clone()}, r"a.weight must have shape \(4,\)"),
        ({"a.input": ROWS, "a.output": ROWS.long()}, r"a.output must be of floating point, got I64"),
        ({"a.input": ROWS, "a.output": ROWS.clone(), "outputs": ROWS[0].clone()}, "outputs must be floating-point"),
    ],
)
def test_a_file_that_is_no_recording_is_one_line(tensors, told, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    with pytest.raises(InputError, match=told) as caught:
        Recording.read(path)
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_refused(file, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(NormkitError, match="truncated or corrupt"):
        opened(path)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"tokens": "[1, 2"}, "the metadata's tokens is no JSON"),
        ({"tokens": "{}"}, "the metadata's tokens must be a JSON list"),
        ({"tokens": '["a"]'}, "the metadata's tokens must be a JSON list of lists of token ids"),
        ({"order": "[1]"}, "the metadata's order must be a JSON list of norm paths"),
    ],
)
def test_metadata_that_say_something_else_are_one_line(metadata, told, tmp_path):
    save_file({"a.input": ROWS, "a.output": ROWS.clone()}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(InputError, match=told) as caught:
        opened(tmp_path / "a.safetensors")
    assert "\n" not in str(caught.value)


def test_names_that_were_not_recorded_and_a_batch_without_its_list_are_taken(tmp_path):
    metadata = {"order": json.dumps(["b", "a"]), "tokens": "[1, 2]"}
    save_file({"a.input": ROWS, "a.output": ROWS.clone()}, tmp_path / "a.safetensors", metadata)
    read = Recording.read(tmp_path / "a.safetensors")
    assert (read.order, read.tokens) == (("a",), ((1, 2),))
    save_file({"weight": ROWS}, tmp_path / "b.safetensors")
    assert opened(tmp_path / "b.safetensors") is None
