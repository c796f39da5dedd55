"""The shots of the film: scenes from fixed data, each with its caption and what normkit.geometry computes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normkit import specs
from normkit.geometry.animation import Film, course_of
from normkit.geometry.batches import centre_over_batch
from normkit.geometry.centring import centre, helmert
from normkit.geometry.decomposition import decompose
from normkit.geometry.image import image_of
from normkit.geometry.space_figures import array, ball_of, flat_sheet, nearest_basis, upright
from normkit.plots.gallery import GROUPS_OF_CLOUD, cloud, vector
from normkit.show import theme
from normkit.show.animation import Moment, eased
from normkit.show.scene import BEHIND, Ball, Camera, Points, Scene
from normkit.text import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AREA = (0.02, 0.25, 0.96, 0.64)
_HALVES = ((0.02, 0.25, 0.47, 0.54), (0.51, 0.25, 0.47, 0.54))
# Shares of a shot: nothing moves before the first and after the second.
_START, _END = 0.12, 0.62
# How many shots turn the camera once to and fro.
_SHOTS_A_SWAY = 12
_LAYER, _RMS = specs.TORCH_LAYER_NORM.replace(eps=0.0), specs.LLAMA.replace(eps=0.0)
_GAIN, _BIAS = vector(1.3, 0.6, 1.0), vector(0.3, 0.1, 0.9)
_GAIN_OF_FOUR = vector(0.9, 1.5, 0.6, 1.0)


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A part of the film with one caption."""

    chapter: int
    """Index in `CHAPTERS`."""
    title: str
    caption: str
    """One or two lines."""
    measured: str
    """The values that normkit.geometry computes of the points shown."""
    draw: Callable[[float], None]
    """Draws the scene for a share of the way, from 0 to 1, into axes that are empty."""
    formula: str = ""
    """As mathtext."""
    is_turning: bool = False
    """Whether it moves from its first frame to its last, evenly."""

    @property
    def seconds(self) -> float:
        """Long enough to read title and caption at three words a second, and to look for half a second."""
        return max(4.5, 0.5 + len(f"{self.title} {self.caption}".split()) / 3)

    def way(self, share: float) -> float:
        """The share of the way at a share of the time."""
        return share if self.is_turning else eased(min(1.0, max(0.0, (share - _START) / (_END - _START))))


CHAPTERS = ("LayerNorm", "BatchNorm beside it", "RMSNorm", "LayerNorm of four features")


def storyboard(figure: Figure) -> list[Shot]:
    """All shots, which draw into a figure; make and use them under `theme.style`."""
    single, *halves = (figure.add_axes(area) for area in (_AREA, *_HALVES))
    for ax in (single, *halves):
        ax.set_axis_off()
    return [*_layer_norm(figure), *_batch_norm(halves), *_rms_norm(figure), *_four_features(single)]


def _on_the_way(scene: Film, before: int, after: int, first: int) -> Callable[[float], None]:
    """Draws the way between two stages of a course; the camera turns with it, from where `first` shots have left it."""

    def drawn(way: float) -> None:
        at = 1.0 if before == after else way
        scene.draw_scene(Moment(before, after, at, way, (first + way) / _SHOTS_A_SWAY))

    return drawn


def _layer_norm(figure: Figure) -> list[Shot]:
    course = course_of(cloud("steps") @ upright().T, GROUPS_OF_CLOUD, _LAYER, _GAIN, _BIAS)
    scene = Film(course, figure, _AREA)
    sizes = _listed(image_of(_LAYER, 3, _GAIN, _BIAS).surface.semi_axes())
    raw, centred, scaled, _, final = course.stages
    return [
        Shot(
            chapter=0,
            title="Three clusters of points",
            formula=raw.formula,
            caption="Each point is a vector of three features.",
            measured=raw.holds,
            draw=_on_the_way(scene, 0, 0, 0),
        ),
        Shot(
            chapter=0,
            title="1  Centre",
            formula=centred.formula,
            caption="Each point loses its mean: it drops along all-ones onto a plane.",
            measured=centred.holds,
            draw=_on_the_way(scene, 0, 1, 1),
        ),
        Shot(
            chapter=0,
            title="2  Scale",
            formula=scaled.formula,
            caption="Each point is divided by its spread: it slides to length √3.\nA circle is left.",
            measured=scaled.holds,
            draw=_on_the_way(scene, 1, 2, 2),
        ),
        Shot(
            chapter=0,
            title="3  Gain and bias",
            formula=final.formula,
            caption="The gain makes the circle an ellipse, the bias moves it.\nNo output lies elsewhere.",
            measured=f"semi-axes of the ellipse: {sizes};  around b = ({', '.join(f'{b:g}' for b in _BIAS.tolist())})",
            draw=_on_the_way(scene, 2, 4, 3),
        ),
    ]


