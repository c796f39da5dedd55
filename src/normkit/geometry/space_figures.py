"""Figures in three dimensions: what each step of a norm does to points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normkit.conventions.rows import CENTRINGS
from normkit.errors import InputError, ShapeError
from normkit.geometry.batches import centre_over_batch
from normkit.geometry.centring import centre, helmert
from normkit.geometry.decomposition import decompose
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.image import image_of
from normkit.show import theme
from normkit.show.axes import figure_of, panels
from normkit.show.drawing import Drawing
from normkit.show.scene import BEHIND, LABEL, ON_SHEET, Ball, Camera, Points, Scene, ellipse, frame
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS_CAMERA = Camera(azimuth=-68.0, elevation=24.0)
_SPHERE_CAMERA = Camera(azimuth=-58.0, elevation=22.0)
_CLOUD_CAMERAS = (
    Camera(azimuth=-40.0, elevation=13.0),
    Camera(azimuth=-40.0, elevation=0.0),
    Camera(azimuth=-90.0, elevation=90.0),
)
_UP = np.array([0.0, 0.0, 1.0])


def upright() -> Tensor:
    """Coordinates for three features in which the all-ones direction points upwards: orthonormal columns (3, 3)."""
    ones = torch.full((3, 1), 1 / math.sqrt(3), dtype=torch.float64)
    return torch.cat([helmert(3), ones], dim=1)


def nearest_basis(directions: Tensor, basis: Tensor) -> Tensor:
    """The orthonormal basis of the columns of `directions` (n, m) that is nearest to `basis` (n, m).

    With it, a tilted hyperplane is drawn with the least rotation against an upright one.
    """
    left, _, right = torch.linalg.svd(directions.mT @ basis)
    rotated: Tensor = directions @ left @ right
    return rotated


def array(points: Tensor) -> Points:
    """A tensor as Matplotlib takes it."""
    return np.asarray(points.detach().double().cpu().numpy())


def groups_of(x: Tensor, features: int, groups: Sequence[int] | None, advice: str = "") -> list[int]:
    """The group of each point; 0 for all if no groups are given.

    Raises:
        ShapeError: If x is not of shape (N, features); the advice ends the message.
    """
    if x.dim() != 2 or x.shape[-1] != features:
        raise ShapeError(f"points of shape (N, {features}) are needed, got {tuple(x.shape)}{advice}")
    return [0] * len(x) if groups is None else list(groups)


def three_steps(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor,
    bias: Tensor,
    groups: Sequence[int] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Drawing:
    """Points of three features, raw, centred, scaled, and with gain and bias, the all-ones direction upwards.

    Args:
        x: Points of shape (N, 3).
        spec: A norm that centres, over the last axis.
        weight: Gain as stored, of shape (3,), no entry 0.
        bias: Of shape (3,).
        groups: For each point 0, 1 or 2: its colour.
        axes: Four axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If the points are not of three features.
        InputError: If the norm does not centre.
    """
    colours = groups_of(x, 3, groups, "; see hyperplane_steps for n = 4")
    if not spec.centring.is_full:
        raise InputError("the three steps are those of a norm that centres; see rms_sphere for one that does not")
    basis = upright()
    values = {step.name: array(step.value.double() @ basis) for step in decompose(x, spec, weight, bias).steps}
    raw, centred, scaled, final = (values[name] for name in ("raw", "centred", "scaled", "gain and bias"))
    circle, _ = _ellipse_of(image_of(spec, 3).surface, basis)
    oval, sides = _ellipse_of(image_of(spec, 3, weight, bias).surface, basis)
    middle = array(bias.double() @ basis)
    level = flat_sheet(1.12 * max(float(np.abs(centred[:, :2]).max()), float(np.abs(circle).max())))
    tilted = _sheet(middle, sides)
    with theme.style():
        scenes = [Scene(ax, _STEPS_CAMERA) for ax in panels(2, 2, 5.6, given=axes)]
        lowest = float(raw[:, 2].min())
        scene = scenes[0]
        scene.heading("1  Raw", "three features a point")
        scene.sheet(level)
        _all_ones(scene, 2.1, lowest, " (1, 1, 1)")
        for k, direction in enumerate(1.6 * array(basis)):
            scene.arrow(direction, f"x{'₁₂₃'[k]}", layer=ON_SHEET)
        scene.points(raw, colours, raw[:, 2] < 0)

        scene = scenes[1]
        scene.heading("2  Centred", "less its mean: x₁ + x₂ + x₃ = 0, a plane")
        scene.sheet(level)
        _all_ones(scene, 2.1, lowest, " (1, 1, 1)")
        for below, layer in ((True, BEHIND), (False, ON_SHEET)):
            chosen = [k for k in range(len(raw)) if (raw[k, 2] < 0) == below]
            if chosen:
                scene.trails(raw[chosen], centred[chosen], [colours[k] for k in chosen], layer)
        scene.ghosts(raw, colours)
        scene.points(centred, colours)

        scene = scenes[2]
        scene.heading("3  Scaled", "divided by its spread: length √3, a circle")
        scene.sheet(level)
        _all_ones(scene, 2.1, 0.0, " (1, 1, 1)")
        scene.curve(circle)
        # The radius is drawn where no point is near.
        free = circle[np.linalg.norm(circle[:, None] - scaled, axis=-1).min(1).argmax()]
        scene.arrow(free, "", arrowstyle="-")
        scene.label(free / 2, "√3", shift=(9, 2))
        scene.trails(centred, scaled, colours)
        scene.ghosts(centred, colours)
        scene.points(scaled, colours)

        scene = scenes[3]
        scene.heading("4  Gain and bias", "times g, plus b: an ellipse around b")
        _all_ones(scene, 2.1, 0.0, " (1, 1, 1)")
        scene.curve(circle, "muted", linewidth=0.8, linestyle=(0, (4, 2)), layer=BEHIND)
        scene.sheet(tilted)
        scene.curve(oval)
        scene.trails(scaled, final, colours)
        scene.arrow(middle, "", name="ink")
        scene.label(middle, "b", shift=(9, -2), name="ink")
        scene.points(final, colours)
        frame(scenes, np.concatenate([raw, centred, level, tilted, 2.1 * _UP[None]]))
    return Drawing(
        name="three-steps",
        figure=figure_of(scenes[0].ax),
        title="What LayerNorm does to a vector, in three steps",
        caption="With three features, every point drops along the all-ones direction onto a plane, moves along a ray "
        "onto a circle, and the gain and bias make that circle a tilted, moved ellipse.",
        description="Four views of the same points: a cloud around a plane; the points dropped onto the plane; on a "
        "circle of radius 1.73 in it; on an ellipse in a tilted plane.",
    )


def hyperplane_steps(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor,
    bias: Tensor,
    groups: Sequence[int] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Drawing:
    """Points of four features inside their hyperplane: centred, on the sphere of radius 2, on the ellipsoid.

    Coordinates of the first two panels are those of the Helmert basis of the rows with mean 0; the third is the
    hyperplane with normal 1 / gain through the bias, in the basis nearest to that one. Lengths are true in each.

    Args:
        x: Points of shape (N, 4).
        spec: A norm that centres, over the last axis.
        weight: Gain as stored, of shape (4,), no entry 0.
        bias: Of shape (4,).
        groups: For each point 0, 1 or 2: its colour.
        axes: Three axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If the points are not of four features.
        InputError: If the norm does not centre.
    """
    colours = groups_of(x, 4, groups, "; see three_steps for n = 3")
    if not spec.centring.is_full:
        raise InputError("inside the hyperplane lie only rows of a norm that centres; see rms_sphere for others")
    basis = helmert(4)
    values = {step.name: step.value.double() for step in decompose(x, spec, weight, bias).steps}
    surface = image_of(spec, 4, weight, bias).surface
    tilted = nearest_basis(surface.axes()[1], basis)
    centred, scaled = array(values["centred"] @ basis), array(values["scaled"] @ basis)
    final = array((values["gain and bias"] - surface.centre) @ tilted)
    sphere, oval = ball_of(image_of(spec, 4).surface, basis), ball_of(surface, tilted)
    with theme.style():
        scenes = [Scene(ax, _SPHERE_CAMERA) for ax in panels(1, 3, 2.6, given=axes)]
        scenes[0].heading("Centred", "four features with mean 0:\nthree dimensions are left")
        for direction, name in zip(np.eye(3), ("h₁", "h₂", "h₃"), strict=True):
            scenes[0].arrow(direction, name)
        scenes[0].points(centred, colours)
        scenes[1].heading("Scaled", "every point at length √4 = 2:\na true sphere")
        scenes[1].ball(sphere)
        scenes[1].trails(centred, scaled, colours, BEHIND)
        scenes[1].points(scaled, colours, ~sphere.faces(_SPHERE_CAMERA, scaled))
        scenes[2].heading("Gain and bias", "an ellipsoid around b;\nmarked: its semi-axes")
        _draw_ellipsoid(scenes[2], oval, final, colours)
        frame(scenes, np.concatenate([centred, scaled, final, *sphere.sections(), *oval.sections()]))
    sizes = ", ".join(f"{size:.2f}" for size in surface.semi_axes())
    return Drawing(
        name="hyperplane-steps",
        figure=figure_of(scenes[0].ax),
        title="Inside the hyperplane: LayerNorm of four features",
        caption="Four features with mean 0 leave three dimensions (h₁ to h₃: any three orthogonal directions of the "
        "hyperplane): centred points fill them, scaling puts them on a sphere of radius √n = 2, and the gain makes "
        "that an ellipsoid in the hyperplane with normal 1/g.",
        description=f"A cloud in three groups; the same points on a sphere of radius 2; on an ellipsoid with semi-axes "
        f"{sizes}.",
    )


def rms_sphere(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor,
    groups: Sequence[int] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Drawing:
    """Points of three features on RMSNorm's sphere and ellipsoid, and the circle to which LayerNorm is confined.

    Args:
        x: Points of shape (N, 3).
        spec: A norm that does not centre, over the last axis.
        weight: Gain as stored, of shape (3,), no entry 0.
        groups: For each point 0, 1 or 2: its colour.
        axes: Three axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If the points are not of three features.
        InputError: If the norm centres.
    """
    colours = groups_of(x, 3, groups)
    if spec.centring.numerator or spec.centring.statistics:
        raise InputError("this sphere is that of a norm that does not centre; see three_steps for one that does")
    basis = upright()
    values = {step.name: array(step.value.double() @ basis) for step in decompose(x, spec, weight).steps}
    raw, scaled, final = (values[name] for name in ("raw", "scaled", "gain and bias"))
    sphere = ball_of(image_of(spec, 3).surface, basis)
    oval = ball_of(image_of(spec, 3, weight).surface, basis)
    sizes, directions = image_of(spec.replace(**CENTRINGS[True, True].conventions()), 3).surface.axes()
    circle = ellipse(np.zeros(3), array(basis.mT @ (directions * sizes)))
    with theme.style():
        scenes = [Scene(ax, _SPHERE_CAMERA) for ax in panels(1, 3, 2.85, given=axes)]
        scenes[0].heading("Raw", "three features a point;\nnothing will be centred")
        for scene in scenes[:2]:
            _all_ones(scene, 2.4)
        for k, direction in enumerate(array(basis)):
            scenes[0].arrow(direction, f"x{'₁₂₃'[k]}")
        scenes[0].points(raw, colours)
        scenes[1].heading("Scaled", "every point at length √3:\nanywhere on the sphere")
        scenes[1].ball(sphere)
        scenes[1].curve_on(sphere, circle, "ink")
        bottom = -sphere.semi_axes[0] * scenes[1].camera.upwards
        scenes[1].label(bottom, "LayerNorm would use\nthe bold circle only", shift=(0, -5), va="top")
        scenes[1].trails(raw, scaled, colours, BEHIND)
        scenes[1].points(scaled, colours, ~sphere.faces(_SPHERE_CAMERA, scaled))
        scenes[2].heading("Gain", "an ellipsoid along the features,\nsemi-axes √3 |g|")
        _draw_ellipsoid(scenes[2], oval, final, colours)
        frame(scenes, np.concatenate([raw, scaled, final, *sphere.sections(), *oval.sections(), 2.4 * _UP[None]]))
    return Drawing(
        name="rms-sphere",
        figure=figure_of(scenes[0].ax),
        title="RMSNorm keeps the whole sphere",
        caption="RMSNorm only scales: points keep their direction, the one along all-ones too, and land anywhere on a "
        "sphere of radius √n; the gain stretches it along the features.",
        description="A cloud in three groups; the same points on a sphere of radius 1.73, with the circle of mean 0 on "
        f"it; on an ellipsoid with semi-axes {', '.join(f'{size:.2f}' for size in np.sort(oval.semi_axes))}.",
    )


def centred_clusters(x: Tensor, groups: Sequence[int] | None = None, axes: Sequence[Axes] | None = None) -> Drawing:
    """A cloud of three features raw, less its mean over the cloud, and less each point's own mean; from three sides.

    Args:
        x: Points of shape (N, 3).
        groups: For each point 0, 1 or 2: its colour.
        axes: Nine axes to draw into: views from the side, along the plane, from above; None for a new figure.

    Raises:
        ShapeError: If the points are not of three features.
    """
    colours = groups_of(x, 3, groups)
    basis = upright()
    clouds = [array(cloud.double() @ basis) for cloud in (x, centre_over_batch(x), centre(x))]
    # Title and words of each view, row by row: from the side, along the plane, from above.
    headings = (
        ("Raw", "three clusters off the plane\nof points with mean 0"),
        ("Centred as by BatchNorm", "less the mean of the cloud,\nfeature by feature"),
        ("Centred as by LayerNorm", "less its own mean,\npoint by point"),
        ("", "the same along the plane,\nwhich is a line now"),
        ("", "above it and below"),
        ("", "every point on it"),
        ("", "the same from above,\nalong all-ones"),
        ("", "the mean of the cloud\nis the origin"),
        ("", "flat now, yet the cloud\nstays off the origin"),
    )
    level = flat_sheet(1.1 * max(float(np.abs(cloud[:, :2]).max()) for cloud in clouds))
    top = 1.05 * float(np.abs(clouds[0][:, 2]).max()) * _UP
    with theme.style():
        given = panels(3, 3, 6.2, given=axes)
        scenes = [Scene(ax, _CLOUD_CAMERAS[place // 3]) for place, ax in enumerate(given)]
        ink, paper = theme.colour("ink"), theme.colour("paper")
        for place, (scene, cloud) in enumerate(zip(scenes, clouds * 3, strict=True)):
            scene.heading(*headings[place])
            scene.sheet(level)
            if place < 3:
                lowest = min(0.0, float(cloud[:, 2].min()))
                scene.curve(np.array([lowest * _UP, 0.0 * _UP]), "muted", layer=BEHIND)
                scene.arrow(top)
                if place:
                    scene.trails(clouds[0], cloud, colours)
            scene.points(cloud, colours, cloud[:, 2] < -1e-9 if place < 3 else None, size=12)
            # A ring at the origin, a cross at the mean of the cloud.
            ring: Any = {"color": paper, "markeredgecolor": ink, "markeredgewidth": 1.0}
            scene.ax.plot(0, 0, marker="o", markersize=6, zorder=LABEL, **ring)
            at = scene.camera.paper(cloud.mean(0))
            scene.ax.plot(*at, marker="x", markersize=6, color=ink, markeredgewidth=1.6, zorder=LABEL)
        scenes[0].label(top, "all-ones", shift=(5, 0), ha="left")
        frame(scenes[:3], np.concatenate([*clouds, level, top[None]]))
        frame(scenes[3:6], np.concatenate([*clouds, level]))
        frame(scenes[6:], np.concatenate([*clouds, level]))
    return Drawing(
        name="centred-clusters",
        figure=figure_of(given[0]),
        title="Two ways to centre: over the batch, or within each vector",
        caption="BatchNorm moves the whole cloud until its mean (cross) is the origin (ring); LayerNorm moves every "
        "point on its own along all-ones onto a plane, where the cloud stays off the origin.",
        description="Three clusters from the side, along a plane and from above: raw off it; moved so that their "
        "common mean is the origin, not flat; pressed onto the plane, their common mean off the origin.",
    )


def flat_sheet(reach: float) -> Points:
    """Corners of the sheet of points with mean 0 about the origin, all-ones being upwards."""
    return _sheet(np.zeros(3), np.eye(3)[:, :2] * reach)


def _sheet(middle: Points, sides: Points) -> Points:
    """Corners (4, 3) of a sheet around its middle (3,), with half its sides as columns (3, 2)."""
    one, other = sides.T
    return np.stack([middle + one + other, middle + one - other, middle - one - other, middle - one + other])


def _ellipse_of(surface: Ellipsoid, basis: Tensor) -> tuple[Points, Points]:
    """An ellipse of the hyperplane as a polygon, and two orthogonal half sides of the sheet around it."""
    sizes, directions = surface.axes()
    curve = ellipse(array(surface.centre @ basis), array(basis.mT @ (directions * sizes)))
    return curve, array(basis.mT @ nearest_basis(directions, helmert(3))) * 1.12 * float(sizes.max())


def ball_of(surface: Ellipsoid, basis: Tensor) -> Ball:
    """The surface about its own centre, in a basis of the subspace that contains it."""
    sizes, directions = surface.axes()
    is_round = float(sizes.max() - sizes.min()) < 1e-9 * float(sizes.max())
    # A sphere may be drawn with any axes; those of the drawing give the clearest picture.
    shown = np.eye(3) if is_round else array(basis.mT @ directions)
    return Ball(centre=np.zeros(3), semi_axes=array(sizes), directions=shown)


def _all_ones(scene: Scene, high: float, low: float | None = None, words: str = "") -> None:
    """Draw the all-ones axis upwards, and, from `low` to 0, the part that a sheet covers."""
    if low is not None:
        scene.curve(np.array([low * _UP, 0 * _UP]), "muted", layer=BEHIND, linewidth=0.9)
    scene.arrow(high * _UP, "", layer=ON_SHEET if low is not None else BEHIND)
    scene.label(high * _UP, f"all-ones{words}", shift=(6, -2), ha="left")


def _draw_ellipsoid(scene: Scene, oval: Ball, points: Points, groups: Sequence[int]) -> None:
    scene.ball(oval)
    for size, direction in zip(oval.semi_axes, oval.directions.T, strict=True):
        sign = 1.0 if scene.camera.nearness(direction) >= 0 else -1.0
        scene.arrow(sign * size * direction, f"{size:.2f}", gap=13.0, arrowstyle="-")
    scene.points(points, groups, ~oval.faces(scene.camera, points))
