"""A file is written whole or not at all, and JSON has one spelling."""

from __future__ import annotations

import json
import math
import os
import stat
from unittest.mock import Mock

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


def test_bytes_and_text_are_written_as_they_are_over_an_old_file(tmp_path):
    content = bytes(range(256)) + b"\r\n"
    path = files.write_bytes(tmp_path / "figure.png", content)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    path = files.write_text(tmp_path / "new" / "folder" / "report.html", "a\nnaïve, old and longer\n")
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert path.read_bytes() == "a\nnaïve, old and longer\n".encode()
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_is_as_readable_as_the_umask_says_and_a_private_one_to_nobody_else(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = files.write_text(tmp_path / "report.html", "text")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE(files.write_bytes(tmp_path / "journal", b"", mode=0o600).stat().st_mode) == 0o600


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_says_why_and_what_to_do(tmp_path, monkeypatch, failure):
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=failure))
    with pytest.raises(InputError if isinstance(failure, OSError) else KeyboardInterrupt) as caught:
        files.write_text(path, "new")
    if isinstance(failure, OSError):
        said = f"cannot write {path}: No space left on device; choose another folder with --out"
        assert str(caught.value) == said
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InputError, match=r"cannot write .*: (Not a directory|File exists)"):
        files.write_text(path / "report.html", "new")
    assert path.read_text() == "old"
