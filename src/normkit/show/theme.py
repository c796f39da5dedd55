"""The palette in its two schemes, and the settings of every figure.

Data colours are Okabe and Ito's (jfly.uni-koeln.de/color), which readers with any colour vision can
tell apart. A figure is drawn in the colours of the scheme that `style` chose, light unless told otherwise;
in a page each colour becomes a CSS variable, so that one drawing serves both schemes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

Scheme = Literal["light", "dark"]

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

PALETTES: Mapping[Scheme, Mapping[str, str]] = {"light": LIGHT, "dark": DARK}
_SCHEME: ContextVar[Scheme] = ContextVar("scheme", default="light")

# Distances are in points; 72 points are an inch of the figure, and a CSS pixel of the page at full width.
_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "normkit",
}
_COLOURED = {
    "ink": ("axes.labelcolor", "axes.titlecolor", "text.color"),
    "muted": ("xtick.labelcolor", "ytick.labelcolor"),
    "line": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "paper": ("axes.facecolor", "figure.facecolor"),
}


@contextmanager
def style(chosen: Scheme | None = None) -> Iterator[None]:
    """Context manager under which figures are drawn and saved; Matplotlib's settings are put back after it.

    Args:
        chosen: Colours on white or on a dark page; None keeps the scheme of the `style` around this one.
    """
    from matplotlib import rc_context

    token = _SCHEME.set(chosen or scheme())
    settings: Any = {**_SETTINGS, **{key: colour(name) for name, keys in _COLOURED.items() for key in keys}}
    try:
        with rc_context(settings):
            yield
    finally:
        _SCHEME.reset(token)


def scheme() -> Scheme:
    """The scheme of the innermost `style`."""
    return _SCHEME.get()


def colour(name: str) -> str:
    """A colour of the palette, in the scheme of the innermost `style`."""
    return PALETTES[_SCHEME.get()][name]
