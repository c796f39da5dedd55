"""`normkit inspect` on models of images and of sound: results, and one line for every bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Wav2Vec2Config, Wav2Vec2Model

import normkit as nk
from helpers import refused
from media_models import saved, saved_clip, write_wave

# Each runs the command on a whole model.
pytestmark = pytest.mark.slow

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("ViT", tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(autouse=True)
def _pages_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normkit.inspection.figures.drawings", lambda _inspection: ())


def test_images(vit: Path, run: Run, tmp_path: Path) -> None:
    done = run("inspect", vit)
    assert done.exit_code == 0, done.output
    assert "whole and in quarters: 15 images; one row of a norm is one patch" in " ".join(done.stdout.split())
    assert "token" not in done.stdout.split("need a training run")[0]
    Image.new("RGB", (50, 40), (200, 10, 10)).save(tmp_path / "a.png")
    done = run("inspect", vit, "--images", tmp_path, "--json", "--no-report")
    model = json.loads(done.stdout)["model"]
    assert (model["source"], model["tokens"], model["unit"]) == (f"a.png of {tmp_path.name}, of one colour", 1, "image")


def test_sound(whisper: Path, run: Run, tmp_path: Path) -> None:
    done = run("inspect", whisper, "--no-report")
    assert done.exit_code == 0, done.output
    rows = "a synthesized signal of 6 s at 16,000 Hz: 1 recording; rows are tokens at 7 norms, frames at 5 norms"
    assert rows in " ".join(done.stdout.split())
    files = [write_wave(tmp_path / name, [[1000], [-1000]] * 4000) for name in ("a.wav", "b.wav")]
    done = run("inspect", whisper, "--audio", files[0], "--audio", files[1], "--format", "markdown", "--no-report")
    assert "2 files at 16,000 Hz: 2 recordings" in done.stdout
    assert done.stdout.count("--audio ") == 2


def test_a_sound_that_is_too_short_behind_a_long_one(run: Run, tmp_path: Path) -> None:
    """It ended in exit code 101: only the first file was tried beforehand."""
    folder = saved("Wav2Vec2", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["conv_kernel"] = [100, 3]
    (folder / "config.json").write_text(json.dumps(config))
    model = Wav2Vec2Model(Wav2Vec2Config(**config))
    model.save_pretrained(folder)
    sounds = [write_wave(tmp_path / f"{count}.wav", [[1000], [-1000]] * (count // 2)) for count in (4000, 50)]
    done = run("inspect", folder, "--audio", sounds[0], "--audio", sounds[1])
    assert "cannot be run on input_values (1, 50)" in refused(done)


def test_a_training_step_on_images(vit: Path, run: Run, tmp_path: Path) -> None:
    done = run("inspect", saved("ResNet", tmp_path / "resnet"), "--train-step", "--fail-on", "error")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "one training step on classes drawn at random: 15 images" in text
    assert "- One step watched Forward and backward" in text
    assert "batch norms 8, eps 1e-5" in text
    assert 'id="batch-norms"' in Path("normkit-out/resnet/report.html").read_text(encoding="utf-8")
    line = refused(run("inspect", vit, "--train-step", "--no-report"))
    assert "ViTModel has no loss that its input alone gives; leave out --train-step" in line


def test_images_and_text_at_once(run: Run, tmp_path: Path) -> None:
    folder = saved_clip(tmp_path / "clip")
    done = run("inspect", folder, "--no-report")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "whole and in quarters, each with a piece of demo text: 300 tokens; rows are patches at 5 norms" in text
    assert "11 norms looked at" in text
    Image.new("RGB", (50, 40), (200, 10, 10)).save(tmp_path / "a.png")
    (tmp_path / "words").write_text("a few words")
    done = run("inspect", folder, "--images", tmp_path, "--text", tmp_path / "words", "--json", "--no-report")
    model = json.loads(done.stdout)["model"]
    assert (model["source"], model["tokens"]) == (f"a.png of {tmp_path.name}, of one colour, with a piece of words", 11)

    def line(*arguments: object) -> str:
        return refused(run("inspect", folder, *arguments, "--no-report"))

    assert "reads no audio: give --images or --text in place of --audio" in line("--audio", tmp_path)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer_config.json").unlink()
    assert "it has no tokenizer; save the processor of the model beside it" in line("--images", tmp_path)
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "preprocessor_config.json").unlink()
    for arguments in ((), ("--images", tmp_path)):
        assert "it has no preprocessor_config.json; save the processor of the model beside it" in line(*arguments)


def test_two_models_of_images_are_compared(vit: Path, run: Run, tmp_path: Path) -> None:
    port = Path(shutil.copytree(vit, tmp_path / "port"))
    weights = load_file(port / "model.safetensors")
    name = next(name for name in weights if name.endswith("layer.1.layernorm_after.weight"))
    save_file({**weights, name: weights[name] * 1.5}, port / "model.safetensors", metadata={"format": "pt"})
    Image.new("RGB", (50, 40), (200, 10, 10)).save(tmp_path / "a.png")
    done = run("compare", port, vit, "--no-report", "--images", tmp_path / "a.png")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 1
    assert "run on: a.png" in text
    assert "The first difference appears at layers.1.layernorm_after" in text
    # In another dtype than its reference, whose processor makes the input of both.
    found = nk.compare(nk.load(vit, dtype="bfloat16"), vit)
    assert found.source == "3 photographs (china.jpg, flower.jpg, grace_hopper.jpg), whole and in quarters"
    assert found.rows is not None
    assert found.rows.not_run == ""
    (port / "preprocessor_config.json").unlink()
    text = " ".join(run("compare", port, port, "--no-report").stdout.split())
    assert "not looked at conventions and rows: port reads images through an image processor: it has no" in text


def test_files_that_cannot_be_used(vit: Path, whisper: Path, run: Run, tmp_path: Path) -> None:
    def line(*arguments: object) -> str:
        return refused(run("inspect", *arguments, "--no-report"))

    (tmp_path / "empty").mkdir()
    assert "expected images (.jpg, " in line(vit, "--images", tmp_path / "empty")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "cannot read the image" in line(vit, "--images", tmp_path)
    assert "ViTModel reads pixel_values: give --images in place of --audio" in line(vit, "--audio", tmp_path)
    assert "give --audio in place of --images" in line(whisper, "--images", tmp_path)
    (tmp_path / "text").write_text("some words")
    assert "give --images in place of --text" in line(vit, "--text", tmp_path / "text")
    sound = write_wave(tmp_path / "a.wav", [[0]], rate=8000)
    assert "has 8,000 samples a second, the model takes 16,000" in line(whisper, "--audio", sound)


def test_processors_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    folder = saved("ViT", tmp_path / "vit")
    file = folder / "preprocessor_config.json"
    whole = json.loads(file.read_text())

    def line(**changes: object) -> str:
        file.write_text(json.dumps({**whole, **changes}))
        return refused(run("inspect", folder, "--no-report"))

    # Of another size than the model's: its own words, on one line.
    assert "ViTModel cannot be run on pixel_values (1, 3, 48, 48)" in line(size={"height": 48, "width": 48})
    assert "asks for images of 100000 pixels a side, expected at most 8192" in line(size={"height": 10**5, "width": 8})
    own = line(image_processor_type="OwnProcessor", auto_map={"AutoImageProcessor": "own.OwnProcessor"})
    assert "its processor is code that comes with the model, which is never run" in own
    assert "its preprocessor_config.json cannot be used" in line(image_processor_type="OwnProcessor")
    file.write_text("{")
    assert "expected JSON in" in refused(run("inspect", folder, "--no-report"))
    file.unlink()
    assert "it has no preprocessor_config.json" in refused(run("inspect", folder, "--no-report"))


def test_other_verbs_say_which_one_runs_images(vit: Path, run: Run) -> None:
    assert "this command runs models that read text, ViTModel reads pixel_values" in refused(run("explore", vit))


CODE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.GroupNorm(8, 8))

def images():
    return [torch.randn(4, 3, 8, 8), torch.randn(2, 3, 8, 8)]

def wrong():
    return torch.randn(4, 5, 8, 8)

def nothing():
    return []

def fails():
    return 1 / 0

def leaves():
    raise SystemExit(3)

def endless():
    while True:
        yield torch.randn(2, 3, 8, 8)

def breaks():
    yield torch.randn(2, 3, 8, 8)
    raise ValueError("no second batch")

def empty():
    return torch.randn(0, 3, 8, 8)
"""


