"""`normkit inspect` without a model: the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import normkit as nk
from normkit.cli import demonstration
from normkit.cli.entry import verbs

# Each part inspects two whole models.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run on 80 columns, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normkit.show.terminal.WIDTH", 80)
        return CliRunner().invoke(verbs, ["inspect", "--out", str(folder)], prog_name="normkit"), folder


def test_one_screen_tells_fault_evidence_place_and_remedy_then_the_healthy_twin(demo: tuple[Result, Path]) -> None:
    done, folder = demo
    assert (done.exit_code, done.stderr) == (0, "")
    rest = " ".join(done.stdout.split())
    for words in (
        "This GPT-2 looks fine. It is not.",
        "its loss is 1.533 nats per token; the original's is 1.523.",
        f"$ normkit inspect {folder}/demo/gpt2-converted",
        "x error B14 Gains are not the ones that are meant",
        "evidence transformer.h.3.ln_1: its 64 gains are a copy of those of transformer.h.2.ln_1",
        "where transformer.h.{2-3}.ln_1",
        "do load or convert the named tensors anew",
        f"$ normkit inspect {folder}/demo/gpt2 ",
        "+ No fault found",
        "8,192 rows",
        f"{folder}/gpt2-converted/report.html",
        "normkit inspect MODEL",
    ):
        assert words in rest
        rest = rest.partition(words)[2]
    lines = done.stdout.replace(str(folder), "normkit-out").splitlines()
    assert max(map(len, lines)) <= 80
    # The command and the prompt behind it stand on the screen too.
    assert len(lines) <= 38
    assert "\x1b" not in done.stdout


def test_the_models_that_it_names_can_be_inspected_by_the_command_that_it_prints(demo: tuple[Result, Path]) -> None:
    folder = demo[1]
    faulty = CliRunner().invoke(verbs, ["inspect", str(folder / "demo" / "gpt2-converted"), "--json", "--no-report"])
    assert faulty.exit_code == 1
    assert json.loads(faulty.stdout) == json.loads((folder / "gpt2-converted" / "report.json").read_text())
    assert (folder / "gpt2-converted" / "report.html").stat().st_size > 1000


def test_json_is_one_document_with_both_models_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(verbs, ["inspect", "--json", "--no-report"], prog_name="normkit")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert document["schema_version"] == 1
    assert [model["model"]["name"] for model in document["models"]] == ["gpt2-converted", "gpt2"]
    assert [len(model["findings"]) for model in document["models"]] == [1, 0]
    assert document["bias_gradient"]["rows"] == document["bias_gradient"]["normkit"] == 8192
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("counted", "headline"), [(512, "PyTorch counts 8,192 rows as 512"), (8192, "This PyTorch counts rows right")]
)
def test_a_pytorch_that_counts_right_is_told_so(counted: int, headline: str) -> None:
    said, count = demonstration._count_in_words({"torch": counted, "normkit": 8192})
    assert said == headline
    assert f"returns {counted:,} (CPU, bfloat16, " in count


def test_the_count_is_measured() -> None:
    assert demonstration._counted(torch.nn.LayerNorm, torch.float64) == 8192
    assert demonstration._counted(nk.LayerNorm) == 8192
