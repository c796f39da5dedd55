"""A tiny GPT-2 with the byte tokenizer on disk, a fresh copy a test, and the command line to run on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import GPT2Config, GPT2LMHeadModel

from normkit.cli.entry import verbs
from normkit.demo.architecture import byte_tokenizer

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def saved_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer(32).save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2(saved_gpt2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_gpt2, tmp_path / "tiny"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `normkit` with some arguments in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def invoke(*arguments: object, text: str | None = None) -> Result:
        return CliRunner().invoke(verbs, [str(argument) for argument in arguments], input=text, prog_name="normkit")

    return invoke
