"""Docstrings as mkdocstrings reads them: an "Example:" is a section of examples, and text is text."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Run on each object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_given: Any) -> None:
        """Name the section as griffe's Google style does."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **_given: Any) -> None:
        """Leave out methods that are called by signs alone, as by `with`."""
        for name in [name for name in cls.members if name.startswith("__") and name != "__init__"]:
            cls.del_member(name)
