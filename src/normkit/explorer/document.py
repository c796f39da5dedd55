"""The page as one file: every script inlined as a data URL, so that it opens from a disk or in a sandboxed frame."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.plots import theme

_PAGE = Path(__file__).parent / "page"


def document(data: dict[str, Any]) -> str:
    """The page with its data.

    Args:
        data: What the page shows beyond its own clouds of points; JSON without NaN.
    """
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("index.html").render(
        title=data["title"],
        colours={"light": theme.LIGHT, "dark": theme.DARK},
        style=Markup((_PAGE / "style.css").read_text(encoding="utf-8")),
        import_map=_embedded({"imports": modules()}),
        data=_embedded(data),
    )


def modules() -> dict[str, str]:
    """The name that scripts import -> a data URL that holds the module."""
    return {
        f"explorer/{path.name}": "data:text/javascript;base64," + base64.b64encode(path.read_bytes()).decode()
        for path in sorted(_PAGE.glob("*.js"))
    }


def _embedded(content: Any) -> Markup:
    """JSON that can stand in a script element: no character of it can end one."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
