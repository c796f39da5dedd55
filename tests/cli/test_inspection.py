"""`normkit inspect MODEL`: results, files, exit codes, and one line for every bad input."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    OlmoConfig,
    OlmoForCausalLM,
)

from forks import Fork
from helpers import refused
from normkit.checkpoint import offloading
from normkit.cli import inspection

# Each runs the command on a whole model.
pytestmark = pytest.mark.slow

Run = Callable[..., Result]

QUICK = ("--max-tokens", "64")


@pytest.fixture(autouse=True)
def _pages_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes half a second; `test_demonstration.py` writes whole pages."""
    monkeypatch.setattr("normkit.inspection.figures.drawings", lambda _inspection: ())


def change(folder: Path, name: str, index: int, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name][index] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_results_and_where_the_report_lies(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, *QUICK, "--no-report")
    assert done.exit_code == 0
    assert not re.search("report:|on the sphere", done.stdout)
    assert list(Path().iterdir()) == []
    done = run("inspect", gpt2, *QUICK, "--activations", "here/channels.safetensors")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "tiny  GPT2LMHeadModel (gpt2)" in done.stdout
    assert "the start of demo text, in windows of 32" in done.stdout
    assert "transformer.h.1.ln_2" in done.stdout
    assert done.stdout.endswith("\nreport: normkit-out/tiny/report.html\n\nactivations: here/channels.safetensors\n")
    assert "transformer.h.1.ln_2.max" in load_file("here/channels.safetensors")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert sorted(file.name for file in Path("normkit-out/tiny").iterdir()) == ["report.html", "report.json"]


def test_json_is_exactly_one_document_and_the_one_that_is_written(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, *QUICK, "--json", "--out", "here", "--dtype", "bfloat16")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["model"]["name"], document["model"]["tokens"]) == (1, "tiny", 64)
    assert (document["training"], document["model"]["dtype"]) == (None, "bfloat16")
    assert Path("here/tiny/report.json").read_text() == done.stdout


def test_markdown_is_all_that_is_printed_and_tells_the_command(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, *QUICK, "--format", "markdown", "--no-report")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("### No fault found")
    assert re.search(r"\n- loss: \d\.\d{3} nats per token on this text, perplexity \d+", done.stdout)
    assert done.stdout.count("```") == 2
    assert re.fullmatch(
        r"normkit inspect .*tiny --max-tokens 64 --no-report --format markdown "
        r"\(normkit \S+, torch \S+, transformers \S+\)",
        done.stdout.splitlines()[-1],
    )


@pytest.mark.exhaustive
def test_a_second_run_writes_the_same_bytes(gpt2: Path, run: Run) -> None:
    for out in ("one", "two"):
        assert run("inspect", gpt2, *QUICK, "--out", out).exit_code == 0
    for name in ("report.html", "report.json"):
        assert Path("one/tiny", name).read_bytes() == Path("two/tiny", name).read_bytes()


def test_a_pattern_chooses_the_norms_that_are_printed_and_the_one_of_the_walk(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, *QUICK, "--token", "--site", "*.ln_2")
    assert re.findall(r"^transformer\S+", done.stdout, re.MULTILINE) == ["transformer.h.0.ln_2", "transformer.h.1.ln_2"]
    words = " ".join(done.stdout.split())
    assert "at transformer.h.0.ln_2, n = 16" in words
    assert "on the sphere of radius sqrt(n)" in words
    assert len(json.loads(Path("normkit-out/tiny/report.json").read_text())["sites"]) == 5
    # A path that is no norm gets at most five names.
    assert refused(run("inspect", gpt2, *QUICK, "--site", "ln_ff")) == (
        "tiny has no norm at 'ln_ff'; did you mean transformer.ln_f, transformer.h.0.ln_1, transformer.h.0.ln_2, "
        "transformer.h.1.ln_1, transformer.h.1.ln_2? `normkit identify MODEL` lists them"
    )


