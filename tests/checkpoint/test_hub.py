"""Hub ids, and one line for each way in which the Hub can refuse; no test asks a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from normkit.checkpoint.hub import fetch, split_identifier
from normkit.checkpoint.loading import load_model
from normkit.errors import InputError, ModelError


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("org/name", None, ("org/name", None)),
        ("gpt2", None, ("gpt2", None)),
        ("org/na.me-2@v1.0", None, ("org/na.me-2", "v1.0")),
        ("org/name@refs/pr/3", None, ("org/name", "refs/pr/3")),
        ("org/name", "abc", ("org/name", "abc")),
        ("org/name@abc", "abc", ("org/name", "abc")),
    ],
)
def test_id_and_revision(model: str, revision: str | None, expected: tuple[str, str | None]) -> None:
    assert split_identifier(model, revision) == expected


@pytest.mark.parametrize(
    "model", ["/no/such", "./no", "../no", "~/no", "a/b/c", "a b", "org/", ".hidden", "README.md", "model.gguf"]
)
def test_what_can_only_be_a_path(model: str) -> None:
    with pytest.raises(ModelError, match="nothing is there"):
        split_identifier(model, None)


def test_two_revisions() -> None:
    with pytest.raises(InputError, match="expected one revision, got 'a' in 'org/name@a' and 'b'"):
        split_identifier("org/name@a", "b")


def test_a_model_that_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="'org/none': there is no such directory, and the Hub's cache here lacks it"):
        load_model("org/none", local_files_only=True)


def refusing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def response_error(kind: type[Exception]) -> Exception:
    """An error of the Hub without the response that its constructor wants."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (response_error(errors.GatedRepoError), "org/name is gated: accept its terms on huggingface.co/org/name"),
        (response_error(errors.RevisionNotFoundError), "org/name has no revision 'v9'"),
        (response_error(errors.RepositoryNotFoundError), "the Hub knows no such model"),
        (errors.OfflineModeIsEnabled("offline"), "the Hub's cache here lacks it"),
        (ConnectionError("no route\nat all"), r"the Hub did not answer \(ConnectionError\)"),
        (errors.HFValidationError("bad id"), r"did not answer \(HFValidationError\)"),
    ],
)
def test_one_line_for_each_refusal(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(error, monkeypatch)
    with pytest.raises(ModelError, match=message) as caught:
        fetch("org/name", "v9", local_files_only=False)
    assert "\n" not in str(caught.value)


class Server:
    """Stands for `snapshot_download`: copies what a pattern allows from one folder to another."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache, self.calls = source, cache, []

    def __call__(self, identifier: str, **options: Any) -> str:
        self.calls.append((identifier, options))
        self.cache.mkdir(exist_ok=True)
        for file in self.source.iterdir():
            if any(file.match(pattern) for pattern in options["allow_patterns"]):
                shutil.copy(file, self.cache)
        return str(self.cache)


def test_settings_come_first_then_the_weights_and_never_a_pickle_or_code(
    saved_gpt2: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "other.safetensors"):
        (gpt2 / name).touch()
    server = Server(gpt2, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", server)
    loaded = load_model("org/tiny@v2")
    assert (loaded.name, loaded.path, loaded.notes) == ("org/tiny", tmp_path / "cache", ())
    assert [call[0] for call in server.calls] == ["org/tiny"] * 2
    assert {call[1]["revision"] for call in server.calls} == {"v2"}
    assert all(call[1]["ignore_patterns"] == ["*/*"] for call in server.calls)
    assert {file.name for file in loaded.path.iterdir()} == {file.name for file in saved_gpt2.iterdir()}


def test_shards_are_fetched_by_the_names_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.safetensors").touch()
    (source / "two.safetensors").touch()
    index = {"weight_map": {"a": "one.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Server(source, tmp_path / "cache"))
    folder = fetch("org/name", None, local_files_only=False)
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["one.safetensors"]


def test_an_index_that_escapes_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    index = {"weight_map": {"a": "../../x.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    server = Server(source, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", server)
    with pytest.raises(ModelError, match="to name safetensors beside it"):
        fetch("org/name", None, local_files_only=False)
    assert len(server.calls) == 1
