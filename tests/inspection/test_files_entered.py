"""How many files of normkit a model passes on its way to a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import normkit as nk
from helpers import files_entered
from normkit import demo
from normkit.checkpoint.loading import load_model


@pytest.mark.slow
def test_a_model_passes_few_files_on_its_way_to_a_page(tmp_path: Path) -> None:
    model = load_model(str(demo.directory("rmsnorm"))).model
    batch = {"input_ids": torch.arange(64).reshape(2, 32)}

    def page() -> None:
        nk.inspect(model, batch).write_html(tmp_path / "report.html")

    # What is read once and kept is read.
    page()
    files = {name for name in files_entered(page) if name.endswith(".py")}
    own = {name for name in files if name.startswith(("inspection/", "measurement/"))}
    # 21 more are of the finder of norms, and 19 of the rules.
    assert len(files) <= 107
    assert len(own) <= 32
