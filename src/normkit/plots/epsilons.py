"""The two places of epsilon: how much one value shortens a short row inside the root and outside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from normkit.conventions.eps import PLACEMENTS, EpsPlacement
from normkit.errors import InputError
from normkit.geometry.scaling import agreement_scale, shrink_factor
from normkit.plots import theme
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES: tuple[tuple[EpsPlacement, str, str], ...] = (
    ("inside", "inside:\n√(v + ε)", "accent"),
    ("outside", "outside:\n√v + ε", "contrast"),
)


def two_epsilons(eps: float = 1e-5, axes: Sequence[Axes] | None = None) -> Drawing:
    """How long a scaled row comes out, and what it lacks, over the row's rms, with eps inside and outside the root.

    Args:
        eps: The one number, between 0 and 1.
        axes: Two axes to draw into, or None for a new figure.

    Raises:
        InputError: If eps is not between 0 and 1.
    """
    if not 0.0 < eps < 1.0:
        raise InputError(f"eps must lie between 0 and 1 for the two places to agree anywhere, got {eps!r}")
    scale = torch.logspace(math.log10(eps) - 2.5, 1.0, 401, dtype=torch.float64)
    same = agreement_scale(eps)
    agreement = (same, _missing(same, eps))
    half = {}
    with theme.style():
        kept, lost = theme.panels(1, 2, 3.3, given=axes)
        for placement, label, name in _CURVES:
            factor = scale / PLACEMENTS[placement].scale_of_root(scale, eps)
            kept.plot(scale, factor, color=colour(name))
            lost.plot(scale, 1 - factor, color=colour(name))
            half[placement] = float(scale[(factor - 0.5).abs().argmin()])
            kept.annotate(
                label,
                (half[placement], 0.5),
                (-6, 42) if placement == "outside" else (7, -9),
                textcoords="offset points",
                color=colour(name),
                ha="right" if placement == "outside" else "left",
            )
        _name_axes(kept, lost, eps)
        _mark_agreement(lost, *agreement)
    return Drawing(
        name="two-epsilons",
        figure=figure_of(kept),
        title=f"One epsilon, two places: ε = {significant(eps)} inside or outside the root",
        caption="A row much shorter than ε's own scale is not brought to length √n. Inside the root that scale is √ε, "
        "outside it is ε; the two agree at one row only, with an rms near one half.",
        description=f"Inside the root half the length is lost at an rms of {significant(half['inside'])}, outside at "
        f"{significant(half['outside'])}. Both lose {significant(agreement[1])} at {significant(same)}; of longer rows "
        "outside takes more.",
    )


def _name_axes(kept: Axes, lost: Axes, eps: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for ax in (kept, lost):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(eps * 10**-2.5, 10)
        ax.set_xlabel("rms of the row, √v")
    kept.set_title("What is left", loc="left")
    kept.set_ylabel("length of the result / √n")
    kept.set_ylim(0, 1.04)
    lost.set_title("What is missing", loc="left")
    lost.set_yscale("log")
    lost.yaxis.set_major_locator(LogLocator(numticks=6))
    lost.yaxis.set_minor_locator(NullLocator())
    lost.set_ylabel("1 − length / √n")
    lost.set_ylim(eps * 1e-3, 3)


def _missing(scale: float, eps: float) -> float:
    row = torch.tensor([scale], dtype=torch.float64)
    return 1.0 - float(shrink_factor(row, eps=eps))


def _mark_agreement(ax: Axes, same: float, loss: float) -> None:
    ax.plot(same, loss, marker="o", markersize=6, color=colour("paper"), markeredgecolor=colour("ink"), zorder=5)
    words = f"equal at rms {significant(same)},\n(1 − ε) / 2"
    ax.annotate(words, (same, loss), (-10, -2), textcoords="offset points", fontsize=9, ha="right", va="top")
