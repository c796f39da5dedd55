"""The structure of a norm: rows, centring, gain and bias; everything but eps, the divisor and the casts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.conventions.divisor import DIVISORS
from normkit.conventions.rows import CHANNELS_LAST, Rows
from normkit.errors import ShapeError
from normkit.identification import affine, coupling, divisor, formula
from normkit.identification.affine import Part
from normkit.identification.coupling import Coupling
from normkit.identification.formula import Fit, Parity
from normkit.identification.passport import Reading, value_of
from normkit.identification.precision import Precision, precision_of
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec


class ComputedAffineError(UnrecognisedError):
    """The rows are explained, but gain or bias is computed from its parameters in some other way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """What a norm does to rows that are too long to feel eps."""

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
        if shape[axis] < given[axis] and axis not in rows.row and _split_by_count(specimen, shape, axis, rows, given):
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
    spec, length = _weighted(spec, gain, rows.n, precision_of(specimen.dtype))
    spec = spec.replace(has_bias=bool(bias.names) or bias.values is not None)
    rows_reading = Reading(value=value_of(spec, "rows"), evidence=(rows.evidence,))
    if rows.axes == (1,) and len(rows.choices) > 1 and gain.constant is not None and not spec.has_bias:
        # Rows over axis 1 of three: neither gain nor bias says whether that axis holds the channels.
        spec, rows_reading = _with_another_axis(specimen, shape, spec, rows)
    readings = {
        "kind": Reading(value="norm", evidence=(degree,)),
        "rows": rows_reading,
        "centring": Reading(
            value=value_of(spec, "centring"),
            evidence=(f"rows of different means: {_centring_in_words(spec)} (residual {residual:.0e})",),
        ),
        "gain": _gain_reading(specimen, spec, gain, length),
        "bias": _bias_reading(spec, bias),
    }
    return Structure(spec=spec, shape=shape, n=rows.n, length=length, gain=gain, bias=bias, readings=readings)


def _split_by_count(
    specimen: Specimen, shape: tuple[int, ...], axis: int, rows: Coupling, given: tuple[int, ...]
) -> bool:
    """Whether rows change with the length of an axis: 4 groups of 4 channels are 4 rows, of 8 channels they pair up."""
    longer = tuple(min(2 * size, given[axis]) if at == axis else size for at, size in enumerate(shape))
    try:
        return coupling.rows_of(specimen, longer, torch.Generator().manual_seed(0)).row != rows.row
    except (UnrecognisedError, ShapeError):
        return True


def _spans_more(gain: Part, bias: Part, parameters: Mapping[str, Tensor], parity: Parity) -> bool:
    """Whether gain or bias is no vector along the last axis."""
    acting = [part.values if part.name is None else parameters[part.name] for part in (gain, bias)]
    return any(values is not None and values.numel() != parity.x.shape[-1] for values in acting)


def _with_another_axis(
    specimen: Specimen, shape: tuple[int, ...], spec: NormSpec, rows: Coupling
) -> tuple[NormSpec, Reading]:
    """Rows over axis 1 of three as an input of four axes tells them: axis 1 alone, or with the new axis between."""
    try:
        longer = coupling.rows_of(specimen, (*shape[:2], 3, *shape[2:]), torch.Generator().manual_seed(0))
    except (UnrecognisedError, ShapeError):
        longer = None
    if longer is None or longer.row not in ((1,), (1, 2)):
        reason = "without gain or bias, one function of such inputs normalizes axis 1, or each channel of the last axis"
        return spec, Reading.open(reason, rows.evidence)
    axes, groups = rows.choices[0 if longer.row == (1,) else 1]
    spec = spec.replace(axes=axes, groups=groups)
    evidence = (rows.evidence, f"with another axis, {longer.evidence}")
    return spec, Reading(value=value_of(spec, "rows"), evidence=evidence)


