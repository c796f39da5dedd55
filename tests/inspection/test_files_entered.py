"""How many files of normkit a model passes on its way to a page, and how often it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from helpers import files_entered
from normkit import demo
from normkit.checkpoint.loading import load_model


@pytest.fixture
def model() -> nn.Module:
    return load_model(str(demo.directory("rmsnorm"))).model


@pytest.mark.slow
def test_the_text_is_run_once_and_a_few_tokens_nine_times(model: nn.Module) -> None:
    """Nine: the calls, the blocks scaled, the parts without effect, the loss with other tokens later; and the leaks:
    two batches as they are, and with another sample, other tokens later, and other padding.
    """
    shapes = []
    model.register_forward_pre_hook(
        lambda _model, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    batches = [{"input_ids": torch.arange(64).reshape(2, 32)}, {"input_ids": torch.arange(32)[None]}]
    nk.inspect(model, batches)
    assert shapes == [*[(1, 16)] * 4, (2, 32), (1, 32), *[(2, 19)] * 5]


@pytest.mark.slow
def test_a_model_passes_few_files_on_its_way_to_a_page(model: nn.Module, tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(64).reshape(2, 32)}

    def page() -> None:
        nk.inspect(model, batch).write_html(tmp_path / "report.html")

    # What is read once and kept is read.
    page()
    files = {name for name in files_entered(page) if name.endswith(".py")}
    own = {name for name in files if name.startswith(("inspection/", "measurement/"))}
    # 22 more are of the finder of norms, and 19 of the rules.
    assert len(files) <= 101
    assert len(own) <= 29
