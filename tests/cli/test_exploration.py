"""`normkit explore`: the page, where it lies, the browser, the animation, and one line for every bad input."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from helpers import refused
from normkit.cli.exploration import open_page
from normkit.explorer import activations as gathering
from normkit.explorer.document import BIAS, GAIN, cloud
from normkit.geometry import animation

Run = Callable[..., Result]

QUICK = ("--max-tokens", "64")


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open, on a machine with a display."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    return addresses


def embedded(path: str | Path) -> dict:
    page = Path(path).read_text(encoding="utf-8")
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.slow
def test_without_a_model_both_twins_are_embedded(run: Run, opened: list[str]) -> None:
    done = run("explore")
    assert done.exit_code == 0, done.output
    assert done.stdout == "explorer: normkit-out/explorer.html\n"
    data = embedded("normkit-out/explorer.html")
    assert [(model["name"], len(model["sites"])) for model in data["models"]] == [("layernorm", 14), ("rmsnorm", 14)]
    assert 1900 <= sum(site["count"] for model in data["models"] for site in model["sites"]) <= 2000
    assert data["start"] == {}
    assert data["notes"] == [
        f"{name}: each norm shows 71 of 4,096 tokens, evenly spread." for name in ("layernorm", "rmsnorm")
    ]
    assert done.stderr == "".join(f"normkit: note: {note}\n" for note in data["notes"])
    assert opened == [Path("normkit-out/explorer.html").resolve().as_uri()]


@pytest.mark.slow
def test_a_model_of_ones_own(gpt2: Path, run: Run, opened: list[str]) -> None:
    done = run("explore", gpt2, *QUICK, "--no-open")
    assert (done.exit_code, done.stdout) == (0, "explorer: normkit-out/tiny/explorer.html\n")
    assert done.stderr == ""
    data = embedded("normkit-out/tiny/explorer.html")
    (model,) = data["models"]
    assert data["title"] == "The norms of tiny"
    assert [site["path"] for site in model["sites"]] == [
        *(f"transformer.h.{layer}.ln_{norm}" for layer in (0, 1) for norm in (1, 2)), "transformer.ln_f", "all layers",
    ]  # fmt: skip
    assert {site["count"] for site in model["sites"][:-1]} == {64}
    assert data["start"]["scene"] == "model"
    assert opened == []
    assert [path.name for path in Path("normkit-out/tiny").iterdir()] == ["explorer.html"]
    # A second run writes the same bytes.
    assert run("explore", gpt2, *QUICK, "--no-open", "--out", "two").exit_code == 0
    assert Path("two/tiny/explorer.html").read_bytes() == Path("normkit-out/tiny/explorer.html").read_bytes()


@pytest.mark.slow
def test_a_text_and_norms_of_ones_own(gpt2: Path, run: Run) -> None:
    path, pattern = "transformer.h.1.ln_2", "*.1.ln_2"
    Path("mine.txt").write_text("ab</script>")
    done = run("explore", gpt2, "--text", "mine.txt", "--site", pattern, "--no-open", "--out", "here")
    assert done.exit_code == 0, done.output
    (model,) = embedded("here/tiny/explorer.html")["models"]
    assert [site["path"] for site in model["sites"]] == [path]
    assert [model["tokens"][index] for index in model["sites"][0]["token"]] == list("ab</script>")


@pytest.mark.slow
def test_json_is_exactly_one_document(gpt2: Path, run: Run, opened: list[str]) -> None:
    done = run("explore", gpt2, *QUICK, "--json", "--dtype", "bfloat16")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, opened) == (0, "", [])
    assert (document["schema_version"], document["page"]) == (1, "normkit-out/tiny/explorer.html")
    (model,) = document["models"]
    assert model["name"] == "tiny"
    assert set(model["sites"][0]) == {"path", "formula", "n", "layer", "explained", "count"}
    assert document["notes"] == []


@pytest.mark.slow
def test_what_was_wrong_with_the_model_stands_on_its_page(gpt2: Path, run: Run) -> None:
    weights = load_file(gpt2 / "model.safetensors")
    del weights["transformer.ln_f.bias"]
    weights["transformer.h.1.ln_1.weight"][3] = torch.nan
    save_file(weights, gpt2 / "model.safetensors", {"format": "pt"})
    done = run("explore", gpt2, *QUICK, "--no-open")
    assert done.exit_code == 0, done.output
    notes = embedded("normkit-out/tiny/explorer.html")["notes"]
    assert "1 weight is missing in the checkpoint" in notes[0]
    assert any("transformer.h.1.ln_1" in note for note in notes[1:])
    assert done.stderr == "".join(f"normkit: note: {note}\n" for note in notes)
    assert run("explore", gpt2, *QUICK, "--no-open", "--quiet").stderr == ""


# The browser.


def test_a_browser_is_started_where_there_is_a_display_and_may_fail(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    open_page(tmp_path / "page.html")
    assert opened == []
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    open_page(tmp_path / "a b.html")
    assert opened == [f"{tmp_path.as_uri()}/a%20b.html"]
    for failure in (webbrowser.Error("none"), OSError("gone")):
        monkeypatch.setattr(webbrowser, "open", Mock(side_effect=failure))
        open_page(tmp_path / "page.html")


# The animation.


@pytest.fixture
def animated(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What the drawing of the animation was called with."""
    calls: list[dict] = []

    def write(path: Path, points: torch.Tensor, groups: object, **rest: object) -> Path:
        calls.append({"path": path, "points": points, "groups": groups, **rest})
        return path

    monkeypatch.setattr(animation, "write_animation", write)
    return calls


