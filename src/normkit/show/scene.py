"""Three-dimensional things in flat axes: sheets, curves, balls, points and arrows, nearer ones on top.

Everything is given in the camera's three coordinates. Points behind a sheet, or on the far side of a ball, are drawn
lighter and under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normkit.show.theme import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = NDArray[np.float64]
Mask = NDArray[np.bool_]

GROUPS = ("accent", "contrast", "third")
"""Colours of groups of points, in their order."""

BEHIND, SHEET, ON_SHEET, FRONT, LABEL = 1.0, 2.0, 3.0, 4.0, 6.0
"""Layers, from the farthest to the nearest."""

_TURN = np.linspace(0.0, 2.0 * math.pi, 121)


@dataclass(frozen=True)
class Camera:
    """A camera far from the origin, the third coordinate upwards; parallel lines stay parallel."""

    azimuth: float = -60.0
    """Degrees around the vertical axis, from the first coordinate."""
    elevation: float = 20.0
    """Degrees above the horizontal plane; 90 looks straight down."""

    def paper(self, points: Points) -> Points:
        """Coordinates of points (..., 3) in the drawing: (..., 2), to the right and upwards."""
        return points @ self._frame()[:, :2]

    def nearness(self, points: Points) -> Points:
        """Distance of points (..., 3) in front of the drawing plane, towards the reader: (...)."""
        return points @ self._frame()[:, 2]

    @property
    def upwards(self) -> Points:
        """The direction that appears as straight up, a unit vector (3,)."""
        return self._frame()[:, 1]

    def _frame(self) -> Points:
        """Unit vectors to the right, upwards and towards the reader, as columns."""
        turn, lift = math.radians(self.azimuth), math.radians(self.elevation)
        right = (-math.sin(turn), math.cos(turn), 0.0)
        upwards = (-math.cos(turn) * math.sin(lift), -math.sin(turn) * math.sin(lift), math.cos(lift))
        towards = (math.cos(turn) * math.cos(lift), math.sin(turn) * math.cos(lift), math.sin(lift))
        return np.array([right, upwards, towards]).T


@dataclass(frozen=True)
class Ball:
    """A sphere or ellipsoid: its centre (3,), semi-axes (3,) and orthonormal directions as columns (3, 3)."""

    centre: Points
    semi_axes: Points
    directions: Points

    def sections(self) -> Points:
        """The ellipses in the three planes of two of its axes, as closed polygons: (3, 121, 3)."""
        stretched = self.directions * self.semi_axes
        return np.stack([ellipse(self.centre, stretched[:, pair]) for pair in ([0, 1], [1, 2], [0, 2])])

    def faces(self, camera: Camera, points: Points) -> Mask:
        """Which points of the surface are on the side of the reader."""
        normals = ((points - self.centre) @ self.directions / self.semi_axes**2) @ self.directions.T
        return np.asarray(camera.nearness(normals) >= -1e-9)


def ellipse(centre: Points, axes: Points) -> Points:
    """centre + axes @ (cos, sin): a closed polygon (121, 3) for two semi-axes as columns (3, 2)."""
    return np.asarray(centre + np.stack([np.cos(_TURN), np.sin(_TURN)], axis=1) @ axes.T)


class Scene:
    """One view of three-dimensional things in a pair of axes."""

    def __init__(self, ax: Axes, camera: Camera) -> None:
        self.ax = ax
        self.camera = camera
        ax.set_axis_off()
        ax.set_aspect("equal")

    def heading(self, title: str, words: str) -> None:
        """Write the name of the panel above it, and below the name the lines of a comment."""
        beside: Any = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points", "va": "baseline"}
        lines = words.split("\n")
        for line, text in enumerate(reversed(lines)):
            self.ax.annotate(text, xytext=(0, 6 + 12 * line), fontsize=9, color=colour("muted"), **beside)
        if title:
            self.ax.annotate(title, xytext=(0, 8 + 12 * len(lines)), weight="bold", **beside)

    def sheet(self, corners: Points, opacity: float = 1.0) -> None:
        """A translucent plane with its border; less of it with an opacity below 1, as of all that takes one."""
        from matplotlib.patches import Polygon

        place = self.camera.paper(corners)
        for name, share, depth in (("paper", 0.6, 0.02), ("muted", 0.1, 0.01)):
            face: Any = {"facecolor": colour(name), "edgecolor": "none", "zorder": SHEET - depth}
            self.ax.add_patch(Polygon(place, alpha=share * opacity, **face))
        edge: Any = {"fill": False, "edgecolor": colour("muted"), "linewidth": 0.7, "zorder": SHEET}
        self.ax.add_patch(Polygon(place, alpha=opacity, **edge))

    def ball(self, ball: Ball, opacity: float = 1.0) -> None:
        """A translucent sphere or ellipsoid: outline, and the sections through its axes, their far half faint."""
        axes = self.camera.paper((ball.directions * ball.semi_axes).T).T
        left, sizes, _ = np.linalg.svd(axes)
        outline = self.camera.paper(ball.centre) + np.stack([np.cos(_TURN), np.sin(_TURN)], axis=1) @ (left * sizes).T
        self.ax.fill(*outline.T, color=colour("muted"), alpha=0.1 * opacity, linewidth=0, zorder=SHEET)
        self.ax.plot(*outline.T, color=colour("muted"), alpha=opacity, linewidth=0.8, zorder=SHEET)
        for section in ball.sections():
            self.curve_on(ball, section, "muted", width=0.6, opacity=opacity)

    def curve_on(self, ball: Ball, points: Points, name: str, width: float = 1.4, opacity: float = 1.0) -> None:
        """A curve on a ball's surface: solid on the near side, faint on the far one."""
        near = ball.faces(self.camera, points)
        for is_near, share, layer in ((True, 0.9, ON_SHEET), (False, 0.35, BEHIND)):
            visible = np.where((near == is_near)[:, None], self.camera.paper(points), math.nan)
            self.ax.plot(*visible.T, color=colour(name), alpha=share * opacity, linewidth=width, zorder=layer)

    def curve(self, points: Points, name: str = "ink", layer: float = ON_SHEET, **options: Any) -> None:
        """A line through points."""
        place = self.camera.paper(points)
        self.ax.plot(*place.T, **{"color": colour(name), "linewidth": 1.2, "zorder": layer, **options})

    def points(
        self,
        points: Points,
        groups: Sequence[int],
        behind: Mask | None = None,
        size: float = 16,
        faint: float = 0.6,
    ) -> None:
        """Dots in the colour of their group; those behind something of the opacity `faint`, and under it."""
        hidden = np.zeros(len(points), dtype=bool) if behind is None else behind
        order = np.argsort(self.camera.nearness(points), kind="stable")
        place = self.camera.paper(points)
        for is_hidden, opacity, layer in ((True, faint, BEHIND + 0.5), (False, 1.0, FRONT)):
            shown = [k for k in order if hidden[k] == is_hidden]
            if shown:
                self.ax.scatter(
                    place[shown, 0],
                    place[shown, 1],
                    s=size,
                    color=[colour(GROUPS[groups[k]]) for k in shown],
                    alpha=opacity,
                    edgecolor=colour("paper"),
                    linewidth=0.5,
                    zorder=layer,
                    label="points",
                )

    def trails(
        self, start: Points, end: Points, groups: Sequence[int], layer: float = ON_SHEET, opacity: float = 0.45
    ) -> None:
        """Thin lines from where points were to where they are."""
        from matplotlib.collections import LineCollection

        lines = np.stack([self.camera.paper(start), self.camera.paper(end)], axis=1)
        colours = [colour(GROUPS[group]) for group in groups]
        self.ax.add_collection(LineCollection(list(lines), colors=colours, linewidth=0.7, alpha=opacity, zorder=layer))

    def ghosts(self, points: Points, groups: Sequence[int], opacity: float = 0.7) -> None:
        """Draw former positions of points as small rings."""
        colours = [colour(GROUPS[group]) for group in groups]
        place = self.camera.paper(points)
        rings: Any = {"facecolor": "none", "edgecolor": colours, "linewidth": 0.6, "alpha": opacity, "zorder": FRONT}
        self.ax.scatter(place[:, 0], place[:, 1], s=9, **rings)

    def arrow(self, tip: Points, label: str = "", *, name: str = "muted", gap: float = 9.0, **options: Any) -> None:
        """An arrow from the origin, its label some points of the paper beyond the tip."""
        tail, head = self.camera.paper(np.zeros(3)), self.camera.paper(tip)
        style = {"arrowstyle": "-|>,head_length=0.35,head_width=0.14", "color": colour(name), "linewidth": 0.9}
        style |= {"shrinkA": 0, "shrinkB": 0}
        layer = options.pop("layer", ON_SHEET)
        self.ax.annotate("", (head[0], head[1]), (tail[0], tail[1]), arrowprops={**style, **options}, zorder=layer)
        if label:
            away = (head - tail) / max(float(np.hypot(*(head - tail))), 1e-9)
            self.label(tip, label, shift=(gap * away[0], gap * away[1]), name=name)

    def label(
        self, point: Points, text: str, *, shift: tuple[float, float] = (0, 0), name: str = "muted", **options: Any
    ) -> None:
        """Draw text at a point, shifted by a distance in typographic points."""
        right, up = self.camera.paper(point)
        placed: Any = {
            "ha": "center",
            "va": "center",
            "fontsize": 8.5,
            "color": colour(name),
            "zorder": LABEL,
            **options,
        }
        self.ax.annotate(text, (right, up), shift, textcoords="offset points", **placed)


def frame(scenes: Sequence[Scene], points: Points) -> None:
    """Give all panels the window that holds the points, so that lengths compare."""
    place = scenes[0].camera.paper(points)
    (left, low), (right, high) = place.min(0), place.max(0)
    margin = 0.03 * (right - left)
    for scene in scenes:
        scene.ax.set_xlim(left - margin, right + margin)
        scene.ax.set_ylim(low - margin, high + margin)
