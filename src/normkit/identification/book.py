"""The passports of one model as one JSON file, one line per convention, so that `diff` of two files reads well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit import files
from normkit.errors import IdentificationError, InputError, NormkitError
from normkit.identification.passport import Passport
from normkit.identification.sites import NormSite, OtherNorm, chosen, find_sites
from normkit.identification.tracing import trace
from normkit.text import counted

_SCHEMA = 1
_CONTENT = "passports of the norms of one model"
"""Tells the file from any other JSON."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One norm of a model."""

    path: str
    """Path of the module; "parent:function" for a function call."""
    class_name: str
    """Name of the class or of the function."""
    features: int
    """Number of features that its gain spans."""
    passport: Passport
    """The passport of the norm. One that was read from a file has no values of weight and bias."""

    @classmethod
    def of(cls, site: NormSite) -> Entry:
        """The entry of a norm that was found in a model."""
        return cls(path=site.path, class_name=site.class_name, features=site.shape[0], passport=site.passport)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary: the passport's, after what the model calls the norm."""
        return {"class_name": self.class_name, "features": self.features, **self.passport.to_json()}

    @classmethod
    def from_json(cls, path: str, values: Any) -> Entry:
        """The entry that `to_json` wrote.

        Raises:
            IdentificationError: If it is none; the message names the path.
        """
        try:
            passport = Passport.from_json(values)
            features = values["features"]
            if not isinstance(features, int) or features < 1:
                reason = f"features must be a whole number from 1 on, got {features!r}; write the file anew"
                raise IdentificationError(reason)
        except NormkitError as error:
            raise IdentificationError(f"{path}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{path} is damaged ({type(error).__name__}: {error}); write the file anew"
            raise IdentificationError(reason) from None
        return cls(path=path, class_name=str(values.get("class_name", "")), features=features, passport=passport)


@dataclass(frozen=True, kw_only=True, eq=False)
class PassportBook:
    """The passports of all norms of one model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> book = survey(model, lambda: model(torch.randn(2, 4)), name="mine")
        >>> [(entry.path, str(entry.passport.spec)) for entry in book.entries]
        [('1', 'y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias')]
    """

    model: str
    entries: tuple[Entry, ...]
    """The norms in forward order."""
    left_out: Mapping[str, str]
    """Path -> reason, for modules that normalize in a way that no spec describes."""

    def __str__(self) -> str:
        """The norms by kind, as `normkit identify` prints them."""
        from normkit.identification.report import describe_book
        from normkit.show.terminal import printed, section

        return printed(section(describe_book(self)))

    def __repr__(self) -> str:
        return f"<PassportBook of {self.model}: {counted(len(self.entries), 'norm')}>"

    @classmethod
    def of(cls, name: str, sites: Sequence[NormSite], left_out: Sequence[OtherNorm]) -> PassportBook:
        """The book of what `find_sites` found."""
        reasons = {other.path: other.reason for other in left_out}
        return cls(model=name, entries=tuple(map(Entry.of, sites)), left_out=reasons)

    def only(self, pattern: str | None) -> PassportBook:
        """The book of the norms that `sites.chosen` chooses.

        Raises:
            InputError: If it chooses none.
        """
        paths = chosen([*(entry.path for entry in self.entries), *self.left_out], pattern, self.model)
        entries = tuple(entry for entry in self.entries if entry.path in paths)
        left_out = {path: reason for path, reason in self.left_out.items() if path in paths}
        return PassportBook(model=self.model, entries=entries, left_out=left_out)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with a `schema_version`."""
        return {
            "schema_version": _SCHEMA,
            "content": _CONTENT,
            "model": self.model,
            "sites": {entry.path: entry.to_json() for entry in self.entries},
            "left_out": dict(self.left_out),
        }

    @classmethod
    def from_json(cls, values: Any) -> PassportBook:
        """The book that `to_json` wrote, without the values of weights and biases.

        Raises:
            IdentificationError: If this is no such document, or one of another schema.
        """
        if not isinstance(values, dict) or values.get("content") != _CONTENT:
            raise IdentificationError(f"it holds no {_CONTENT}; `normkit identify MODEL` writes such a file")
        if values.get("schema_version") != _SCHEMA:
            raise IdentificationError(
                f"expected schema_version {_SCHEMA}, got {values.get('schema_version')!r}; write it anew, or update "
                "normkit"
            )
        sites, left_out = values.get("sites"), values.get("left_out", {})
        if not isinstance(sites, dict) or not isinstance(left_out, dict):
            raise IdentificationError('"sites" and "left_out" must be objects; the file is damaged, write it anew')
        return cls(
            model=str(values.get("model", "")),
            entries=tuple(Entry.from_json(path, entry) for path, entry in sites.items()),
            left_out={path: str(reason) for path, reason in left_out.items()},
        )

    def write(self, path: Path) -> Path:
        """Write the file, whole or not at all, the same bytes for the same passports; returns its path.

        Raises:
            InputError: If it cannot be written there.
        """
        return files.write_text(path, files.json_text(self.to_json()))

    @classmethod
    def read(cls, path: Path) -> PassportBook:
        """Read a file of passports.

        Raises:
            InputError: If it cannot be read.
            IdentificationError: If it holds anything else; the message names the file.
        """
        try:
            values = files.parse_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}; give a file of passports") from None
        except InputError as error:
            reason = (
                f"expected passports in {path}, found no JSON: {error}; `normkit identify MODEL` writes such a file"
            )
            raise IdentificationError(reason) from None
        try:
            return cls.from_json(values)
        except NormkitError as error:
            raise IdentificationError(f"cannot use {path} as passports: {error}") from None


def survey(model: nn.Module, run: Callable[[], object], *, name: str = "") -> PassportBook:
    """Find and identify every norm that one forward pass of a model calls.

    Args:
        model: The model; it is left as it is.
        run: Calls the model on a small input.
        name: What to call the model.
    """
    with torch.no_grad():
        sites, left_out = find_sites(model, trace(model, run))
    return PassportBook.of(name or type(model).__name__, sites, left_out)
