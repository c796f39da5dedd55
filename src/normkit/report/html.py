"""A report as one HTML file: it loads nothing, can be read without scripts, and has the same bytes every time."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.files import write_text
from normkit.inspection.result import Inspection
from normkit.plots import theme
from normkit.plots.drawing import Drawing, labelled
from normkit.plots.inspection import drawings
from normkit.report import embedding
from normkit.report.description import describe
from normkit.report.embedding import bars
from normkit.report.formula import mathml
from normkit.report.wording import printable

_HERE = Path(__file__).parent
_FRAME_HEIGHT = 760

# Beginning of a figure's name -> the section that it belongs to.
_SECTIONS = {"run": "run", "attention": "attention", "ellipsoid": "geometry", "": "depth"}


def render(inspection: Inspection) -> str:
    """The page as text."""
    figures: dict[str, list[Drawing]] = {section: [] for section in _SECTIONS.values()}
    for figure in printable(drawings(inspection)):
        section = next(section for start, section in _SECTIONS.items() if figure.name.startswith(start))
        figures[section].append(figure)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return (
        environment()
        .get_template("page.html")
        .render(
            report=describe(inspection),
            figures=figures,
            colours={"light": theme.LIGHT, "dark": theme.DARK},
            style=Markup(style_sheet()),
            script=Markup(script),
            # The name of the script in the content security policy.
            script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
            document=embedding.packed_json(inspection.to_json()),
        )
    )


def write(inspection: Inspection, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path.

    Raises:
        InputError: If it cannot be written there.
    """
    return write_text(path, render(inspection))


def frame(inspection: Inspection) -> str:
    """The page in a sandboxed frame, for notebooks."""
    title = f"normkit inspection of {describe(inspection).title}"
    return embedding.frame(render(inspection), title, height=_FRAME_HEIGHT)


def style_sheet() -> str:
    """The style sheet that all pages share."""
    return (_HERE / "page.css").read_text(encoding="utf-8")


def environment() -> Environment:
    """The templates, with the functions that they can call."""
    templates = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(mathml=mathml, bars=bars, svg=lambda drawing: labelled(drawing, drawing.description))
    # A path may be broken after each dot.
    templates.filters["breakable"] = lambda path: Markup(".<wbr>").join(path.split("."))
    return templates