def _batch_norm(halves: list[Any]) -> list[Shot]:
    """The same cloud centred by both norms; seen along the plane; and with one cluster pulled away."""
    raw = cloud("clusters") @ upright().T
    groups = list(GROUPS_OF_CLOUD)
    first = torch.tensor(groups) == 0
    pulled = raw + first[:, None] * vector(2.0, -1.0, -1.0)
    basis = upright()
    maps = (centre_over_batch, centre)
    clouds, after = ([array(each(points) @ basis) for each in maps] for points in (raw, pulled))
    before = array(raw @ basis)
    thick = [float(points[:, 2].std()) for points in clouds]
    shifts = [float(np.linalg.norm(b - a, axis=1)[~first.numpy()].max()) for a, b in zip(clouds, after, strict=True)]
    level = flat_sheet(1.15 * max(float(np.abs(points[:, :2]).max()) for points in clouds))
    reach = np.concatenate([before, *clouds, *after, level])
    names, top = ("BatchNorm", "LayerNorm"), np.array([0.0, 0.0, 1.1 * float(before[:, 2].max())])

    def drawn(starts: list[Points], ends: list[Points], tilt: tuple[float, float], way: float) -> None:
        camera = Camera(azimuth=-72.0, elevation=tilt[0] + (tilt[1] - tilt[0]) * way)
        for ax, name, start, end in zip(halves, names, starts, ends, strict=True):
            scene = Scene(ax, camera)
            points = start + way * (end - start)
            low, high = camera_window(ax, reach)
            ax.set_xlim(low[0], high[0])
            ax.set_ylim(low[1], high[1])
            put: Any = ax.text
            put(0.03, 1.03, name, transform=ax.transAxes, fontsize=12, weight="bold", va="bottom")
            scene.sheet(level)
            scene.arrow(top, "")
            scene.label(top, "all-ones", shift=(7, 0), ha="left", fontsize=9)
            if 0 < way < 1:
                scene.trails(start, points, groups, BEHIND)
            scene.points(points, groups, points[:, 2] < -1e-9, size=24, faint=0.75)
            middle = points.mean(0)
            place = scene.camera.paper(middle)
            cross: Any = {
                "marker": "x",
                "markersize": 8,
                "markeredgewidth": 1.8,
                "color": theme.colour("ink"),
                "zorder": 5,
            }
            ax.plot(*place, **cross)

    def camera_window(ax: Any, points: Points) -> tuple[Points, Points]:
        """The widest window over the two tilts, of the shape of the axes."""
        places = np.concatenate([Camera(-72.0, tilt).paper(points) for tilt in (0.0, 16.0)])
        low, high = places.min(0), places.max(0)
        box = np.array([ax.get_window_extent().width, ax.get_window_extent().height])
        half = 0.54 * box * ((high - low) / box).max()
        return (low + high) / 2 - half, (low + high) / 2 + half

    steep, flat = (16.0, 16.0), (16.0, 0.0)
    common: dict[str, Any] = {"chapter": 1, "formula": ""}
    return [
        Shot(
            **common,
            title="Whose mean?",
            caption="BatchNorm takes one mean for each feature,\nLayerNorm one for each point.",
            measured="the same 33 points, centred only; cross: mean of the cloud",
            draw=partial(drawn, [before, before], clouds, steep),
        ),
        Shot(
            **common,
            title="Seen along the plane",
            caption="BatchNorm only moved the cloud.\nLayerNorm pressed it flat, away from the origin.",
            measured=f"standard deviation along all-ones: before {before[:, 2].std():.2f}, "
            f"BatchNorm {thick[0]:.2f}, LayerNorm {thick[1]:.2f}",
            draw=partial(drawn, clouds, clouds, flat),
        ),
        Shot(
            **common,
            title="Pull one cluster away",
            caption="Under BatchNorm all other points move, too.\nUnder LayerNorm none does.",
            measured="largest move of a point of the other two clusters: "
            f"BatchNorm {shifts[0]:.2f}, LayerNorm {significant(shifts[1])}",
            draw=partial(drawn, clouds, after, (0.0, 16.0)),
        ),
    ]


