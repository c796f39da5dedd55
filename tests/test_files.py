"""A file is written whole or not at all, and JSON has one spelling."""

from __future__ import annotations

import json
import os
import stat

import pytest

from normkit import files
from normkit.errors import InputError

SPELLING = """{
  "b": 1.0,
  "a": [
    true,
    null
  ],
  "name": "naïve",
  "nested": {
    "x": 1e-05
  }
}
"""


def test_json_has_one_spelling():
    document = {"b": 1.0, "a": [True, None], "name": "naïve", "nested": {"x": 1e-5}}
    assert files.json_text(document) == SPELLING
    assert json.loads(files.json_text(document)) == document


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_has_no_word_for(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.json_text({"value": value})


def test_bytes_are_written_as_they_are(tmp_path):
    content = bytes(range(256)) + b"\r\n"
    path = files.write_bytes(tmp_path / "figure.png", content)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_written_byte_for_byte(tmp_path):
    path = files.write_text(tmp_path / "new" / "folder" / "report.html", "a\nnaïve\n")
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert path.read_bytes() == "a\nnaïve\n".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old and longer")
    files.write_text(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_is_as_readable_as_the_umask_says(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = files.write_text(tmp_path / "report.html", "text")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(_descriptor):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    expected = InputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_failed_write_says_why_and_what_to_do(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError) as caught:
        files.write_text(tmp_path / "report.html", "new")
    message = str(caught.value)
    assert (
        message == f"cannot write {tmp_path / 'report.html'}: No space left on device; choose another folder with --out"
    )


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write .*: (Not a directory|File exists)"):
        files.write_text(tmp_path / "file" / "report.html", "new")
    assert (tmp_path / "file").read_text() == "in the way"
