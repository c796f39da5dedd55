"""The folder of a verb's output: always below one folder, never in the folder of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from normkit import files
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection


def output_folder(out: Path, *names: str, source: Path | None = None) -> Path:
    """The folder that a verb writes to, checked before minutes are spent on measuring.

    Args:
        out: The value of --out.
        names: Names of the folders below it; the "/" of a Hub id and the ":" of FILE.py:NAME become "--".
        source: The folder that the model was read from, or None.

    Raises:
        InputError: If it lies within the model's folder, or cannot be made or written to.
    """
    folder = out.joinpath(*(name.replace("/", "--").replace(":", "--") for name in names))
    if source is not None and folder.resolve().is_relative_to(source.resolve()):
        raise InputError(
            f"the results would be written to {folder}, inside the model's own folder; choose --out elsewhere"
        )
    require_writable(folder)
    return folder


def require_file(file: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        InputError: If it is a folder or read-only, or its folder cannot be made or written to.
    """
    if file.is_dir():
        raise InputError(f"cannot write to {file}: it is a folder; give the name of a file in it")
    if file.exists() and not os.access(file, os.W_OK):
        raise InputError(f"cannot write to {file}: it is read-only; choose another file")
    require_writable(file.parent)


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to.

    Raises:
        InputError: If a file is in its place or above it, or the folder that would contain it is read-only.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise InputError(f"cannot write to {folder}: {existing} is a file; choose another folder with --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {folder}: {existing} is read-only; choose another folder with --out")


def write_report(inspection: Inspection, folder: Path) -> Path:
    """Write report.html and report.json, and return the path of the page.

    Raises:
        InputError: If a file cannot be written.
    """
    files.write_text(folder / "report.json", files.json_text(inspection.to_json()))
    return inspection.write_html(folder / "report.html")
