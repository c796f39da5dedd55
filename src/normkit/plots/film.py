"""The frames of an animation: the cloud at each moment, the surface it is on, and the text beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from normkit.plots import theme
from normkit.plots.camera import Camera, Points, array, upright
from normkit.plots.scene import BEHIND, Ball, Scene, ellipse
from normkit.plots.stages import Course, Stage
from normkit.plots.timeline import Moment

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = (640, 580)
"""Dots across and down, both even as H.264 wants them."""

_DOTS = 100
# The part of the figure that the scene takes, between the texts.
_LEFT, _LOW, _WIDE, _HIGH = 0.02, 0.09, 0.96, 0.69
_AZIMUTH, _SWAY, _ELEVATION = -62.0, 16.0, 23.0
_MOST_TRAILS = 200
_FEATURES = array(upright())


class Film:
    """One figure, drawn anew for each moment; make and use it under `theme.style`."""

    def __init__(self, course: Course) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._course = course
        self._figure = Figure(figsize=(SIZE[0] / _DOTS, SIZE[1] / _DOTS), dpi=_DOTS)
        self._canvas: Any = FigureCanvasAgg(self._figure)
        self._ax = self._figure.add_axes((_LEFT, _LOW, _WIDE, _HIGH))
        self._ring = ellipse(np.zeros(3), course.radius * np.eye(3)[:, :2]) @ _FEATURES.T
        self._square = _square(course)
        self._windows = [self._window(stage) for stage in course.stages]

    def picture(self, moment: Moment) -> Image:
        """One frame."""
        from PIL import Image

        # Faster than clearing the axes, which would rebuild ticks and spines.
        for parts in (self._ax.lines, self._ax.patches, self._ax.collections, self._ax.texts):
            for part in list(parts):
                part.remove()
        for part in [*self._figure.texts, *self._figure.artists]:
            part.remove()
        self._draw(moment)
        self._write(moment)
        self._write_way(moment)
        self._canvas.draw()
        return Image.fromarray(np.array(self._canvas.buffer_rgba())[..., :3])

    def _window(self, stage: Stage) -> Points:
        """Left, right, low and high on paper of all that a stage shows, from anywhere the camera goes."""
        ball = _ball(self._course.radius, stage.gain, stage.middle)
        sections = [ball.section(first, second) for first, second in ((0, 1), (1, 2), (0, 2))]
        shown = [stage.points[np.isfinite(stage.points).all(1)], np.array([[0.0, 0.0, _top(self._course)]]), *sections]
        if self._course.is_centred:
            shown.append(self._plane(stage.gain, stage.middle))
        places = [Camera(_AZIMUTH + turn, _ELEVATION).paper(np.concatenate(shown)) for turn in (-_SWAY, 0.0, _SWAY)]
        low, high = np.min(places, axis=(0, 1)), np.max(places, axis=(0, 1))
        box = np.array([SIZE[0] * _WIDE, SIZE[1] * _HIGH])
        half = 0.53 * box * ((high - low) / box).max()
        middle = (low + high) / 2
        return np.stack([middle - half, middle + half], axis=1).ravel()

    def _plane(self, gain: Points, middle: Points) -> Points:
        """The image under gain and bias of a square of points with mean 0."""
        return _affine(self._square @ _FEATURES.T, gain, middle)

    def _draw(self, moment: Moment) -> None:
        course = self._course
        before, after = course.stages[moment.before], course.stages[moment.after]
        way, rest = moment.way, moment.rest
        scene = Scene(self._ax, Camera(_AZIMUTH + _SWAY * math.sin(2 * math.pi * moment.turn), _ELEVATION))
        window = (1 - way) * self._windows[moment.before] + way * self._windows[moment.after]
        self._ax.set_xlim(*window[:2])
        self._ax.set_ylim(*window[2:])
        points = (1 - way) * before.points + way * after.points
        gain, middle = (1 - way) * before.gain + way * after.gain, (1 - way) * before.middle + way * after.middle
        ball = _ball(course.radius, gain, middle)
        plane, sphere = moment.opacity(before.is_flat, after.is_flat), moment.opacity(before.is_scaled, after.is_scaled)
        _draw_axes(scene, course)
        if plane:
            scene.sheet(self._plane(gain, middle), opacity=plane)
        if sphere:
            scene.ball(ball, opacity=sphere * (0.55 if course.is_centred else 1.0))
        if sphere and course.is_centred:
            scene.curve_on(ball, _affine(self._ring, gain, middle), "ink", width=1.6, opacity=sphere)
        if moved := moment.opacity(bool(before.middle.any()), bool(after.middle.any())):
            scene.arrow(middle, "b", name="ink", alpha=moved)
        if moment.after and len(points) <= _MOST_TRAILS:
            scene.trails(before.points, points, course.groups, BEHIND, opacity=0.45 * (1 - rest))
            scene.ghosts(before.points, course.groups, opacity=0.6 * (1 - rest) * min(1.0, 4 * way))
        cover = plane if course.is_centred else sphere
        # Scaled rows of a norm that centres are on the sheet, not under it.
        below = (points[:, 2] < -1e-9) & (not sphere)
        behind = below if course.is_centred else ~ball.faces(scene.camera, points)
        scene.points(points, course.groups, behind, size=26, faint=1 - 0.3 * cover)

    def _write(self, moment: Moment) -> None:
        """Name, formula and invariants: those of the stage that is left go first, what will hold comes last."""
        before, after = (self._course.stages[k] for k in (moment.before, moment.after))
        if moment.before == moment.after:
            stage, known, held = after, 1.0, 1.0
        elif moment.way < 0.1:
            stage, known, held = before, 1 - 10 * moment.way, 1 - 10 * moment.way
        else:
            stage, known, held = after, min(1.0, 5 * moment.way - 0.5), max(0.0, 5 * moment.way - 4)
        put: Any = self._figure.text
        put(0.04, 0.919, stage.name, fontsize=19, weight="bold", va="center", alpha=known)
        put(0.96, 0.919, stage.formula, fontsize=14, ha="right", va="center", alpha=known)
        put(0.04, 0.835, stage.shape, fontsize=10.5, va="center", alpha=known)
        put(0.04, 0.801, stage.holds, fontsize=8.5, va="center", alpha=held, color=theme.colour("muted"))

    def _write_way(self, moment: Moment) -> None:
        """The names of all stages along a line, in the accent's colour up to where it is."""
        from matplotlib.lines import Line2D

        places = np.linspace(0.1, 0.9, len(self._course.stages))
        here = moment.between(places[moment.before], places[moment.after])
        for end, name in ((places[-1], "line"), (here, "accent")):
            line: Any = {"color": theme.colour(name), "linewidth": 2.0, "solid_capstyle": "round"}
            self._figure.add_artist(Line2D([places[0], end], [0.062, 0.062], **line))
        for place, stage in zip(places, self._course.stages, strict=True):
            is_past = place <= here + 1e-9
            dot: Any = {"marker": "o", "markersize": 6, "color": theme.colour("accent" if is_past else "line")}
            self._figure.add_artist(Line2D([place], [0.062], **dot))
            words: Any = {"fontsize": 9, "ha": "center", "va": "center"}
            self._figure.text(
                place, 0.028, stage.name.lower(), color=theme.colour("ink" if is_past else "muted"), **words
            )


