"""A template and its words as one HTML file: it loads nothing, can be read without scripts, and repeats its bytes."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.show.drawing import labelled
from normkit.show.embedding import bars
from normkit.show.theme import PALETTES
from normkit.spec import NormSpec

_HERE = Path(__file__).parent


def html_page(template: Path, *, script: str = "", **words: Any) -> str:
    """The text of a page.

    Args:
        template: A template that extends page.html.
        script: The page's one script.
        words: What the template says; a string is escaped.
    """
    return (
        _templates(template.parent)
        .get_template(template.name)
        .render(
            colours=PALETTES,
            style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            # The name of the script in the content security policy.
            script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
            **words,
        )
    )


@functools.cache
def _templates(folder: Path) -> Environment:
    """The templates of a folder; each is compiled once."""
    templates = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(mathml=mathml, bars=bars, svg=lambda drawing: labelled(drawing, drawing.description))
    # A path may be broken after each dot.
    templates.filters["breakable"] = lambda path: Markup(".<wbr>").join(path.split("."))
    return templates


def mathml(spec: NormSpec) -> Markup:
    """The formula as a `math` element in display style: mu is the row's mean, w its gain, b its bias."""
    # The conventions write constants and numbers, so only the text could need escaping.
    return Markup('<math display="block" alttext="{}">').format(str(spec)) + Markup(spec.mathml()) + Markup("</math>")
