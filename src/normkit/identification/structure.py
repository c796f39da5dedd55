"""The structure of a norm: rows, centring, gain and bias; everything but eps, the divisor and the casts.

The experiments, in order: a larger input (is it a norm?), one element changed (which elements are a row?), and the
parameters drawn anew, with both signs (what is subtracted, what divides, which parameters are gain and bias?).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.conventions.divisor import DIVISORS
from normkit.conventions.rows import Centring, Rows
from normkit.errors import ShapeError
from normkit.identification import coupling, formula, gain_and_bias
from normkit.identification.coupling import Coupling
from normkit.identification.eps_and_divisor import is_length, row_rms
from normkit.identification.formula import Fit, Parity
from normkit.identification.gain_and_bias import Part
from normkit.identification.passport import Reading
from normkit.identification.spec_readings import value_of
from normkit.identification.specimen import Precision, Specimen, UnrecognisedError
from normkit.spec import NormSpec

_LAST_AXIS = Rows()
_CENTRINGS = {
    Centring(True, True): "the mean is subtracted and the standard deviation divides",
    Centring(False, False): "no mean is subtracted and the root mean square divides",
    Centring(False, True): "no mean is subtracted, but the standard deviation about the mean divides",
    Centring(True, False): "the mean is subtracted, but the root mean square of the uncentred row divides",
}


class ComputedAffineError(UnrecognisedError):
    """The rows are explained, but gain or bias is computed from its parameters in some other way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """The effect of a norm on rows that are too long for eps to matter."""

    spec: NormSpec
    """Axes, groups, centring, presence and placement of weight and bias, offset; eps is 0."""
    shape: tuple[int, ...]
    """Input shape for the next steps: that of the search, with rows as long as asked for."""
    n: int
    """Number of features of a row."""
    length: float | None
    """Root mean square of a normalized row; None where an unknown gain hides it."""
    gain: Part
    bias: Part
    readings: dict[str, Reading]
    """Under "kind", "rows", "centring", "gain" and "bias"."""


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
    for axis in range(1, len(shape) - 1):
        if shape[axis] >= given[axis] or axis in rows.row:
            continue
        # Rows may change with the length of another axis: a group norm may pair up 8 channels, and not 4.
        longer = tuple(min(2 * size, given[axis]) if at == axis else size for at, size in enumerate(shape))
        found = _rows_of(specimen, longer)
        if found is None or found.row != rows.row:
            shape = tuple(size if at != axis else given[axis] for at, size in enumerate(shape))
            rows = coupling.rows_of(specimen, shape, generator)
    draws, parities = [], []
    # Both signs, because a gain of abs(weight) is no straight line of it. Two single numbers always lie on a line.
    has_scalar = any(parameter.numel() == 1 for parameter in specimen.parameters.values())
    for sign in (1.0, -1.0) * (2 if has_scalar else 1) if specimen.parameters else (1.0,):
        specimen.draw(generator, sign)
        draws.append({name: value.clone() for name, value in specimen.parameters.items()})
        parities.append(formula.respond(specimen, shape, generator))
        if not float(parities[-1].odd.square().sum()) > 0:
            raise ComputedAffineError("norm", "its gain vanishes, or is no number, for parameters of one sign")
    spec, gain, bias, residual = _settled(specimen, parities, draws, rows)
    spec, length = _with_gain(spec, gain, rows.n, specimen.precision)
    spec = spec.replace(has_bias=bool(bias.names) or bias.values is not None)
    rows_reading = Reading(value=value_of(spec, "rows"), evidence=(rows.evidence,))
    if rows.choices[0].are_places and len(rows.choices) > 1 and gain.constant is not None and not spec.has_bias:
        # Rows over axis 1 of three: neither gain nor bias says whether that axis holds the channels.
        spec, rows_reading = _with_another_axis(specimen, shape, spec, rows)
    readings = {
        "kind": Reading(value="norm", evidence=(degree,)),
        "rows": rows_reading,
        "centring": Reading(
            value=value_of(spec, "centring"),
            evidence=(f"on rows of different means {_CENTRINGS[spec.centring]} (residual {residual:.0e})",),
        ),
        "gain": _gain_reading(specimen, spec, gain, length),
        "bias": _bias_reading(spec, bias),
    }
    return Structure(spec=spec, shape=shape, n=rows.n, length=length, gain=gain, bias=bias, readings=readings)