def _settled(
    specimen: Specimen, parities: Sequence[Parity], draws: Sequence[Mapping[str, Tensor]], rows: Coupling
) -> tuple[NormSpec, Part, Part, float]:
    """Centring, axes, placement of the gain, gain, bias; and what the formula leaves of the rows."""
    fits = [formula.fit(parity, rows.axes, rows.groups) for parity in parities]
    explained = all(formula.explains(fit) for fit in fits)
    scale, tolerance = float(parities[0].odd.square().mean().sqrt()), parities[0].fits
    for axes, groups in rows.choices:
        channels = Rows(axes, groups).channel_axis == 1
        bias = affine.bias_of([parity.bias for parity in parities], draws, channels, scale, tolerance)
        if explained:
            spec, residual = fits[0].spec.replace(axes=axes, groups=groups), fits[0].residual
            gain = affine.gain_of([fit.gain for fit in fits], draws, channels, tolerance)
        else:
            # The specimen still has the parameters of the last draw.
            before = formula.fit_before(specimen, parities[-1], axes, groups)
            if before is None:
                continue
            spec, residual = before.spec, before.residual
            gain = Part(name=before.name, slope=before.scale, intercept=before.scale * spec.weight_offset)
        is_last = axes == CHANNELS_LAST
        if gain is not None and bias is not None and not (is_last and _spans_more(gain, bias, draws[0], parities[0])):
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
    axes, groups = rows.choices[0]
    spec = fits[0].spec.replace(axes=axes, groups=groups)
    slopes = sorted({divisor.row_rms(known, rows.n) for known in DIVISORS.values()}, key=lambda rms: abs(rms - 1.0))
    scale, tolerance = float(parities[0].odd.square().mean().sqrt()), parities[0].fits
    gains, biases = [fit.gain for fit in fits], [parity.bias for parity in parities]
    gain = affine.gain_of(gains, draws, False, tolerance) or affine.gathered_of(gains, draws, slopes, tolerance)
    bias = affine.bias_of(biases, draws, False, scale, tolerance)
    bias = bias or affine.gathered_of(biases, draws, (1.0,), tolerance)
    # A spec's gain varies along the channels if its rows span them, whatever entries of parameters it consists of.
    over_channels = spec.rows.are_channels
    if gain is None or bias is None or bias.intercept or over_channels:
        reason = "its gain and bias are not entries of parameters, plus a constant in the gain"
        if over_channels and gain is not None and bias is not None:
            over = "axis 1" if spec.rows.are_places else "all axes but the first"
            reason = f"its gain or bias lies along the last axis; of rows over {over}, a spec's lies along axis 1"
            if axes == CHANNELS_LAST:
                reason = "its gain or bias lies along another axis than the channels of its rows, the last axis"
        raise ComputedAffineError("norm", reason, _common_factor(gain, biases, draws, tolerance, rows.n))
    return spec, gain, bias, fits[0].residual


def _common_factor(
    gain: Part | None, biases: Sequence[Tensor], draws: Sequence[Mapping[str, Tensor]], fits: float, n: int
) -> dict[str, Reading]:
    """The factor of both gain and bias, where each is otherwise a parameter."""
    bias = affine.gain_of(biases, draws, False, fits)
    if gain is None or gain.name is None or bias is None or bias.name is None or abs(bias.slope - 1.0) < fits:
        return {}
    if abs(bias.intercept) >= fits * abs(bias.slope) or not divisor.is_length(gain.slope / bias.slope, n, fits):
        return {}
    # As text: reports and comparisons leave out numbers, which are measured and differ from run to run.
    factor = f"{bias.slope:.6g}"
    line = f"its output is {factor} times what {gain.name} and {bias.name} make of the row"
    return {"factor": Reading(value=factor, evidence=(line,))}


def _weighted(spec: NormSpec, gain: Part, n: int, precision: Precision) -> tuple[NormSpec, float | None]:
    """The spec with what the gain says, and the length of a normalized row where the gain does not hide it."""
    if gain.names:
        measured = gain.intercept / gain.slope
        # Adding 0.0 turns -0.0 into 0.0.
        offset = round(measured, math.floor(-math.log10(9 * precision.offset))) + 0.0
        offset = offset if abs(measured - offset) < precision.offset else measured
        return spec.replace(has_weight=True, weight_offset=offset), gain.slope
    if gain.constant is not None and divisor.is_length(gain.constant, n, precision.length):
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


def _gain_reading(specimen: Specimen, spec: NormSpec, gain: Part, length: float | None) -> Reading:
    if not gain.names:
        evidence = "no parameter changes the gain" + ("" if spec.has_weight else ": there is none")
        if length is None:
            return Reading.open("no parameter sets the gain, so it cannot be told from the length of a row", evidence)
        if specimen.module is None:
            return Reading.open("a function has no parameter to set: a gain of 1 and none are the same", evidence)
        return Reading(value={**value_of(spec, "gain"), "kind": "none"}, evidence=(evidence,))
    names = _listed(gain.names)
    if spec.weight_placement == "before":
        evidence = f"{names} multiplies the row before it is normalized, offset {spec.weight_offset:g}"
    else:
        followed = names if gain.name is not None else f"(entries of {names})"
        evidence = (
            f"gain = {gain.slope:.7g} * {followed} + {gain.intercept:.7g} over two random draws of {names}: "
            f"offset {spec.weight_offset:g}"
        )
    sizes = gain.gathered.index.shape if gain.gathered is not None else specimen.parameters[gain.names[0]].shape
    value = {**value_of(spec, "gain"), "kind": _kind(sizes, spec), "parameter": names, "shape": list(sizes)}
    return Reading(value=value, evidence=(evidence,))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} parameters)"


def _kind(sizes: Sequence[int], spec: NormSpec) -> str:
    """What a weight of these sizes holds: one number, one for each feature, or one row for each head."""
    if math.prod(sizes) == 1:
        return "scalar"
    if spec.rows.are_channels:
        return "vector"
    return "per head" if any(size > 1 for size in sizes[: -len(spec.axes)]) else "vector"


def _bias_reading(spec: NormSpec, bias: Part) -> Reading:
    names = _listed(bias.names)
    value = {**value_of(spec, "bias"), "parameter": names or None}
    if names:
        return Reading(value=value, evidence=(f"bias = {names if bias.name else f'(entries of {names})'}",))
    if bias.values is None:
        return Reading(value=value, evidence=("f(x) + f(-x) = 0: no bias",))
    return Reading(value=value, evidence=("there is a bias, and no parameter changes it",))