def test_weights_that_stay_in_the_file_give_the_same_report(
    gpt2: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_RESIDENT", 200)
    offloaded, in_memory = (run("inspect", gpt2, *QUICK, "--json", *option) for option in (["--offload"], []))
    assert (offloaded.exit_code, offloaded.stderr) == (0, "")
    assert offloaded.stdout == in_memory.stdout


def test_a_training_step_needs_the_weights(gpt2: Path, run: Run) -> None:
    line = "--train-step does not go with --offload, which keeps no weights for a backward pass"
    assert refused(run("inspect", gpt2, "--offload", "--train-step")) == line


def test_a_training_step_is_told_of_in_results_files_and_json(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, *QUICK, "--train-step", "--fail-on", "never")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(r"One step watched|at step 0", done.stdout)
    assert "is chance among 256 entries" in done.stdout
    assert 'id="run"' in Path("normkit-out/tiny/report.html").read_text()
    training = json.loads(Path("normkit-out/tiny/report.json").read_text())["training"]
    assert (training["steps"], training["reports"], training["remarks"]) == (1, 1, [])


# Texts.


def test_a_text_of_ones_own(gpt2: Path, run: Run) -> None:
    Path("mine.txt").write_text("A short text of one's own.")
    done = run("inspect", gpt2, "--text", "mine.txt", "--json", "--no-report")
    document = json.loads(done.stdout)
    assert (document["model"]["source"], document["model"]["tokens"]) == ("mine.txt", 26)
    assert document["walk"]["token"] in "A short text of one's own."
    assert document["walk"]["token"]


def test_a_text_from_stdin_that_is_longer_than_the_context(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, "--text", "-", "--seq-length", "999", "--json", "--no-report", text="normal " * 20)
    model = json.loads(done.stdout)["model"]
    assert (model["source"], model["tokens"]) == ("stdin, in windows of 32", 140)


@pytest.mark.parametrize(("content", "found"), [("", "nothing"), (" \n\t", "white space")])
def test_an_empty_text(gpt2: Path, run: Run, content: str, found: str) -> None:
    Path("empty.txt").write_text(content)
    assert f"expected a text in empty.txt, found {found}" in refused(run("inspect", gpt2, "--text", "empty.txt"))


def test_a_model_without_a_tokenizer_runs_on_random_ids_and_says_so(gpt2: Path, run: Run) -> None:
    for file in gpt2.glob("tokenizer*"):
        file.unlink()
    done = run("inspect", gpt2, *QUICK, "--json", "--no-report")
    assert json.loads(done.stdout)["model"]["source"] == "random token ids, seed 0, in windows of 32"
    Path("mine.txt").write_text("text")
    assert "tiny has no tokenizer for the text mine.txt" in refused(run("inspect", gpt2, "--text", "mine.txt"))


def test_an_encoder_is_inspected_and_has_no_loss(tmp_path: Path, run: Run) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes)).save_pretrained(tmp_path / "bert")
    line = refused(run("inspect", tmp_path / "bert", *QUICK, "--train-step"))
    assert line.startswith("BertModel has no loss that token ids alone give; leave out --train-step")
    assert list(Path().iterdir()) == []
    done = run("inspect", tmp_path / "bert", *QUICK, "--json", "--no-report", "--fail-on", "never")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["model"]["class_name"], len(document["sites"])) == (0, "BertModel", 5)


# Notes and findings.


@pytest.mark.parametrize(("option", "quiet"), [("--json", True), ("-q", True), ("--no-report", False)])
def test_json_and_quiet_show_no_progress(
    gpt2: Path, run: Run, monkeypatch: pytest.MonkeyPatch, option: str, quiet: bool
) -> None:
    asked = []

    def ask(*, quiet: bool) -> bool:
        asked.append(quiet)
        raise SystemExit(0)

    monkeypatch.setattr(inspection, "shows_progress", ask)
    assert run("inspect", gpt2, "--max-tokens", "8", option).exit_code == 0
    assert asked == [quiet]


def test_what_did_not_fit_while_loading_is_noted_and_in_the_source(gpt2: Path, run: Run) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors", {"format": "pt"})
    words = "1 weight is in the checkpoint but not used by GPT2LMHeadModel: surplus"
    done = run("inspect", gpt2, *QUICK, "--json", "--no-report")
    assert done.stderr == f"normkit: note: {words}\n"
    assert json.loads(done.stdout)["model"]["source"].endswith(f"; {words}")
    assert run("inspect", gpt2, *QUICK, "--json", "--no-report", "--quiet").stderr == ""


