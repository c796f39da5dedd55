"""The rule on checkpoints that do not fit, on facts of its own and on a folder through `nk.load`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import normkit as nk
from helpers import finding_of
from normkit.checkpoint.misfits import Misfit
from normkit.rules.loading import parts_that_do_not_fit
from normkit.rules.rule import NotChecked

MORE = Misfit(path="model.layers", in_file=30, in_model=28)
FEWER = Misfit(path="model.layers", in_file=1, in_model=2)
HEAD = Misfit(path="lm_head", in_file=0, in_model=1, is_head=True)


@pytest.mark.parametrize(
    ("parts", "severity", "measured", "line"),
    [
        ([MORE], "error", "2 layers are not run", "model.layers: config.json asks for 28, the file has 30"),
        ([FEWER], "error", "1 layer is drawn at random", "model.layers: config.json asks for 2, the file has 1"),
        (
            [HEAD],
            "warning",
            "the head has no weights",
            "lm_head: config.json does not tie it to the table of embeddings, and the file has no weights of it",
        ),
        (
            [MORE, HEAD],
            "error",
            "2 layers are not run; the head has no weights",
            "model.layers: config.json asks for 28, the file has 30",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, severity, measured, line):
    found = parts_that_do_not_fit.check(SimpleNamespace(misfits=tuple(parts)))
    assert (found.severity, found.measured, found.evidence[0]) == (severity, measured, line)
    assert found.sites == tuple(part.path for part in parts)


def test_without_a_file_nothing_is_said():
    assert parts_that_do_not_fit.check(SimpleNamespace(misfits=())) is None
    assert isinstance(parts_that_do_not_fit.check(SimpleNamespace(misfits=None)), NotChecked)


@pytest.mark.filterwarnings("ignore:.*in the checkpoint but not used")
def test_a_folder_with_a_layer_too_many(models, inspected, status, tmp_path: Path):
    model = models.tiny("Llama", layers=2)
    assert status(inspected(model), "E10") == "not checked"
    model.save_pretrained(tmp_path)
    assert status(inspected(nk.load(tmp_path)), "E10") == "clean"
    model.config.num_hidden_layers = 1
    model.config.save_pretrained(tmp_path)
    found = finding_of(inspected(nk.load(tmp_path)), "E10")
    assert (found.severity, found.measured, found.sites) == ("error", "1 layer is not run", ("model.layers",))
