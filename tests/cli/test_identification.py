"""`normkit identify MODEL`: screens, files, exit codes, and one line for every bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from gguf_files import gguf
from helpers import refused
from normkit.identification.book import PassportBook
from onnx_models import layer_norm, written

Run = Callable[..., Result]

QUICK = ("--max-tokens", "64")


def widest(result: Result) -> int:
    return max(map(len, result.stdout.splitlines()))


# One model.


@pytest.mark.slow
def test_alike_norms_stand_together_with_their_formula_in_full(gpt2: Path, run: Run) -> None:
    done = run("identify", gpt2)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "tiny 5 norms, of 1 kind; found by what they do, not by their names"
    assert "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias" in lines
    assert "transformer.h.*.ln_1 2 LayerNorm 16" in lines
    assert "transformer.ln_f 1 LayerNorm 16" in lines
    assert "eps 1e-05, inside the root" in lines
    assert lines[-1] == "passports: normkit-out/tiny/passports.json"
    assert widest(done) <= 100


@pytest.mark.slow
def test_the_file_holds_every_norm_and_json_prints_the_same(gpt2: Path, run: Run) -> None:
    done = run("identify", gpt2, "--json", "--out", "mine")
    assert (done.exit_code, done.stderr) == (0, "")
    assert Path("mine/tiny/passports.json").read_text() == done.stdout
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["model"], len(document["sites"])) == (1, "tiny", 5)
    book = PassportBook.read(Path("mine/tiny/passports.json"))
    assert {str(entry.passport.spec) for entry in book.entries} == {
        "y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias"
    }
    assert not Path("normkit-out").exists()


def test_no_report_writes_nothing(gpt2: Path, run: Run) -> None:
    done = run("identify", gpt2, "--no-report")
    assert done.exit_code == 0
    assert "passports:" not in done.stdout
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_pattern_chooses_norms(gpt2: Path, run: Run) -> None:
    done = run("identify", gpt2, "--site", "*.ln_1", "--json", "--no-report")
    assert list(json.loads(done.stdout)["sites"]) == ["transformer.h.0.ln_1", "transformer.h.1.ln_1"]
    line = refused(run("identify", gpt2, "--site", "x*"))
    assert line == (
        "tiny has no norm at 'x*'; there are transformer.h.0.ln_1, transformer.h.0.ln_2, transformer.h.1.ln_1, "
        "transformer.h.1.ln_2, transformer.ln_f"
    )


def test_a_model_without_a_tokenizer_needs_none(gpt2: Path, run: Run) -> None:
    for file in gpt2.glob("tokenizer*"):
        file.unlink()
    assert run("identify", gpt2, "--no-report").exit_code == 0


@pytest.mark.slow
def test_what_did_not_fit_while_loading_is_noted(gpt2: Path, run: Run) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / "model.safetensors", {"format": "pt"})
    assert "surplus" in run("identify", gpt2, "--no-report").stderr
    assert run("identify", gpt2, "--no-report", "-q").stderr == ""


@pytest.mark.slow
def test_without_a_model_the_two_that_ship(run: Run) -> None:
    done = run("identify")
    assert done.exit_code == 0
    assert done.output.index("LayerNorm, eps 1e-5") < done.output.index("RMSNorm, eps 1e-5")
    folders = [path.parent.name for path in Path().glob("normkit-out/*/passports.json")]
    assert sorted(folders) == ["layernorm", "rmsnorm"]
    done = run("identify", "--json", "--out", "json")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, document["schema_version"]) == (0, "", 1)
    written = [json.loads(Path(f"json/{name}/passports.json").read_text()) for name in ("layernorm", "rmsnorm")]
    assert document["models"] == written


# Bad input: one line and 2.


def test_passports_as_the_first_argument(gpt2: Path, run: Run) -> None:
    run("identify", gpt2)
    file = "normkit-out/tiny/passports.json"
    line = refused(run("identify", file))
    assert line == f"{file} holds passports, and the first argument is a model; give it to normkit compare"


def test_a_file_that_is_no_passports(run: Run) -> None:
    Path("other.json").write_text("{}")
    assert refused(run("identify", "other.json")).startswith("cannot use other.json as passports: ")
    Path("notes.txt").write_text("{}")
    assert refused(run("identify", "notes.txt")).startswith("notes.txt is a file and no model; give a model's folder")


def test_paths_that_are_no_model(tmp_path: Path, run: Run) -> None:
    assert "nothing is there" in refused(run("identify", "./none"))
    assert "with a config.json" in refused(run("identify", tmp_path))


def test_the_models_own_folder_is_not_written_to(gpt2: Path, run: Run) -> None:
    before = sorted(gpt2.iterdir())
    assert "inside the model's own folder" in refused(run("identify", gpt2, "--out", gpt2 / "here"))
    assert sorted(gpt2.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--site", "ln_f"), "--site needs a MODEL"),
        (("m", "--against", "r"), "--against has gone: normkit compare PORT r compares with a reference."),
        (("m", "--text", "x.txt"), "No such option '--text'"),
        (("m", "--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("identify", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


# Files that nothing here runs.


def gains(added: float) -> dict[str, torch.Tensor]:
    """Norms of a trained Llama with a number added to their gains."""
    drawn = torch.Generator().manual_seed(0)
    return {f"blk.{layer}.attn_norm.weight": added + 0.8 * torch.rand(256, generator=drawn) + 0.3 for layer in range(8)}


@pytest.mark.parametrize(("added", "headline", "code"), [(0.0, "+ one-centred", 0), (1.0, "x 1 too much", 1)])
def test_a_gguf_file_says_how_its_gains_are_stored(run: Run, added: float, headline: str, code: int) -> None:
    Path("model.gguf").write_bytes(gguf({"general.architecture": "llama"}, gains(added)))
    done = run("identify", "model.gguf")
    assert (done.exit_code, done.stderr) == (code, "")
    assert done.stdout.splitlines()[0] == "Gains of model.gguf"
    assert headline in done.stdout
    assert done.stdout.endswith("gains: normkit-out/model/gains.json\n")
    printed = run("identify", "model.gguf", "--json", "--no-report")
    assert printed.exit_code == code
    assert json.loads(printed.stdout) == json.loads(Path("normkit-out/model/gains.json").read_text())
    assert json.loads(printed.stdout)["schema_version"] == 1


def test_a_quantized_folder_says_how_its_gains_are_stored(run: Run) -> None:
    Path("mlx").mkdir()
    save_file(gains(1.0), "mlx/model.safetensors", {"format": "mlx"})
    config = {"model_type": "qwen3_5", "quantization": {"bits": 4, "group_size": 64}}
    Path("mlx/config.json").write_text(json.dumps(config))
    done = run("identify", "mlx", "--no-report")
    assert done.exit_code == 1
    assert "1 too much" in done.stdout
    assert "MLX qwen3_5" in done.stdout


def test_safetensors_alone_say_how_their_gains_are_stored(run: Run) -> None:
    save_file(gains(0.0), "tensors.safetensors")
    done = run("identify", "tensors.safetensors")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "Gains of tensors.safetensors"


def test_a_site_of_a_file_of_tensors_is_refused(run: Run) -> None:
    Path("model.gguf").write_bytes(gguf({"general.architecture": "llama"}, gains(0.0)))
    assert "holds tensors alone" in refused(run("identify", "model.gguf", "--site", "*"))


@pytest.mark.slow
def test_the_norms_of_an_onnx_file_are_identified(run: Run) -> None:
    written(Path(), layer_norm(), "model.onnx")
    done = run("identify", "model.onnx", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [entry.class_name for entry in PassportBook.read(Path("normkit-out/model/passports.json")).entries] == [
        "LayerNormalization"
    ]
