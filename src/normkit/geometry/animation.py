"""A norm of three features as an animation: raw, centred, scaled, times gain, plus bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normkit import files
from normkit.conventions.gain import NO_GAIN
from normkit.errors import InputError
from normkit.geometry.decomposition import Step, decompose
from normkit.geometry.image import image_of
from normkit.geometry.rows import sphere_radius
from normkit.geometry.space_figures import array, groups_of, upright
from normkit.show import animation, theme
from normkit.show.animation import Clip, Moment, timeline
from normkit.show.scene import BEHIND, GROUPS, Ball, Camera, Points, Scene, ellipse
from normkit.spec import NormSpec
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], None]

SIZE = (640, 580)
"""Dots across and down, both even as H.264 wants them."""

_SECONDS = 2.0
_LONGEST = 600.0
_RATES: Mapping[Clip, float] = {"gif": 12.5, "mp4": 20.0}
# The part of the figure that the scene takes, between the texts.
Area = tuple[float, float, float, float]
_AREA: Area = (0.02, 0.09, 0.96, 0.69)
_AZIMUTH, _SWAY, _ELEVATION = -62.0, 16.0, 23.0
_MOST_TRAILS = 200
_FEATURES = array(upright())
_FOR_THREE = {"sqrt(n)": "√3", "sqrt(n - 1)": "√2", "n mean": "3 mean", "n variance": "3 variance", "/ n": "/ 3"}
_SYMBOLS = {"^2": "²", " * ": " · "}


def write_animation(
    path: str | Path,
    points: Any,
    groups: Sequence[int] | None = None,
    *,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scheme: theme.Scheme = "light",
    seconds: float | None = None,
    frames_per_second: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """Draw what a norm does to points of three features, step by step, as a GIF or MP4 that loops.

    The points travel straight from raw to centred (not for RMSNorm) to scaled, times gain, plus bias, with a pause at
    each, while the camera sways; each step has its formula and what holds after it, from `geometry.decompose`.

    Args:
        path: A file .gif or .mp4, written whole or not at all; the same GIF for the same arguments.
        points: Of shape (N, 3), finite; some hundreds can be told apart.
        groups: For each point a whole number, its colour modulo 3; None for one colour.
        spec: A LayerNorm or an RMSNorm over the last axis.
        weight: Gain as stored, of shape (3,); None leaves the step out.
        bias: Of shape (3,); None leaves the step out.
        scheme: Colours on white, or on a dark page.
        seconds: How long it is before it starts again; 2 for each stage unless given.
        frames_per_second: At most 50; 12.5 for a GIF, which counts in hundredths of a second, and 20 for an MP4, unless
            given.
        progress: Called with "frames", how many are drawn, and of how many.

    Returns:
        The path.

    Raises:
        ShapeError: If the points, gain or bias are not of three features.
        InputError: If the file is neither .gif nor .mp4 or cannot be written; if points, groups, norm or times cannot
            be used; if it is an MP4 and ffmpeg is not installed.
    """
    target = Path(path)
    kind = animation.clip_of(target)
    rate = _RATES[kind] if frames_per_second is None else frames_per_second
    if not (0 < rate <= 50):
        raise InputError(f"an animation has more than 0 and at most 50 frames per second, got {rate:g}")
    if seconds is not None and not 0 < seconds <= _LONGEST:
        raise InputError(f"an animation takes more than 0 and at most {_LONGEST:g} seconds, got {seconds:g}")
    if kind == "mp4":
        animation.ffmpeg()
    course = course_of(points, groups, spec, weight, bias)
    hundredths = round(100 / rate)
    length = _SECONDS * len(course.stages) if seconds is None else seconds
    moments = timeline(len(course.stages), max(2, round(length * (100 / hundredths if kind == "gif" else rate))))
    with theme.style(scheme):
        film = Film(course)

        def drawn() -> Iterator[None]:
            for done, moment in enumerate(moments):
                if progress is not None:
                    progress("frames", done, len(moments))
                film.draw(moment)
                yield

        pictures = (animation.picture_of(film.figure) for _ in drawn())
        if kind == "gif":
            paper, ink, *colours = (theme.colour(name) for name in ("paper", "ink", *GROUPS))
            content = animation.gif(pictures, paper, ink, colours, hundredths)
        else:
            content = animation.mp4(pictures, rate)
    return files.write_bytes(target, content)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A cloud after one map, in coordinates in which the all-ones direction points upwards."""

    name: str
    """"Raw", "Centre", "Scale", "Gain" or "Bias"."""
    formula: str
    """The formula up to this step, as mathtext."""
    shape: str
    """The set that the points lie on, in words."""
    holds: str
    """The invariants, and how far the points are from them."""
    points: Points
    """Shape (N, 3)."""
    gain: Points
    """The factors along the features by which the sphere has been stretched, shape (3,)."""
    middle: Points
    """The centre of the sphere, shape (3,)."""
    is_flat: bool
    """Whether the points are in a plane."""
    is_scaled: bool
    """Whether the points are on the sphere, or on what gain and bias made of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """A cloud of points at each step of a norm."""

    stages: tuple[Stage, ...]
    """In order, the raw points first; without "Centre" if the norm does not centre."""
    groups: list[int]
    """The colour of each point: 0, 1 or 2."""
    radius: float
    """Length of a scaled row without eps."""
    is_centred: bool
    """Whether the norm centres, so that its image is a circle and not a sphere."""


def course_of(
    points: Any, groups: Sequence[int] | None, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> Course:
    """Take a cloud through the maps of a norm; every number is `geometry.decompose`'s.

    Args:
        points: Of shape (N, 3).
        groups: For each point a whole number, its colour modulo 3; None for one colour.
        spec: LayerNorm or RMSNorm, over the last axis.
        weight: Gain as stored, of shape (3,); None leaves "Gain" out.
        bias: Of shape (3,); None leaves "Bias" out.

    Raises:
        ShapeError: If points, gain or bias are not of three features.
        InputError: If there is no point, one is not finite, or not each has a group; if the norm centres on one side of
            the fraction bar only, or its gain comes first.
    """
    x = torch.as_tensor(points, dtype=torch.float64)
    colours = [group % len(GROUPS) for group in groups_of(x, 3, groups)]
    if not len(x) or not bool(x.isfinite().all()):
        raise InputError("an animation needs at least 1 point, and finite ones; leave out those that are not")
    if len(colours) != len(x):
        raise InputError(f"an animation needs a group for each of its {len(x)} points, got {len(colours)}")
    if spec.centring.is_half or spec.gain.is_before:
        raise InputError(f"an animation needs a LayerNorm or an RMSNorm with its gain last, got {spec}")
    surface = image_of(spec, 3, weight, bias).surface
    gain, middle = array(surface.gain), array(surface.centre.double() @ upright())
    is_centred = spec.centring.numerator
    stages: list[Stage] = []

    def add(name: str, step: Step, formula: str, shape: str) -> None:
        stage = Stage(
            name=name,
            formula=formula,
            shape=shape,
            holds=_holds(step, spec),
            points=array(step.value @ upright()),
            gain=gain if name in ("Gain", "Bias") else np.ones(3),
            middle=middle if name == "Bias" else np.zeros(3),
            is_flat=is_centred and name != "Raw",
            is_scaled=name not in ("Raw", "Centre"),
        )
        stages.append(stage)

    steps = {step.name: step for step in decompose(x, spec).steps}
    circle = "a circle" if is_centred else "the whole sphere"
    ring = f"{circle} of radius {_in_words(spec.divisor.radius_in_words, spec)}"
    oval = "an ellipse in a tilted plane" if is_centred else "an ellipsoid along the features"
    plain = spec.replace(**NO_GAIN.conventions())
    add("Raw", steps["raw"], "$x = (x_1, x_2, x_3)$", "three features a point")
    if is_centred:
        add("Centre", steps["centred"], r"$x - \mu_x$", "a plane: nothing is left along all-ones")
    add("Scale", steps["scaled"], _formula(plain), ring)
    if weight is not None:
        plain = spec.replace(has_weight=True, has_bias=False)
        add("Gain", decompose(x, spec, weight).steps[-1], _formula(plain), oval)
    if bias is not None:
        words = f"{ring if weight is None else oval}, around b"
        add("Bias", decompose(x, spec, weight, bias).steps[-1], _formula(plain.replace(has_bias=True)), words)
    return Course(stages=tuple(stages), groups=colours, radius=sphere_radius(spec, 3), is_centred=is_centred)


def _formula(spec: NormSpec) -> str:
    """The spec's own formula, its fraction large and those in it small, as Matplotlib's mathtext knows them."""
    return spec._repr_latex_().replace(r"\frac", r"\dfrac").replace(r"\tfrac", r"\frac")


def _holds(step: Step, spec: NormSpec) -> str:
    """The invariants of a step in one line, with the largest defect over the points."""
    held = [invariant for invariant in step.invariants if "where g = 0" not in invariant.statement]
    words = _in_words(",  ".join(invariant.statement for invariant in held), spec)
    worst = float(torch.stack([invariant.defect.abs().nan_to_num(0.0) for invariant in held]).max())
    lost = int(step.value.isnan().any(-1).sum())
    undefined = f"   {lost} of {len(step.value)} points: 0/0" if lost else ""
    return f"{words}   (defect at most {significant(worst)}){undefined}"


def _in_words(statement: str, spec: NormSpec) -> str:
    """A statement of `geometry` for n = 3, without the shrink factor if eps does not shrink."""
    if spec.eps == 0:
        statement = statement.replace(" * shrink", "")
    for written, shown in (_FOR_THREE | _SYMBOLS).items():
        statement = statement.replace(written, shown)
    return statement


class Film:
    """One figure, drawn anew for each moment: the cloud, the surface it is on, and the text beside it.

    Make and use it under `theme.style`.
    """

    def __init__(self, course: Course, figure: Figure | None = None, area: Area = _AREA) -> None:
        """Add axes to a figure for the scene; to a new one unless given.

        Args:
            course: What is shown.
            figure: With an Agg canvas.
            area: Left, low, width and height of the scene, as shares of the figure.
        """
        self.figure = animation.new_figure(SIZE) if figure is None else figure
        self._ax = self.figure.add_axes(area)
        self._ax.set_axis_off()
        self._box = np.array(self.figure.get_size_inches() * self.figure.dpi) * area[2:]
        self._course = course
        self._top = np.array([0.0, 0.0, 1.3 * course.radius])
        self._circle = ellipse(np.zeros(3), course.radius * np.eye(3)[:, :2]) @ _FEATURES.T
        # Corners of a square of points with mean 0 that holds the sphere and the centred and scaled points, rotated so
        # that no edge is horizontal in the picture.
        flat = np.concatenate([stage.points[:, :2] for stage in course.stages if stage.name in ("Centre", "Scale")])
        reach = 1.12 * max(course.radius, float(np.abs(flat).max(initial=0.0, where=np.isfinite(flat))))
        corners = np.radians(_AZIMUTH + 1.4 * _SWAY + np.array([45.0, 135.0, 225.0, 315.0]))
        self._square = np.stack([np.cos(corners), np.sin(corners), 0.0 * corners], axis=1) * (math.sqrt(2.0) * reach)
        self._windows = [self._window(stage) for stage in course.stages]

    def draw(self, moment: Moment) -> None:
        """Draw the frame of a moment."""
        animation.clear(self.figure)
        self.draw_scene(moment)
        self._write(moment)
        self._draw_progress(moment)

    def _window(self, stage: Stage) -> Points:
        """Left, right, low and high on paper of all that a stage shows, from anywhere the camera goes."""
        sections = self._ball(stage.gain, stage.middle).sections()
        shown = [stage.points[np.isfinite(stage.points).all(1)], self._top[None], *sections]
        if self._course.is_centred:
            shown.append(_affine(self._square @ _FEATURES.T, stage.gain, stage.middle))
        places = [Camera(_AZIMUTH + turn, _ELEVATION).paper(np.concatenate(shown)) for turn in (-_SWAY, 0.0, _SWAY)]
        low, high = np.min(places, axis=(0, 1)), np.max(places, axis=(0, 1))
        half = 0.53 * self._box * ((high - low) / self._box).max()
        middle = (low + high) / 2
        return np.stack([middle - half, middle + half], axis=1).ravel()

    def _ball(self, gain: Points, middle: Points) -> Ball:
        """The sphere, stretched along the features and moved; never quite flat, so that it has two sides."""
        sizes = self._course.radius * np.maximum(np.abs(gain), 1e-3)
        return Ball(centre=middle, semi_axes=sizes, directions=_FEATURES.T)

    def draw_scene(self, moment: Moment) -> None:
        """Draw the cloud and its surface, without text, into axes that are empty."""
        course = self._course
        before, after = course.stages[moment.before], course.stages[moment.after]
        way, rest = moment.way, moment.rest
        scene = Scene(self._ax, Camera(_AZIMUTH + _SWAY * math.sin(2 * math.pi * moment.turn), _ELEVATION))
        window = (1 - way) * self._windows[moment.before] + way * self._windows[moment.after]
        self._ax.set_xlim(*window[:2])
        self._ax.set_ylim(*window[2:])
        points = (1 - way) * before.points + way * after.points
        gain, middle = (1 - way) * before.gain + way * after.gain, (1 - way) * before.middle + way * after.middle
        ball = self._ball(gain, middle)
        plane, sphere = moment.opacity(before.is_flat, after.is_flat), moment.opacity(before.is_scaled, after.is_scaled)
        scene.curve(np.array([-self._top, 0 * self._top]), "muted", layer=BEHIND, linewidth=0.8, alpha=0.5)
        scene.arrow(self._top, "")
        scene.label(self._top, "all-ones (1, 1, 1)", shift=(6, -2), ha="left")
        for k, direction in enumerate(0.95 * course.radius * _FEATURES):
            scene.arrow(direction, f"x{'₁₂₃'[k]}", linewidth=0.7, alpha=0.7)
        if plane:
            scene.sheet(_affine(self._square @ _FEATURES.T, gain, middle), opacity=plane)
        if sphere:
            scene.ball(ball, opacity=sphere * (0.55 if course.is_centred else 1.0))
        if sphere and course.is_centred:
            scene.curve_on(ball, _affine(self._circle, gain, middle), "ink", width=1.6, opacity=sphere)
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
        put: Any = self.figure.text
        put(0.04, 0.919, stage.name, fontsize=19, weight="bold", va="center", alpha=known)
        put(0.96, 0.919, stage.formula, fontsize=14, ha="right", va="center", alpha=known)
        put(0.04, 0.835, stage.shape, fontsize=10.5, va="center", alpha=known)
        put(0.04, 0.801, stage.holds, fontsize=8.5, va="center", alpha=held, color=theme.colour("muted"))

    def _draw_progress(self, moment: Moment) -> None:
        """The names of all stages along a line, in the accent's colour up to where it is."""
        from matplotlib.lines import Line2D

        places = np.linspace(0.1, 0.9, len(self._course.stages))
        here = moment.between(places[moment.before], places[moment.after])
        for end, name in ((places[-1], "line"), (here, "accent")):
            line: Any = {"color": theme.colour(name), "linewidth": 2.0, "solid_capstyle": "round"}
            self.figure.add_artist(Line2D([places[0], end], [0.062, 0.062], **line))
        for place, stage in zip(places, self._course.stages, strict=True):
            dot, ink = ("accent", "ink") if place <= here + 1e-9 else ("line", "muted")
            look: Any = {"marker": "o", "markersize": 6, "color": theme.colour(dot)}
            self.figure.add_artist(Line2D([place], [0.062], **look))
            words: Any = {"fontsize": 9, "ha": "center", "va": "center", "color": theme.colour(ink)}
            self.figure.text(place, 0.028, stage.name.lower(), **words)


def _affine(rows: Points, gain: Points, middle: Points) -> Points:
    """Rows of features (N, 3) times gain, in the coordinates of the drawing, about the middle."""
    moved: Points = (rows * gain) @ _FEATURES + middle
    return moved
