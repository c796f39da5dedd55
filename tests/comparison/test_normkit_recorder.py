"""normkit_recorder.py, the file that ships for other runtimes: what it writes, and that the page shows it."""

from __future__ import annotations

import ast
import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from helpers import ROOT, SOURCE
from normkit.comparison.normkit_recorder import Recorder
from normkit.comparison.recording import Recording
from page_blocks import blocks

FILE = SOURCE / "comparison" / "normkit_recorder.py"


def test_it_needs_numpy_and_safetensors_alone():
    nodes = ast.walk(ast.parse(FILE.read_text()))
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules == {"__future__", "json", "collections.abc", "typing", "numpy", "safetensors.numpy"}
    assert len(FILE.read_text().splitlines()) < 60


def test_the_page_shows_it_as_it_is():
    page = (ROOT / "docs" / "how-to" / "record-a-run.md").read_text()
    (shown,) = (block.text for block in blocks(page) if block.file == "normkit_recorder.py")
    assert shown == FILE.read_text()


def test_it_writes_rows_parameters_tokens_and_outputs(tmp_path):
    file, random = tmp_path / "a.safetensors", np.random.default_rng(0)
    recorder = Recorder(rows=12)
    x, residual = random.standard_normal((2, 2, 5, 8)), random.standard_normal((2, 2, 5, 8))
    recorder.add("b", x[0], x[0])
    for call in range(2):
        recorder.add("a", x[call], x[call] + 1, np.ones(8), residual=residual[call])
    recorder.save(
        str(file), tokens=np.arange(10).reshape(2, 5), outputs=random.standard_normal((2, 5, 7)), runtime="r 1"
    )
    with safe_open(file, "np") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "a.input": (12, 8),
        "a.output": (12, 8),
        "a.residual": (12, 8),
        "a.weight": (8,),
        "outputs": (10, 7),
        "b.input": (10, 8),
        "b.output": (10, 8),
    }
    assert (tensors["a.input"] == x.reshape(-1, 8)[:12]).all()
    assert json.loads(metadata.pop("tokens")) == np.arange(10).reshape(2, 5).tolist()
    assert json.loads(metadata.pop("order")) == ["b", "a"]
    assert metadata == {"format": "normkit-recording", "version": "1", "runtime": "r 1"}


def test_what_the_runtime_writes_over_later_is_kept(tmp_path):
    file, x, weight = tmp_path / "a.safetensors", np.ones((4, 8)), np.ones(8)
    recorder = Recorder()
    recorder.add("a", x, x, weight)
    x[:], weight[:] = 2, 2
    recorder.save(str(file))
    with safe_open(file, "np") as opened:
        assert (opened.get_tensor("a.input") == 1).all()
        assert (opened.get_tensor("a.weight") == 1).all()


def test_bfloat16_comes_back_bit_for_bit(tmp_path):
    file, x = tmp_path / "a.safetensors", torch.randn(6, 8).bfloat16()
    recorder = Recorder(array=lambda tensor: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    recorder.add("norm", x, -x, x[0])
    recorder.save(str(file))
    norm = Recording.read(file).norms["norm"]
    assert norm.input.dtype == torch.bfloat16
    assert torch.equal(norm.input, x)
    assert torch.equal(norm.output, -x)
    assert torch.equal(norm.weight, x[0])


def test_a_file_without_norms_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a call of Recorder"):
        Recorder().save(str(tmp_path / "a.safetensors"))
    assert not (tmp_path / "a.safetensors").exists()