def _rows_of(specimen: Specimen, shape: tuple[int, ...]) -> Coupling | None:
    """The rows of inputs of another shape; None where the norm refuses it, or has no rows that a spec describes."""
    try:
        return coupling.rows_of(specimen, shape, torch.Generator().manual_seed(0))
    except (UnrecognisedError, ShapeError):
        return None


def _with_another_axis(
    specimen: Specimen, shape: tuple[int, ...], spec: NormSpec, rows: Coupling
) -> tuple[NormSpec, Reading]:
    """Rows over axis 1 of three as an input of four axes tells them: axis 1 alone, or with the new axis between."""
    longer = _rows_of(specimen, (*shape[:2], 3, *shape[2:]))
    if longer is None or longer.row not in ((1,), (1, 2)):
        reason = "without gain or bias, one function of such inputs normalizes axis 1, or each channel of the last axis"
        return spec, Reading.open(reason, rows.evidence)
    spec = spec.replace(**rows.choices[0 if longer.row == (1,) else 1].conventions())
    evidence = (rows.evidence, f"with another axis, {longer.evidence}")
    return spec, Reading(value=value_of(spec, "rows"), evidence=evidence)


def _settled(
    specimen: Specimen, parities: Sequence[Parity], draws: Sequence[Mapping[str, Tensor]], rows: Coupling
) -> tuple[NormSpec, Part, Part, float]:
    """Centring, axes, placement of the gain, gain, bias; and what the formula leaves of the rows."""
    fits = [formula.fit(parity, rows.choices[0]) for parity in parities]
    explained = all(fit.explains for fit in fits)
    scale, tolerance = float(parities[0].odd.square().mean().sqrt()), parities[0].fits
    for choice in rows.choices:
        bias = gain_and_bias.bias_of([parity.bias for parity in parities], draws, choice, scale, tolerance)
        if explained:
            spec, residual = fits[0].spec.replace(**choice.conventions()), fits[0].residual
            gain = gain_and_bias.gain_of([fit.gain for fit in fits], draws, choice, tolerance)
        else:
            # The specimen still has the parameters of the last draw.
            before = formula.fit_before(specimen, parities[-1], choice)
            if before is None:
                continue
            spec, residual = before.spec, before.residual
            gain = Part(name=before.name, slope=before.scale, intercept=before.scale * spec.gain.offset)
        if gain is None or bias is None:
            continue
        acting = [part.values if part.name is None else draws[0][part.name] for part in (gain, bias)]
        num_channels = parities[0].x.shape[-1]
        if choice.channel_axis != -1 or all(values is None or values.numel() == num_channels for values in acting):
            return spec, gain, bias, residual
    if explained:
        return _gathered(parities, draws, fits, rows)
    raise UnrecognisedError(
        "norm",
        "it does not grow with its input, but no division by a standard deviation or rms explains its rows "
        "(a gain in front of the division is found only where it is a parameter)",
    )


def _gathered(
    parities: Sequence[Parity], draws: Sequence[Mapping[str, Tensor]], fits: Sequence[Fit], rows: Coupling
) -> tuple[NormSpec, Part, Part, float]:
    """Gain and bias whose entries are in several parameters, or in one that varies along another axis."""
    spec = fits[0].spec.replace(**rows.choices[0].conventions())
    slopes = sorted({row_rms(known, rows.n) for known in DIVISORS.values()}, key=lambda rms: abs(rms - 1.0))
    scale, tolerance = float(parities[0].odd.square().mean().sqrt()), parities[0].fits
    gains, biases = [fit.gain for fit in fits], [parity.bias for parity in parities]
    for role, acting in (("gain", gains), ("bias", biases)):
        if line := gain_and_bias.rounded(role, acting, draws, _LAST_AXIS):
            raise ComputedAffineError("norm", line)
    gain = gain_and_bias.gain_of(gains, draws, _LAST_AXIS, tolerance)
    gain = gain or gain_and_bias.gathered_of(gains, draws, slopes, tolerance)
    bias = gain_and_bias.bias_of(biases, draws, _LAST_AXIS, scale, tolerance)
    bias = bias or gain_and_bias.gathered_of(biases, draws, (1.0,), tolerance)
    for role, part in (("gain", gain), ("bias", bias)):
        if part is not None and part.gathered is not None and (line := part.gathered.misread(role, draws[0])):
            raise ComputedAffineError("norm", line)
    # A spec's gain varies along the channels if its rows span them, whatever entries of parameters it consists of.
    if gain is not None and bias is not None and not bias.intercept and not spec.rows.are_channels:
        return spec, gain, bias, fits[0].residual
    reason = "its gain and bias are not entries of parameters, plus a constant in the gain"
    if spec.rows.channel_axis == -1 and gain is not None and bias is not None:
        reason = "its gain or bias lies along another axis than the channels of its rows, the last axis"
    elif spec.rows.are_channels and gain is not None and bias is not None:
        over = "axis 1" if spec.rows.are_places else "all axes but the first"
        reason = f"its gain or bias lies along the last axis; of rows over {over}, a spec's lies along axis 1"
    raise ComputedAffineError("norm", reason, _common_factor(gain, biases, draws, tolerance, rows.n))


