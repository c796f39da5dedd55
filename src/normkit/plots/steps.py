"""The three steps of LayerNorm on points of three features: onto a plane, onto a circle, onto an ellipse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry.decomposition import decompose
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.image import image_of
from normkit.plots import theme
from normkit.plots.camera import Camera, Points, array, helmert, nearest_basis, upright
from normkit.plots.depth import figure_of
from normkit.plots.drawing import Drawing
from normkit.plots.scene import BEHIND, ON_SHEET, Scene, ellipse
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAMERA = Camera(azimuth=-68.0, elevation=24.0)
_TOP = 2.1
_AXIS = np.array([0.0, 0.0, 1.0])


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
    circle, _ = _ring(image_of(spec, 3).surface, basis)
    oval, tilted = _ring(image_of(spec, 3, weight, bias).surface, basis)
    middle = array(bias.double() @ basis)
    reach = 1.12 * max(float(np.abs(centred[:, :2]).max()), float(np.abs(circle).max()))
    with theme.style():
        scenes = [Scene(ax, _CAMERA) for ax in theme.panels(2, 2, 5.6, given=axes)]
        _draw_raw(scenes[0], raw, colours, reach, basis)
        _draw_centred(scenes[1], raw, centred, colours, reach)
        _draw_scaled(scenes[2], centred, scaled, colours, reach, circle)
        _draw_affine(scenes[3], scaled, final, colours, circle, oval, square(middle, tilted), middle)
        frame(scenes, np.concatenate([raw, centred, level(reach), square(middle, tilted), _TOP * _AXIS[None]]))
    return Drawing(
        name="three-steps",
        figure=figure_of(scenes[0].ax),
        title="What LayerNorm does to a vector, in three steps",
        caption="With three features, every point drops along the all-ones direction onto a plane, moves along a ray "
        "onto a circle, and the gain and bias make that circle a tilted, moved ellipse.",
        description="Four views of the same points: a cloud around a plane; the points dropped onto the plane; on a "
        "circle of radius 1.73 in it; on an ellipse in a tilted plane.",
    )


def frame(scenes: Sequence[Scene], points: Points) -> None:
    """Give all panels the window that holds the points, so that lengths compare."""
    place = scenes[0].camera.paper(points)
    (left, low), (right, high) = place.min(0), place.max(0)
    margin = 0.03 * (right - left)
    for scene in scenes:
        scene.ax.set_xlim(left - margin, right + margin)
        scene.ax.set_ylim(low - margin, high + margin)


def heading(scene: Scene, title: str, words: str) -> None:
    """Write the name of a panel, and below it what holds there."""
    beside: Any = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points", "va": "baseline"}
    lines = words.split("\n")
    for line, text in enumerate(reversed(lines)):
        height = 6 + 12 * line
        scene.ax.annotate(text, xytext=(0, height), fontsize=9, color=theme.colour("muted"), **beside)
    if title:
        scene.ax.annotate(title, xytext=(0, 8 + 12 * len(lines)), weight="bold", **beside)


def _ring(surface: Ellipsoid, basis: Tensor) -> tuple[Points, Points]:
    """An ellipse of the hyperplane as a polygon, and two orthonormal directions of its plane."""
    sizes, directions = surface.axes()
    curve = ellipse(array(surface.centre @ basis), array(basis.mT @ (directions * sizes)))
    return curve, array(basis.mT @ nearest_basis(directions, helmert(3))) * 1.12 * float(sizes.max())


def square(middle: Points, sides: Points) -> Points:
    """Corners (4, 3) of a sheet around its middle (3,), with half its sides as columns (3, 2)."""
    one, other = sides.T
    return np.stack([middle + one + other, middle + one - other, middle - one - other, middle - one + other])


def level(reach: float) -> Points:
    """Corners of the sheet of points with mean 0 about the origin, all-ones being upwards."""
    return square(np.zeros(3), np.eye(3)[:, :2] * reach)


def groups_of(x: Tensor, features: int, groups: Sequence[int] | None, advice: str = "") -> list[int]:
    """The group of each point; 0 for all if no groups are given.

    Raises:
        ShapeError: If x is not of shape (N, features); the advice ends the message.
    """
    if x.dim() != 2 or x.shape[-1] != features:
        raise ShapeError(f"points of shape (N, {features}) are needed, got {tuple(x.shape)}{advice}")
    return [0] * len(x) if groups is None else list(groups)


def _axis(scene: Scene, low: float, high: float = _TOP) -> None:
    """Draw the all-ones axis; its part below the plane is covered by the plane."""
    scene.curve(np.array([low * _AXIS, 0 * _AXIS]), "muted", layer=BEHIND, linewidth=0.9)
    scene.arrow(high * _AXIS, "")
    scene.label(high * _AXIS, "all-ones (1, 1, 1)", shift=(6, -2), ha="left")


def _draw_raw(scene: Scene, raw: Points, groups: list[int], reach: float, basis: Tensor) -> None:
    heading(scene, "1  Raw", "three features a point")
    scene.sheet(level(reach))
    _axis(scene, float(raw[:, 2].min()))
    for k, direction in enumerate(1.6 * array(basis)):
        scene.arrow(direction, f"x{'₁₂₃'[k]}", layer=ON_SHEET)
    scene.points(raw, groups, raw[:, 2] < 0)


def _draw_centred(scene: Scene, raw: Points, centred: Points, groups: list[int], reach: float) -> None:
    heading(scene, "2  Centred", "less its mean: x₁ + x₂ + x₃ = 0, a plane")
    scene.sheet(level(reach))
    _axis(scene, float(raw[:, 2].min()))
    for below, layer in ((True, BEHIND), (False, ON_SHEET)):
        chosen = [k for k in range(len(raw)) if (raw[k, 2] < 0) == below]
        if chosen:
            scene.trails(raw[chosen], centred[chosen], [groups[k] for k in chosen], layer)
    scene.ghosts(raw, groups)
    scene.points(centred, groups)


def _draw_scaled(
    scene: Scene, centred: Points, scaled: Points, groups: list[int], reach: float, circle: Points
) -> None:
    heading(scene, "3  Scaled", "divided by its spread: length √3, a circle")
    scene.sheet(level(reach))
    _axis(scene, 0.0)
    scene.curve(circle)
    # The radius is drawn where no point is near.
    free = circle[np.linalg.norm(circle[:, None] - scaled, axis=-1).min(1).argmax()]
    scene.arrow(free, "", arrowstyle="-")
    scene.label(free / 2, "√3", shift=(9, 2))
    scene.trails(centred, scaled, groups)
    scene.ghosts(centred, groups)
    scene.points(scaled, groups)


def _draw_affine(
    scene: Scene,
    scaled: Points,
    final: Points,
    groups: list[int],
    circle: Points,
    oval: Points,
    sheet: Points,
    middle: Points,
) -> None:
    heading(scene, "4  Gain and bias", "times g, plus b: an ellipse around b")
    _axis(scene, 0.0)
    scene.curve(circle, "muted", linewidth=0.8, linestyle=(0, (4, 2)), layer=BEHIND)
    scene.sheet(sheet)
    scene.curve(oval)
    scene.trails(scaled, final, groups)
    scene.arrow(middle, "", name="ink")
    scene.label(middle, "b", shift=(9, -2), name="ink")
    scene.points(final, groups)
