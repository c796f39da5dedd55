"""The figure of the gains: the entries of each norm's gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.errors import InputError
from normkit.inspection.result import Inspection
from normkit.measurement.facts import Site
from normkit.plots import theme
from normkit.plots.depth import figure_of, legend, log_axis, marker_size, site_axis, symlog_axis
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Above this number of norms, strips would be narrower than the gaps between them; bands are drawn instead.
_MOST_STRIPS = 60
# The largest ratio of largest to smallest entry that a linear axis shows.
_DECADES = 30
_GAP = (math.nan,) * 7


def gain_spectrum(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The entries of each norm's effective gain: range, 5 to 95 %, quartiles, median; recurring outliers marked.

    Raises:
        InputError: If no norm has a finite gain.
    """
    sites = inspection.sites
    quantiles = [site.gain.quantiles if site.gain and has_finite_gain(site) else _GAP for site in sites]
    medians, lows, highs = ([q[k] for q in quantiles if q is not _GAP] for k in (3, 0, 6))
    if not medians:
        raise InputError("a gain spectrum needs a norm with a finite gain; this inspection has none")
    with theme.style():
        ax = ax or theme.new_axes()
        ax.axhline(
            1.0, color=colour("muted"), linewidth=1.0, linestyle=(0, (4, 2)), label="1: as initialised", zorder=1
        )
        _strips(ax, quantiles)
        for (feature, _), marker in zip(inspection.recurring_outliers, "ovs", strict=False):
            _recurring(ax, sites, feature, marker)
        smallest = min((abs(median) for median in medians if median), default=math.inf)
        if min(lows) > 0 and max(highs) > _DECADES * min(lows):
            log_axis(ax, [*lows, *highs])
        elif max(abs(value) for value in (*lows, *highs)) > _DECADES * smallest:
            symlog_axis(ax, [*lows, *highs], smallest)
        ax.set_ylabel("effective gain")
        site_axis(ax, sites)
        legend(ax)
    features = ", ".join(str(feature) for feature, _ in inspection.recurring_outliers)
    return Drawing(
        name="gain-spectrum",
        figure=figure_of(ax),
        title="What the gains have become",
        caption="A gain stretches the sphere into an ellipsoid, one axis a feature; far outliers single features out.",
        description=f"The medians run over {spread(medians)}, the entries over {spread([*lows, *highs])}. "
        + (f"Outliers recur at feature {features}." if features else "No outlier recurs over several norms."),
    )


def has_finite_gain(site: Site) -> bool:
    """Whether there is a spectrum to draw."""
    return site.gain is not None and all(map(math.isfinite, site.gain.quantiles))


def _strips(ax: Axes, quantiles: Sequence[tuple[float, ...]]) -> None:
    """The range as a line, 5 to 95 % and the quartiles as strips, the median as a light dash; or all as bands."""
    places = range(len(quantiles))
    columns = list(zip(*quantiles, strict=True))
    strips = ((1, 5, 0.28, "5 to 95 %"), (2, 4, 1.0, "25 to 75 %"))
    if len(quantiles) > _MOST_STRIPS:
        for low, high, opacity, label in ((0, 6, 0.15, "all entries"), *strips):
            ax.fill_between(
                places,
                columns[low],
                columns[high],
                step="mid",
                color=colour("accent"),
                alpha=opacity,
                linewidth=0,
                label=label,
            )
        ax.plot(places, columns[3], color=colour("paper"), linewidth=1.2, drawstyle="steps-mid")
        return
    ax.vlines(places, columns[0], columns[6], colors=colour("accent"), linewidth=1.2, label="all entries")
    for low, high, opacity, label in strips:
        heights = [q[high] - q[low] for q in quantiles]
        ax.bar(places, heights, 0.56, columns[low], color=colour("accent"), alpha=opacity, linewidth=0, label=label)
    ax.hlines(
        columns[3],
        [place - 0.28 for place in places],
        [place + 0.28 for place in places],
        colors=colour("paper"),
        linewidth=1.6,
    )


def _recurring(ax: Axes, sites: Sequence[Site], feature: int, marker: str) -> None:
    """One feature's value wherever it is an outlier."""
    values = [
        (place, value)
        for place, site in enumerate(sites)
        if site.gain
        for index, value in site.gain.outliers
        if index == feature
    ]
    if values:
        places, heights = zip(*values, strict=True)
        ax.plot(
            places,
            heights,
            linestyle="none",
            marker=marker,
            markersize=1.1 * marker_size(len(sites)),
            markerfacecolor="none",
            markeredgecolor=colour("contrast"),
            label=f"feature {feature}",
            zorder=4,
        )
