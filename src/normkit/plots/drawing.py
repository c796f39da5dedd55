"""A figure with its title, caption and description."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

from normkit.plots import theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """What the figure shows, for readers who cannot see it."""
    scheme: theme.Scheme = field(default_factory=theme.scheme)

    def svg(self) -> str:
        """The figure as an SVG element for a page, in the colours and the font of the page."""
        return theme.svg(self.figure, self.name, self.scheme)

    def file(self, kind: theme.Format) -> bytes:
        """The figure with its title and caption as the bytes of a file, the same for the same figure.

        Args:
            kind: "svg", "png" or "pdf".
        """
        return theme.sheet(self.figure, kind, self.scheme, self.title, self.caption)


def labelled(drawing: Drawing, label: str) -> Markup:
    """The SVG element of a figure with its accessible name."""
    return Markup(drawing.svg().replace("<svg", Markup('<svg role="img" aria-label="{}"').format(label), 1))
