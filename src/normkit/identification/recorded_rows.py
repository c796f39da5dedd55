"""`identify_rows`: the norm that recorded rows show, where there is no norm to call.

A factor for each row, a gain and a bias are fitted first, with the row's mean and without. Then the factors are held
against each scale that a spec can have. A field that several scales leave open, the passport leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.conventions.eps import EPS
from normkit.identification.eps_and_divisor import RollOff, choose
from normkit.identification.passport import Passport, Reading, Verdict, without_spec
from normkit.identification.row_bits import SAME_BUT_FOR_EPS, compared_bit_by_bit
from normkit.identification.row_fits import Fit, Recording, fits_of
from normkit.identification.row_scales import Scale, scales_of, still_fits
from normkit.identification.spec_readings import CONVENTIONS, value_of
from normkit.spec import NormSpec
from normkit.text import dtype_name

_SHORT_ROWS = "rows of a root mean square of 1e-3 show an eps of 1e-6"


def identify_rows(x: Any, y: Any, weight: Any = None, bias: Any = None) -> Passport:
    """Find out from recorded inputs and outputs which norm computed them.

    Any runtime can have recorded them. What the rows do not show stays undecided, with the rows that would show it:
    nothing is guessed.

    Args:
        x: The inputs, of shape (..., n), eight rows or more, in the dtype in which the norm took them. A tensor, or an
            array that numpy or DLPack can read.
        y: The outputs, of the same shape, in the dtype in which they came.
        weight: The stored gain, of shape (n,), or of the last axes if rows have several. Without it its offset, the
            divisor and the casts are not shown.
        bias: The stored bias, of the weight's shape.

    Returns:
        The passport: a spec over the last axis, or over the weight's axes, with the weight and bias as they act;
        without a spec where no norm of the space of conventions gives these rows.

    Raises:
        InputError: If the arrays do not belong together, or are too few rows.

    Example:
        >>> import torch
        >>> import normkit as nk
        >>> x = 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        >>> weight = torch.linspace(0.5, 1.5, 32)
        >>> passport = identify_rows(x, nk.rms_norm(x, (32,), weight, eps=1e-5), weight)
        >>> print(passport.spec)
        y = weight * x / sqrt(mean(x^2) + 1e-05)
        >>> sorted(passport.undecidable)
        ['bias', 'casts', 'output dtype']
    """
    rows = Recording.checked(x, y, weight, bias)
    found = _identified(rows)
    if len(rows.axes) == 1 or found.spec is None:
        return found
    heads, groups = math.prod(rows.axes[:-1]), found.spec.groups
    if groups not in (1, heads):
        reason = f"rows of {len(rows.axes)} axes are normalized in {groups} groups: no spec does"
        return _without_spec(rows, "norm", found.evidence[:1], reason)
    # A gain for each head of rows that are normalized head by head.
    axes = tuple(range(-len(rows.axes), 0)) if groups == 1 else (-1,)
    spec = found.spec.replace(axes=axes, groups=1)
    line = f"the gain has {len(rows.axes)} axes, and rows are normalized over {'all' if groups == 1 else 'the last'}"
    over = Reading(value=value_of(spec, "rows"), evidence=(line,))
    parts = (None if part is None else part.reshape(rows.axes) for part in (found.weight, found.bias))
    weight, bias = parts
    return replace(found, spec=spec, readings={**found.readings, "rows": over}, weight=weight, bias=bias)


def _identified(rows: Recording) -> Passport:
    """The passport of checked rows."""
    fits = fits_of(rows)
    best = min(fits, key=lambda fit: fit.residual)
    kind = [
        f"{len(rows.x)} recorded rows of {rows.x.shape[-1]} features, "
        f"{dtype_name(rows.x.dtype)} in and {dtype_name(rows.y.dtype)} out"
    ]
    if rows.left_out:
        kind.append(f"{rows.left_out} rows that are zero, or hold a NaN or an infinity, were left out")
    units = torch.nn.functional.normalize(rows.x.double(), dim=-1)
    units = units * (units @ units[0]).sign()[:, None]
    if float((units - units[0]).abs().max()) < 8 * torch.finfo(rows.x.dtype).eps:
        reason = "all rows are multiples of one row, which shows neither a mean nor a length: give ordinary rows"
        return _without_spec(rows, "undecidable", kind, reason)
    if best.residual > rows.precision.fits:
        reason = "no factor of each row with a gain and a bias makes these outputs of these inputs: "
        return _without_spec(rows, "undecidable", kind, f"{reason}{best.residual:.1%} of their size is left")
    # A row without a mean is the same with its mean taken out.
    near = [fit for fit in fits if fit.residual <= max(3 * best.residual, rows.precision.fits / 30)]
    scales = [scale for fit in near for scale in scales_of(rows, fit)]
    least = min((scale.misfit for scale in scales), default=math.inf)
    noise = max(least, (rows.rounding / 8) ** 2)
    spread = float(best.numerator.square().mean(-1).clamp_min(1e-300).log().std()) / 2
    if spread < 10 * math.sqrt(noise):
        reason = (
            f"all rows are equally long, to {spread:.1e}: a fixed factor would do the same; rows of other lengths tell"
        )
        return _without_spec(rows, "undecidable", kind, reason)
    if float(best.factor.abs().clamp_min(1e-300).log().var(correction=0)) <= 4 * noise:
        acting = best.gain * best.factor.median() - 1
        is_identity = max(float(acting.abs().max()), float(best.shift.abs().max())) < rows.precision.fits
        reason = "every row is multiplied by the same factor, however long it is"
        return _without_spec(rows, "identity" if is_identity else "affine", kind, reason)
    if least > rows.precision.agrees**2:
        reason = (
            f"the factors of the rows follow no scale that a spec has: the nearest is off by {math.sqrt(least):.1e}"
        )
        return _without_spec(rows, "undecidable", kind, reason)
    limit = still_fits(least, best.factor.numel(), rows.rounding)
    possible = [scale for scale in scales if scale.misfit <= limit]
    # A length that a divisor gives explains more than one that was fitted.
    possible = [scale for scale in possible if scale.length is not None] or possible
    return _with_spec(rows, possible, kind)


def _without_spec(rows: Recording, verdict: Verdict, kind: Sequence[str], reason: str) -> Passport:
    found = without_spec(verdict, *kind, reason)
    return replace(found, shape=tuple(rows.x.shape), dtype=dtype_name(rows.x.dtype))


def _with_spec(rows: Recording, possible: Sequence[Scale], kind: Sequence[str]) -> Passport:
    """The passport of a norm, from all the scales that explain its rows; what they do not agree on is open."""
    found = min(possible, key=lambda scale: (scale.fit.centred != scale.centred, scale.misfit))
    fit, gain = found.fit, found.gain
    if gain.misfit is not None:
        return _without_spec(rows, "undecidable", kind, gain.misfit)
    if found.length is None and gain.unit is not None:
        length = gain.unit * found.stretch
        reason = f"a normalized row has root mean square {length:.6g} per unit of gain: no spec has"
        return _without_spec(rows, "norm", kind, reason)
    felt = _roll_off(found, possible)
    choice = choose(
        fit.numerator.shape[-1], found.length, felt, max(rows.precision.length, rows.rounding), found.centred
    )
    lengths = sorted({scale.length for scale in possible if scale.length is not None})
    readings = {"kind": Reading(value="norm", evidence=tuple(kind)), **choice.readings}
    if readings["divisor"].undecidable is None and len(lengths) > 1:
        reason = f"normalized rows of root mean square {' and '.join(f'{each:.6g}' for each in lengths)} fit alike"
        readings["divisor"] = Reading.open(reason)
    elif readings["divisor"].undecidable is None and felt.undecidable is not None:
        # sqrt(n) x / |x| is x / rms(x) wherever no eps is felt.
        readings["divisor"] = replace(
            Reading.open(SAME_BUT_FOR_EPS, *readings["divisor"].evidence),
            value={"correction": choice.divisor.correction},
        )
    spec = choice.apply(
        NormSpec(
            centre_numerator=fit.centred,
            centre_statistics=found.centred,
            groups=fit.groups,
            has_weight=False,
            has_bias=False,
        ),
        felt.placement,
    )
    if choice.eps == EPS["float32"] and readings["eps"].undecidable is None:
        line = "eps is the machine epsilon of float32: it may be eps=None, rows in float64 tell"
        readings["eps"] = Reading.open(line, *readings["eps"].evidence)
    readings["rows"] = Reading(
        value=value_of(spec, "rows"),
        evidence=(f"the rows as recorded are normalized{f' in {fit.groups} groups' if fit.groups > 1 else ''}",),
    )
    readings["centring"] = _centring(spec, possible)
    spec, readings["gain"] = _gain(rows, spec, found, possible)
    spec, readings["bias"] = _bias(rows, spec, fit, possible)
    pairs = dict.fromkeys((scale.fit.centred, scale.centred) for scale in possible)
    spec, found_by_bits = compared_bit_by_bit(rows, spec, readings, list(pairs))
    readings |= found_by_bits
    names = ["kind", *(name for name in CONVENTIONS if name in readings)]
    return Passport(
        verdict="norm",
        spec=spec,
        readings={name: readings[name] for name in names},
        shape=tuple(rows.x.shape),
        dtype=dtype_name(rows.x.dtype),
        weight=_acting_weight(rows, spec, found),
        bias=None if not spec.has_bias else rows.bias if rows.bias is not None else fit.shift.flatten().float(),
    )


def _roll_off(found: Scale, possible: Sequence[Scale]) -> RollOff:
    """eps and its place as `choose` takes them."""
    alike = [scale for scale in possible if scale.length == found.length and scale.centred == found.centred]
    places = {scale.placement.name: scale for scale in alike}
    if min(scale.interval[0] for scale in possible) == 0:
        shown = max((scale.placement.length(scale.interval[1]) for scale in alike), default=0.0)
        return RollOff(
            placement="inside",
            eps=0.0,
            error=0.0,
            evidence=f"an eps that shortens rows of root mean square {shown:.1e} would be seen, and none is",
            undecidable=f"no recorded row is short enough to feel eps: {_SHORT_ROWS}",
        )
    least, most = found.interval
    error = max(most / found.eps - 1, 1 - least / found.eps)
    evidence = f"short rows are shortened as by an eps {found.placement.words} between {least:.3g} and {most:.3g}"
    reason = None
    if len(places) > 1:
        words = " and ".join(scale.placement.words for scale in places.values())
        reason = f"eps {words} explain these rows alike: {_SHORT_ROWS}"
    return RollOff(placement=found.placement.name, eps=found.eps, error=error, evidence=evidence, undecidable=reason)


def _centring(spec: NormSpec, possible: Sequence[Scale]) -> Reading:
    """The places where the mean is subtracted, if all possible scales say so."""
    seen = {(scale.fit.centred, scale.centred) for scale in possible}
    if len(seen) == 1:
        line = f"with the mean {spec.centring.words}, a factor for each row leaves {possible[0].fit.residual:.1e} of y"
        return Reading(value=value_of(spec, "centring"), evidence=(line,))
    return Reading.open(
        "the means of the rows are too small to show whether they are subtracted: rows with a mean tell"
    )


def _gain(rows: Recording, spec: NormSpec, found: Scale, possible: Sequence[Scale]) -> tuple[NormSpec, Reading]:
    """The spec with what multiplies the rows, and its reading."""
    gain = found.gain
    if gain.ignored:
        return spec, Reading(value=value_of(spec, "gain"), evidence=("the weight that was given does not act",))
    befores = {scale.before for scale in possible}
    if rows.weight is None and not gain.visible:
        return spec, Reading.open("every feature is multiplied alike: a gain of ones, or none")
    if rows.weight is None:
        spec = spec.replace(has_weight=True, weight_placement="before" if befores == {True} else "after")
        line = "the stored weight was not given, so what is added to it is not shown"
        return spec, replace(Reading.open(line), value={"has_weight": True})
    offsets = {scale.gain.offset for scale in possible}
    spec = spec.replace(
        has_weight=True, weight_offset=gain.offset, weight_placement="before" if befores == {True} else "after"
    )
    if gain.untold is not None:
        return spec, Reading.open(gain.untold)
    if not gain.visible:
        acting = float(rows.weight.double().mean()) + gain.offset
        if len(offsets) > 1 or abs(acting - 1) < 1e-2:
            spec = spec if abs(acting - 1) >= 1e-2 else spec.replace(has_weight=False, weight_offset=0.0)
            return spec, Reading.open(
                "all weights are equal: whether they act, and what is added to them, is not shown"
            )
    if len(befores) > 1:
        return spec, Reading.open("a gain before normalizing explains these rows as well")
    line = f"what multiplies the features is {spec.gain.words}"
    return spec, Reading(value=value_of(spec, "gain"), evidence=(line,))


def _bias(rows: Recording, spec: NormSpec, fit: Fit, possible: Sequence[Scale]) -> tuple[NormSpec, Reading]:
    """The spec with what is added to the rows, and its reading."""
    shift, noise = fit.shift.flatten(), fit.noise[1].flatten()
    if bool((shift.abs() > noise).any()):
        if any(bool((each.fit.shift.abs() <= each.fit.noise[1]).all()) for each in possible):
            return spec, Reading.open(
                "whether a bias is added turns on whether the mean is subtracted, and that is open"
            )
        spec = spec.replace(has_bias=True)
        if rows.bias is None:
            return spec, Reading(value={"has_bias": True}, evidence=("a constant is added to each feature",))
        off = (shift - rows.bias.double()).abs()
        if bool((off <= noise + rows.precision.offset * shift.abs()).all()):
            return spec, Reading(value={"has_bias": True}, evidence=("the bias that was given is added",))
        reason = f"what is added to each feature is not the bias that was given: {float(off.max()):.1e} apart"
        return spec, Reading.open(reason)
    if rows.bias is not None and bool((rows.bias.double().abs() > 4 * noise).any()):
        return spec, Reading(value={"has_bias": False}, evidence=("the bias that was given is not added",))
    return spec, Reading.open("nothing is added to the features: no bias, or one of zeros")


def _acting_weight(rows: Recording, spec: NormSpec, found: Scale) -> Tensor | None:
    """The spec's weight: the one that was given, or the fitted gain in units of the length found."""
    if not spec.has_weight:
        return None
    return rows.weight if rows.weight is not None else (found.fit.gain * found.stretch).flatten().float()
