"""What stands inside a page: data that no character of can end its element, and a page that stands in another."""

from __future__ import annotations

import base64
import gzip
import html
import json
from typing import Any

from markupsafe import Markup


def script_json(content: Any) -> Markup:
    """JSON that can stand in a script element: no character of it can end one, and NaN is refused."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def packed_json(content: Any) -> str:
    """JSON compressed by gzip, in base64: the same bytes for the same content, with no character that markup knows."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def frame(page: str, title: str, *, height: int, sandbox: str = "allow-scripts") -> str:
    """A page in a sandboxed frame, for notebooks: its style and script stay inside.

    Args:
        page: The whole page.
        title: What the frame is called by those who do not see it.
        height: In CSS pixels.
        sandbox: What the page may do.
    """
    attributes = f'title="{html.escape(title)}" sandbox="{sandbox}" style="width: 100%; height: {height}px; border: 0"'
    return f'<iframe {attributes} srcdoc="{html.escape(page)}"></iframe>'
