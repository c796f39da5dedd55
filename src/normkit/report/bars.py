"""The first entries of a vector as a row of bars, drawn by hand: too small for a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

_WIDTH, _HEIGHT, _GAP = 160.0, 96.0, 5.0


def bars(values: Sequence[float], mean: float) -> Markup:
    """An SVG element: bars up and down from zero over a band from -1 to 1, the mean as a dashed line.

    The largest bar takes the whole height, so that each drawing stands on a scale of its own.

    Args:
        values: The entries; those that are not finite are left out.
        mean: Where the dashed line stands, if that is within the bars.
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
