"""Tiny checkpoints and their folds on disk, and the ways in which someone could tamper with them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normkit.checkpoint import fold
from normkit.checkpoint.model_folder import CERTIFICATE
from normkit.checkpoint.reader import Located, read_header
from normkit.checkpoint.verification import Checked, Verification
from normkit.demo.architecture import byte_tokenizer
from tiny_models import tiny


@dataclass(frozen=True)
class Pair:
    """A checkpoint and what folding made of it."""

    source: Path
    result: Path

    def copy(self, folder: Path) -> Pair:
        """The same elsewhere, to be tampered with."""
        return Pair(
            Path(shutil.copytree(self.source, folder / "source")), Path(shutil.copytree(self.result, folder / "result"))
        )

    @property
    def certificate(self) -> dict[str, Any]:
        return json.loads((self.result / CERTIFICATE).read_text())


def folded(
    folder: Path,
    family: str = "gpt2",
    dtype: torch.dtype = torch.float32,
    *,
    dtype_of_result: str = "same",
    **options: Any,
) -> Pair:
    """A tiny model with a tokenizer, in several files, folded."""
    source = folder / "source"
    model = tiny(family, dtype=dtype)[0]
    model.save_pretrained(source, max_shard_size="20KB")
    byte_tokenizer(28).save_pretrained(source)
    fold(source, folder / "result", dtype=dtype_of_result, **options)
    return Pair(source, folder / "result")


def tensors(folder: Path) -> dict[str, Located]:
    """Where each tensor of a checkpoint lies."""
    return {name: found for file in sorted(folder.glob("*.safetensors")) for name, found in read_header(file).items()}


def flip(file: Path, byte: int, bit: int = 0) -> None:
    """Turn over one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        (value,) = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([value ^ (1 << bit)]))


@contextmanager
def flipped(file: Path, byte: int, bit: int = 0) -> Iterator[None]:
    """One bit of a file turned over, and back afterwards."""
    flip(file, byte, bit)
    try:
        yield
    finally:
        flip(file, byte, bit)


def write_certificate(folder: Path, document: dict[str, Any]) -> None:
    """As normkit writes it."""
    (folder / CERTIFICATE).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def forge(pair: Pair) -> None:
    """Have the certificate name the files that are there, as one would who hides what was done to them."""
    document = pair.certificate
    for side, folder in (("source", pair.source), ("result", pair.result)):
        files = {
            str(path.relative_to(folder)): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != CERTIFICATE
        }
        document[side]["files"] = dict(sorted(files.items()))
    write_certificate(pair.result, document)


def failed(found: Verification) -> dict[str, str]:
    """Name -> what, of each check that failed."""
    assert found.passed == all(check.passed is not False for check in found.checks)
    return {check.name: check.what for check in found.checks if check.passed is False}


def check(found: Verification, name: str) -> Checked:
    """One check of a verification."""
    return next(check for check in found.checks if check.name == name)


ENGLISH = ("reason", "reasons", "remarks", "does_not_prove")
"""Keys of a certificate that stand for people."""


def without_english(document: Any) -> Any:
    """A certificate without its sentences."""
    if isinstance(document, dict):
        return {key: without_english(value) for key, value in document.items() if key not in ENGLISH}
    return [without_english(value) for value in document] if isinstance(document, list) else document


def reworded(document: Any, key: str = "") -> Any:
    """A certificate with other sentences."""
    if isinstance(document, dict):
        return {name: reworded(value, name) for name, value in document.items()}
    if isinstance(document, list):
        return ["said better"] if key in ENGLISH else [reworded(value) for value in document]
    return "said better" if key in ENGLISH and document else document
