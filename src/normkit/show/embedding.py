"""Parts of a page: data that cannot end its element, small drawings, and another page in a frame."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

# Sizes of a drawing of bars.
_WIDTH, _HEIGHT, _GAP = 160.0, 96.0, 5.0


def script_json(content: Any) -> Markup:
    """JSON for a script element: no character of it can end the element, and NaN is refused."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def packed_json(content: Any) -> str:
    """JSON compressed by gzip, in base64: the same bytes for the same content, without characters of markup."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def frame(page: str, title: str, *, height: int, sandbox: str = "allow-scripts") -> str:
    """A page in a sandboxed frame, for notebooks: its style and script stay inside.

    Args:
        page: The whole page.
        title: Its accessible name.
        height: In CSS pixels.
        sandbox: What the page may do.
    """
    attributes = f'title="{html.escape(title)}" sandbox="{sandbox}" style="width: 100%; height: {height}px; border: 0"'
    return f'<iframe {attributes} srcdoc="{html.escape(page)}"></iframe>'


def bars(values: Sequence[float], mean: float) -> Markup:
    """An SVG element: bars up and down from zero over a band from -1 to 1, the mean as a dashed line.

    The largest bar takes the whole height, so that each drawing has its own scale.

    Args:
        values: The entries; those that are not finite are left out.
        mean: Position of the dashed line, which is drawn if it is within the bars.
    """
    finite = [value for value in values if math.isfinite(value)]
    lowest, highest = min([0.0, *finite]), max([0.0, *finite])
    if lowest == highest:
        lowest, highest = -1.0, 1.0
    step = _WIDTH / max(1, len(values))
    scale = _HEIGHT / (highest - lowest)
    zero = highest * scale
    top, bottom = max(0.0, zero - scale), min(_HEIGHT, zero + scale)
    shapes = [f'<rect class="band" y="{top:.1f}" width="{_WIDTH:g}" height="{bottom - top:.1f}"/>']
    for place, value in enumerate(values):
        if math.isfinite(value):
            x, y = place * step + _GAP / 2, zero - max(0.0, value * scale)
            size = f'width="{step - _GAP:.1f}" height="{abs(value) * scale:.1f}"'
            shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size}/>')
    shapes.append(f'<path d="M0 {zero:.1f}H{_WIDTH:g}"/>')
    if lowest <= mean <= highest:
        shapes.append(f'<path class="mean" d="M0 {zero - mean * scale:.1f}H{_WIDTH:g}"/>')
    opening = f'<svg class="bars" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" aria-hidden="true">'
    return Markup(f"{opening}{''.join(shapes)}</svg>")
