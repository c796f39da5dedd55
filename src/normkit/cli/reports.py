"""Where a verb's report goes: a folder that is no model's own, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from normkit import files
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

DEFAULT = Path("normkit-report")


def report_folder(out: Path | None, name: str, source: Path) -> Path:
    """The folder for the report on a model, checked before minutes are spent on measuring.

    Args:
        out: The folder that the user chose, or None for `normkit-report/<name>`.
        name: Of the model; the "/" of a Hub id becomes "--".
        source: The folder that the model was read from.

    Raises:
        InputError: If it lies within the model's folder, or cannot be made or written to.
    """
    folder = out if out is not None else DEFAULT / name.replace("/", "--")
    if folder.resolve().is_relative_to(source.resolve()):
        raise InputError(
            f"the report would be written to {folder}, inside the model's own folder; choose --out elsewhere"
        )
    require_writable(folder)
    return folder


def page_file(out: Path | None, name: str, source: Path | None) -> Path:
    """The file for the explorer's page, checked before a model runs.

    Args:
        out: The file that the user chose, or None for `normkit-report/<name>/explorer.html`.
        name: Of the model, or "" for the page without one; the "/" of a Hub id becomes "--".
        source: The folder that the model was read from, or None.

    Raises:
        InputError: If it is stdout, lies within the model's folder, is a folder, or cannot be written.
    """
    if out is not None and str(out) == "-":
        raise InputError("the page is a file to be opened and does not go to stdout, got --out -; name a file")
    file = out if out is not None else DEFAULT / name.replace("/", "--") / "explorer.html"
    if source is not None and file.resolve().is_relative_to(source.resolve()):
        raise InputError(f"the page would be written to {file}, inside the model's own folder; choose --out elsewhere")
    require_file(file)
    return file


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
        InputError: If a file is in its place or above it, or what it would lie in is read-only.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
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
