"""Files below a folder, and what tells them apart."""

from __future__ import annotations

import hashlib
import os

import pytest

from normkit.checkpoint.fingerprints import Fingerprint, file_names, fingerprints, sha256
from normkit.errors import InputError


def test_hidden_files_are_none_of_them(tmp_path):
    for name in ("b", "a/c", ".hidden", ".git/config", "a/.d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert file_names(tmp_path) == ["a/c", "b"]


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path)
    assert file_names(tmp_path) == ["loop"]
    with pytest.raises(InputError, match="loop"):
        sha256(tmp_path / "loop")


def test_a_hash_is_that_of_the_content_however_long(tmp_path):
    content = os.urandom(2**21 + 5)
    (tmp_path / "file").write_bytes(content)
    steps = []
    assert sha256(tmp_path / "file", steps.append) == hashlib.sha256(content).hexdigest()
    assert sum(steps) == len(content)
    assert max(steps) <= 2**20


def test_known_hashes_are_not_taken_again(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    found = fingerprints(tmp_path, ["b"], {"a": "known"})
    assert list(found.items()) == [
        ("a", Fingerprint(1, "known")),
        ("b", Fingerprint(1, hashlib.sha256(b"b").hexdigest())),
    ]


def test_what_is_no_file_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent"):
        with pytest.raises(InputError, match=f"expected a file in .*{name}"):
            sha256(tmp_path / name)
