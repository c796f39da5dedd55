"""The scale and the mean of the rows that enter the norms, over depth; and `drawings`, all figures of an inspection.

Here as in `gains` and `attention`, a function takes an `Inspection`, draws into `ax` or a new figure, and
returns a `Drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.conventions.eps import eps_in
from normkit.inspection.result import Inspection
from normkit.measurement.facts import Role, Site
from normkit.plots import theme
from normkit.plots.attention import attention_entropy, attention_logits
from normkit.plots.depth import figure_of, legend, log_axis, marker_size, positive, present, site_axis
from normkit.plots.drawing import Drawing
from normkit.plots.ellipsoid import ellipsoid_depth, has_axes
from normkit.plots.gains import gain_spectrum, has_finite_gain
from normkit.plots.theme import colour
from normkit.plots.training import run_drawings
from normkit.text import percent_spread, significant, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Role -> legend, colour and marker.
_ROLES: dict[Role, tuple[str, str, str]] = {
    "pre": ("before a branch", "accent", "o"),
    "post": ("after the sum", "accent", "o"),
    "embedding": ("after the embedding", "accent", "s"),
    "final": ("final norm", "accent", "D"),
    "unknown": ("other norms", "accent", "X"),
    "output": ("on a branch's output", "contrast", "^"),
    "query-key": ("on queries and keys", "third", "v"),
}


def drawings(inspection: Inspection) -> tuple[Drawing, ...]:
    """Every figure for which the inspection holds numbers; those of a training run come first."""
    with theme.style():
        figures = []
        if inspection.sites:
            figures += [input_scale, mean_direction]
        if any(map(has_finite_gain, inspection.sites)):
            figures.append(gain_spectrum)
        if any(map(has_axes, inspection.sites)):
            figures.append(ellipsoid_depth)
        if inspection.attentions:
            figures += [attention_logits, attention_entropy]
        return (*run_drawings(inspection), *(draw(inspection) for draw in figures))


def input_scale(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The rms of the rows that enter each norm, and of the residual stream between blocks, on a log axis.

    Raises:
        InputError: If there are no norms.
    """
    sites = present(inspection.sites, "input scale", "norm")
    with theme.style():
        ax = ax or theme.new_axes()
        for role in _ROLES:
            _role_series(ax, sites, role)
        stream = _stream(inspection)
        if stream:
            ax.plot(
                *zip(*stream, strict=True),
                color=colour("muted"),
                linestyle=(0, (4, 2)),
                linewidth=1.2,
                label="residual stream",
                zorder=1,
            )
        levels = [eps_level(site) for site in sites]
        lowest = min((s.input.rms_quantiles[0] for s in sites if s.input.rms_quantiles[0] > 0), default=0.0)
        in_reach = [level if level > lowest / 30 else math.nan for level in levels]
        if reached := [place for place, level in enumerate(in_reach) if level > 0]:
            ax.plot(
                range(len(sites)),
                in_reach,
                color=colour("error"),
                linestyle=(0, (1, 1.5)),
                drawstyle="steps-mid",
                zorder=2,
            )
            at = (reached[0], in_reach[reached[0]])
            ax.annotate("eps", at, (-4, 4), textcoords="offset points", color=colour("error"))
        shown = [value for site in sites for value in site.input.rms_quantiles]
        log_axis(ax, [*shown, *in_reach, *(value for _, value in stream)])
        ax.set_ylabel("rms of a row (5 %, median, 95 %)")
        site_axis(ax, sites)
        legend(ax)
    medians = [site.input.rms_median for site in sites]
    below = "" if reached else ", out of reach below"
    return Drawing(
        name="input-scale",
        figure=figure_of(ax),
        title="How large the rows are that enter each norm",
        caption="A norm divides by this scale, so only direction gets through"
        + ("; near the eps line, rows come out short." if reached else "."),
        description=f"The median rms is {significant(medians[0])} at the first norm, {significant(medians[-1])} at the "
        f"last, and {spread(medians)} over all {len(sites)}; eps acts at {spread(levels)}{below}.",
    )


def mean_direction(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The share of a row's energy along the all-ones direction at each norm, in percent.

    Raises:
        InputError: If there are no norms.
    """
    sites = present(inspection.sites, "mean direction", "norm")
    with theme.style():
        ax = ax or theme.new_axes()
        for centres, name, label in (
            (True, "accent", "removed by centring"),
            (False, "contrast", "kept: no centring"),
        ):
            places = [place for place, site in enumerate(sites) if site.spec.centring.numerator is centres]
            energy = [100 * sites[place].input.mean_energy for place in places]
            if places:
                ax.bar(
                    places,
                    energy,
                    0.62,
                    color=colour(name),
                    hatch=None if centres else "///",
                    fill=centres,
                    edgecolor=colour(name),
                    linewidth=0.8,
                    label=label,
                )
        chance = [100 / site.input.features for site in sites]
        ax.plot(
            range(len(sites)),
            chance,
            color=colour("muted"),
            linestyle=(0, (4, 2)),
            linewidth=1.2,
            drawstyle="steps-mid",
            label="1/n: no preferred direction",
        )
        ax.set_ylim(bottom=0)
        ax.set_ylabel("energy along all-ones, %")
        site_axis(ax, sites)
        legend(ax)
    energies = [site.input.mean_energy for site in sites]
    most = max(sites, key=lambda site: -1.0 if math.isnan(site.input.mean_energy) else site.input.mean_energy)
    return Drawing(
        name="mean-direction",
        figure=figure_of(ax),
        title="How much of a row lies along the all-ones direction",
        caption="This is all that a LayerNorm removes and an RMSNorm keeps; where it is small, the two nearly agree.",
        description=f"The share is {percent_spread(energies)}, largest {_whereabouts(most)}.",
    )


def eps_level(site: Site) -> float:
    """The rms of a row whose root, before eps is added, is as long as eps: there eps begins to count."""
    spec, features = site.spec, site.input.features
    eps = max(eps_in(site.dtype, spec.eps), 0.0)
    return spec.placement.length(eps) * math.sqrt(spec.divisor.count(features) / features)


def _role_series(ax: Axes, sites: Sequence[Site], role: Role) -> None:
    label, name, marker = _ROLES[role]
    places = [place for place, site in enumerate(sites) if site.role == role]
    if not places:
        return
    low, median, high = zip(*(sites[place].input.rms_quantiles for place in places), strict=True)
    ax.vlines(
        places,
        positive(low),
        positive(high),
        colors=colour(name),
        alpha=0.3,
        zorder=2,
        linewidth=max(1.0, min(7.0, 200 / len(sites))),
    )
    ax.plot(
        places,
        positive(median),
        color=colour(name),
        marker=marker,
        linewidth=1.0,
        zorder=3,
        markersize=marker_size(len(sites)),
        label=label,
    )


def _whereabouts(site: Site) -> str:
    if site.block is not None:
        return f"in block {site.block}"
    return {"embedding": "after the embedding", "final": "at the final norm"}.get(site.role, "outside the blocks")


def _stream(inspection: Inspection) -> list[tuple[float, float]]:
    """Place and median rms of the residual stream before each block and after the last."""
    points = []
    for block in inspection.blocks:
        places = [place for place, site in enumerate(inspection.sites) if site.block == block.index]
        if places:
            points.append((places[0] - 0.5, block.stream_in.rms_median))
            last = (places[-1] + 0.5, block.stream_out.rms_median)
    return [(place, value) for place, value in [*points, last] if value > 0] if points else []
