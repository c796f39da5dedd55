"""Recordings: what `record` keeps, what any runtime may write, and what is told of a file that is none."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

import normkit as nk
from normkit.cli.entry import verbs
from normkit.comparison.recording import is_recording, read_recording, survey_recording
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


def test_rows_of_all_norms_are_kept_and_no_activation(llama, file):
    recording = read_recording(file)
    assert sorted(recording) == sorted(name for name, _ in llama.named_modules() if name.endswith("norm"))
    for name, norm in recording.items():
        assert norm.input.shape == norm.output.shape == (40, norm.weight.shape[0])
        torch.testing.assert_close(llama.get_submodule(name)(norm.input), norm.output, rtol=0, atol=1e-6)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["version"]) == ("normkit-recording", "1")
    assert json.loads(metadata["tokens"]) == torch.arange(32).reshape(2, 16).tolist()
    assert not llama._forward_pre_hooks
    assert not any(module._forward_hooks for module in llama.modules())


def test_the_norms_of_a_recording_are_identified(file):
    book = survey_recording(file)
    assert book.left_out == {}
    for entry in book.entries:
        spec = entry.passport.spec
        assert (spec.centre_numerator, spec.has_bias, spec.weight_offset) == (False, False, 0.0)
        assert "gain" not in entry.passport.undecidable


def test_a_compiled_model_is_recorded_alike(llama, file, tmp_path):
    torch._dynamo.reset()
    compiled = torch.compile(llama, backend="eager")
    with torch.no_grad(), nk.record(compiled, tmp_path / "a.safetensors", rows=40):
        compiled(torch.arange(32).reshape(2, 16))
        compiled(torch.arange(32).reshape(2, 16))
    found = {name.removeprefix("_orig_mod."): norm for name, norm in read_recording(tmp_path / "a.safetensors").items()}
    for name, norm in read_recording(file).items():
        assert torch.equal(found[name].output, norm.output)


def test_another_runtime_writes_the_file_with_its_residual(tmp_path):
    x, residual, weight = torch.randn(64, 32), torch.randn(64, 32), torch.rand(32) + 0.5
    y, _ = nk.add_rms_norm(x, residual, (32,), weight, eps=1e-6)
    save_file(
        {"norm.input": x, "norm.residual": residual, "norm.output": y, "norm.weight": weight},
        tmp_path / "a.safetensors",
    )
    (entry,) = survey_recording(tmp_path / "a.safetensors").entries
    assert str(entry.passport.spec).startswith("y = weight * x / ")


def test_nothing_is_written_where_nothing_was_recorded_or_the_block_raised(llama, tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="no norm of it was called"), nk.record(llama, path):
        pass
    with pytest.raises(IndexError), nk.record(llama, path):
        llama(torch.arange(4)[None] + 10**6)
    with pytest.raises(InputError, match="rows must be at least 1, got 0"), nk.record(llama, path, rows=0):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_tells_what_the_rows_show(file, tmp_path):
    result = CliRunner().invoke(verbs, ["identify", str(file), "--out", str(tmp_path)], prog_name="normkit")
    assert result.exit_code == 0, result.output
    assert "weight * x / " in result.output
    found = json.loads((tmp_path / "llama" / "passports.json").read_text())
    assert len(found["sites"]) == len(read_recording(file))


ROWS = torch.randn(9, 4)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"weight": ROWS}, "tensors named <norm path>.input and .output in .*, found none"),
        ({"a.input": ROWS}, r"a.input must have shape \(rows, n\), and a.output beside it"),
        ({"a.input": ROWS[0], "a.output": ROWS[0].clone()}, r"a.input must have shape \(rows, n\)"),
        ({"a.input": ROWS, "a.output": ROWS[:, :3].clone()}, r"a.output must have shape \(9, 4\), got \(9, 3\)"),
        ({"a.input": ROWS, "a.output": ROWS.clone(), "a.weight": ROWS.clone()}, r"a.weight must have shape \(4,\)"),
    ],
)
def test_a_file_that_is_no_recording_is_one_line(tensors, told, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    with pytest.raises(InputError, match=told) as caught:
        read_recording(path)
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_refused(file, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(file.read_bytes()[:-100])
    assert not is_recording(path)
    with pytest.raises(NormkitError, match="truncated or corrupt"):
        read_recording(path)
