"""The ellipsoid onto which a trained gain maps the sphere: its axes over depth, and between the gain's entries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.errors import InputError
from normkit.geometry.image import image_of
from normkit.inspection.result import Inspection
from normkit.measurement.facts import Site
from normkit.plots import theme
from normkit.plots.depth import figure_of, legend, log_axis, marker_size, present, site_axis
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.spec import NormSpec
from normkit.text import significant, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ellipsoid_depth(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The shortest, median and longest semi-axis of each norm's image over sqrt(n), on a log axis.

    Raises:
        InputError: If no norm has an image of semi-axes.
    """
    sites = present(inspection.sites, "an ellipsoid over depth", "norm")
    shapes = {place: site.geometry for place, site in enumerate(sites) if site.geometry and has_axes(site)}
    if not shapes:
        raise InputError("an ellipsoid over depth needs a norm whose image has axes; this inspection has none")
    places = list(shapes)
    low, median, high = zip(*(shape.semi_axes for shape in shapes.values() if shape.semi_axes), strict=True)
    with theme.style():
        ax = ax or theme.new_axes()
        ax.axhline(1.0, color=colour("muted"), linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        ax.annotate(
            "1: no gain",
            (1, 1.0),
            (3, 0),
            ("axes fraction", "data"),
            "offset points",
            color=colour("muted"),
            va="center",
            fontsize=9,
        )
        ax.vlines(places, low, high, colors=colour("accent"), linewidth=max(1.0, min(6.0, 160 / len(sites))), alpha=0.3)
        options: Any = {"linestyle": "none", "markersize": marker_size(len(sites)), "color": colour("accent")}
        for values, marker, word in (
            (high, "^", "longest"),
            (median, "o", "median"),
            (low, "v", "shortest semi-axis"),
        ):
            ax.plot(places, values, marker=marker, label=word, **options)
        log_axis(ax, [*low, *high, 1.0])
        ax.set_ylabel("semi-axis / √n")
        site_axis(ax, sites)
        legend(ax)
    most = max(shape.elongation for shape in shapes.values())
    return Drawing(
        name="ellipsoid-depth",
        figure=figure_of(ax),
        title="The shape that each norm's gain gives its output",
        caption="Before its gain a norm's output lies on a sphere; the gain makes that an ellipsoid. The longer a bar, "
        "the more unlike a sphere.",
        description=f"Median semi-axes run over {spread(median)}; the longest axis of one norm over its shortest is at "
        f"most {significant(most)}.",
    )


def has_axes(site: Site) -> bool:
    """Whether the axes of a norm's image can be drawn on a log axis."""
    axes = site.geometry.semi_axes if site.geometry else None
    return axes is not None and all(0 < size < math.inf for size in axes)


def interlacing(weight: Tensor, spec: NormSpec, name: str = "", ax: Axes | None = None) -> Drawing:
    """The sorted semi-axes of one gain's ellipsoid between the sorted entries of that gain.

    Args:
        weight: Gain as stored, of shape (n,).
        spec: A norm that centres.
        name: Of the norm, for the words.
        ax: Where to draw, or None for a new figure.

    Raises:
        InputError: If the norm does not centre.
    """
    if not spec.centring.is_full:
        raise InputError("without centring the semi-axes are the gain's entries themselves; give a norm that centres")
    surface = image_of(spec, len(weight), weight).surface
    entries = surface.gain.double().abs().sort().values
    axes = surface.semi_axes().double() / float(surface.radius or 1.0)
    # A gain of zero removes an axis; its place stays, at zero.
    axes = torch.cat([axes.new_zeros(len(entries) - 1 - len(axes)), axes])
    places = range(1, len(axes) + 1)
    with theme.style():
        ax = ax or theme.new_axes()
        ax.vlines(
            places,
            entries[:-1],
            entries[1:],
            colors=colour("contrast"),
            linewidth=max(1.5, min(5.0, 330 / len(entries))),
            alpha=0.45,
            zorder=2,
        )
        ax.plot(
            places,
            axes,
            linestyle="none",
            marker="o",
            markersize=max(2.0, min(5.0, 230 / len(entries))),
            color=colour("accent"),
            zorder=3,
        )
        if float(entries[0]) > 0 and float(entries[-1] / entries[0]) > 30:
            log_axis(ax, [*entries.tolist(), *axes.tolist()])
        last = len(axes)
        gap = int(entries.diff()[: last // 2 + 1].argmax())
        said: Any = {"textcoords": "offset points", "va": "center"}
        middle = float(entries[gap : gap + 2].mean())
        ax.annotate(
            "from one |g| of the gain to the next", (gap + 1, middle), (12, -6), color=colour("contrast"), **said
        )
        place = last * 3 // 5
        ax.annotate(
            "semi-axis / √n", (place + 1, float(axes[place])), (-6, 16), color=colour("accent"), ha="right", **said
        )
        ax.set_xlim(0, last + 1)
        ax.set_ylabel("|g| and semi-axis / √n")
        ax.set_xlabel("axis of the ellipsoid, shortest first")
    where = f" Here: {name}." if name else ""
    return Drawing(
        name="interlacing",
        figure=figure_of(ax),
        title="The axes of an ellipsoid lie between the entries of its gain",
        caption="Centring takes one dimension, so n entries of the gain leave n − 1 axes: one between each two "
        f"neighbouring entries, by size.{where}",
        description=f"{len(axes)} semi-axes over {spread(axes.tolist())} times √n, between {len(entries)} entries over "
        f"{spread(entries.tolist())}.",
    )
