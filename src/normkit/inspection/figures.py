"""The figures of an inspection, over the depth of the model.

Each function takes an `Inspection`, draws into `ax` or a new figure, and returns a `Drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from normkit.errors import InputError
from normkit.inspection.run_figures import run_drawings
from normkit.measurement.facts import Role, Site
from normkit.show import theme
from normkit.show.axes import (
    DASHED,
    DOTTED,
    block_axis,
    drawable,
    figure_of,
    legend,
    log_axis,
    marker_size,
    new_axes,
    symlog_axis,
    with_gaps,
)
from normkit.show.drawing import Drawing
from normkit.show.theme import colour
from normkit.text import percent_spread, significant, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from normkit.inspection.result import Inspection

T = TypeVar("T")

LOGIT_LINES = ((100.0, "100"), (1e3, "1,000"), (1e4, "10,000"))
"""The size at which attention logits are called large: 100 is Megatron's default for QK-clip; at 1e4 runs diverged."""

# Role -> legend, colour and marker.
_ROLES: dict[str, tuple[str, str, str]] = {
    "pre": ("before a branch", "accent", "o"),
    "post": ("after the sum", "accent", "o"),
    "embedding": ("after the embedding", "accent", "s"),
    "final": ("final norm", "accent", "D"),
    "in-branch": ("in a branch", "accent", "P"),
    "unknown": ("other norms", "accent", "X"),
    "output": ("on a branch's output", "contrast", "^"),
    "query-key": ("on queries and keys", "third", "v"),
}
# Above this number of norms, strips would be narrower than the gaps between them; bands are drawn instead.
_MOST_STRIPS = 60
# The largest ratio of largest to smallest entry that a linear axis shows.
_LINEAR = 30
_GAP = (math.nan,) * 7


def drawings(inspection: Inspection) -> tuple[Drawing, ...]:
    """Every figure for which the inspection holds numbers; those of a training run come first."""
    with theme.style():
        figures, sites = [], inspection.sites
        if sites:
            figures += [input_scale, mean_direction]
        # Gains that are all 1, and spheres of one size, show nothing.
        if any(_has_finite_gain(site) and site.gain and {*site.gain.quantiles} != {1.0} for site in sites):
            figures.append(gain_spectrum)
        if any(_has_axes(site) and site.geometry and not site.geometry.is_unit_sphere for site in sites):
            figures.append(ellipsoid_depth)
        if inspection.attentions:
            figures += [attention_logits, attention_entropy]
        of_run = () if inspection.training is None else run_drawings(inspection)
        return (*of_run, *(draw(inspection) for draw in figures))


