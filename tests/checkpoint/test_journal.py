"""The journal of a fold: JSON lines that may end anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from normkit.checkpoint.staging import JOURNAL, FinishedFile, Staging, journal_bytes, read_journal
from normkit.errors import InputError

HEAD = {"plan": "a", "source": {"model.safetensors": [8, 1]}}
FILES = {
    name: FinishedFile(name=name, source_sha256="s", sha256="h", size=7, residuals={"bias": 0.1 + 0.2})
    for name in ("a", "b")
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of two files."""
    found = tmp_path / "journal.jsonl"
    found.write_bytes(journal_bytes(HEAD, FILES.values()))
    return found


def test_it_is_json_lines_without_times(path):
    assert read_journal(path) == (HEAD, FILES)
    first, *others = map(json.loads, path.read_text().splitlines())
    assert first == HEAD
    assert [set(line) for line in others] == [{"name", "source_sha256", "sha256", "size", "residuals"}] * 2


def test_cut_anywhere_it_counts_up_to_its_last_whole_line(path):
    content = path.read_bytes()
    ends = [position for position, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        head, found = read_journal(path)
        lines = sum(end < length for end in ends)
        assert head == (HEAD if lines else None)
        assert list(found) == ["a", "b"][: max(0, lines - 1)]


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"1\n", b"\xff\n", b"[" * 9999 + b"\n", None])
def test_something_else_is_no_journal(path, content):
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert read_journal(path) == (None, {})


@pytest.mark.parametrize("line", [b'{"name": "c"}', b"[1]", b"1", b"{", b"\xff"])
def test_a_line_of_something_else_ends_it(path, line):
    content = path.read_bytes()
    path.write_bytes(content + line + b"\n" + content)
    assert read_journal(path) == (HEAD, FILES)


def test_a_line_that_does_not_fit_is_an_error(tmp_path):
    with Staging(tmp_path / "out") as staging:
        staging.begin(HEAD)
        for name, file in FILES.items():
            staging.part(name).write_bytes(b"weights")
            if name == "b":
                os.dup2(os.open("/dev/full", os.O_WRONLY), staging._journal)
                with pytest.raises(InputError, match="No space left on device"):
                    staging.keep(file)
            else:
                staging.keep(file)
        assert read_journal(staging.folder / JOURNAL)[1] == {"a": FILES["a"]}