@pytest.mark.parametrize("name", ["steps.gif", "deep/steps.MP4"])
def test_an_animation_and_nothing_else(run: Run, animated: list[dict], opened: list[str], name: str) -> None:
    done = run("explore", "--animation", name)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"animation: {name}\n", "")
    (call,) = animated
    assert call["path"] == Path(name)
    assert torch.equal(call["points"], cloud("scatter").points)
    assert call["groups"] == cloud("scatter").groups
    assert (tuple(call["weight"].tolist()), tuple(call["bias"].tolist())) == (GAIN, BIAS)
    assert (opened, list(Path().iterdir())) == ([], [])
    done = run("explore", "--animation", name, "--json")
    assert json.loads(done.stdout) == {"schema_version": 1, "animation": name}
    assert len(animated) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_gif(run: Run) -> None:
    assert run("explore", "--animation", "steps.gif").exit_code == 0
    assert Path("steps.gif").read_bytes()[:6] == b"GIF89a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--animation", "steps.png"), "--animation writes .gif or .mp4, got steps.png"),
        (("--animation", "steps"), "--animation writes .gif or .mp4, got steps"),
        (("some/model", "--animation", "steps.gif"), "takes no MODEL, got some/model"),
        (("--animation", "file/steps.gif"), "file is a file"),
        (("--animation", "folder"), "--animation writes .gif or .mp4, got folder"),
        (("--out", "file"), "file is a file"),
        (("--out", "file/deeper"), "file is a file"),
        (("nowhere",), "nowhere"),
    ],
)
def test_one_line_for_bad_input(
    run: Run, animated: list[dict], opened: list[str], arguments: tuple[str, ...], message: str
) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    assert message in refused(run("explore", *arguments))
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]
    assert (animated, opened) == ([], [])


@pytest.mark.slow
def test_bad_input_beside_a_model(gpt2: Path, run: Run) -> None:
    assert "inside the model's own folder" in refused(run("explore", gpt2, "--out", gpt2 / "pages"))
    assert "no norm at 'ln_3'; did you mean transformer.h.0.ln_1," in refused(run("explore", gpt2, "--site", "ln_3"))
    assert "cannot read the text gone.txt" in refused(run("explore", gpt2, "--text", "gone.txt"))
    assert not list(gpt2.glob("*.html"))


def test_a_model_without_norms_and_one_that_runs_on_no_tokens(
    gpt2: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "find_sites", lambda _model, _trace: ((), ()))
    assert refused(run("explore", gpt2, *QUICK)) == "tiny has no norms: there is nothing to draw"
    assert not Path("normkit-out").exists()
    config = MobileNetV2Config(image_size=32, depth_multiplier=0.25)
    MobileNetV2ForImageClassification(config).save_pretrained(tmp_path / "vision")
    assert "give a language model or a text encoder" in refused(run("explore", tmp_path / "vision"))


@pytest.mark.parametrize("option", [("--site", "a"), ("--text", "a"), ("--max-tokens", "64"), ("--dtype", "float16")])
def test_options_that_need_a_model(run: Run, option: tuple[str, str]) -> None:
    done = run("explore", *option)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option[0]} needs a MODEL." in done.stderr
    assert list(Path().iterdir()) == []
