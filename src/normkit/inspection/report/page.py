"""The page of an inspection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normkit.inspection.figures import drawings
from normkit.inspection.report.description import describe
from normkit.show import embedding
from normkit.show.drawing import Drawing
from normkit.show.html import html_page
from normkit.show.parts import printable

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

_HERE = Path(__file__).parent
_FRAME_HEIGHT = 760

# Beginning of a figure's name -> the section that it belongs to.
_SECTIONS = {"run": "steps", "attention": "attention", "ellipsoid": "geometry", "": "depth"}


def render(inspection: Inspection) -> str:
    """The page as text."""
    figures: dict[str, list[Drawing]] = {section: [] for section in _SECTIONS.values()}
    for figure in printable(drawings(inspection)):
        section = next(section for start, section in _SECTIONS.items() if figure.name.startswith(start))
        figures[section].append(figure)
    return html_page(
        _HERE / "inspection.html",
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        kind="inspection",
        start="verdict",
        report=describe(inspection),
        figures=figures,
        document=embedding.packed_json(inspection.to_json()),
    )


def frame(inspection: Inspection) -> str:
    """The page in a sandboxed frame, for notebooks."""
    title = f"normkit inspection of {describe(inspection).title}"
    return embedding.frame(render(inspection), title, height=_FRAME_HEIGHT)
