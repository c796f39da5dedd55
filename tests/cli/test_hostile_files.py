"""Files made to hurt: each is one line and exit code 2, and neither SRC nor anything beside DST is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from gguf_files import Raw, gguf
from normkit.checkpoint.model_folder import CERTIFICATE
from normkit.demo import directory

Run = Callable[..., Result]

NO_JSON = {
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "1e999": b"1e999",
    "half a character": b'"\\ud800"',
    "nested": b"[" * 800 + b"]" * 800,
    "integer": b"1" * 5000,
    "key twice": b'{"a": 1, "a": 1}',
    "no UTF-8": b'"\xff"',
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the small Llama that ships."""
    return Path(shutil.copytree(directory("rmsnorm"), tmp_path / "model"))


def line(result: Result) -> str:
    """The one line on stderr of a run that ended with 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    said = result.stderr.removesuffix("\n")
    assert said.isprintable()
    assert len(said) < 2500
    return said


def add(path: Path, value: bytes) -> None:
    """Give a JSON file a key of this value."""
    path.write_bytes(b'{"hostile": ' + value + b", " + path.read_bytes().lstrip().removeprefix(b"{"))


def set_keys(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON.keys())
def test_a_configuration_that_is_no_json(run: Run, model: Path, value: bytes) -> None:
    add(model / "config.json", value)
    assert line(run("fold", model, "out")).startswith(f"normkit: expected JSON in {model / 'config.json'}: it ")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON.keys())
def test_an_index_that_is_no_json(run: Run, model: Path, value: bytes) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "one.safetensors"}}')
    add(index, value)
    assert line(run("fold", model, "out")).startswith(f"normkit: expected JSON in {index}: it ")


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON.keys())
def test_passports_an_intent_and_a_certificate_that_are_no_json(run: Run, model: Path, value: bytes) -> None:
    Path("file.json").write_bytes(b'{"content": ' + value + b"}")
    assert "found no JSON: it " in line(run("compare", model, "file.json"))
    assert "found no JSON: it " in line(run("inspect", model, "--intent", "file.json"))
    (model / CERTIFICATE).write_bytes(value)
    assert "is no certificate of a fold: it " in line(run("verify", model, model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "x" * 10**5}, "got model_type 'xxxx"),
        ({"model_type": "\x1b[31m\u202e"}, "got model_type"),
        ({"architectures": ["L" * 10**5]}, "got 'LLLL"),
        ({"rms_norm_eps": {"a" * 10**5: 1}}, "expected a number as rms_norm_eps"),
        ({"rms_norm_eps": 10**99}, ""),
        ({"num_hidden_layers": 10**15}, "expected the tensor"),
        ({"num_hidden_layers": "1" * 10**5}, "expected a whole number as num_hidden_layers"),
        ({"hidden_size": 10**60}, ""),
        ({"transformers_weights": "other.safetensors"}, "has transformers load other weights"),
        ({"text_config": {"transformers_weights": "x"}}, "(text_config.transformers_weights), which are not folded"),
    ],
)
def test_a_configuration_that_lies(run: Run, model: Path, changes: dict[str, Any], said: str) -> None:
    set_keys(model / "config.json", **changes)
    assert said in line(run("fold", model, "out"))
    assert list(Path.cwd().iterdir()) == []


def test_a_link_out_of_the_source_is_not_copied(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    assert "notes.txt is a link to" in line(run("fold", model, "out"))
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", ["a\nb.txt", "\x1b[2J.txt", "gpj.\u202etxt", "n" * 200 + "/" + "n" * 60])
def test_a_name_that_verify_would_refuse_is_not_folded(run: Run, model: Path, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    assert "at most 256 printable characters" in line(run("fold", model, "out"))
    assert list(Path.cwd().iterdir()) == []


def test_an_adapter_beside_the_model(run: Run, model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    assert "holds an adapter" in line(run("fold", model, "out"))


def test_a_link_in_place_of_the_staging_folder(run: Run, model: Path, tmp_path: Path) -> None:
    """`ln -s victim .dst.normkit-partial; normkit fold SRC dst --resume` once deleted all that is in `victim`."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years")
    Path(".out.normkit-partial").symlink_to(victim)
    for more in ((), ("--resume",)):
        assert "which is a link, and not a folder of normkit's own" in line(run("fold", model, "out", *more))
    assert (victim / "thesis.tex").read_text() == "years"
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is truncated or corrupt (its header needs byte 4"),
        (gguf({"general.architecture": "llama"}, {"a": torch.ones(99)})[:-200], "ends at byte"),
        (gguf(num_keys=2**60), "it claims 1,152,921,504,606,846,976 keys"),
        (gguf({"general.architecture": "\x1b[2J"}), "its architecture is '\\x1b[2J'"),
        (gguf({}, {"\u202e": torch.ones(1)}), "'\\u202e' is no name for a tensor"),
        (gguf({}, {"a": Raw(77, bytes(32), (8,))}), "can be compared: nothing here runs a GGUF file"),
        (gguf({}, {"a": Raw(0, b"", (2**40, 2**20))}), "ends at byte"),
        (gguf({"split.count": 99_999}), "a name such as NAME-00001-of-99999.gguf"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_file(run: Run, model: Path, content: bytes, said: str) -> None:
    Path("port.gguf").write_bytes(content)
    assert said in line(run("compare", "port.gguf", model))
    assert said in line(run("compare", model, "port.gguf"))
    assert [path.name for path in Path.cwd().iterdir()] == ["port.gguf"]