def test_a_file_with_more_layers_than_the_model_fails(gpt2: Path, run: Run) -> None:
    values = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(values | {"n_layer": values["n_layer"] - 1}))
    done = run("inspect", gpt2, *QUICK, "--json", "--no-report")
    assert done.exit_code == 1
    found = json.loads(done.stdout)["findings"][0]
    assert (found["rule"], found["severity"], found["measured"]) == ("E10", "error", "1 layer is not run")


def test_a_weight_that_is_not_finite_is_a_finding(gpt2: Path, run: Run) -> None:
    change(gpt2, "transformer.h.1.ln_1.weight", 3, float("nan"))
    done = run("inspect", gpt2, *QUICK, "--intent", "intent.json")
    assert done.exit_code == 1
    assert "transformer.h.1.ln_1" in done.stdout
    # What a faulty first run declares is said.
    assert "; it may hold faults, as there is 1 above a note\n" in done.stderr
    document = json.loads(Path("normkit-out/tiny/report.json").read_text())
    assert document["findings"][0]["severity"] == "error"
    done = run("inspect", gpt2, *QUICK, "--no-report", "--fail-on", "never", "-q", "--intent", "other.json")
    assert (done.exit_code, done.stderr) == (0, "")
    done = run("inspect", gpt2, *QUICK, "--train-step", "--no-report")
    assert done.exit_code == 1
    assert "NaN at step 0" in done.stdout


@pytest.mark.parametrize(
    ("worst", "codes"),
    [
        (None, (0, 0, 0, 0)),
        ("note", (0, 0, 1, 0)),
        ("warning", (0, 1, 1, 0)),
        ("error", (1, 1, 1, 0)),
    ],
)
def test_the_exit_code_follows_fail_on(worst: str | None, codes: tuple[int, ...]) -> None:
    levels = ("error", "warning", "note", "never")
    assert tuple(int(inspection._fails(SimpleNamespace(worst=worst), level)) for level in levels) == codes


def test_a_model_without_a_norm_gets_a_clear_report(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo import modeling_olmo

    # A stock class with its norms taken out stands for a model that has none.
    monkeypatch.setattr(modeling_olmo, "OlmoLayerNorm", lambda *_: nn.Identity())
    config = OlmoConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, pad_token_id=0
    )
    OlmoForCausalLM(config).save_pretrained(tmp_path / "bare")
    done = run("inspect", tmp_path / "bare", *QUICK)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "norm" in done.stdout
    document = json.loads(Path("normkit-out/bare/report.json").read_text())
    assert (document["sites"], document["walk"]) == ([], None)


# The intent file.


def test_an_intent_file_is_written_once_and_held_to(gpt2: Path, run: Run) -> None:
    options = (*QUICK, "--json", "--no-report", "--intent", "intent.json")
    first = run("inspect", gpt2, *options)
    remark = "intent.json says what this run saw; later runs with --intent are held to it"
    assert (first.exit_code, first.stderr) == (0, f"normkit: note: {remark}\n")
    assert json.loads(first.stdout)["findings"] == []
    written = Path("intent.json").read_text()
    again = run("inspect", gpt2, *options)
    assert (again.exit_code, again.stderr) == (0, "")
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 0.5}))
    held = run("inspect", gpt2, *options)
    assert (held.exit_code, held.stderr) == (1, "")
    found = json.loads(held.stdout)["findings"]
    assert found[0]["rule"] == "A1"
    assert Path("intent.json").read_text() == written


def test_an_intent_file_that_is_none(run: Run) -> None:
    Path("intent.json").write_text("[]")
    line = refused(run("inspect", "./none", "--intent", "intent.json"))
    assert line.startswith("expected an intent file in intent.json, found other JSON")


# Bad input: one line and 2. `tests/checkpoint` has every way in which a checkpoint can be wrong.


def test_a_path_that_is_no_model_and_a_folder_that_cannot_be_written(gpt2: Path, tmp_path: Path, run: Run) -> None:
    assert "nothing is there" in refused(run("inspect", "./none"))
    assert "with a config.json" in refused(run("inspect", tmp_path))
    Path("file").touch()
    line = refused(run("inspect", gpt2, "--out", "file/report"))
    assert line == "cannot write to file/report/tiny: file is a file; choose another folder with --out"
    before = sorted(gpt2.iterdir())
    assert "inside the model's own folder" in refused(run("inspect", gpt2, "--out", gpt2 / "report"))
    assert sorted(gpt2.iterdir()) == before


