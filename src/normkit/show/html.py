"""A template and its words as one HTML file: it loads nothing, can be read without scripts, and repeats its bytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from normkit.show.embedding import bars
from normkit.show.formula import mathml

_HERE = Path(__file__).parent


def html_page(template: Path, colours: Mapping[str, Mapping[str, str]], *, script: str = "", **words: Any) -> str:
    """The text of a page.

    Args:
        template: A template that extends page.html.
        colours: The palettes "light" and "dark": the name of a colour -> its value.
        script: The page's one script.
        words: What the template says; a string is escaped.
    """
    templates = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(mathml=mathml, bars=bars, svg=_labelled)
    # A path may be broken after each dot.
    templates.filters["breakable"] = lambda path: Markup(".<wbr>").join(path.split("."))
    return templates.get_template(template.name).render(
        colours=colours,
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # The name of the script in the content security policy.
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        **words,
    )


def _labelled(drawing: Any) -> Markup:
    """The SVG element of a figure, with the figure's description as its accessible name."""
    label = Markup('<svg role="img" aria-label="{}"').format(drawing.description)
    return Markup(drawing.svg().replace("<svg", label, 1))
