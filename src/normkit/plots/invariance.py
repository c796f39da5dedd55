"""The invariances of each norm as a table of marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normkit.geometry.invariance import InvarianceTable
from normkit.plots import theme
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"batch": "BatchNorm", "weight": "WeightNorm", "layer": "LayerNorm", "rms": "RMSNorm"}

_SYMBOLS = {"^T": "ᵀ", "_1": "₁", "'": "′"}


def invariance_marks(table: InvarianceTable, ax: Axes | None = None) -> Drawing:
    """A full disc where the output does not change, a ring where it does, each with the measured change.

    Args:
        table: Of `normkit.geometry.invariances`.
        ax: Where to draw, or None for a new figure.
    """
    with theme.style():
        ax = ax or theme.new_axes(7.2, 0.55 * (len(table.rows) + 1.8))
        ax.set_axis_off()
        ax.set_xlim(-2.6, len(table.norms) - 0.4)
        ax.set_ylim(len(table.rows) + 0.25, -1.0)
        for column, norm in enumerate(table.norms):
            ax.text(column - 0.32, -0.72, _NAMES.get(norm, norm), va="center", weight="bold")
        for place, row in enumerate(table.rows):
            ax.axhline(place - 0.5, color=colour("line"), linewidth=0.8)
            ax.text(-2.6, place - 0.14, row.transformation, va="center")
            ax.text(-2.6, place + 0.2, _typeset(row.what), va="center", fontsize=8.5, color=colour("muted"))
            for column, cell in enumerate(row.cells):
                mark(ax, column - 0.22, place, is_invariant=cell.is_invariant)
                ax.text(column - 0.05, place, significant(cell.error), va="center", fontsize=8.5, color=colour("muted"))
        _legend(ax, len(table.rows))
    unchanged = {
        _NAMES.get(norm, norm): [row.transformation for row in table.rows if row.cells[place].is_invariant]
        for place, norm in enumerate(table.norms)
    }
    return Drawing(
        name="invariances",
        figure=figure_of(ax),
        title="What each norm does not notice",
        caption="A full disc: the output stays the same to the last digits (below "
        f"{significant(table.tolerance)}) when weights or data are changed so; a ring: it changes, by this share.",
        description=" ".join(f"{name} ignores {', '.join(rows) or 'nothing'}." for name, rows in unchanged.items()),
    )


def _typeset(formula: str) -> str:
    for plain, symbol in _SYMBOLS.items():
        formula = formula.replace(plain, symbol)
    return formula


def mark(ax: Axes, x: float, y: float, *, is_invariant: bool) -> None:
    """A full disc if the output stays, a ring if it changes."""
    name = "accent" if is_invariant else "contrast"
    face = colour(name) if is_invariant else "none"
    ax.plot(x, y, "o", markersize=10, color=face, markeredgecolor=colour(name), markeredgewidth=1.6)


def _legend(ax: Axes, rows: int) -> None:
    ax.axhline(rows - 0.5, color=colour("line"), linewidth=0.8)
    for place, is_invariant, words in ((-2.52, True, "stays the same"), (-1.25, False, "changes")):
        mark(ax, place, rows - 0.05, is_invariant=is_invariant)
        ax.text(place + 0.17, rows - 0.05, words, va="center", fontsize=9)
    words = "numbers: largest change over largest output"
    ax.text(-0.32, rows - 0.05, words, va="center", fontsize=9, color=colour("muted"))