def test_truncated_weights(gpt2: Path, run: Run) -> None:
    whole = (gpt2 / "model.safetensors").read_bytes()
    (gpt2 / "model.safetensors").write_bytes(whole[:-100])
    assert "is truncated or corrupt" in refused(run("inspect", gpt2))


def test_a_model_with_code_of_its_own(gpt2: Path, run: Run) -> None:
    values = json.loads((gpt2 / "config.json").read_text())
    values |= {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "novel.Novel"}}
    (gpt2 / "config.json").write_text(json.dumps(values))
    (gpt2 / "novel.py").write_text("raise SystemExit(3)")
    assert "code that comes with a model is never run" in refused(run("inspect", gpt2))


def test_a_model_that_cannot_run(tmp_path: Path, run: Run) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=None, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    line = refused(run("inspect", tmp_path / "classifier"))
    assert line.startswith("LlamaForSequenceClassification cannot be run on token ids alone (ValueError: Cannot handle")
    assert run("inspect", tmp_path / "classifier", *QUICK, "--batch-size", "1", "--fail-on", "never").exit_code == 0


@pytest.mark.parametrize("option", ["--dtype float16", "--format markdown"])
def test_options_that_need_a_model(run: Run, option: str) -> None:
    done = run("inspect", *option.split())
    assert done.exit_code == 2
    assert f"{option.split()[0]} needs a MODEL." in done.stderr


# A real terminal.


# `python -m normkit` in a fork, whose streams are made as an interpreter makes them when it starts.
PROGRAM = """
import os, runpy, sys
for number, name in enumerate(("stdout", "stderr"), 1):
    os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_NOCTTY), number)
    setattr(sys, name, open(number, "w", closefd=False, encoding=os.environ.get("PYTHONIOENCODING")))
runpy.run_module("normkit", run_name="__main__", alter_sys=True)
"""


def on_terminal(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run whose two streams are terminals."""
    terminals, ends = zip(*(pty.openpty() for _ in range(2)), strict=True)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "HF_HUB_OFFLINE": "1", **variables}
    process = Fork(PROGRAM, *map(os.ttyname, ends), *arguments, environment=environment)

    def drained(end: int) -> str:
        content = b""
        # Linux ends a terminal's output with an error.
        with suppress(OSError):
            while part := os.read(end, 65536):
                content += part
        os.close(end)
        return content.decode()

    # Together, or the process would wait for a reader of the one while the other is read.
    with ThreadPoolExecutor() as pool:
        read = [pool.submit(drained, terminal) for terminal in terminals]
        process.communicate(timeout=120)
        for end in ends:
            os.close(end)
    return process.returncode, read[0].result(), read[1].result()


def test_a_terminal_gets_colour_and_progress(gpt2: Path) -> None:
    code, out, err = on_terminal("inspect", str(gpt2), *QUICK, "--no-report")
    assert code == 0
    assert "\x1b[1m" in out
    assert "loading" in err
    assert "tiny: selectable keys" in err


@pytest.mark.exhaustive
def test_no_color_leaves_no_escape_code(gpt2: Path) -> None:
    code, out, err = on_terminal("inspect", str(gpt2), *QUICK, "--no-report", NO_COLOR="1")
    assert code == 0
    assert "transformer.ln_f" in out
    assert not re.search(r"\x1b|\x9b", out + err)


@pytest.mark.exhaustive
def test_a_terminal_without_unicode_still_gets_its_results_and_findings_exit_with_1(gpt2: Path) -> None:
    change(gpt2, "transformer.ln_f.weight", 0, float("inf"))
    named = gpt2.rename(gpt2.with_name("caf\u00e9"))
    arguments = ("inspect", str(named), *QUICK, "--no-report")
    code, out, err = on_terminal(*arguments, PYTHONIOENCODING="ascii", TERM="dumb")
    assert (code, err) == (1, "")
    assert out.startswith("caf?  GPT2LMHeadModel")
    assert "transformer.ln_f" in out
