"""A file is written whole or not at all, and JSON has one spelling."""

from __future__ import annotations

import json
import math
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is not JSON: line 1, column 1"),
        (b"{'a': 1}", "it is not JSON: line 1, column 2"),
        (b"\xff", "it is not JSON in UTF-8"),
        (b'{"a": NaN}', "it holds the number NaN"),
        (b"[-Infinity]", "it holds the number -Infinity"),
        (b"1e999", "it holds the number 1e999"),
        (b"-" + b"1" * 9999 + b".0e5", "it holds the number -111"),
        (b'{"a": 1, "a": 2}', "it holds the key 'a' twice"),
        (b'["\\ud800"]', r"it holds half a character, in '\ud800'"),
        (b'{"\\udc00": 1}', r"it holds half a character, in '\udc00'"),
        (b"1" * 5000, "it holds an integer of 5,000 digits"),
        (b"1" * 101, "it holds an integer of 101 digits"),
        *((b"[" * depth + b"]" * depth, "it is nested more than 100 levels deep") for depth in (102, 800, 100_000)),
    ],
)
def test_what_python_takes_for_json_and_is_none_is_refused(content, said):
    with pytest.raises(InputError) as error:
        files.parse_json(content)
    assert str(error.value).startswith(said)
    assert len(str(error.value)) < 120


def test_json_is_read():
    text = '{"a": [1, -2.5e-3, true, null, "\U0001f600\\ud83d\\ude00ä", {}], "b": ' + "9" * 100 + "}"
    assert files.parse_json(text.encode()) == json.loads(text)
    assert files.parse_json(b"[" * 100 + b"]" * 100)
    assert files.parse_json(b"[Infinity, -Infinity]", infinity=True) == [math.inf, -math.inf]


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


def test_a_private_file_is_never_readable_to_others(tmp_path):
    path = files.write_bytes(tmp_path / "journal", b"", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


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
