"""A report as one HTML file: no request leaves it, it reads without scripts, the same bytes every time."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.errors import InputError
from normkit.files import write_text
from normkit.inspection.result import Inspection
from normkit.plots import theme
from normkit.plots.drawing import Drawing
from normkit.plots.inspection import drawings
from normkit.report.bars import bars
from normkit.report.description import describe
from normkit.report.formula import mathml

_HERE = Path(__file__).parent
_FRAME_HEIGHT = 760


def render(inspection: Inspection) -> str:
    """The page as text.

    Where Matplotlib is not installed, the page says so in place of its figures.
    """
    figures: tuple[Drawing, ...] = ()
    missing = ""
    try:
        figures = drawings(inspection)
    except InputError as error:
        missing = f"No figures: {error}"
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=describe(inspection),
            figures=figures,
            missing=missing,
            colours={"light": theme.LIGHT, "dark": theme.DARK},
            style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=_hash(script),
            document=_embedded_json(inspection),
        )
    )


def write(inspection: Inspection, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path.

    Raises:
        InputError: If it cannot be written there.
    """
    return write_text(path, render(inspection))


def frame(inspection: Inspection) -> str:
    """The page in a sandboxed frame, for notebooks: its style and script stay inside."""
    title = html.escape(f"normkit inspection of {describe(inspection).title}")
    style = f"width: 100%; height: {_FRAME_HEIGHT}px; border: 0"
    page = html.escape(render(inspection))
    return f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(mathml=mathml, bars=bars, svg=_inline)
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(path: str) -> Markup:
    """A path that may go on to a new line after each dot."""
    return Markup(".<wbr>").join(path.split("."))


def _inline(drawing: Drawing) -> Markup:
    """The figure's element with its description as accessible name."""
    label = Markup('<svg role="img" aria-label="{}"').format(drawing.description)
    return Markup(drawing.svg().replace("<svg", label, 1))


def _hash(script: str) -> str:
    """What the content security policy calls this script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded_json(inspection: Inspection) -> Markup:
    """The inspection as JSON that can stand in a script element: no character of it can end one."""
    text = json.dumps(inspection.to_json(), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
