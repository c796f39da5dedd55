"""A norm taken apart: the rows after each of its maps, and the laws that hold there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit import reference
from normkit.geometry.centring import centre, cosine_and_sine_to_ones, split
from normkit.geometry.rows import require_floating, require_row
from normkit.geometry.scaling import affine, length, over, row_scale
from normkit.spec import NormSpec

StepName = Literal["raw", "centred", "scaled", "gain and bias"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Invariant:
    """One statement about a step that holds for every row."""

    statement: str
    """In words and symbols: x is the input of the norm, y the output of the step, g the gain as it acts, b the bias;
    shrink is sqrt(v) / s, the share of a row's length that eps leaves."""
    defect: Tensor
    """How far each row is from it, of shape (...): 0 up to rounding where it holds. Lengths are relative to the length
    of the row that entered, or to the radius of the sphere; directions are compared as unit vectors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The rows after one map."""

    name: StepName
    value: Tensor
    """The rows, of shape (..., n)."""
    mean: Tensor
    """mean(value), of shape (...), as are the next four."""
    variance: Tensor
    """|centre(value)|**2 / n."""
    norm: Tensor
    """|value|."""
    angle_to_ones: Tensor
    """In radians; NaN for a zero row."""
    energy_along_ones: Tensor
    """Share of |value|**2 along the all-ones direction; NaN for a zero row."""
    invariants: tuple[Invariant, ...]
    """The laws that hold after this map."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition:
    """The maps of one norm, from x to y."""

    spec: NormSpec
    steps: tuple[Step, ...]
    """raw; centred, if the numerator is; scaled; gain and bias, if there are any. A gain that the spec puts before
    normalizing is a step of its own after raw."""

    @property
    def output(self) -> Tensor:
        """y."""
        return self.steps[-1].value


def decompose(x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None) -> Decomposition:
    """Take rows through the maps of a norm one by one.

    u = x - mean(x) if the numerator is centred, else x; z = k * u / s with k = 1 or sqrt(n) and the s of
    `reference.statistics`; y = gain * z + bias with the effective gain. A gain that stands before the norm multiplies
    x, and gain * x is centred and scaled. All in x's dtype: a spec's casts for 16-bit input are not followed, so give
    such rows as float64.

    Args:
        x: Rows of shape (..., n).
        spec: Any norm over the last axis; it may centre above and below the bar, at neither or at one.
        weight: Gain as stored, broadcast against x; None for none.
        bias: Bias, likewise.

    Returns:
        The steps. `output` is `reference.forward(x, spec, weight, bias)` in float64. With eps = 0 the scaled zero row
        is NaN.

    Raises:
        DtypeError: If x is not of a floating dtype.
        SpecError: If a row of the spec is not the last axis.

    Example:
        >>> from normkit.geometry import decompose
        >>> for step in decompose(torch.tensor([1.0, 2.0, 6.0]), NormSpec(eps=0.0)).steps:
        ...     print(step.name, step.value, [invariant.statement for invariant in step.invariants])
        raw tensor([1., 2., 6.]) ['|x|^2 = n mean^2 + n variance']
        centred tensor([-2., -1.,  3.]) ['mean = 0', 'variance unchanged by centring', 'variance = |y|^2 / n']
        scaled tensor([-0.9258, -0.4629,  1.3887]) ['direction unchanged', 'norm = sqrt(n) * shrink', 'mean = 0']

    Source:
        Brody, Alon and Yahav 2023, arXiv:2305.02582, with eps, and for every convention of a `NormSpec`.
    """
    require_row(spec)
    gain = None if weight is None else spec.gain.effective(weight, x.dtype)
    row = require_floating(x)
    steps = [_step("raw", row, raw_invariants(row))]
    if spec.gain.is_before and gain is not None:
        row, gain = affine(row, gain), None
        steps.append(_step("gain and bias", row, ()))
    entered = row
    if spec.centring.numerator:
        row = centre(entered)
        steps.append(_step("centred", row, centred_invariants(row, entered)))
    scaled = row / divisor(entered, spec)
    target = _target(entered, spec)
    steps.append(_step("scaled", scaled, scaled_invariants(scaled, row, target, spec)))
    if gain is not None or bias is not None:
        y = affine(scaled, gain, bias)
        steps.append(_step("gain and bias", y, affine_invariants(y, scaled, target, gain, bias, spec)))
    return Decomposition(spec=spec, steps=tuple(steps))


def divisor(x: Tensor, spec: NormSpec) -> Tensor:
    """The number that a norm divides each row by, factor included: s or s / sqrt(n), of shape (..., 1)."""
    return row_scale(x, spec, reference.machine_eps(x, spec)) / spec.divisor.factor(x.shape[-1])


def raw_invariants(x: Tensor) -> tuple[Invariant, ...]:
    """Pythagoras: |x|**2 is the energy along the all-ones direction plus the energy across it."""
    along, size = x.mean(-1) * math.sqrt(x.shape[-1]), length(x)
    defect = over(torch.hypot(along, length(centre(x))) - size, size)
    return (Invariant(statement="|x|^2 = n mean^2 + n variance", defect=defect),)


def centred_invariants(y: Tensor, u: Tensor) -> tuple[Invariant, ...]:
    """The laws of y = centre(u); variances are compared by their roots, in units of rms(u)."""
    n, size = y.shape[-1], length(u)
    spread = length(centre(y))
    return (
        Invariant(statement="mean = 0", defect=over(y.mean(-1) * math.sqrt(n), size)),
        Invariant(statement="variance unchanged by centring", defect=over(spread - length(centre(u)), size)),
        Invariant(statement="variance = |y|^2 / n", defect=over(spread - length(y), size)),
    )


def scaled_invariants(y: Tensor, u: Tensor, target: Tensor, spec: NormSpec) -> tuple[Invariant, ...]:
    """The laws of y = k * u / s, whose length is to be `target` times the radius (see `_target`)."""
    before, after = (over(row, length(row).unsqueeze(-1)) for row in (u, y))
    return (
        Invariant(statement="direction unchanged", defect=length(after - before)),
        *_on_the_surface(y, target, spec, "y"),
    )


def affine_invariants(
    y: Tensor, z: Tensor, target: Tensor, gain: Tensor | None, bias: Tensor | None, spec: NormSpec
) -> tuple[Invariant, ...]:
    """The laws of y = gain * z + bias: (y - bias) / gain obeys those of z.

    An entry with gain 0 says nothing about z; the entry of z itself is put there. Rounding errors are larger where the
    bias is much larger than gain * z.
    """
    name = "y" if bias is None else "y - b"
    if gain is not None:
        name = "y / g" if bias is None else "(y - b) / g"
    held = _on_the_surface(pulled_back(y, z, gain, bias), target, spec, name)
    if gain is None:
        return held
    lost = y if bias is None else y - bias.to(y.dtype)
    pinned = torch.where(gain == 0, lost.abs(), 0.0).amax(-1)
    return (*held, Invariant(statement=f"y = {0 if bias is None else 'b'} where g = 0", defect=pinned))


def pulled_back(y: Tensor, z: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """(y - bias) / gain, with the entries of z where the gain is 0."""
    moved = y if bias is None else y - bias.to(y.dtype)
    if gain is None:
        return moved
    return torch.where(gain == 0, z, moved / torch.where(gain == 0, 1.0, gain.to(y.dtype)))


def _target(u: Tensor, spec: NormSpec) -> Tensor:
    """The ratio of length to radius that the scaled row must have: sqrt(v) / s, computed without `row_scale`."""
    numerator, deviation = split(u, spec.centring)
    root = length(deviation) / math.sqrt(spec.divisor.count(u.shape[-1]))
    shrink = root / spec.placement.scale_of_root(root, reference.machine_eps(u, spec))
    if spec.centring.numerator and spec.centring.is_half:
        return shrink * over(length(numerator), length(deviation))
    return shrink


def _on_the_surface(p: Tensor, target: Tensor, spec: NormSpec, name: str) -> tuple[Invariant, ...]:
    """The length of p, and its plane where the norm centres above the bar."""
    n = p.shape[-1]
    radius, centring = spec.divisor.radius(n), spec.centring
    words, measured = f"{spec.divisor.radius_in_words} * shrink", p
    size = "norm" if name == "y" else f"|{name}|"
    if centring.numerator and centring.is_half:
        words = f"{words} * sin(angle to 1 before centring)"
    elif centring.is_half:
        measured, size = centre(p), f"|{name} - mean({name})|"
    held = [Invariant(statement=f"{size} = {words}", defect=length(measured) / radius - target)]
    if centring.numerator:
        statement = "mean = 0" if name == "y" else f"sum({name}) = 0"
        held.append(Invariant(statement=statement, defect=p.mean(-1) * math.sqrt(n) / radius))
    return tuple(held)


def _step(name: StepName, value: Tensor, invariants: tuple[Invariant, ...]) -> Step:
    cosine, sine = cosine_and_sine_to_ones(value)
    return Step(
        name=name,
        value=value,
        mean=value.mean(-1),
        variance=length(centre(value)).square() / value.shape[-1],
        norm=length(value),
        angle_to_ones=torch.atan2(sine, cosine),
        energy_along_ones=cosine.square(),
        invariants=invariants,
    )
