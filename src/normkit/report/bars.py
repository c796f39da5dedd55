"""The first entries of a vector as a row of bars, drawn by hand: too small for a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

_WIDTH, _HEIGHT, _GAP = 160.0, 96.0, 5.0


def bars(values: Sequence[float], mean: float, largest: float) -> Markup:
    """An SVG element: bars up and down from zero over a band from -1 to 1, the mean as a dashed line.

    Args:
        values: The entries; those that are not finite are left out.
        mean: Where the dashed line stands.
        largest: The magnitude that reaches the edge, at least that of every entry.
    """
    middle, step = _HEIGHT / 2, _WIDTH / max(1, len(values))
    scale = (middle - 1) / largest
    band = min(scale, middle)
    shapes = [f'<rect class="band" x="0" y="{middle - band:.1f}" width="{_WIDTH:g}" height="{2 * band:.1f}"/>']
    for place, value in enumerate(values):
        if math.isfinite(value):
            top = middle - max(0.0, value * scale)
            shapes.append(
                f'<rect x="{place * step + _GAP / 2:.1f}" y="{top:.1f}" width="{step - _GAP:.1f}" '
                f'height="{abs(value) * scale:.1f}"/>'
            )
    shapes.append(f'<path d="M0 {middle:g}H{_WIDTH:g}"/>')
    if abs(mean) <= largest:
        shapes.append(f'<path class="mean" d="M0 {middle - mean * scale:.1f}H{_WIDTH:g}"/>')
    opening = f'<svg class="bars" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" aria-hidden="true">'
    return Markup(f"{opening}{''.join(shapes)}</svg>")
