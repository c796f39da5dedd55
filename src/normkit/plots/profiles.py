"""The figure of a run over depth: gradients, stream and updates block by block, at its first report and its last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from normkit.errors import InputError
from normkit.inspection.result import Inspection
from normkit.measurement.training import Quantity, Training
from normkit.plots import course, theme
from normkit.plots.depth import figure_of, log_axis, marker_size, positive, shared_legend
from normkit.plots.drawing import Drawing
from normkit.plots.theme import colour
from normkit.text import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Block -> value, at the first report and at the last.
Profile = tuple[Mapping[int, float], Mapping[int, float]]

_QUANTITIES: tuple[tuple[Quantity, str], ...] = (
    ("activation gradient", "rms of the gradient"),
    ("stream rms", "rms of the stream"),
)


def has_profiles(inspection: Inspection) -> bool:
    """Whether there is anything to draw."""
    return bool(_profiles(inspection))


def depth_profiles(inspection: Inspection) -> Drawing:
    """Gradient, residual stream and largest update ratio by block, one panel each, first report and last.

    Raises:
        InputError: If no block was measured in a run.
    """
    profiles, training = _profiles(inspection), inspection.training
    if not profiles or training is None:
        raise InputError("profiles over depth need a run that was watched in blocks; this inspection has none")
    begin, end = _steps(training)
    with theme.style():
        panels = theme.panels(1, len(profiles), 3.0)
        for ax, (name, (first, last)) in zip(panels, profiles.items(), strict=True):
            if end > begin:
                _line(ax, first, "muted", (4, 2), f"step {begin:,}")
            _line(ax, last, "accent", (), f"step {end:,}")
            course.crosses(ax, [block for block, value in last.items() if not math.isfinite(value)])
            log_axis(ax, [*first.values(), *last.values()])
            ax.set_ylabel(name)
            course.step_axis(ax, min(last), max(last))
            ax.set_xlabel("block")
        shared_legend(panels[0])
    told = [f"{name}: {f'{spread(first.values())} at first, ' if end > begin else ''}{spread(last.values())} at last"
            for name, (first, last) in profiles.items()]  # fmt: skip
    return Drawing(
        name="run-depth",
        figure=figure_of(panels[0]),
        title="Gradients, stream and updates over depth",
        caption="Level lines train all blocks alike; a slope that steepens over the run ends in blocks that move too "
        "much or not at all.",
        description=f"Over the blocks, {'; '.join(told)}.",
    )


def _profiles(inspection: Inspection) -> dict[str, Profile]:
    """Name of each panel -> its values; panels without a positive value are left out."""
    training = inspection.training
    if training is None:
        return {}
    blocks = {block.path: block.index for block in inspection.blocks}
    profiles: dict[str, Profile] = {}
    for quantity, name in _QUANTITIES:
        measured = [each for each in training.of(quantity) if each.path in blocks and each.values]
        if any(0 < value < math.inf for each in measured for value in (each.values[0], each.last)):
            profiles[name] = (
                {blocks[each.path]: each.values[0] for each in measured},
                {blocks[each.path]: each.last for each in measured},
            )
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for parameter in training.parameters:
        if parameter.block is not None and parameter.kind == "weight" and not math.isnan(parameter.update_ratio):
            for at, value in ((first, parameter.first_update_ratio), (last, parameter.update_ratio)):
                at[parameter.block] = max(at.get(parameter.block, 0.0), value)
    if any(0 < value < math.inf for value in last.values()):
        profiles["largest update ratio"] = (first, last)
    return profiles


def _steps(training: Training) -> tuple[int, int]:
    """The first and the last step at which blocks were measured, or at which the run was."""
    steps = [step for quantity, _ in _QUANTITIES for each in training.of(quantity) for step in each.steps]
    return (min(steps), max(steps)) if steps else (0, max(0, training.steps - 1))


def _line(ax: Axes, values: Mapping[int, float], name: str, dash: tuple[float, ...], label: str) -> None:
    places = sorted(values)
    ax.plot(
        places,
        positive(values[place] for place in places),
        color=colour(name),
        linestyle=(0, dash) if dash else "solid",
        marker="o",
        markersize=0.8 * marker_size(len(places)),
        markerfacecolor=colour("paper") if dash else colour(name),
        label=label,
    )
