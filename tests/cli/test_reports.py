"""Where a verb writes: below one folder, and never in the folder of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.cli.reports import output_folder, require_file, require_writable
from normkit.errors import InputError


def test_names_become_folders_below_the_one_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_folder(Path("out")) == Path("out")
    assert output_folder(Path("out"), "figures") == Path("out/figures")
    assert output_folder(Path("a/b"), "org/name", source=tmp_path / "model") == Path("a/b/org--name")
    assert list(tmp_path.iterdir()) == []


def test_never_inside_the_models_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path(), Path("deep/er")):
        with pytest.raises(InputError, match="inside the model's own folder; choose"):
            output_folder(out, "name", source=tmp_path)


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; choose another folder with --out"):
        output_folder(tmp_path / "file" / "deeper", "name")


def test_any_folder_can_be_tried(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "deeper")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file"):
        require_writable(tmp_path / "file")


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind root, who runs tests in containers.
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)
    with pytest.raises(InputError, match="is read-only; choose another folder with --out"):
        output_folder(tmp_path / "new", "name")


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    require_file(tmp_path / "file")
    require_file(tmp_path / "new" / "file")
    with pytest.raises(InputError, match="it is a folder; give the name of a file in it"):
        require_file(tmp_path)
    with pytest.raises(InputError, match="file is a file; choose another folder"):
        require_file(tmp_path / "file" / "deeper")
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path / "file")
    with pytest.raises(InputError, match="it is read-only; choose another file"):
        require_file(tmp_path / "file")
