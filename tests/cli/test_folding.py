"""`normkit fold SRC DST`: screens, JSON, exit codes, and one line for every bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import Result

from normkit import demo
from normkit.checkpoint import fold, hub
from normkit.errors import ModelError

Run = Callable[..., Result]

LAYERNORM, RMSNORM = demo.directory("layernorm"), demo.directory("rmsnorm")


def line(result: Result) -> str:
    """The one line on stderr of a run that ended with 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def test_a_plan_says_what_folds_and_what_does_not_and_writes_nothing(run: Run):
    result = run("fold", LAYERNORM, "--plan", "--ops", "all")
    assert result.exit_code == 0
    lines = [text.rstrip() for text in result.stdout.splitlines()]
    assert lines[0] == "GPT2LMHeadModel  12 of 13 norms folded, 13 writers centred"
    assert "transformer.h.*.ln_1       6   folded   folded   -         c_attn" in lines
    assert "! asked for and not done, as it would change what the model computes" in lines
    assert "final: transformer.ln_f" in lines
    assert any(text.startswith("memory   some ") for text in lines)
    assert "rms: transformer.h.*.ln_1 (6)" in lines
    assert max(map(len, lines)) <= 100
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_a_fold_prints_what_it_did_and_how_to_prove_it(run: Run, tmp_path: Path):
    result = run("fold", RMSNORM, tmp_path / "out")
    assert result.exit_code == 0
    assert "LlamaForCausalLM  12 of 13 norms folded" in result.stdout
    assert f"proof:  normkit verify {RMSNORM} {tmp_path / 'out'}" in result.stdout
    assert (tmp_path / "out" / "normkit_certificate.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two words", "a'b", "\x1b[2J\u202e\\\n$(touch x)", b"\xff\xc2\x9b"])
def test_the_command_that_proves_it_can_be_pasted(run: Run, tmp_path: Path, name: str | bytes):
    out = tmp_path / os.fsdecode(name)
    result = run("fold", RMSNORM, out)
    assert result.exit_code == 0, result.output
    *_, folded, proof = result.stdout.splitlines()
    assert folded.isprintable()
    assert proof.isprintable()
    words = proof.removeprefix("proof:  normkit verify ")
    found = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True).stdout
    assert found.split(b"\0")[:2] == [os.fsencode(RMSNORM), os.fsencode(out)]


@pytest.mark.slow
def test_a_hub_id_and_a_file_of_a_model_are_sources_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda *given, **_: asked.append(given) or RMSNORM)
    done = run("fold", "org/name", tmp_path / "out", "--revision", "v1")
    assert (done.exit_code, done.stderr) == (0, "")
    proof = f"org/name@v1 {tmp_path / 'out'}"
    assert done.stdout.endswith(f"proof:  normkit verify {proof}\n")
    assert run("verify", *proof.split()).exit_code == 0
    assert asked == [("org/name", "v1")] * 2
    assert run("verify", RMSNORM / "config.json", tmp_path / "out").exit_code == 0