def input_scale(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The rms of the rows that enter each norm, and of the residual stream between blocks, on a log axis.

    Raises:
        InputError: If there are no norms.
    """
    sites = _present(inspection.sites, "input scale", "norm")
    stream = _stream(inspection)
    levels = [site.eps_level for site in sites]
    lowest = min((site.input.rms_quantiles[0] for site in sites if site.input.rms_quantiles[0] > 0), default=0.0)
    in_reach = [level if level > lowest / 30 else math.nan for level in levels]
    reached = [place for place, level in enumerate(in_reach) if level > 0]
    with theme.style():
        ax = ax or new_axes()
        for role, (label, name, marker) in _ROLES.items():
            places = [place for place, site in enumerate(sites) if inspection.shown_role(site) == role]
            if not places:
                continue
            quantiles = zip(*(sites[place].input.rms_quantiles for place in places), strict=True)
            low, median, high = (drawable(values, log=True) for values in quantiles)
            width = max(1.0, min(7.0, 200 / len(sites)))
            ax.vlines(places, low, high, colors=colour(name), alpha=0.3, zorder=2, linewidth=width)
            look: Any = {"color": colour(name), "marker": marker, "markersize": marker_size(len(sites)), "zorder": 3}
            ax.plot(places, median, linewidth=0, **look, label=label)
            # No line joins norms outside the blocks.
            blocks = [(place, sites[place].block) for place in places]
            of_each = [f"norm {at}" if block is None else inspection.stack_of(block) for at, block in blocks]
            ax.plot(*with_gaps(of_each, places, median), linewidth=1.0, **look | {"marker": ""})
        if stream:
            look = {"color": colour("muted"), "linestyle": DASHED, "linewidth": 1.2, "zorder": 1}
            ax.plot(*zip(*stream, strict=True), label="residual stream", **look)
        if reached:
            look = {"color": colour("error"), "linestyle": DOTTED, "drawstyle": "steps-mid", "zorder": 2}
            ax.plot(range(len(sites)), in_reach, **look)
            at = (reached[0], in_reach[reached[0]])
            ax.annotate("eps", at, (-4, 4), textcoords="offset points", color=colour("error"))
        shown = [value for site in sites for value in site.input.rms_quantiles]
        log_axis(ax, [*shown, *in_reach, *(value for _, value in stream)])
        ax.set_ylabel("rms of a row (5 %, median, 95 %)")
        _site_axis(ax, inspection)
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


def _stream(inspection: Inspection) -> list[tuple[float, float]]:
    """Place and median rms of the residual stream before each block and after the last, with a gap between stacks."""
    stacks: dict[str, list[tuple[float, float]]] = {}
    for block in inspection.blocks:
        places = [place for place, site in enumerate(inspection.sites) if site.block == block.index]
        if places:
            points = stacks.setdefault(inspection.stack_of(block.index), [])
            after = (places[-1] + 0.5, block.stream_out.rms_median)
            points[-1:] = [(places[0] - 0.5, block.stream_in.rms_median), after]
    shown = [[point for point in points if point[1] > 0] for points in stacks.values()]
    return [point for points in shown if points for point in [(math.nan, math.nan), *points]][1:]


def mean_direction(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The share of a row's energy along the all-ones direction at each norm, in percent.

    Raises:
        InputError: If there are no norms.
    """
    sites = _present(inspection.sites, "mean direction", "norm")
    with theme.style():
        ax = ax or new_axes()
        for centres, name, label in ((True, "accent", "removed by centring"), (False, "contrast", "kept: no centring")):
            places = [place for place, site in enumerate(sites) if site.spec.centring.numerator is centres]
            energy = [100 * sites[place].input.mean_energy for place in places]
            look: Any = {"fill": centres, "hatch": None if centres else "///", "linewidth": 0.8}
            if places:
                ax.bar(places, energy, 0.62, color=colour(name), edgecolor=colour(name), label=label, **look)
        chance = [100 / site.input.features for site in sites]
        look = {"color": colour("muted"), "linestyle": DASHED, "linewidth": 1.2, "drawstyle": "steps-mid"}
        ax.plot(range(len(sites)), chance, label="1/n: no preferred direction", **look)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("energy along all-ones, %")
        _site_axis(ax, inspection)
        legend(ax)
    most = max(sites, key=lambda site: -1.0 if math.isnan(site.input.mean_energy) else site.input.mean_energy)
    outside = {"embedding": "after the embedding", "final": "at the final norm"}.get(most.role, "outside the blocks")
    where = outside if most.block is None else f"in block {inspection.block_name(most.block)}"
    energies = [site.input.mean_energy for site in sites]
    return Drawing(
        name="mean-direction",
        figure=figure_of(ax),
        title="How much of a row lies along the all-ones direction",
        caption="This is all that a LayerNorm removes and an RMSNorm keeps; where it is small, the two nearly agree.",
        description=f"The share is {percent_spread(energies)}, largest {where}.",
    )


def gain_spectrum(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The entries of each norm's effective gain: range, 5 to 95 %, quartiles, median; recurring outliers marked.

    Raises:
        InputError: If no norm has a finite gain.
    """
    sites = inspection.sites
    quantiles = [site.gain.quantiles if site.gain and _has_finite_gain(site) else _GAP for site in sites]
    medians, lows, highs = ([q[k] for q in quantiles if q is not _GAP] for k in (3, 0, 6))
    if not medians:
        raise InputError("a gain spectrum needs a norm with a finite gain; this inspection has none")
    with theme.style():
        ax = ax or new_axes()
        look: Any = {"color": colour("muted"), "linewidth": 1.0, "linestyle": DASHED, "zorder": 1}
        ax.axhline(1.0, label="1: as initialised", **look)
        _draw_quantiles(ax, quantiles)
        for (feature, _), marker in zip(inspection.recurring_outliers, "ovs", strict=False):
            found = {
                place: value
                for place, site in enumerate(sites)
                for index, value in (site.gain.outliers if site.gain else ())
                if index == feature
            }
            look = {"markerfacecolor": "none", "markeredgecolor": colour("contrast"), "linestyle": "none", "zorder": 4}
            look["markersize"] = 1.1 * marker_size(len(sites))
            if found:
                ax.plot(list(found), list(found.values()), marker=marker, label=f"feature {feature}", **look)
        smallest = min((abs(median) for median in medians if median), default=math.inf)
        if min(lows) > 0 and max(highs) > _LINEAR * min(lows):
            log_axis(ax, [*lows, *highs])
        elif max(abs(value) for value in (*lows, *highs)) > _LINEAR * smallest:
            symlog_axis(ax, [*lows, *highs], smallest)
        ax.set_ylabel("effective gain")
        _site_axis(ax, inspection)
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


def _has_finite_gain(site: Site) -> bool:
    return site.gain is not None and all(map(math.isfinite, site.gain.quantiles))


def _draw_quantiles(ax: Axes, quantiles: Sequence[tuple[float, ...]]) -> None:
    """The range as a line, 5 to 95 % and the quartiles as strips, the median as a light dash; or all as bands."""
    places = range(len(quantiles))
    columns = list(zip(*quantiles, strict=True))
    strips = ((1, 5, 0.28, "5 to 95 %"), (2, 4, 1.0, "25 to 75 %"))
    look: Any = {"color": colour("accent"), "linewidth": 0}
    if len(quantiles) > _MOST_STRIPS:
        for low, high, opacity, label in ((0, 6, 0.15, "all entries"), *strips):
            ax.fill_between(places, columns[low], columns[high], step="mid", alpha=opacity, label=label, **look)
        ax.plot(places, columns[3], color=colour("paper"), linewidth=1.2, drawstyle="steps-mid")
        return
    ax.vlines(places, columns[0], columns[6], colors=colour("accent"), linewidth=1.2, label="all entries")
    for low, high, opacity, label in strips:
        heights = [q[high] - q[low] for q in quantiles]
        ax.bar(places, heights, 0.56, columns[low], alpha=opacity, label=label, **look)
    left, right = [place - 0.28 for place in places], [place + 0.28 for place in places]
    ax.hlines(columns[3], left, right, colors=colour("paper"), linewidth=1.6)


def ellipsoid_depth(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The shortest, median and longest semi-axis of each norm's image over sqrt(n), on a log axis.

    Raises:
        InputError: If no norm has an image of semi-axes.
    """
    sites = _present(inspection.sites, "an ellipsoid over depth", "norm")
    shapes = {place: site.geometry for place, site in enumerate(sites) if site.geometry and _has_axes(site)}
    if not shapes:
        raise InputError("an ellipsoid over depth needs a norm whose image has axes; this inspection has none")
    low, median, high = zip(*(shape.semi_axes for shape in shapes.values() if shape.semi_axes), strict=True)
    with theme.style():
        ax = ax or new_axes()
        ax.axhline(1.0, color=colour("muted"), linewidth=1.0, linestyle=DASHED, zorder=1)
        _name_level(ax, 1.0, "1: no gain", color=colour("muted"), fontsize=9)
        width = max(1.0, min(6.0, 160 / len(sites)))
        ax.vlines(list(shapes), low, high, colors=colour("accent"), linewidth=width, alpha=0.3)
        look: Any = {"linestyle": "none", "markersize": marker_size(len(sites)), "color": colour("accent")}
        for values, marker, word in ((high, "^", "longest"), (median, "o", "median"), (low, "v", "shortest semi-axis")):
            ax.plot(list(shapes), values, marker=marker, label=word, **look)
        log_axis(ax, [*low, *high, 1.0])
        ax.set_ylabel("semi-axis / √n")
        _site_axis(ax, inspection)
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


def _has_axes(site: Site) -> bool:
    """Whether the axes of a norm's image can be drawn on a log axis."""
    axes = site.geometry.semi_axes if site.geometry else None
    return axes is not None and all(0 < size < math.inf for size in axes)


def attention_logits(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The bound on each attention's logits and the largest sampled one, on a log axis.

    Raises:
        InputError: If there is no attention.
    """
    attentions = _present(inspection.attentions, "attention logits", "attention call")
    bounds = [attention.bound for attention in attentions]
    sampled = [attention.sampled_max for attention in attentions]
    reached = max((value for value in (*bounds, *sampled) if math.isfinite(value)), default=0.0)
    lines = [(level, name) for level, name in LOGIT_LINES if level <= max(100.0, 10 * reached)]
    size = marker_size(len(attentions))
    with theme.style():
        ax = ax or new_axes()
        accent: Any = {"color": colour("accent")}
        open_mark: Any = {
            "marker": "v",
            "markersize": 1.1 * size,
            "markerfacecolor": colour("paper"),
            "linestyle": DASHED,
        }
        bound_line, sampled_line = (
            _over_attentions(inspection, drawable(each, log=True)) for each in (bounds, sampled)
        )
        ax.plot(*bound_line, label="bound: no logit exceeds it", **accent, **open_mark)
        ax.plot(*sampled_line, label="largest sampled", marker="o", markersize=size, **accent)
        for level, name in lines:
            ax.axhline(level, color=colour("error"), linewidth=1.2, linestyle=DOTTED, zorder=1)
            _name_level(ax, level, name, color=colour("error"))
        log_axis(ax, [*bounds, *sampled, *(level for level, _ in lines)])
        ax.set_ylabel("|logit| before softmax")
        _attention_axis(ax, inspection)
        legend(ax)
    return Drawing(
        name="attention-logits",
        figure=figure_of(ax),
        title="How large the attention logits get",
        caption="Large logits make softmax one-hot, and then it passes no gradient; growing ones end in a loss spike.",
        description=f"The bounds run from {spread(bounds)}, the largest sampled logits from {spread(sampled)}.",
    )


def attention_entropy(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The mean entropy of each attention against that of uniform attention, in nats.

    Raises:
        InputError: If there is no attention.
    """
    attentions = _present(inspection.attentions, "attention entropy", "attention call")
    uniform = [attention.uniform_entropy for attention in attentions]
    mean = [attention.entropy for attention in attentions]
    sharpest = [attention.entropy_min for attention in attentions]
    with theme.style():
        ax = ax or new_axes()
        size = marker_size(len(attentions))
        for values, name, dash, marker, label in (
            (uniform, "muted", DASHED, "", "uniform attention"),
            (mean, "accent", "solid", "o", "mean over heads"),
            (sharpest, "contrast", "solid", "v", "sharpest head"),
        ):
            look: Any = {"linestyle": dash, "marker": marker, "markersize": size}
            ax.plot(*_over_attentions(inspection, values), color=colour(name), label=label, **look)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("entropy, nats")
        _attention_axis(ax, inspection)
        legend(ax)
    return Drawing(
        name="attention-entropy",
        figure=figure_of(ax),
        title="How spread out attention is",
        caption="At 0 a query reads one key only; at the dashed line it reads all of its keys alike.",
        description=f"Mean entropy is {spread(mean)} nats; uniform attention would have {spread(uniform)}; the "
        f"sharpest heads have {spread(sharpest)}.",
    )


def _present(values: tuple[T, ...], figure: str, noun: str) -> tuple[T, ...]:
    """The values, if there are some."""
    if not values:
        raise InputError(f"{figure} needs at least one {noun}; this inspection has none")
    return values


def _site_axis(ax: Axes, inspection: Inspection) -> None:
    names: dict[Role, str] = {"embedding": "emb", "final": "final"}
    outside = [names.get(site.role, "") for site in inspection.sites]
    block_axis(ax, [site.block for site in inspection.sites], "norms", outside, inspection.stack_names())


def _attention_axis(ax: Axes, inspection: Inspection) -> None:
    blocks = [attention.block for attention in inspection.attentions]
    block_axis(ax, blocks, "attention calls", stacks=inspection.stack_names())


def _over_attentions(inspection: Inspection, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Places and values of attention calls, with a gap between different stacks."""
    stacks = [inspection.stack_of(attention.block) for attention in inspection.attentions]
    return with_gaps(stacks, range(len(values)), values)


def _name_level(ax: Axes, level: float, name: str, **look: Any) -> None:
    """Write the name of a horizontal line right of the axes."""
    ax.annotate(name, (1, level), (3, 0), ("axes fraction", "data"), "offset points", va="center", **look)
