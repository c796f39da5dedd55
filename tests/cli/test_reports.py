"""Where a report may go, checked before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.cli.reports import page_file, report_folder, require_file, require_writable
from normkit.errors import InputError


def test_the_default_bears_the_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "model"
    assert report_folder(None, "name", source) == Path("normkit-report/name")
    assert report_folder(None, "org/name", source) == Path("normkit-report/org--name")
    assert report_folder(Path("a/b"), "name", source) == Path("a/b")
    assert list(tmp_path.iterdir()) == []


def test_never_inside_the_models_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (None, Path(), Path("deep/er")):
        with pytest.raises(InputError, match="inside the model's own folder; choose"):
            report_folder(out, "name", tmp_path)


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; choose another folder with --out"):
        report_folder(tmp_path / "file" / "deeper", "name", tmp_path / "model")


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
        report_folder(tmp_path / "new", "name", tmp_path / "model")


def test_where_a_page_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "model"
    assert page_file(None, "", None) == Path("normkit-report/explorer.html")
    assert page_file(None, "org/name", source) == Path("normkit-report/org--name/explorer.html")
    assert page_file(Path("a/b.html"), "name", source) == Path("a/b.html")
    with pytest.raises(InputError, match="inside the model's own folder; choose --out elsewhere"):
        page_file(Path("model/page.html"), "name", source)
    with pytest.raises(InputError, match="got --out -; name a file"):
        page_file(Path("-"), "", None)
    assert list(tmp_path.iterdir()) == []


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
