"""The structure of a norm: rows, centring, gain and bias; everything but eps, the divisor and the casts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.identification import affine, coupling, divisor, formula
from normkit.identification.affine import Part
from normkit.identification.coupling import Coupling
from normkit.identification.formula import Parity
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec

_SAME_OFFSET = 1e-5
"""An offset this near a number of four decimals is that number; it is measured to about 1e-6."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """What a norm does to rows that are far from eps.

    Attributes:
        spec: Axes, groups, centring, presence and placement of weight and bias, offset; eps is 0.
        shape: An input shape to go on with: that of the search, with rows as long as asked for.
        n: Features of a row.
        length: Root mean square of a normalized row, or None where an unknown gain hides it.
        gain: What the weight is.
        bias: What the bias is.
        evidence: Lines on what decided.
        doubts: Lines on what could not be decided.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    n: int
    length: float | None
    gain: Part
    bias: Part
    evidence: tuple[str, ...]
    doubts: tuple[str, ...]


def recover(
    specimen: Specimen, shape: tuple[int, ...], given: tuple[int, ...], generator: torch.Generator
) -> Structure:
    """Find the structure of a norm; its parameters are left at random values.

    Args:
        specimen: The norm.
        shape: An input shape for the search.
        given: The input shape that was asked for: a row must not be shorter, for eps may depend on its length.
        generator: Source of inputs and parameters.

    Raises:
        UnrecognisedError: If it is not a norm, or one that no spec describes.
    """
    specimen.draw(generator)
    degree = formula.check_kind(specimen, shape, generator)
    rows = coupling.rows_of(specimen, shape, generator)
    if any(shape[axis] < given[axis] for axis in rows.row):
        shape = tuple(max(size, given[axis]) if axis in rows.row else size for axis, size in enumerate(shape))
        rows = coupling.rows_of(specimen, shape, generator)
    n = math.prod(shape[axis] for axis in rows.row) // rows.groups
    draws, parities = [], []
    # Of both signs: a gain of abs(weight) is no straight line of it.
    for sign in (1.0, -1.0) if specimen.parameters else (1.0,):
        specimen.draw(generator, sign)
        draws.append({name: value.clone() for name, value in specimen.parameters.items()})
        parities.append(formula.respond(specimen, shape, generator))
    spec, gain, bias, residual = _settled(specimen, parities, draws, rows)
    spec, length = _weighted(spec, gain, n)
    spec = spec.replace(has_bias=bias.name is not None or bias.values is not None)
    centring = f"rows of different means: {_centring_in_words(spec)} (residual {residual:.0e})"
    doubts = []
    if length is None:
        doubts.append("the length of a normalized row: no parameter sets the gain, which is taken as it acts")
    elif specimen.module is None:
        doubts.append("whether there is a gain: a function has no parameter to set, so a gain of 1 is assumed")
    return Structure(
        spec=spec,
        shape=shape,
        n=n,
        length=length,
        gain=gain,
        bias=bias,
        evidence=(degree, rows.evidence, centring, *_affine_in_words(spec, gain, bias)),
        doubts=tuple(doubts),
    )


def _settled(
    specimen: Specimen, parities: Sequence[Parity], draws: Sequence[Mapping[str, Tensor]], rows: Coupling
) -> tuple[NormSpec, Part, Part, float]:
    """Centring, axes, placement of the gain, gain, bias; and what the formula leaves of the rows."""
    fits = [formula.fit(parity, rows.axes, rows.groups) for parity in parities]
    explained = all(formula.explains(fit) for fit in fits)
    scale = float(parities[0].odd.square().mean().sqrt())
    for axes, groups in rows.choices:
        channels = axes == (1,) or axes == "all_but_batch"
        bias = affine.bias_of([parity.bias for parity in parities], draws, channels, scale)
        if explained:
            spec, residual = fits[0].spec.replace(axes=axes, groups=groups), fits[0].residual
            gain = affine.gain_of([fit.gain for fit in fits], draws, channels)
        else:
            # The specimen still has the parameters of the last draw.
            before = formula.fit_before(specimen, parities[-1], axes, groups)
            if before is None:
                continue
            spec, residual = before.spec, before.residual
            gain = Part(name=before.name, slope=before.scale, intercept=before.scale * spec.weight_offset)
        if gain is not None and bias is not None:
            return spec, gain, bias, residual
    if explained:
        raise UnrecognisedError("norm", "its gain and bias are not one parameter each, plus a constant in the gain")
    raise UnrecognisedError(
        "norm",
        "it does not grow with its input, but no division by a standard deviation or rms explains its rows "
        "(a gain in front of the division is found only where it is a parameter)",
    )


def _weighted(spec: NormSpec, gain: Part, n: int) -> tuple[NormSpec, float | None]:
    """The spec with what the gain says, and the length of a normalized row where the gain does not hide it."""
    if gain.name is not None:
        measured = gain.intercept / gain.slope
        # Adding 0.0 turns -0.0 into 0.0.
        offset = round(measured, 4) + 0.0
        offset = offset if abs(measured - offset) < _SAME_OFFSET else measured
        return spec.replace(has_weight=True, weight_offset=offset), gain.slope
    if gain.constant is not None and divisor.is_length(gain.constant, n):
        return spec, gain.constant
    return spec.replace(has_weight=True), None


def _centring_in_words(spec: NormSpec) -> str:
    match spec.centre_numerator, spec.centre_statistics:
        case True, True:
            words = "the mean is subtracted, the standard deviation divides"
        case False, False:
            words = "no mean is subtracted, the root mean square divides"
        case False, True:
            words = "no mean is subtracted, yet the standard deviation about the mean divides"
        case _:
            words = "the mean is subtracted, yet the root mean square of the uncentred row divides"
    return words


def _affine_in_words(spec: NormSpec, gain: Part, bias: Part) -> Iterator[str]:
    if gain.name is not None and spec.weight_placement == "before":
        yield f"{gain.name} multiplies the row before it is normalized, offset {spec.weight_offset:g}"
    elif gain.name is not None:
        yield (
            f"gain = {gain.slope:.7g} * {gain.name} + {gain.intercept:.7g} over two random draws of {gain.name}: "
            f"offset {spec.weight_offset:g}"
        )
    else:
        yield "no parameter changes the gain" + ("" if spec.has_weight else ": there is none")
    if bias.name is not None:
        yield f"bias = {bias.name}"
    else:
        yield "f(x) + f(-x) = 0: no bias" if bias.values is None else "there is a bias, and no parameter changes it"
