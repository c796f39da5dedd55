"""The palette in its two schemes, the settings of every figure, and reproducible files.

Data colours are Okabe and Ito's (jfly.uni-koeln.de/color), which readers with any colour vision can
tell apart. A figure is drawn in the colours of the scheme that `style` chose, light unless told otherwise;
in a page each colour becomes a CSS variable, so that one drawing serves both schemes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from normkit.errors import InputError
from normkit.plots.element import element

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Scheme = Literal["light", "dark"]
Format = Literal["svg", "png", "pdf"]

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

_PALETTES: Mapping[Scheme, Mapping[str, str]] = {"light": LIGHT, "dark": DARK}
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

# Around a figure that is a file of its own: inches; points that a character of caption and title takes on average.
_MARGIN, _CHARACTER, _LETTER = 0.2, 4.9, 8.0
# Without these, neither the date nor Matplotlib's version gets into a file.
_NO_METADATA: Mapping[Format, Mapping[str, None]] = {
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    "png": {"Software": None},
    "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
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
    return _PALETTES[_SCHEME.get()][name]


def new_axes(width: float = 7.2, height: float = 3.5) -> Axes:
    """Axes alone in a new figure, of a size in inches; call it under `style`."""
    return panels(1, 1, height, width)[0]


def panels(
    rows: int, columns: int, height: float, width: float = 7.2, given: Sequence[Axes] | None = None
) -> list[Axes]:
    """Axes in rows and columns of a new figure, of a size in inches, or those given; call it under `style`.

    Raises:
        InputError: If too few or too many are given.
    """
    from matplotlib.figure import Figure

    if given is not None:
        if len(given) != rows * columns:
            raise InputError(f"this figure needs {rows * columns} axes, got {len(given)}; give one a panel")
        return list(given)
    figure = Figure(figsize=(width, height), layout="constrained")
    return list(figure.subplots(rows, columns, squeeze=False).flat)


def sheet(figure: Figure, kind: Format, chosen: Scheme, title: str, caption: str) -> bytes:
    """A figure with its title above and its caption below, as the bytes of a file; equal for equal figures.

    Args:
        figure: Drawn in the scheme `chosen`; it is left as it was.
        kind: The format.
        chosen: The scheme.
        title: Also put into the file's metadata, as is the caption.
        caption: Broken into lines as wide as the figure.
    """
    from matplotlib.transforms import Bbox

    width, height = figure.get_size_inches()
    heading, lines = wrap(title, int(72 * width / _LETTER)), wrap(caption, int(72 * width / _CHARACTER))
    metadata = {"Title": title, "Subject" if kind == "pdf" else "Description": caption}
    buffer = io.BytesIO()
    with style(chosen):
        words = [
            figure.text(0, 1 + 0.16 / height, "\n".join(heading), fontsize=13, weight="bold", va="bottom"),
            figure.text(
                0, -0.14 / height, "\n".join(lines), fontsize=9.5, linespacing=1.4, va="top", color=colour("muted")
            ),
        ]
        area = Bbox([[-_MARGIN, -0.3 - 0.19 * len(lines)], [width + _MARGIN, height + 0.3 + 0.25 * len(heading)]])
        figure.savefig(buffer, format=kind, bbox_inches=area, metadata={**_NO_METADATA[kind], **metadata})
    for artist in words:
        artist.remove()
    return buffer.getvalue()


def svg(figure: Figure, prefix: str, chosen: Scheme = "light") -> str:
    """A figure as an SVG element to stand in a page: no size of its own, colours as CSS variables.

    Args:
        figure: A Matplotlib figure.
        prefix: Put before every id, so that several drawings can stand in one page.
        chosen: The scheme that it was drawn in.

    Returns:
        The element as text; equal bytes for equal figures.
    """
    buffer = io.StringIO()
    with style(chosen):
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict(_NO_METADATA["svg"]))
    return element(buffer.getvalue(), prefix, _PALETTES[chosen])
