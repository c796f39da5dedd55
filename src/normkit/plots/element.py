"""Turns a figure's SVG file into an element of a page: with the page's colours and font, and a quarter of the bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import groupby

_NUMBER = re.compile(r"-?\d+\.\d+")
_PATH = re.compile(r'<path d="([^"]*)"([^>]*)/>')
_STYLE = re.compile(r' style="([^"]*)"')
# A style that occurs this often gets a class.
_OFTEN = 3


def element(text: str, prefix: str, palette: Mapping[str, str]) -> str:
    """Matplotlib's SVG file as an element of a page.

    Args:
        text: The file.
        prefix: Put before every id and class, so that several drawings can stand in one page.
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
    text = _PATH.sub(lambda found: f'<path d="{_tight(found[1])}"{found[2]}/>', text)
    text = _without_empty_groups(re.sub(r"\s*\n\s*", "\n", text).strip())
    return _classed(_joined(text), prefix)


def _rounded(number: re.Match[str]) -> str:
    # Widths of lines and opacities are small: they keep two digits.
    value = float(number[0])
    short = f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def _tight(data: str) -> str:
    """Path data without unnecessary spaces."""
    return re.sub(r" ?([A-Za-z]) ?", r"\1", " ".join(data.split()))


def _without_empty_groups(text: str) -> str:
    """The text without groups that are empty, or that hold one shape and have no attributes."""
    while True:
        shorter = re.sub(r"<g/>\n?|<g>\s*</g>\n?", "", text)
        shorter = re.sub(r"<g>\n(<(?:path|text)[^>]*(?:/>|>[^<\n]*</text>))\n</g>", r"\1", shorter)
        if shorter == text:
            return text
        text = shorter


def _joined(text: str) -> str:
    """The text with neighbouring lines of one style merged into one path; filled shapes may overlap and stay."""
    lines = []
    for attributes, members in groupby(text.split("\n"), _line_style):
        run = list(members)
        if attributes is None or len(run) == 1:
            lines += run
        else:
            data = "".join(found[1] for found in map(_PATH.fullmatch, run) if found)
            lines.append(f'<path d="{data}"{attributes}/>')
    return "\n".join(lines)


def _line_style(line: str) -> str | None:
    found = _PATH.fullmatch(line)
    return found[2] if found and "fill: none" in found[2] else None


def _classed(text: str, prefix: str) -> str:
    """The text with each frequent style moved into a class."""
    often = [style for style, count in Counter(_STYLE.findall(text)).most_common() if count >= _OFTEN]
    names = {style: f"{prefix}-{place}" for place, style in enumerate(often)}
    text = _STYLE.sub(lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], text)
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return text.replace("</style>", f"{rules}</style>", 1)
