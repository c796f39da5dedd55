"""What a user can give as one side: each form offers what it has, and anything else is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normkit as nk
from normkit import demo
from normkit.comparison.sides import called, open_side
from normkit.errors import InputError, KindError, ModelError

CODE = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))

def batch():
    return torch.ones(2, 4)

def broken():
    raise ValueError("no weights")

number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "port.py").write_text(CODE)
    return tmp_path / "port.py"


def test_a_folder_offers_tensors_and_is_not_loaded_yet() -> None:
    side = open_side(str(demo.directory("rmsnorm")))
    assert (side.form, side.name, side.model, side.lacking) == ("folder", "rmsnorm", None, {})
    assert side.weights is not None
    assert side.runs


@pytest.mark.slow
def test_a_file_of_tensors_offers_nothing_that_runs(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "a.safetensors")
    side = open_side(tmp_path / "a.safetensors")
    assert (side.form, side.runs) == ("safetensors", False)
    assert side.lacking.keys() == {"conventions", "rows"}
    found = nk.compare(tmp_path / "a.safetensors", {"norm.weight": np.zeros(8, dtype=np.float32)})
    assert (found.forms, found.differs) == (("safetensors", "arrays"), False)
    assert found.values is not None
    # Ones against zeros: too little to tell a constant from an offset.
    assert found.values.is_right is None


@pytest.mark.slow
def test_a_recording_offers_its_gains(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with nk.record(model, tmp_path / "run.safetensors"):
        model(torch.randn(16, 4))
    side = open_side(str(tmp_path / "run.safetensors"))
    assert (side.form, side.name) == ("recording", "run")
    assert side.recording is not None
    assert side.weights is not None
    assert {*side.weights.source.tensors} == {"1.weight", "1.bias"}


@pytest.mark.slow
def test_code_that_the_user_names_is_run(code: Path) -> None:
    side = open_side(f"{code}:build")
    assert (side.form, isinstance(side.model, nn.Sequential)) == ("code", True)
    assert torch.equal(called(f"{code}:batch"), torch.ones(2, 4))
    found = nk.compare(f"{code}:build", side.model, called(f"{code}:batch"))
    assert not found.differs
    assert found.not_looked_at == {}


@pytest.mark.slow
def test_single_norms_are_compared_by_what_they_compute() -> None:
    found = nk.compare(nn.LayerNorm(8), lambda x: nn.functional.layer_norm(x, (8,), eps=1e-3), shape=8)
    assert found.differs
    assert "eps 1e-05 instead of 0.001" in found.causes[0].sentence
    assert not nk.compare(nn.LayerNorm(8), nn.LayerNorm(8), shape=8).differs
    with pytest.raises(InputError, match="expected the shape of an input for the norm <lambda>"):
        nk.compare(lambda x: x, nn.LayerNorm(8))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (":broken", "failed: ValueError: no weights"),
        (":none", "has no attribute 'none'; name a function without arguments"),
        ("x:build", "expected a file of Python before the colon"),
    ],
)
def test_code_that_fails_is_one_line(code: Path, end: str, message: str) -> None:
    given = f"{code}{end}" if end[0] == ":" else f"{code.with_name('x.py')}:build"
    with pytest.raises(InputError, match=message):
        open_side(given)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (3, KindError, "a module, arrays or a norm, got int"),
        ("none.gguf", InputError, "there is no such file"),
        ("none.onnx", InputError, "there is no such file"),
        ("nomodule:build", InputError, "cannot import nomodule:build"),
        ("./none", ModelError, "nothing is there"),
    ],
)
def test_what_cannot_be_compared_is_one_line(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        open_side(given)


def test_called_needs_a_function() -> None:
    with pytest.raises(InputError, match=r"expected FILE\.py:function or module:function"):
        called("batch.pt")


@pytest.mark.slow
def test_two_that_share_nothing_are_one_line() -> None:
    book = open_side(nn.LayerNorm(8), shape=8).book
    with pytest.raises(InputError, match="nothing of arrays and LayerNorm can be compared"):
        nk.compare({"norm.weight": torch.ones(8)}, book)
