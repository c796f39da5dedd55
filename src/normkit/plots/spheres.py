"""Norms whose image is a sphere that can be drawn: LayerNorm of four features, RMSNorm of three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from normkit.conventions.rows import CENTRINGS
from normkit.errors import InputError
from normkit.geometry.decomposition import decompose
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.image import image_of
from normkit.plots import theme
from normkit.plots.camera import Camera, Points, array, helmert, nearest_basis, upright
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.scene import BEHIND, Ball, Scene, ellipse
from normkit.plots.steps import frame, groups_of, heading
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAMERA = Camera(azimuth=-58.0, elevation=22.0)


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
    level = helmert(4)
    values = {step.name: step.value.double() for step in decompose(x, spec, weight, bias).steps}
    surface, plain = image_of(spec, 4, weight, bias).surface, image_of(spec, 4).surface
    tilted = nearest_basis(surface.axes()[1], level)
    centred, scaled = array(values["centred"] @ level), array(values["scaled"] @ level)
    final = array((values["gain and bias"] - surface.centre) @ tilted)
    sphere, oval = _ball(plain, level), _ball(surface, tilted)
    with theme.style():
        scenes = [Scene(ax, _CAMERA) for ax in theme.panels(1, 3, 2.6, given=axes)]
        heading(scenes[0], "Centred", "four features with mean 0:\nthree dimensions are left")
        for direction, name in zip(np.eye(3), ("h₁", "h₂", "h₃"), strict=True):
            scenes[0].arrow(direction, name)
        scenes[0].points(centred, colours)
        heading(scenes[1], "Scaled", "every point at length √4 = 2:\na true sphere")
        scenes[1].ball(sphere)
        scenes[1].trails(centred, scaled, colours, BEHIND)
        scenes[1].points(scaled, colours, ~sphere.faces(_CAMERA, scaled))
        heading(scenes[2], "Gain and bias", "an ellipsoid around b;\nmarked: its semi-axes")
        _draw_ellipsoid(scenes[2], oval, final, colours)
        frame(scenes, np.concatenate([centred, scaled, final, _outline(sphere), _outline(oval)]))
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
    sphere = _ball(image_of(spec, 3).surface, basis)
    oval = _ball(image_of(spec, 3, weight).surface, basis)
    sizes, directions = image_of(spec.replace(**CENTRINGS[True, True].conventions()), 3).surface.axes()
    circle = ellipse(np.zeros(3), array(basis.mT @ (directions * sizes)))
    with theme.style():
        scenes = [Scene(ax, _CAMERA) for ax in theme.panels(1, 3, 2.85, given=axes)]
        heading(scenes[0], "Raw", "three features a point;\nnothing will be centred")
        _ones(scenes[0])
        for k, direction in enumerate(array(basis)):
            scenes[0].arrow(direction, f"x{'₁₂₃'[k]}")
        scenes[0].points(raw, colours)
        heading(scenes[1], "Scaled", "every point at length √3:\nanywhere on the sphere")
        _ones(scenes[1])
        scenes[1].ball(sphere)
        scenes[1].curve_on(sphere, circle, "ink")
        bottom = -sphere.semi_axes[0] * scenes[1].camera.upwards
        scenes[1].label(bottom, "LayerNorm would use\nthe bold circle only", shift=(0, -5), va="top")
        scenes[1].trails(raw, scaled, colours, BEHIND)
        scenes[1].points(scaled, colours, ~sphere.faces(_CAMERA, scaled))
        heading(scenes[2], "Gain", "an ellipsoid along the features,\nsemi-axes √3 |g|")
        _draw_ellipsoid(scenes[2], oval, final, colours)
        frame(scenes, np.concatenate([raw, scaled, final, _outline(sphere), _outline(oval), [[0.0, 0.0, 2.4]]]))
    return Drawing(
        name="rms-sphere",
        figure=figure_of(scenes[0].ax),
        title="RMSNorm keeps the whole sphere",
        caption="RMSNorm only scales: points keep their direction, the one along all-ones too, and land anywhere on a "
        "sphere of radius √n; the gain stretches it along the features.",
        description="A cloud in three groups; the same points on a sphere of radius 1.73, with the circle of mean 0 on "
        f"it; on an ellipsoid with semi-axes {', '.join(f'{size:.2f}' for size in np.sort(oval.semi_axes))}.",
    )


def _ball(surface: Ellipsoid, basis: Tensor) -> Ball:
    """The surface about its own centre, in a basis of the subspace that contains it."""
    sizes, directions = surface.axes()
    is_round = float(sizes.max() - sizes.min()) < 1e-9 * float(sizes.max())
    # A sphere may be drawn with any axes; those of the drawing give the clearest picture.
    shown = np.eye(3) if is_round else array(basis.mT @ directions)
    return Ball(centre=np.zeros(3), semi_axes=array(sizes), directions=shown)


def _outline(ball: Ball) -> Points:
    return np.concatenate([ball.section(0, 1), ball.section(1, 2), ball.section(0, 2)])


def _ones(scene: Scene) -> None:
    scene.arrow(np.array([0.0, 0.0, 2.4]), "", layer=BEHIND)
    scene.label(np.array([0.0, 0.0, 2.4]), "all-ones", shift=(6, -2), ha="left")


def _draw_ellipsoid(scene: Scene, oval: Ball, points: Points, groups: Sequence[int]) -> None:
    scene.ball(oval)
    for size, direction in zip(oval.semi_axes, oval.directions.T, strict=True):
        sign = 1.0 if scene.camera.nearness(direction) >= 0 else -1.0
        scene.arrow(sign * size * direction, f"{size:.2f}", gap=13.0, arrowstyle="-")
    scene.points(points, groups, ~oval.faces(scene.camera, points))