@pytest.mark.slow
def test_json_is_the_certificate(run: Run, tmp_path: Path):
    result = run("fold", LAYERNORM, tmp_path / "out", "--untie", "--json")
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "out" / "normkit_certificate.json").read_text())
    planned = json.loads(run("fold", LAYERNORM, "--plan", "--untie", "--json").stdout)
    assert planned["schema_version"] == 1
    assert planned["norms"] == document["plan"]["norms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Missing argument 'DST'"),
        (("out", "--ops", "gain,fold"), "got 'fold'"),
        (("out", "--ops", ","), "expected all, or some of"),
        (("out", "--ops", "batchnorm"), "expected a model with batch norms of torch's classes, found none"),
        (("out", "--max-memory", "much"), "a size such as 1GB or 800MB, got 'much'"),
        (("out", "--threads", "0"), "0 is not in the range"),
        (("out", "--dtype", "float16"), "--dtype float16 is for DST.gguf"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_what_is_wrong(run: Run, options, words):
    result = run("fold", LAYERNORM, *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_what_cannot_be_folded_is_one_line(run: Run, tmp_path: Path):
    assert "nothing is there" in line(run("fold", tmp_path / "none", tmp_path / "out"))
    assert "sees the mean" in line(run("fold", RMSNORM, tmp_path / "out", "--ops", "centre"))
    assert "0.00 GB are allowed" in line(run("fold", RMSNORM, tmp_path / "out", "--max-memory", "1KB"))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.slow
def test_dropout_is_refused_for_training_only(run: Run, tmp_path: Path):
    source = Path(shutil.copytree(LAYERNORM, tmp_path / "source"))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resid_pdrop": 0.1}))
    assert "got resid_pdrop = 0.1" in line(run("fold", source, tmp_path / "out", "--for-training"))
    result = run("fold", source, tmp_path / "out")
    assert result.exit_code == 0
    assert "equal in evaluation mode, not under dropout (resid_pdrop = 0.1)" in " ".join(result.stdout.split())
    certificate = json.loads((tmp_path / "out" / "normkit_certificate.json").read_text())
    assert certificate["plan"]["remarks"][0].startswith("equal in evaluation mode")


def test_a_destination_that_cannot_be_made_is_one_line(run: Run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "choose another folder" in line(run("fold", RMSNORM, tmp_path / "file" / "out"))


@pytest.mark.slow
def test_a_model_of_the_hub_is_folded_from_the_cache_and_its_commit_is_in_the_certificate(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the layout of huggingface_hub: files are links to blobs, and a branch is a file with a commit."""
    commit, other = "0123456789abcdef" * 2 + "01234567", "f" * 40
    home = tmp_path / "cache" / "models--org--tiny"
    for name in (commit, other):
        (home / "snapshots" / name).mkdir(parents=True)
    for kind in ("blobs", "refs"):
        (home / kind).mkdir()
    (home / "refs" / "main").write_text(commit)
    for file in RMSNORM.iterdir():
        shutil.copy(file, home / "blobs" / file.name)
        for name in (commit, other):
            (home / "snapshots" / name / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = run("fold", "org/tiny", "folded", "--local-files-only", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert f"proof:  normkit verify org/tiny@{commit} folded" in result.stdout
    certificate = json.loads(Path("folded/normkit_certificate.json").read_text())
    assert certificate["source"]["hub"] == f"org/tiny@{commit}"
    proof = run("verify", f"org/tiny@{commit}", "folded", "--local-files-only", "--quiet")
    assert proof.exit_code == 0, proof.output
    assert "from org/tiny, commit 01234567" in " ".join(proof.stdout.split())
    # The same files of another commit are not what the certificate names; a plain folder of them may be.
    assert run("verify", f"org/tiny@{other}", "folded", "--local-files-only", "--quiet").exit_code == 1
    assert run("verify", RMSNORM, "folded", "--quiet").exit_code == 0
    certificate["source"]["hub"] = "org/tiny@main"
    Path("folded/normkit_certificate.json").write_text(json.dumps(certificate))
    assert "expected a name and a commit of the Hub" in line(run("verify", RMSNORM, "folded", "--quiet"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out.gguf"], "DST.gguf and --metadata FILE.gguf belong together"),
        (["out", "--metadata", "x.gguf"], "DST.gguf and --metadata FILE.gguf belong together"),
        (["out.gguf", "--metadata", "none.gguf"], "none.gguf is no GGUF file that can be read"),
    ],
)
def test_what_gguf_needs_is_said(run: Run, words: list[str], message: str):
    result = run("fold", RMSNORM, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("words", [["out"], ["out.gguf", "--metadata", "model.gguf"], ["--plan"]])
def test_a_gguf_file_is_written_and_not_read(run: Run, words: list[str]):
    Path("model.gguf").touch()
    told = "expected the folder of a model, got the GGUF file model.gguf, which is written and not read; fold the"
    assert told in line(run("fold", "model.gguf", *words))
    with pytest.raises(ModelError, match="fold the checkpoint that it was made from"):
        fold("model.gguf", "out")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_channels_that_are_measured_migrate(run: Run) -> None:
    done = run("inspect", RMSNORM, "--max-tokens", "64", "--no-report", "--activations", "channels.safetensors")
    assert done.stdout.endswith("\nactivations: channels.safetensors\n")
    asked = ("--ops", "migrate", "--scales", "channels.safetensors")
    done = run("fold", RMSNORM, "out", *asked, "--alpha", "0.5")
    assert "divided" in done.stdout
    assert done.stdout.endswith(f"\nproof:  normkit verify {RMSNORM} out --scales channels.safetensors\n")
    done = run("verify", RMSNORM, "out", "--scales", "channels.safetensors")
    assert done.exit_code == 0
    assert "not proved: any positive scales pass: whether they help a quantizer is not proved" in done.stdout
    assert "give it with --scales" in line(run("verify", RMSNORM, "out"))
    assert "alpha and powers_of_two are for migrate" in line(run("fold", RMSNORM, "other", "--alpha", "0.5"))
