"""`normkit compare PORT REFERENCE`: screens, files, exit codes, and one line for every bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from forks import Fork
from helpers import refused
from normkit import demo

Run = Callable[..., Result]

QUICK = ("--max-tokens", "64")


@pytest.fixture
def port(gpt2: Path, tmp_path: Path) -> Path:
    """A copy with another eps."""
    folder = Path(shutil.copytree(gpt2, tmp_path / "port"))
    configure(folder, layer_norm_epsilon=1e-3)
    return folder


def configure(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def widest(result: Result) -> int:
    return max(map(len, result.stdout.splitlines()))


@pytest.mark.slow
def test_a_model_against_itself(gpt2: Path, run: Run) -> None:
    done = run("compare", gpt2, gpt2, *QUICK)
    assert (done.exit_code, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "+ the same All 5 gains and 5 biases that are stored are right; all 5 norms compute" in words
    assert "Side by side they agree to the bit at 5 norms and in their output." in done.stdout
    assert done.stdout.endswith("\ncomparison: normkit-out/tiny/comparison.json\n")
    done = run("compare", gpt2, gpt2, *QUICK, "--no-report", "--out", "none")
    assert done.exit_code == 0
    assert "comparison:" not in done.stdout
    assert not Path("none").exists()


def test_undecided_is_no_success(run: Run) -> None:
    gain = torch.randn(64)
    save_file({"model.norm.weight": gain}, "reference.safetensors")
    save_file({"model.norm.weight": gain + 1}, "port.safetensors")
    done = run("compare", "port.safetensors", "reference.safetensors", "--json", "--no-report")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "undecided")
    assert run("compare", "port.safetensors", "port.safetensors", "--no-report").exit_code == 0


@pytest.mark.slow
def test_a_port_with_another_eps(gpt2: Path, port: Path, run: Run) -> None:
    done = run("compare", port, gpt2, *QUICK)
    assert (done.exit_code, done.stderr) == (1, "")
    words = " ".join(done.stdout.split())
    assert "port compared with tiny" in words
    assert "x different 5 of 5 norms have eps 0.001 instead of 1e-05" in words
    assert (
        "The first difference appears at transformer.h.0.ln_1: its input agrees to the bit, its output differs by"
        in words
    )
    assert "5 norms: eps 0.001 instead of 1e-05, inside the root both" in words
    assert widest(done) <= 100


@pytest.mark.slow
def test_json_of_a_comparison_and_its_file(gpt2: Path, port: Path, run: Run) -> None:
    done = run("compare", port, gpt2, *QUICK, "--json", "--out", "here")
    assert (done.exit_code, done.stderr) == (1, "")
    assert Path("here/port/comparison.json").read_text() == done.stdout
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["differs"]) == (2, True)
    assert document["rows"]["birth"]["path"] == "transformer.h.0.ln_1"
    assert {pair["changes"][0]["reading"] for pair in document["conventions"]["pairs"]} == {"eps"}


@pytest.mark.slow
def test_a_file_in_place_of_the_reference(gpt2: Path, port: Path, run: Run) -> None:
    assert run("identify", gpt2).exit_code == 0
    file = "normkit-out/tiny/passports.json"
    done = run("compare", port, file, *QUICK)
    assert done.exit_code == 1
    assert "5 norms: eps 0.001 instead of 1e-05" in done.stdout
    assert "rows: passports cannot be run" in done.stdout
    assert run("compare", gpt2, file, *QUICK).exit_code == 0


@pytest.mark.slow
def test_two_models_of_one_name_are_called_as_they_were_given(gpt2: Path, run: Run) -> None:
    other = Path(shutil.copytree(gpt2, gpt2.parent / "other" / "tiny"))
    done = run("compare", gpt2, other, *QUICK, "--json")
    document = json.loads(done.stdout)
    assert (document["port"], document["reference"]) == (str(gpt2), str(other))


@pytest.mark.slow
def test_one_changed_weight_between_two_norms(gpt2: Path, tmp_path: Path, run: Run) -> None:
    folder = Path(shutil.copytree(gpt2, tmp_path / "port"))
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.weight"][3] += 1.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    done = run("compare", folder, gpt2, *QUICK)
    assert done.exit_code == 1
    words = " ".join(done.stdout.split())
    assert "all 5 norms compute the same formulas, but the two runs differ." in words
    assert "in the MLP: what leaves transformer.h.0.ln_2 agrees to the bit, what enters transformer.h.1.ln_1" in words


@pytest.mark.slow
def test_two_families(gpt2: Path, run: Run) -> None:
    done = run("compare", gpt2, demo.directory("rmsnorm"), *QUICK)
    assert done.exit_code == 1
    words = " ".join(done.stdout.split())
    assert "x different" in words
    assert "rows: no norm of the one has as many features as a norm of the other" in words


@pytest.mark.slow
def test_a_smaller_vocabulary(gpt2: Path, tmp_path: Path, run: Run) -> None:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "small")
    done = run("compare", gpt2, tmp_path / "small", *QUICK)
    assert done.exit_code == 1
    words = " ".join(done.stdout.split())
    assert "small embeds 40 tokens, and the text has token" in words
    # The two were drawn apart.
    assert re.search(r"x different \d+ matrices \(.*\) are unrelated to the reference's. The norms are right.", words)


@pytest.mark.slow
def test_a_text_of_ones_own(gpt2: Path, run: Run) -> None:
    done = run("compare", gpt2, gpt2, "--text", "-", "--json", text="normal " * 20)
    assert json.loads(done.stdout)["source"] == "stdin, in windows of 32"


@pytest.mark.slow
def test_a_config_is_taken_for_its_model(gpt2: Path, run: Run) -> None:
    assert run("compare", gpt2 / "config.json", gpt2 / "config.json", *QUICK).exit_code == 0


def test_the_reference_s_own_folder_is_not_written_to(gpt2: Path, port: Path, run: Run) -> None:
    line = refused(run("compare", port, gpt2, "--out", gpt2 / "here"))
    assert "inside the model's own folder" in line


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_difference_exits_with_1_in_a_process_of_its_own(gpt2: Path, port: Path) -> None:
    program = "import runpy; runpy.run_module('normkit', run_name='__main__', alter_sys=True)"
    process = Fork(program, "compare", port, gpt2, *QUICK)
    _, error = process.communicate()
    assert (process.returncode, error) == (1, "")


# Bad input: one line and 2.


@pytest.mark.slow
def test_what_did_not_fit_while_loading_is_noted(gpt2: Path, run: Run) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors", {"format": "pt"})
    Path("mine.txt").write_text("A text.")
    arguments = ("compare", demo.directory("layernorm"), gpt2, "--text", "mine.txt")
    assert "surplus" in run(*arguments).stderr
    assert run(*arguments, "-q").stderr == ""


def test_a_file_that_is_no_passports(gpt2: Path, run: Run) -> None:
    Path("other.json").write_text("{}")
    assert "cannot use other.json as passports" in refused(run("compare", gpt2, "other.json"))
    Path("other.txt").write_text("no")
    assert "other.txt is nothing that can be compared" in refused(run("compare", gpt2, "other.txt"))


def test_paths_that_are_no_model(gpt2: Path, run: Run) -> None:
    assert "nothing is there" in refused(run("compare", gpt2, "./none"))
    assert "nothing is there" in refused(run("compare", "./none", gpt2))
