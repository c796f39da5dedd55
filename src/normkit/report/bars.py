"""The first entries of a vector as a row of bars, drawn by hand: too small for a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

_WIDTH, _HEIGHT, _GAP = 160.0, 96.0, 5.0


def bars(values: Sequence[float], mean: float, lowest: float, highest: float) -> Markup:
    """An SVG element: bars up and down from zero over a band from -1 to 1, the mean as a dashed line.

    Args:
        values: The entries, from `lowest` to `highest`; those that are not finite are left out.
        mean: Where the dashed line stands.
        lowest: What the lower edge stands for, at most -1.
        highest: What the upper edge stands for, at least 1.
    """
    step = _WIDTH / max(1, len(values))
    scale = _HEIGHT / (highest - lowest)
    zero = highest * scale
    shapes = [f'<rect class="band" y="{zero - scale:.1f}" width="{_WIDTH:g}" height="{2 * scale:.1f}"/>']
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
