"""Docstrings as mkdocstrings reads them: an "Example:" is a section of examples, and text is text."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Run on each object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_given: Any) -> None:
        """Name the section as griffe's Google style does; methods that are called by signs alone are not listed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if obj.is_function and obj.name.startswith("__") and obj.name != "__init__":
            obj.public = False
