"""Two kinds of centring on one cloud: BatchNorm's moves it to the origin, LayerNorm's projects it onto a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from normkit.geometry.batches import centre_over_batch
from normkit.geometry.centring import centre
from normkit.plots import theme
from normkit.plots.camera import Camera, Points, array, upright
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.scene import BEHIND, LABEL, Scene
from normkit.plots.steps import frame, groups_of, heading, level

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIDE = Camera(azimuth=-40.0, elevation=13.0)
_ALONG = Camera(azimuth=-40.0, elevation=0.0)
_ABOVE = Camera(azimuth=-90.0, elevation=90.0)


def centred_clusters(x: Tensor, groups: Sequence[int] | None = None, axes: Sequence[Axes] | None = None) -> Drawing:
    """A cloud of three features raw, less its mean over the cloud, and less each point's own mean; from three sides.

    Args:
        x: Points of shape (N, 3).
        groups: For each point 0, 1 or 2: its colour.
        axes: Nine axes to draw into: views from the side, along the plane, from above; None for a new figure.

    Raises:
        ShapeError: If the points are not of three features.
        InputError: If Matplotlib is not installed.
    """
    colours = groups_of(x, 3, groups)
    basis = upright()
    clouds = [array(cloud.double() @ basis) for cloud in (x, centre_over_batch(x), centre(x))]
    names = (
        ("Raw", "three clusters off the plane\nof points with mean 0"),
        ("Centred as by BatchNorm", "less the mean of the cloud,\nfeature by feature"),
        ("Centred as by LayerNorm", "less its own mean,\npoint by point"),
    )
    reach = 1.1 * max(float(np.abs(cloud[:, :2]).max()) for cloud in clouds)
    plane = level(reach)
    with theme.style():
        given = theme.panels(3, 3, 6.2, given=axes)
        side, along, above = (
            [Scene(ax, camera) for ax in given[3 * row : 3 * row + 3]]
            for row, camera in enumerate((_SIDE, _ALONG, _ABOVE))
        )
        for scene, cloud, (title, words) in zip(side, clouds, names, strict=True):
            heading(scene, title, words)
            scene.sheet(plane)
            height = 1.05 * float(np.abs(clouds[0][:, 2]).max())
            scene.curve(np.array([[0, 0, min(0.0, float(cloud[:, 2].min()))], [0.0, 0.0, 0.0]]), "muted", layer=BEHIND)
            scene.arrow(np.array([0.0, 0.0, height]))
            if cloud is not clouds[0]:
                scene.trails(clouds[0], cloud, colours)
            scene.points(cloud, colours, cloud[:, 2] < -1e-9, size=12)
            _middle(scene, cloud)
        for scene, cloud in zip([*along, *above], clouds * 2, strict=True):
            scene.sheet(plane)
            scene.points(cloud, colours, size=12)
            _middle(scene, cloud)
        side[0].label(np.array([0.0, 0.0, height]), "all-ones", shift=(5, 0), ha="left")
        heading(along[0], "", "the same along the plane,\nwhich is a line now")
        heading(along[1], "", "above it and below")
        heading(along[2], "", "every point on it")
        heading(above[0], "", "the same from above,\nalong all-ones")
        heading(above[1], "", "the mean of the cloud\nis the origin")
        heading(above[2], "", "flat now, yet the cloud\nstays off the origin")
        frame(side, np.concatenate([*clouds, plane, [[0.0, 0.0, height]]]))
        frame(along, np.concatenate([*clouds, plane]))
        frame(above, np.concatenate([*clouds, plane]))
    return Drawing(
        name="centred-clusters",
        figure=figure_of(side[0].ax),
        title="Two ways to centre: over the batch, or within each vector",
        caption="BatchNorm moves the whole cloud until its mean (cross) is the origin (ring); LayerNorm moves every "
        "point on its own along all-ones onto a plane, where the cloud stays off the origin.",
        description="Three clusters from the side, along a plane and from above: raw off it; moved so that their "
        "common mean is the origin, not flat; pressed onto the plane, their common mean off the origin.",
    )


def _middle(scene: Scene, cloud: Points) -> None:
    """A cross at the mean of the cloud, a ring at the origin."""
    ink, paper = theme.colour("ink"), theme.colour("paper")
    scene.ax.plot(0, 0, marker="o", markersize=6, color=paper, markeredgecolor=ink, markeredgewidth=1.0, zorder=LABEL)
    at = scene.camera.paper(cloud.mean(0))
    scene.ax.plot(*at, marker="x", markersize=6, color=ink, markeredgewidth=1.6, zorder=LABEL)
