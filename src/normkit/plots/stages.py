"""A norm of three features in stages: the cloud after each stage, its formula, and what then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.conventions.gain import NO_GAIN
from normkit.errors import InputError
from normkit.geometry.decomposition import Step, decompose
from normkit.geometry.image import image_of
from normkit.geometry.rows import sphere_radius
from normkit.plots.camera import Points, array, upright
from normkit.plots.scene import GROUPS
from normkit.plots.steps import groups_of
from normkit.spec import NormSpec
from normkit.text import significant

_FOR_THREE = {"sqrt(n)": "√3", "sqrt(n - 1)": "√2", "n mean": "3 mean", "n variance": "3 variance", "/ n": "/ 3"}
_SYMBOLS = {"^2": "²", " * ": " · "}


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A cloud after one map, in coordinates in which the all-ones direction points upwards."""

    name: str
    """"Raw", "Centre", "Scale", "Gain" or "Bias"."""
    formula: str
    """What is computed up to here, as mathtext."""
    shape: str
    """What the points lie on, in words."""
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
    steps = {step.name: step for step in decompose(x, spec).steps}
    surface = image_of(spec, 3, weight, bias).surface
    gain, middle = array(surface.gain), array(surface.centre.double() @ upright())
    is_centred, radius = spec.centring.numerator, _in_words(spec.divisor.radius_in_words, spec)
    ring = f"{'a circle' if is_centred else 'the whole sphere'} of radius {radius}"
    oval = "an ellipse in a tilted plane" if is_centred else "an ellipsoid along the features"
    plain = spec.replace(**NO_GAIN.conventions())
    found = [_stage("Raw", steps["raw"], "$x = (x_1, x_2, x_3)$", "three features a point", spec)]
    if is_centred:
        words = "a plane: nothing is left along all-ones"
        found.append(_stage("Centre", steps["centred"], r"$x - \mu_x$", words, spec))
    found.append(_stage("Scale", steps["scaled"], _formula(plain), ring, spec))
    if weight is not None:
        plain = spec.replace(has_weight=True, has_bias=False)
        found.append(_stage("Gain", decompose(x, spec, weight).steps[-1], _formula(plain), oval, spec, gain))
    if bias is not None:
        words = f"{ring if weight is None else oval}, around b"
        moved = decompose(x, spec, weight, bias).steps[-1]
        found.append(_stage("Bias", moved, _formula(plain.replace(has_bias=True)), words, spec, gain, middle))
    return Course(stages=tuple(found), groups=colours, radius=sphere_radius(spec, 3), is_centred=is_centred)


def _stage(
    name: str,
    step: Step,
    formula: str,
    shape: str,
    spec: NormSpec,
    gain: Points | None = None,
    middle: Points | None = None,
) -> Stage:
    return Stage(
        name=name,
        formula=formula,
        shape=shape,
        holds=_holds(step, spec),
        points=array(step.value @ upright()),
        gain=np.ones(3) if gain is None else gain,
        middle=np.zeros(3) if middle is None else middle,
        is_flat=spec.centring.numerator and name != "Raw",
        is_scaled=name not in ("Raw", "Centre"),
    )


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