def test_a_model_of_ones_own(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(CODE)
    done = run("inspect", f"{file}:model", "--batch", f"{file}:images")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("own.py:model  Sequential, ")
    rows = "own.py:images: 6 images; rows are channel groups at 1 norm, channels at 1 norm"
    assert rows in " ".join(done.stdout.split())
    assert Path("normkit-out/own.py--model/report.html").is_file()

    def line(model: str, *arguments: object) -> str:
        return refused(run("inspect", f"{file}:{model}", *arguments, "--no-report"))

    assert "needs --batch FILE.py:NAME, a function that returns its batches" in line("model")
    assert "--images does not go with --batch" in line("model", "--batch", f"{file}:images", "--images", tmp_path)
    assert "--dtype does not go with a model in code" in line("model", "--batch", "a.py:b", "--dtype", "bfloat16")
    assert "fails failed: ZeroDivisionError" in line("fails", "--batch", f"{file}:images")
    assert "leaves failed: SystemExit: 3" in line("leaves", "--batch", f"{file}:images")
    assert "breaks failed: ValueError: no second batch" in line("model", "--batch", f"{file}:breaks")
    assert "at least one sample, this one has shape (0, 3, 8, 8)" in line("model", "--batch", f"{file}:empty")
    done = run("inspect", f"{file}:model", "--batch", f"{file}:endless", "--no-report")
    assert "the first 256 batches of own.py:endless: 512 images" in " ".join(done.stdout.split())
    assert f"or {file.name}:NAME, a function that returns a model" in refused(run("inspect", file))
    assert "expected a model of torch from" in line("images", "--batch", f"{file}:images")
    assert "got none; return one, or a list of them" in line("model", "--batch", f"{file}:nothing")
    assert "Sequential cannot be run on input (1, 5, 8, 8) (RuntimeError" in line("model", "--batch", f"{file}:wrong")
    assert "cannot use" in line("absent", "--batch", f"{file}:images")
    assert "there is none" in refused(run("inspect", "no.py:model", "--batch", f"{file}:images"))


def test_a_checkpoint_on_batches_of_ones_own(vit: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef images():\n    return {'pixel_values': torch.randn(3, 3, 32, 32)}\n"
    )
    done = run("inspect", vit, "--batch", f"{tmp_path}/own.py:images", "--json", "--no-report")
    model = json.loads(done.stdout)["model"]
    assert (model["source"], model["tokens"], model["unit"]) == ("own.py:images", 3, "image")
