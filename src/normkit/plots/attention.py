"""The figures of attention in an inspection: the size of its logits, and its entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from normkit.inspection.result import Inspection
from normkit.plots import theme
from normkit.plots.depth import block_axis, figure_of, legend, log_axis, marker_size, positive, present
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGIT_LINES = ((100.0, "100"), (1e3, "1,000"), (1e4, "10,000"))
"""Where attention logits begin to be large: 100 is Megatron's default for QK-clip; 1e4 has been seen to diverge."""


def attention_logits(inspection: Inspection, ax: Axes | None = None) -> Drawing:
    """The bound on each attention's logits and the largest sampled one, on a log axis.

    Raises:
        InputError: If there is no attention.
    """
    attentions = present(inspection.attentions, "attention logits", "attention call")
    places = range(len(attentions))
    bounds = [attention.bound for attention in attentions]
    sampled = [attention.sampled_max for attention in attentions]
    with theme.style():
        ax = ax or theme.new_axes()
        ax.plot(
            places,
            positive(bounds),
            color=colour("accent"),
            linestyle=(0, (4, 2)),
            marker="v",
            markersize=1.1 * marker_size(len(attentions)),
            markerfacecolor=colour("paper"),
            label="bound: no logit exceeds it",
        )
        ax.plot(
            places,
            positive(sampled),
            color=colour("accent"),
            marker="o",
            markersize=marker_size(len(attentions)),
            label="largest sampled",
        )
        reached = max((value for value in (*bounds, *sampled) if math.isfinite(value)), default=0.0)
        lines = [(level, name) for level, name in LOGIT_LINES if level <= max(100.0, 10 * reached)]
        for level, name in lines:
            ax.axhline(level, color=colour("error"), linewidth=1.2, linestyle=(0, (1, 1.5)), zorder=1)
            beside = (1, level)
            ax.annotate(
                name, beside, (3, 0), ("axes fraction", "data"), "offset points", color=colour("error"), va="center"
            )
        log_axis(ax, [*bounds, *sampled, *(level for level, _ in lines)])
        ax.set_ylabel("|logit| before softmax")
        block_axis(ax, [attention.block for attention in attentions], "attention calls")
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
    attentions = present(inspection.attentions, "attention entropy", "attention call")
    places = range(len(attentions))
    with theme.style():
        ax = ax or theme.new_axes()
        for values, name, dash, marker, label in (
            ([a.uniform_entropy for a in attentions], "muted", (0, (4, 2)), "", "uniform attention"),
            ([a.entropy for a in attentions], "accent", "solid", "o", "mean over heads"),
            ([a.entropy_min for a in attentions], "contrast", "solid", "v", "sharpest head"),
        ):
            ax.plot(
                places,
                values,
                color=colour(name),
                linestyle=dash,
                marker=marker,
                markersize=marker_size(len(attentions)),
                label=label,
            )
        ax.set_ylim(bottom=0)
        ax.set_ylabel("entropy, nats")
        block_axis(ax, [attention.block for attention in attentions], "attention calls")
        legend(ax)
    return Drawing(
        name="attention-entropy",
        figure=figure_of(ax),
        title="How spread out attention is",
        caption="At 0 a query reads one key only; at the dashed line it reads all of its keys alike.",
        description=f"Mean entropy is {spread(a.entropy for a in attentions)} nats; uniform attention would have "
        f"{spread(a.uniform_entropy for a in attentions)}; the sharpest heads have "
        f"{spread(a.entropy_min for a in attentions)}.",
    )
