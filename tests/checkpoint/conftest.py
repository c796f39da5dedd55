"""A tiny GPT-2 on disk, and its folds; a fresh copy for each test to damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from folded_checkpoints import Pair, folded
from normkit.checkpoint.plan import ALL
from normkit.demo.architecture import byte_tokenizer

CONFIG = {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.fixture(scope="session")
def saved_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    byte_tokenizer(32).save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2(saved_gpt2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_gpt2, tmp_path / "tiny"))


class Edit:
    """Changes the values of a JSON file; None removes one."""

    def __call__(self, path: Path, **changes: Any) -> None:
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def edit() -> Edit:
    return Edit()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A GPT-2 in several files, with gains and biases folded and a head of its own."""
    return folded(tmp_path_factory.mktemp("gains"), untie=True)


@pytest.fixture(scope="session")
def centred(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same in bfloat16, with everything done to it."""
    return folded(tmp_path_factory.mktemp("centred"), dtype=torch.bfloat16, operations=ALL, untie=True)


@pytest.fixture
def pair(saved: Pair, tmp_path: Path) -> Pair:
    return saved.copy(tmp_path)
