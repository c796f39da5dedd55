"""A figure with its title, caption and description; its bytes as a file, and as an element of a page.

The element has the page's colours and font, and a quarter of the bytes of Matplotlib's SVG file.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from normkit.show import theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["svg", "png", "pdf"]

# Around a figure that is a file of its own: inches; points that a character of caption and title takes on average.
_MARGIN, _CHARACTER, _LETTER = 0.2, 4.9, 8.0
# Without these, neither the date nor Matplotlib's version gets into a file.
_NO_METADATA: Mapping[Format, Mapping[str, None]] = {
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    "png": {"Software": None},
    "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
}
_NUMBER = re.compile(r"-?\d+\.\d+")
_PATH = re.compile(r'<path d="([^"]*)"([^>]*)/>')
_STYLE = re.compile(r' style="([^"]*)"')
# A style that occurs this often gets a class.
_OFTEN = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """One figure of a result."""

    name: str
    """A short identifier, as in "input-scale"."""
    figure: Figure
    title: str
    caption: str
    """One sentence that says how to read it."""
    description: str
    """The description of the figure for readers who cannot see it."""
    scheme: theme.Scheme = field(default_factory=theme.scheme)

    def svg(self) -> str:
        """The figure as an SVG element for a page, in the colours and the font of the page; it has no size."""
        buffer = io.StringIO()
        with theme.style(self.scheme):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata=dict(_NO_METADATA["svg"]))
        return element(buffer.getvalue(), self.name, theme.PALETTES[self.scheme])

    def file(self, kind: Format) -> bytes:
        """The figure with its title above and its caption below as the bytes of a file, the same for the same figure.

        Title and caption are in the file's metadata, too; the figure is left as it was.

        Args:
            kind: "svg", "png" or "pdf".
        """
        from matplotlib.transforms import Bbox

        width, height = self.figure.get_size_inches()
        heading = wrap(self.title, int(72 * width / _LETTER))
        lines = wrap(self.caption, int(72 * width / _CHARACTER))
        metadata = {"Title": self.title, "Subject" if kind == "pdf" else "Description": self.caption}
        area = Bbox([[-_MARGIN, -0.3 - 0.19 * len(lines)], [width + _MARGIN, height + 0.3 + 0.25 * len(heading)]])
        below: Any = {"fontsize": 9.5, "linespacing": 1.4, "va": "top"}
        buffer = io.BytesIO()
        with theme.style(self.scheme):
            words = [
                self.figure.text(0, 1 + 0.16 / height, "\n".join(heading), fontsize=13, weight="bold", va="bottom"),
                self.figure.text(0, -0.14 / height, "\n".join(lines), color=theme.colour("muted"), **below),
            ]
            self.figure.savefig(buffer, format=kind, bbox_inches=area, metadata={**_NO_METADATA[kind], **metadata})
        for artist in words:
            artist.remove()
        return buffer.getvalue()


def labelled(drawing: Drawing, label: str) -> Markup:
    """The SVG element of a figure with its accessible name."""
    return Markup(drawing.svg().replace("<svg", Markup('<svg role="img" aria-label="{}"').format(label), 1))


def element(text: str, prefix: str, palette: Mapping[str, str]) -> str:
    """Matplotlib's SVG file as an element of a page; equal bytes for equal figures.

    Args:
        text: The file.
        prefix: Put before every id and class, so that several drawings can be in one page.
        palette: Name -> colour, as drawn; each becomes the page's variable of that name.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    # The page's font is used; Matplotlib measured with DejaVu Sans, which is wider than most fonts.
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    for name, code in palette.items():
        text = text.replace(code, f"var(--{name})")
    referred = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'xlink:href="#([^"]+)"', text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in referred else "", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    # Round coordinates to a tenth of a point, but no numbers between the tags, which are text.
    text = re.sub(r"<[^>]+>", lambda tag: _NUMBER.sub(_rounded, tag[0]), text)
    text = _PATH.sub(lambda found: f'<path d="{_without_spaces(found[1])}"{found[2]}/>', text)
    text = re.sub(r"\s*\n\s*", "\n", text).strip()
    # Groups that are empty, or that hold one shape and have no attributes, go, from the innermost outwards.
    longer = ""
    while text != longer:
        longer = text
        text = re.sub(r"<g/>\n?|<g>\s*</g>\n?", "", text)
        text = re.sub(r"<g>\n(<(?:path|text)[^>]*(?:/>|>[^<\n]*</text>))\n</g>", r"\1", text)
    text = _with_joined_lines(text)
    # Each frequent style becomes a class.
    often = [style for style, count in Counter(_STYLE.findall(text)).most_common() if count >= _OFTEN]
    names = {style: f"{prefix}-{place}" for place, style in enumerate(often)}
    text = _STYLE.sub(lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], text)
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return text.replace("</style>", f"{rules}</style>", 1)


def _rounded(number: re.Match[str]) -> str:
    # Widths of lines and opacities are small: they keep two digits.
    value = float(number[0])
    short = f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def _without_spaces(data: str) -> str:
    """Path data without unnecessary spaces."""
    return re.sub(r" ?([A-Za-z]) ?", r"\1", " ".join(data.split()))


def _with_joined_lines(text: str) -> str:
    """The text with neighbouring lines of one style as one path; filled shapes may overlap and are left."""

    def line_style(line: str) -> str | None:
        found = _PATH.fullmatch(line)
        return found[2] if found and "fill: none" in found[2] else None

    lines = []
    for attributes, members in groupby(text.split("\n"), line_style):
        run = list(members)
        if attributes is None or len(run) == 1:
            lines += run
        else:
            data = "".join(found[1] for found in map(_PATH.fullmatch, run) if found)
            lines.append(f'<path d="{data}"{attributes}/>')
    return "\n".join(lines)
