"""The text that a user names: what is read of it, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.cli.texts import read_text
from normkit.errors import InputError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found nothing"),
        (b" \n\t ", "found white space"),
        (b"caf\xe9", "expected UTF-8 in .*, found the byte 0xe9"),
    ],
)
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(str(file), 100)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the text .*: No such file"):
        read_text(str(tmp_path / "none"), 100)
    with pytest.raises(InputError, match=r"cannot read the text .*: Is a directory"):
        read_text(str(tmp_path), 100)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(str(tmp_path / "text.txt"), 100) == "abc"


def test_a_long_file_is_read_no_further_than_needed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab" * 10_000)
    assert len(read_text(str(tmp_path / "text.txt"), 10)) == 320
