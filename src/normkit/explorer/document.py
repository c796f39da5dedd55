"""The page as one file: every script inside it, so that it opens from a disk or in a sandboxed frame."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.show.embedding import script_json
from normkit.show.theme import PALETTES

_PAGE = Path(__file__).parent / "page"


def document(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
        data: What the page shows beyond its own clouds of points; JSON without NaN.
    """
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("index.html").render(
        title=data["title"],
        colours=PALETTES,
        style=Markup((_PAGE / "style.css").read_text(encoding="utf-8")),
        modules=base64.b64encode(gzip.compress(json.dumps(modules()).encode(), mtime=0)).decode(),
        data=script_json(data),
    )


def modules() -> dict[str, str]:
    """Name under which scripts import a module -> its source."""
    return {f"explorer/{path.name}": path.read_text(encoding="utf-8") for path in sorted(_PAGE.glob("*.js"))}
