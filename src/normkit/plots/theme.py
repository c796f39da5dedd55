"""The one palette, the settings of every figure, and SVG whose bytes repeat.

Data colours are Okabe and Ito's (jfly.uni-koeln.de/color), which readers with any colour vision can
tell apart. Figures are drawn in the light colours; in a page each becomes a CSS variable, so that one
drawing serves the light and the dark scheme.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from normkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIGHT = {
    "paper": "#ffffff",
    "surface": "#f6f7f8",
    "ink": "#1b1e22",
    "muted": "#5a626b",
    "line": "#dcdfe3",
    "accent": "#0072b2",
    "contrast": "#d55e00",
    "third": "#009e73",
    "error": "#b03a00",
    "warning": "#855800",
    "note": "#005f96",
    "good": "#006b4e",
}
"""Name -> colour on white. `accent`, `contrast` and `third` are Okabe and Ito's blue, vermillion and green."""

DARK = {
    "paper": "#131619",
    "surface": "#1b1f23",
    "ink": "#e8eaed",
    "muted": "#a0a8b1",
    "line": "#343a41",
    "accent": "#56b4e9",
    "contrast": "#e69f00",
    "third": "#2fc79a",
    "error": "#ff8f5e",
    "warning": "#eeb33b",
    "note": "#7cc4ef",
    "good": "#4fd1aa",
}
"""The same names on a dark page: Okabe and Ito's sky blue and orange, and their green made lighter."""

# Distances are in points; 72 points are an inch of the figure, and a CSS pixel of the page at full width.
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["line"],
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": LIGHT["ink"],
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": LIGHT["paper"],
    "svg.fonttype": "none",
    "svg.hashsalt": "normkit",
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def style() -> Any:
    """Context manager under which figures are drawn and saved; Matplotlib's settings are put back after it.

    Raises:
        InputError: If Matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        raise InputError('figures need Matplotlib, which is not installed: pip install "normkit[plot]"') from None
    return rc_context(_SETTINGS)


def new_axes(width: float = 7.2, height: float = 3.5) -> Axes:
    """Axes alone in a new figure, of a size in inches; call it under `style`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


def svg(figure: Any, prefix: str) -> str:
    """A figure as an SVG element to stand in a page: no size of its own, colours as CSS variables.

    Args:
        figure: A Matplotlib figure drawn in the colours of `LIGHT`.
        prefix: Put before every id, so that several drawings can stand in one page.

    Returns:
        The element as text; equal bytes for equal figures.
    """
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return _for_a_page(buffer.getvalue(), prefix)


def _for_a_page(text: str, prefix: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    # The page's own font stands in; Matplotlib measured with DejaVu Sans, which is wider than most.
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
    return re.sub(r"\n\s*", "\n", text).strip()