def _ball(radius: float, gain: Points, middle: Points) -> Ball:
    """The sphere, stretched along the features and moved; never quite flat, so that it has two sides."""
    return Ball(centre=middle, semi_axes=radius * np.maximum(np.abs(gain), 1e-3), directions=_FEATURES.T)


def _affine(rows: Points, gain: Points, middle: Points) -> Points:
    """Rows of features (N, 3) times gain, in the coordinates of the drawing, about the middle."""
    moved: Points = (rows * gain) @ _FEATURES + middle
    return moved


def _square(course: Course) -> Points:
    """Corners of a square of points with mean 0 that holds the sphere and the centred and scaled points."""
    flat = np.concatenate([stage.points[:, :2] for stage in course.stages if stage.name in ("Centre", "Scale")])
    reach = 1.12 * max(course.radius, float(np.abs(flat).max(initial=0.0, where=np.isfinite(flat))))
    # Rotated so that no edge is horizontal in the picture.
    corners = np.radians(_AZIMUTH + 1.4 * _SWAY + np.array([45.0, 135.0, 225.0, 315.0]))
    return np.stack([np.cos(corners), np.sin(corners), 0.0 * corners], axis=1) * (math.sqrt(2.0) * reach)


def _top(course: Course) -> float:
    """How far up the all-ones axis is drawn."""
    return 1.3 * course.radius


def _draw_axes(scene: Scene, course: Course) -> None:
    """The all-ones axis and the directions of the features."""
    top = np.array([0.0, 0.0, _top(course)])
    scene.curve(np.array([-top, 0 * top]), "muted", layer=BEHIND, linewidth=0.8, alpha=0.5)
    scene.arrow(top, "")
    scene.label(top, "all-ones (1, 1, 1)", shift=(6, -2), ha="left")
    for k, direction in enumerate(0.95 * course.radius * _FEATURES):
        scene.arrow(direction, f"x{'₁₂₃'[k]}", linewidth=0.7, alpha=0.7)
