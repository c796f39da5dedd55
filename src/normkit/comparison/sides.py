"""The two sides of a comparison: what the user gave is opened into what it offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS
from normkit.errors import KindError
from normkit.identification.book import PassportBook

Form = Literal["folder", "passports", "module"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One of the two that are compared."""

    name: str
    """What to call it."""
    given: str
    """What the user gave; the same as the name for objects in memory."""
    form: Form
    """What it is."""
    path: Path | None = None
    """The file or the folder that it is read from."""
    loaded: LoadedModel | None = None
    """The model with its tokenizer, if it was loaded from a folder."""
    model: nn.Module | None = None
    """A model that can be run."""
    book: PassportBook | None = None
    """The passports of its norms, if they are written down."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""


def open_side(
    given: Any,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    show_downloads: bool = False,
) -> Side:
    """Open one side of a comparison.

    Args:
        given: A model's folder or Hub id, a file of passports, an `nn.Module`, or a `PassportBook`.
        dtype: As `load_model` takes it.
        revision: Branch, tag or commit of a Hub id.
        local_files_only: Ask no server.
        show_downloads: Leave the Hub's download bars on.

    Raises:
        ModelError: If a model cannot be loaded.
        InputError: If a file cannot be used.
        KindError: If it is something else.
    """
    if isinstance(given, nn.Module):
        name = type(given).__name__
        return Side(name=name, given=name, form="module", model=given)
    if isinstance(given, PassportBook):
        return Side(name=given.model, given=given.model, form="passports", book=given)
    if not isinstance(given, str | Path):
        raise KindError(f"compare: expected a model, its folder, a Hub id or passports, got {type(given).__name__}")
    path = Path(given).expanduser()
    if path.is_file() and path.name not in (CONFIG, WEIGHTS, INDEX):
        book = PassportBook.read(path)
        return Side(name=book.model, given=str(given), form="passports", path=path, book=book)
    loaded = load_model(
        str(given), dtype=dtype, revision=revision, local_files_only=local_files_only, show_downloads=show_downloads
    )
    return Side(
        name=loaded.name,
        given=str(given),
        form="folder",
        path=loaded.path,
        loaded=loaded,
        model=loaded.model,
        notes=loaded.notes,
    )
