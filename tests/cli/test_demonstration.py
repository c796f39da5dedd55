"""`normkit inspect` without a model: the show of `make demo`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from normkit.cli import demonstration
from normkit.cli.entry import verbs


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run of the whole show, and the folder of its reports."""
    folder = tmp_path_factory.mktemp("show")
    return CliRunner().invoke(verbs, ["inspect", "--out", str(folder)], prog_name="normkit"), folder


@pytest.mark.slow
def test_the_show_works_and_its_planted_faults_are_no_findings(show: tuple[Result, Path]) -> None:
    done, _ = show
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_parts_come_in_order(show: tuple[Result, Path]) -> None:
    headings = [
        "What a norm does to one token",
        "gain and bias",
        "Two healthy models",
        "layernorm",
        "rmsnorm",
        "The same weights with a fault",
        "error  A1 ",
        "at transformer.h.{0-5}.ln_1 and",
        "2 more",
        "the config says 1e-05",
        "And with another",
        "error  D3  A norm of the architecture is missing",
        "And PyTorch itself, on this machine",
        "right is 8192",
        "The whole reports",
        "rmsnorm/report.html",
        "normkit inspect MODEL",
    ]
    rest = show[0].stdout
    for heading in headings:
        assert heading in rest, heading
        rest = rest.partition(heading)[2]


@pytest.mark.slow
def test_each_fault_is_shown_with_evidence_and_remedy(show: tuple[Result, Path]) -> None:
    for label in ("measured", "evidence", "why", "do", "confirm"):
        assert len(re.findall(rf"^ *{label} +\S", show[0].stdout, re.MULTILINE)) == 2, label


@pytest.mark.slow
def test_it_fits_a_terminal_without_escape_codes(show: tuple[Result, Path]) -> None:
    lines = [line for line in show[0].stdout.splitlines() if "report.html" not in line]
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in show[0].stdout


@pytest.mark.slow
def test_the_reports_of_both_models_lie_where_it_says(show: tuple[Result, Path]) -> None:
    done, folder = show
    for name in ("layernorm", "rmsnorm"):
        page = folder / name / "report.html"
        assert str(page) in done.stdout
        assert page.stat().st_size > 1000
        assert json.loads((folder / name / "report.json").read_text())["model"]["name"] == name


@pytest.mark.slow
def test_json_is_one_document_with_both_models() -> None:
    done = CliRunner().invoke(verbs, ["inspect", "--json", "--no-report"], prog_name="normkit")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert list(document) == ["schema_version", "models"]
    assert [model["model"]["name"] for model in document["models"]] == ["layernorm", "rmsnorm"]


def test_the_gradient_that_is_called_right_is_the_number_of_rows() -> None:
    assert demonstration._bias_gradient(torch.float64) == demonstration._ROWS