def _rms_norm(figure: Figure) -> list[Shot]:
    gain = vector(0.65, 1.35, 1)
    points = (cloud("sphere") + vector(0, 0, 0.35)) @ upright().T
    course = course_of(points, GROUPS_OF_CLOUD, _RMS, gain, None)
    scene = Film(course, figure, _AREA)
    _, scaled, final = course.stages
    return [
        Shot(
            chapter=2,
            title="RMSNorm",
            formula=scaled.formula,
            caption="RMSNorm does not centre: points slide to length √3,\nanywhere on the sphere.",
            measured=scaled.holds,
            draw=_on_the_way(scene, 0, 1, 7),
        ),
        Shot(
            chapter=2,
            title="RMSNorm: gain",
            formula=final.formula,
            caption="The gain makes the sphere an ellipsoid along the features.",
            measured=f"semi-axes √3 |w|: {_listed(image_of(_RMS, 3, gain).surface.semi_axes())}",
            draw=_on_the_way(scene, 1, 2, 8),
        ),
    ]


def _listed(sizes: Tensor) -> str:
    return ", ".join(f"{size:.2f}" for size in sorted(sizes.tolist(), reverse=True))


def _four_features(ax: Any) -> list[Shot]:
    """Inside the hyperplane of four features with mean 0, the camera going round."""
    x = cloud("sphere") @ helmert(4).T
    basis = helmert(4)
    surface = image_of(_LAYER, 4, _GAIN_OF_FOUR).surface
    tilted = nearest_basis(surface.axes()[1], basis)
    steps = {step.name: step.value for step in decompose(x, _LAYER, _GAIN_OF_FOUR).steps}
    centred, scaled = (array(steps[name] @ basis) for name in ("centred", "scaled"))
    final = array(steps["gain and bias"] @ tilted)
    stretch = array(tilted.mT @ torch.diag(_GAIN_OF_FOUR) @ basis)
    lengths = [float(np.linalg.norm(points, axis=1).min()) for points in (centred, scaled)]
    sphere = ball_of(image_of(_LAYER, 4).surface, basis)
    groups = list(GROUPS_OF_CLOUD)
    box = np.array([ax.get_window_extent().width, ax.get_window_extent().height])
    # Half the height of the window, of the sphere and of the ellipsoid.
    heights = (1.25 * sphere.semi_axes.max(), 1.12 * float(surface.semi_axes().max()))

    def drawn(place: int, way: float) -> None:
        # It moves in the middle of a shot and turns all the time.
        moved = eased(min(1.0, max(0.0, (way - _START) / (_END - _START))))
        camera = Camera(azimuth=-58.0 + 40.0 * (place + way), elevation=20.0)
        scene = Scene(ax, camera)
        stretched = moved if place == 2 else 0.0
        half = (heights[0] + stretched * (heights[1] - heights[0])) * box / box.min()
        ax.set_xlim(-half[0], half[0])
        ax.set_ylim(-half[1], half[1])
        matrix = np.eye(3) + stretched * (stretch - np.eye(3))
        left, sides, _ = np.linalg.svd(matrix)
        ball = Ball(centre=np.zeros(3), semi_axes=sphere.semi_axes[0] * sides, directions=left)
        start, end = ((centred, centred), (centred, scaled), (scaled, final))[place]
        points = start + moved * (end - start)
        if place:
            scene.ball(ball, opacity=moved if place == 1 else 1.0)
        for direction, name in zip(np.eye(3), ("h₁", "h₂", "h₃"), strict=True):
            scene.arrow(1.2 * direction, name, linewidth=0.9, alpha=0.8)
        if place == 1 and 0 < moved < 1:
            scene.trails(start, points, groups, BEHIND)
        behind = ~ball.faces(camera, points) if place else np.zeros(len(points), dtype=bool)
        scene.points(points, groups, behind, size=24, faint=0.6)

    common: dict[str, Any] = {"chapter": 3, "is_turning": True}
    return [
        Shot(
            **common,
            title="Four features, from inside",
            formula=r"$x - \mu_x$",
            caption="Four features with mean 0 leave three dimensions:\nLayerNorm's plane, from inside.",
            measured=f"h₁, h₂, h₃: three directions across all-ones; lengths from {lengths[0]:.2f} on",
            draw=partial(drawn, 0),
        ),
        Shot(
            **common,
            title="Scaled: a true sphere",
            formula=r"$\dfrac{x - \mu_x}{\sigma_x}$",
            caption="All points have length √4 = 2.",
            measured=f"length of every point: {lengths[1]:.4f}; dimension {image_of(_LAYER, 4).dimension}",
            draw=partial(drawn, 1),
        ),
        Shot(
            **common,
            title="Gain: an ellipsoid",
            formula=r"$w \odot \dfrac{x - \mu_x}{\sigma_x}$",
            caption="The gain makes it an ellipsoid.\nCentre, scale, stretch: that is all.",
            measured=f"semi-axes: {_listed(surface.semi_axes())}",
            draw=partial(drawn, 2),
        ),
    ]
