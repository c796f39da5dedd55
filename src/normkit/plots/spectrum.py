"""The singular values of a norm's Jacobian: how the output responds to small changes of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normkit import specs
from normkit.errors import ShapeError
from normkit.geometry.spectrum import jacobian_spectrum
from normkit.plots import theme
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def jacobian_spectra(x: Tensor, eps: float, axes: Sequence[Axes] | None = None) -> Drawing:
    """All singular values of the Jacobians of LayerNorm and RMSNorm at one row, without and with eps.

    Args:
        x: One row of shape (n,), n from 4 on.
        eps: Inside the root, in units of x squared.
        axes: Two axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If x is not one row of at least 4 features.
        InputError: If Matplotlib is not installed.
    """
    if x.dim() != 1 or len(x) < 4:
        raise ShapeError(f"one row of shape (n,) with n >= 4 is needed, got {tuple(x.shape)}")
    norms = {"LayerNorm": specs.TORCH_LAYER_NORM, "RMSNorm": specs.TORCH_RMS_NORM}
    values = {
        name: [jacobian_spectrum(x, spec.replace(eps=e)).singular_values(len(x)) for e in (0.0, eps)]
        for name, spec in norms.items()
    }
    top = 1.3 * max(float(pair[0].max()) for pair in values.values())
    with theme.style():
        panels = theme.panels(1, 2, 3.2, given=axes)
        for ax, (name, (bare, damped)) in zip(panels, values.items(), strict=True):
            _draw(ax, bare, damped, top)
            ax.set_title(name, loc="left")
            _say(ax, name, bare, damped, eps)
        panels[0].set_ylabel("stretch |dy| / |dx| (singular value)")
    lines = (f"{name}: {_listing(pair[0])} at eps 0, {_listing(pair[1])} with eps." for name, pair in values.items())
    return Drawing(
        name="jacobian-spectrum",
        figure=figure_of(panels[0]),
        title="What a norm lets through of a small change",
        caption="A change along the vector itself is (all but) stopped, and LayerNorm also stops one along all-ones; "
        "every other direction passes, divided by the scale s.",
        description=" ".join(lines),
    )


def _draw(ax: Axes, bare: Tensor, damped: Tensor, top: float) -> None:
    places = range(1, len(bare) + 1)
    ax.vlines(places, 0, damped, colors=colour("accent"), linewidth=1.6)
    ax.plot(places, damped, linestyle="none", marker="o", markersize=6, color=colour("accent"), zorder=3, clip_on=False)
    ax.plot(
        places,
        bare,
        linestyle="none",
        marker="o",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=colour("contrast"),
        markeredgewidth=1.4,
        zorder=4,
        clip_on=False,
    )
    ax.set_xlim(-0.7, len(bare) + 2.2)
    ax.grid(visible=False)
    ax.set_xticks(list(places))
    ax.set_ylim(0, top)
    ax.set_xlabel("direction, least stretched first")


def _say(ax: Axes, name: str, bare: Tensor, damped: Tensor, eps: float) -> None:
    n, radial = len(bare), 2 if name == "LayerNorm" else 1
    said: Any = {"textcoords": "offset points", "fontsize": 9}
    quiet = {"color": colour("muted"), **said}
    if radial == 2:
        ax.annotate("all-ones:\n0", (1, 0), (0, 8), ha="center", **quiet)
    where = "x − mean" if radial == 2 else "x itself"
    ax.annotate(
        f"{where}:\nε / s³",
        (radial, float(damped[radial - 1])),
        (5, 7),
        ha="right",
        **quiet,
    )
    ax.annotate(
        f"all {n - radial} others: 1 / s", ((radial + 1 + n) / 2, float(bare[-1])), (0, 10), ha="center", **quiet
    )
    ax.annotate("ε = 0", (n, float(bare[-1])), (8, 0), va="center", color=colour("contrast"), **said)
    ax.annotate(f"ε = {eps:g}", (n, float(damped[-1])), (8, 0), va="center", color=colour("accent"), **said)


def _listing(values: Tensor) -> str:
    """Each value once, with its number of occurrences."""
    words: dict[str, int] = {}
    for value in values.tolist():
        word = significant(value)
        words[word] = words.get(word, 0) + 1
    return ", ".join(word if count == 1 else f"{word} ({count} times)" for word, count in words.items())
