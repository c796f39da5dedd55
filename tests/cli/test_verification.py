"""`normkit verify SRC DST [--logits]`: screens, exit codes, and one line for every bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from folded_checkpoints import Pair, flip, folded, forge, tensors, write_certificate
from helpers import refused
from normkit import demo
from normkit.checkpoint import fold
from normkit.checkpoint.limits import LIMITS
from normkit.checkpoint.model_folder import CERTIFICATE

Run = Callable[..., Result]

ALL = ("gain", "bias", "final", "centre", "rms", "value")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return folded(tmp_path_factory.mktemp("saved"), untie=True)


@pytest.fixture
def pair(saved: Pair, tmp_path: Path) -> Pair:
    return saved.copy(tmp_path)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The models that ship, with everything done to them that may be."""
    folder, found = tmp_path_factory.mktemp("demos"), {}
    for name in ("layernorm", "rmsnorm"):
        found[name] = Pair(demo.directory(name), folder / name)
        fold(demo.directory(name), folder / name, operations=ALL, untie=True)
    return found


def squeezed(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_a_proof_names_what_was_checked(saved: Pair, run: Run) -> None:
    done = run("verify", saved.source, saved.result)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = squeezed(done)
    assert lines[:3] == ["GPT2LMHeadModel", "+ proved every tensor follows from the source, bit for bit", ""]
    assert [line.split("  ")[0] for line in lines[3:] if line.startswith("x")] == []
    for name in ("source files", "result files", "plan", "identical", "product", "sum", "constant", "config.json"):
        assert any(line.startswith(f"+ {name} ") for line in lines)
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_flipped_bit_is_exit_code_1_and_names_the_place(pair: Pair, run: Run) -> None:
    place = tensors(pair.result)["transformer.h.0.attn.c_attn.weight"]
    flip(place.file, place.start)
    done = run("verify", pair.source, pair.result)
    assert (done.exit_code, done.stderr) == (1, "")
    assert squeezed(done)[1].startswith("x not proved 2 of ")
    assert f"x result files {place.file.name} is not the one in the certificate" in " ".join(squeezed(done))
    assert "x product transformer.h.0.attn.c_attn.weight[0, 0] is" in " ".join(squeezed(done))
    forge(pair)
    done = run("verify", pair.source, pair.result, "-q")
    assert done.exit_code == 1
    assert squeezed(done)[1].startswith("x not proved 1 of ")


@pytest.mark.slow
def test_json_is_one_document(pair: Pair, run: Run) -> None:
    done = run("verify", pair.source, pair.result, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["passed"]) == (1, True)
    assert all(check["passed"] for check in document["checks"].values())
    flip(pair.result / "config.json", 20)
    done = run("verify", pair.source, pair.result, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["passed"] is False
    assert document["checks"]["config.json"]["passed"] is False


@pytest.mark.slow
def test_the_output_does_not_depend_on_the_threads(saved: Pair, run: Run) -> None:
    answers = {run("verify", saved.source, saved.result, "--threads", threads).stdout for threads in (1, 2, 5)}
    assert len(answers) == 1


# --logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_the_logits_of_the_models_that_ship_agree(demos: dict[str, Pair], name: str, run: Run) -> None:
    done = run("verify", demos[name].source, demos[name].result, "--logits", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)["logits"]
    assert found["holds"] is True
    assert found["tokens"] == 512
    # Weights of float32, each rounded once more.
    assert 0 < found["difference"] < 1e-5
    assert found["unit"] == 2.0**-24
    assert found["source"].startswith("random token ids, seed 0")
    assert "demo text" in found["source"]


@pytest.mark.slow
def test_logits_are_one_more_line(demos: dict[str, Pair], run: Run) -> None:
    Path("mine.txt").write_text("A text of mine, long enough for a window of sixty-four bytes, and a little longer.")
    done = run("verify", demos["rmsnorm"].source, demos["rmsnorm"].result, "--logits", "--text", "mine.txt")
    assert done.exit_code == 0
    assert "+ logits differ by " in " ".join(squeezed(done))
    assert "mine.txt" in " ".join(squeezed(done))


@pytest.mark.slow
def test_without_a_tokenizer_the_ids_are_random(tmp_path: Path, run: Run) -> None:
    pair = folded(tmp_path, "llama", torch.float64)
    for file in [*pair.source.glob("tokenizer*"), *pair.result.glob("tokenizer*")]:
        file.unlink()
    forge(pair)
    done = run("verify", pair.source, pair.result, "--logits", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["logits"]
    assert found["difference"] < 1e-12
    assert "text" not in found["source"]


def test_logits_are_not_run_where_the_files_already_fail(pair: Pair, run: Run) -> None:
    flip(pair.result / "tokenizer_config.json", 9)
    done = run("verify", pair.source, pair.result, "--logits")
    assert done.exit_code == 1
    assert "logits" not in done.stdout


# Bad input.


def test_the_help_says_what_is_not_proved(run: Run) -> None:
    said = " ".join(run("verify", "--help").stdout.split())
    assert all(limit in said for limit in LIMITS)


def test_a_text_needs_logits(saved: Pair, run: Run) -> None:
    done = run("verify", saved.source, saved.result, "--text", "x")
    assert done.exit_code == 2
    assert "--text needs --logits" in done.stderr
    assert "cannot read the text absent" in refused(
        run("verify", saved.source, saved.result, "--logits", "--text", "absent")
    )


@pytest.mark.parametrize(
    "content", [b"", b"not JSON", b"[" * 100_000, b"[]", b"\xff", b'{"schema_version": 7}', b'{"schema_version": 1}']
)
def test_a_hostile_certificate_is_one_line(pair: Pair, content: bytes, run: Run) -> None:
    (pair.result / CERTIFICATE).write_bytes(content)
    assert f"{CERTIFICATE} is no certificate of a fold: " in refused(run("verify", pair.source, pair.result))


def test_a_certificate_that_names_other_folders_is_one_line(pair: Pair, run: Run) -> None:
    document = pair.certificate
    document["result"]["files"]["../source/config.json"] = {"bytes": 1, "sha256": "0" * 64}
    write_certificate(pair.result, document)
    assert "it names the file '../source/config.json', which is none beside it" in refused(
        run("verify", pair.source, pair.result)
    )


def test_folders_that_are_none_are_one_line(saved: Pair, run: Run) -> None:
    assert "expected the folder of a checkpoint, got nowhere" in refused(run("verify", saved.source, "nowhere"))
    assert f"found no {CERTIFICATE}" in refused(run("verify", saved.result, saved.source))
    assert run("verify", saved.source).exit_code == 2


def test_it_stands_under_check(run: Run) -> None:
    screen = run("--help").stdout
    assert screen.index("Check:") < screen.index("verify  ") < screen.index("This machine:")


@pytest.mark.slow
def test_the_logits_of_a_model_of_images_agree_after_its_batch_norms_are_folded(tmp_path: Path, run: Run) -> None:
    from checkpoint.test_batch_norm_files import model_of

    model_of("ResNet").save_pretrained(tmp_path / "source")
    assert run("fold", tmp_path / "source", tmp_path / "result", "--ops", "batchnorm").exit_code == 0
    done = run("verify", tmp_path / "source", tmp_path / "result", "--logits", "--json")
    found = json.loads(done.stdout)["logits"]
    assert (done.exit_code, found["holds"], found["tokens"]) == (0, True, 2)
    assert 0 < found["difference"] <= 8 * found["rounding"]
    assert found["source"] == "random pixels, seed 0, 64 a side"
    wrong = run("verify", tmp_path / "source", tmp_path / "result", "--logits", "--text", __file__)
    assert wrong.exit_code == 2
    assert "got --text of a model that reads pixel_values; leave it out" in " ".join(wrong.stderr.split())
