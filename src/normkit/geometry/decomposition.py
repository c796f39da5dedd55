"""A norm taken apart: every intermediate of its maps, and what holds after each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit import reference
from normkit.geometry.centring import centre, cosine_and_sine_to_ones
from normkit.geometry.rows import require_floating, require_row, sphere_radius
from normkit.geometry.scaling import affine, length, over, row_scale, shrink_factor
from normkit.spec import NormSpec

StepName = Literal["raw", "centred", "scaled", "gain and bias"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Invariant:
    """One statement about a step that holds for every row.

    Attributes:
        statement: In words and symbols: x is what entered the norm, y what left the step, g the gain as it acts, b the
            bias; shrink is `shrink_factor` of the row under the root, with the eps that suits the spec's divisor.
        defect: How far each row is from it, of shape (...): 0 up to rounding where it holds. Without unit: lengths are
            counted in the length of what entered, or of the sphere; directions are compared as unit vectors.
    """

    statement: str
    defect: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The rows after one map.

    Attributes:
        name: "raw", "centred", "scaled" or "gain and bias".
        value: The rows, of shape (..., n).
        mean: mean(value), of shape (...), as are all that follow.
        variance: |centre(value)|**2 / n.
        norm: |value|.
        angle_to_ones: In radians; NaN for a zero row.
        energy_along_ones: Share of |value|**2 along the all-ones direction; NaN for a zero row.
        invariants: What holds after this map.
    """

    name: StepName
    value: Tensor
    mean: Tensor
    variance: Tensor
    norm: Tensor
    angle_to_ones: Tensor
    energy_along_ones: Tensor
    invariants: tuple[Invariant, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition:
    """One norm's way from x to y.

    Attributes:
        spec: The norm.
        steps: raw; centred, if the numerator is; scaled; gain and bias, if there are any. A gain that the spec puts
            before normalizing is a step of its own after raw.
    """

    spec: NormSpec
    steps: tuple[Step, ...]

    @property
    def output(self) -> Tensor:
        """What leaves the norm."""
        return self.steps[-1].value


def decompose(x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None) -> Decomposition:
    """Take rows through the maps of a norm one by one.

    u = x - mean(x) if the numerator is centred, else x; z = multiplier * u / s with the s of
    `reference.statistics`; y = gain * z + bias with gain = weight + weight_offset. With weight_placement "before" it
    is gain * x that is centred and scaled. All in x's dtype: a spec's casts for 16-bit input are not followed, so give
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
    gain = None if weight is None else reference.effective_weight(weight, spec, x.dtype)
    row = require_floating(x)
    steps = [_step("raw", row, raw_invariants(row))]
    if spec.weight_placement == "before" and gain is not None:
        row, gain = affine(row, gain), None
        steps.append(_step("gain and bias", row, ()))
    entered = row
    if spec.centre_numerator:
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
    """What a norm divides each row by, s / multiplier, of shape (..., 1)."""
    scale = row_scale(x, spec, reference.machine_eps(x, spec))
    return scale / math.sqrt(x.shape[-1]) if spec.multiplier == "sqrt_n" else scale


def raw_invariants(x: Tensor) -> tuple[Invariant, ...]:
    """Pythagoras: the energy along the all-ones direction and the energy across it are all there is."""
    along, size = x.mean(-1) * math.sqrt(x.shape[-1]), length(x)
    defect = over(torch.hypot(along, length(centre(x))) - size, size)
    return (Invariant(statement="|x|^2 = n mean^2 + n variance", defect=defect),)


def centred_invariants(y: Tensor, u: Tensor) -> tuple[Invariant, ...]:
    """What holds for y = centre(u); variances are compared by their roots, in units of rms(u)."""
    n, size = y.shape[-1], length(u)
    spread = length(centre(y))
    return (
        Invariant(statement="mean = 0", defect=over(y.mean(-1) * math.sqrt(n), size)),
        Invariant(statement="variance unchanged by centring", defect=over(spread - length(centre(u)), size)),
        Invariant(statement="variance = |y|^2 / n", defect=over(spread - length(y), size)),
    )


def scaled_invariants(y: Tensor, u: Tensor, target: Tensor, spec: NormSpec) -> tuple[Invariant, ...]:
    """What holds for y = multiplier * u / s, whose length (see `_target`) is to be `target` times the radius."""
    before, after = (over(row, length(row).unsqueeze(-1)) for row in (u, y))
    return (
        Invariant(statement="direction unchanged", defect=length(after - before)),
        *_on_the_surface(y, target, spec, "y"),
    )


def affine_invariants(
    y: Tensor, z: Tensor, target: Tensor, gain: Tensor | None, bias: Tensor | None, spec: NormSpec
) -> tuple[Invariant, ...]:
    """What holds for y = gain * z + bias: pulled back through both, y lies where z lay.

    An entry whose gain is 0 says nothing of z; there z itself is put in. Rounding grows where the bias dwarfs gain * z.
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


def radius_in_words(spec: NormSpec) -> str:
    """The radius of `sphere_radius` as a formula: "sqrt(n)", "sqrt(n - 1)", "1" or "n", say."""
    words = "1" if spec.reduction == "sum" else "sqrt(n - 1)" if spec.correction else "sqrt(n)"
    if spec.multiplier == "one":
        return words
    return {"1": "sqrt(n)", "sqrt(n)": "n"}.get(words, f"{words} * sqrt(n)")


def _target(u: Tensor, spec: NormSpec) -> Tensor:
    """Length over radius that the scaled row must have, by a second way than its own scale: the exact shrink factor.

    s is built from |d|**2 / D, D = n - correction or 1, where `shrink_factor` has n: eps is carried over by D / n.
    """
    n = u.shape[-1]
    share = 1 / n if spec.reduction == "sum" else (n - spec.correction) / n
    eps = reference.machine_eps(u, spec) * (share if spec.eps_placement == "inside" else math.sqrt(share))
    shrink = shrink_factor(centre(u) if spec.centre_statistics else u, eps=eps, eps_placement=spec.eps_placement)
    if spec.centre_numerator and not spec.centre_statistics:
        return shrink * over(length(centre(u)), length(u))
    return shrink


def _on_the_surface(p: Tensor, target: Tensor, spec: NormSpec, name: str) -> tuple[Invariant, ...]:
    """The length of p, and its plane where the norm centres above the bar."""
    n = p.shape[-1]
    radius = sphere_radius(spec.replace(centre_numerator=spec.centre_statistics), n)
    words, measured = f"{radius_in_words(spec)} * shrink", p
    size = "norm" if name == "y" else f"|{name}|"
    if spec.centre_numerator and not spec.centre_statistics:
        words = f"{words} * sin(angle to 1 before centring)"
    if spec.centre_statistics and not spec.centre_numerator:
        measured, size = centre(p), f"|{name} - mean({name})|"
    held = [Invariant(statement=f"{size} = {words}", defect=length(measured) / radius - target)]
    if spec.centre_numerator:
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