def _common_factor(
    gain: Part | None, biases: Sequence[Tensor], draws: Sequence[Mapping[str, Tensor]], fits: float, n: int
) -> dict[str, Reading]:
    """The factor of both gain and bias, where each is otherwise a parameter."""
    bias = gain_and_bias.gain_of(biases, draws, _LAST_AXIS, fits)
    if gain is None or gain.name is None or bias is None or bias.name is None or abs(bias.slope - 1.0) < fits:
        return {}
    if abs(bias.intercept) >= fits * abs(bias.slope) or not is_length(gain.slope / bias.slope, n, fits):
        return {}
    # As text: reports and comparisons leave out numbers, which are measured and differ from run to run.
    factor = f"{bias.slope:.6g}"
    line = f"its output is {factor} times what {gain.name} and {bias.name} make of the row"
    return {"factor": Reading(value=factor, evidence=(line,))}


def _with_gain(spec: NormSpec, gain: Part, n: int, precision: Precision) -> tuple[NormSpec, float | None]:
    """The spec with what the gain says, and the length of a normalized row where the gain does not hide it."""
    if gain.names:
        measured = gain.intercept / gain.slope
        # Adding 0.0 turns -0.0 into 0.0.
        offset = round(measured, math.floor(-math.log10(9 * precision.offset))) + 0.0
        offset = offset if abs(measured - offset) < precision.offset else measured
        return spec.replace(has_weight=True, weight_offset=offset), gain.slope
    if gain.constant is not None and is_length(gain.constant, n, precision.length):
        return spec, gain.constant
    return spec.replace(has_weight=True), None


def _gain_reading(specimen: Specimen, spec: NormSpec, gain: Part, length: float | None) -> Reading:
    if not gain.names:
        evidence = "no parameter changes the gain" + ("" if spec.has_weight else ": there is none")
        if length is None:
            return Reading.open("no parameter sets the gain, so it cannot be told from the length of a row", evidence)
        if specimen.module is None:
            return Reading.open("a function has no parameter to set: a gain of 1 and none are the same", evidence)
        return Reading(value={**value_of(spec, "gain"), "kind": "none"}, evidence=(evidence,))
    names = _listed(gain.names)
    if spec.gain.is_before:
        evidence = f"{names} multiplies the row before it is normalized, offset {spec.gain.offset:g}"
    else:
        followed = names if gain.name is not None else f"(entries of {names})"
        evidence = (
            f"gain = {gain.slope:.7g} * {followed} + {gain.intercept:.7g} over two random draws of {names}: "
            f"offset {spec.gain.offset:g}"
        )
    sizes = gain.gathered.index.shape if gain.gathered is not None else specimen.parameters[gain.names[0]].shape
    # One number, one for each feature, or one row for each head.
    kind = "scalar" if math.prod(sizes) == 1 else "vector"
    if not spec.rows.are_channels and any(size > 1 for size in sizes[: -spec.rows.parameter_dim]):
        kind = "per head"
    value = {**value_of(spec, "gain"), "kind": kind, "parameter": names, "shape": list(sizes)}
    return Reading(value=value, evidence=(evidence,))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} parameters)"


def _bias_reading(spec: NormSpec, bias: Part) -> Reading:
    names = _listed(bias.names)
    value = {**value_of(spec, "bias"), "parameter": names or None}
    if names:
        return Reading(value=value, evidence=(f"bias = {names if bias.name else f'(entries of {names})'}",))
    if bias.values is None:
        return Reading(value=value, evidence=("f(x) + f(-x) = 0: no bias",))
    return Reading(value=value, evidence=("there is a bias, and no parameter changes it",))
