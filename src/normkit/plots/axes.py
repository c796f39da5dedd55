"""Which numbers share one mean: a batch of activations as a block, with the part that is normalized together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from normkit.plots import theme
from normkit.plots.camera import Camera
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.scene import Scene
from normkit.plots.steps import frame, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAMERA = Camera(azimuth=-52.0, elevation=24.0)
_SAMPLES, _FEATURES, _TOKENS = 3, 6, 4

Cell = tuple[int, int, int]


def normalized_together(axes: Sequence[Axes] | None = None) -> Drawing:
    """A block of samples, tokens and features, drawn twice: the group of BatchNorm, and that of LayerNorm or RMSNorm.

    Args:
        axes: Two axes to draw into, or None for a new figure.
    """
    panels = (
        ("BatchNorm", "one feature, over all samples and tokens:\na vector's result depends on its neighbours", 1),
        ("LayerNorm, RMSNorm", "one token's vector, over its features:\nnothing else in the batch matters", 2),
    )
    with theme.style():
        scenes = [Scene(ax, _CAMERA) for ax in theme.panels(1, 2, 3.6, given=axes)]
        for scene, (title, words, kind) in zip(scenes, panels, strict=True):
            heading(scene, title, words)
            for cell in product(range(_SAMPLES), range(_FEATURES), range(_TOKENS)):
                _draw_cell(scene, cell, _together(cell, kind))
            _name_edges(scene)
        corners = np.array(list(product((-0.9, _SAMPLES), (-0.9, _FEATURES), (-0.3, _TOKENS + 0.2))))
        frame(scenes, corners)
    return Drawing(
        name="normalized-together",
        figure=figure_of(scenes[0].ax),
        title="Which numbers share one mean and one spread",
        caption="Each small cube is one number; the coloured ones are normalized together. BatchNorm mixes the samples "
        "of a batch, LayerNorm and RMSNorm look at one vector only, in training and in use alike.",
        description="Two blocks of samples by features by tokens. In the first a slab of one feature is coloured, in "
        "the second a bar of one token's features.",
    )


def _together(cell: Cell, kind: int) -> bool:
    """Whether a cell belongs to the group that is shown."""
    sample, feature, token = cell
    return feature == 1 if kind == 1 else sample == _SAMPLES - 1 and token == _TOKENS - 1


def _draw_cell(scene: Scene, cell: Cell, is_chosen: bool) -> None:
    """The three faces of a cube that the camera sees, if nothing hides them."""
    from matplotlib.patches import Polygon

    corner = np.array(cell, dtype=float)
    # The camera is on the side of high samples, low features and high tokens.
    for axis, is_far in ((0, True), (1, False), (2, True)):
        edge = (_SAMPLES - 1, 0, _TOKENS - 1)[axis]
        if cell[axis] != edge:
            continue
        one, other = np.delete(np.eye(3), axis, axis=0)
        start = corner + (np.eye(3)[axis] if is_far else 0)
        place = scene.camera.paper(np.array([start, start + one, start + one + other, start + other]))
        shade = {0: 0.80, 1: 0.62, 2: 1.0}[axis]
        face = theme.colour("accent") if is_chosen else theme.colour("line")
        options: Any = {"edgecolor": theme.colour("paper"), "linewidth": 0.9, "zorder": 2}
        scene.ax.add_patch(Polygon(place, facecolor=theme.colour("paper"), **options))
        opacity = shade if is_chosen else 0.75 * shade
        scene.ax.add_patch(Polygon(place, facecolor=face, alpha=opacity, **options))


def _name_edges(scene: Scene) -> None:
    middle_sample = np.array([_SAMPLES / 2, 0.0, 0.0])
    middle_feature = np.array([_SAMPLES, _FEATURES / 2, 0.0])
    middle_token = np.array([0.0, 0.0, _TOKENS / 2])
    scene.label(middle_sample, "samples", shift=(-6, -9), ha="right")
    scene.label(middle_feature, "features", shift=(8, -9), ha="left")
    scene.label(middle_token, "tokens", shift=(-6, 0), ha="right")
