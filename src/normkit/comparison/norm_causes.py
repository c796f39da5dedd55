"""Causes at a norm of a port that does not follow the reference's formula, or gives other bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.comparison.effects import Formula, distances
from normkit.comparison.own_rounding import Limit
from normkit.comparison.row_causes import RowCause
from normkit.comparison.row_places import Place
from normkit.conventions.eps import eps_in
from normkit.errors import InputError, NormkitError, SpecError
from normkit.identification.cast_program import in_words, programs_of
from normkit.identification.half_precision_calls import Run, rate
from normkit.identification.recorded_rows import identify_rows
from normkit.identification.row_bits import USUAL_EPS
from normkit.identification.spec_readings import CONVENTIONS, words_of
from normkit.reference import HALF
from normkit.spec import NormSpec

_OFFSETS = (0.0, 1.0, -1.0, 2.0)
"""The offsets of a weight: by design 0 or 1, by mistake the others."""
_SAME_BITS, _OTHER_BITS = 0.99, 0.97
"""A norm's own cast program gives more of its bits than the first, a wrong one misses 4 % or more of them."""

_ROUNDED_NOWHERE = ("rows", "centring", "divisor", "eps", "gain", "bias")
"""The conventions that are no casts."""


def applied(formula: Formula, x: Tensor) -> Tensor:
    """The formula on rows of shape (rows, n), in float64 without a rounding."""
    part = formula.weight if formula.weight is not None else formula.bias
    whole = x.double()
    if part is not None and part.dim() > x.dim() - 1:
        # A gain for each head; heads stand within tokens.
        whole = whole.reshape(-1, *part.shape[: part.dim() - x.dim() + 1], *x.shape[1:])
    elif part is not None and part.dim() < x.dim() - 1 and part.numel() == x[0].numel():
        # The formula was found on flat rows.
        whole = whole.flatten(1)
    spec = formula.spec.replace(eps=eps_in(x.dtype, formula.spec.eps))
    return replace(formula, spec=spec)(whole, torch.float64).reshape(x.shape)


def takes(formula: Formula, x: Tensor) -> bool:
    """Whether the sizes of rows are those of the formula: a norm may have been recorded in other rows than its own."""
    try:
        return applied(formula, x[:1]).shape == x[:1].shape
    except (RuntimeError, IndexError, NormkitError):
        return False


def causes_at(
    place: Place, formulas: Mapping[str, Formula], places: Sequence[Place], limit: Limit
) -> Iterator[RowCause]:
    """The cause at a norm of the port that does not follow the reference's formula."""
    x, y = place.port_rows
    formula, path = formulas[place.reference], place.path

    def fits(candidate: Formula) -> bool:
        return limit.holds(distances(y, applied(candidate, x)))

    if limit.holds(distances(y, x)):
        yield RowCause(kind="not applied", paths=(path,), words="{} is not applied: what leaves is what enters")
        return
    for changed in _variants(place, formula):
        if fits(changed):
            words = _difference(changed.spec, formula.spec)
            yield RowCause(
                kind="formula",
                paths=(path,),
                words=f"the port's rows at {{}} follow the reference's formula with {words}",
            )
            return
    for other in places:
        gain = formulas.get(other.reference)
        if other is place or gain is None or (gain.bias is None) != (formula.bias is None):
            continue
        if gain.weight is None or formula.weight is None or gain.weight.shape != formula.weight.shape:
            continue
        if torch.equal(gain.weight, formula.weight):
            continue
        if fits(replace(formula, weight=gain.weight, bias=gain.bias)):
            there, own = other.port_rows, replace(gain, weight=formula.weight, bias=formula.bias)
            if limit.holds(distances(there[1], applied(own, there[0]))):
                both = tuple(sorted((path, other.path)))
                yield RowCause(
                    kind="swapped gains", paths=both, words=f"the gains of {both[0]} and {both[1]} are swapped"
                )
            else:
                yield RowCause(kind="gain", paths=(path, other.path), words=f"{path} has the gain of {other.path}")
            return
    if limit.holds(distances(y, applied(formula, applied(formula, x)))):
        yield RowCause(kind="applied twice", paths=(path,), words=f"{path} is applied twice")
        return
    if (divisor := _other_divisor(x, y, formula, limit)) is not None:
        words = f"the port's rows at {{}} are divided by {divisor}"
        yield RowCause(kind="divisor", paths=(path,), words=words)
        return
    x0, y0 = place.reference_rows
    rows = ((y0, applied(formula, x0)), (y, applied(formula, x)))
    exact, apart = (float(distances(*each).median()) for each in rows)
    words = (
        f"the port's rows at {{}} do not follow the reference's formula, and no single change explains them: "
        f"{apart:.1e} from it, the reference's own {exact:.1e}"
    )
    yield RowCause(kind="unknown", paths=(path,), words=words)


def _other_divisor(x: Tensor, y: Tensor, formula: Formula, limit: Limit) -> str | None:
    """The divisor of the port's rows in words, where it is another size of the row; else None."""
    spec = formula.spec
    if spec.rows.are_channels or x.dim() != 2 or (formula.weight is not None and formula.weight.shape != x.shape[1:]):
        return None
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if spec.centre_numerator else wide
    gain = torch.ones(()) if formula.weight is None else spec.gain.effective(formula.weight, torch.float64)
    bias = torch.zeros(()) if formula.bias is None else formula.bias
    sizes = {
        "the mean of their magnitudes": wide.abs().mean(-1, keepdim=True),
        "the sum of their magnitudes": wide.abs().sum(-1, keepdim=True),
        "their largest magnitude": wide.abs().amax(-1, keepdim=True),
        "the mean of their squares, without the root": wide.square().mean(-1, keepdim=True),
        "the root of the sum of their squares": wide.square().sum(-1, keepdim=True).sqrt(),
    }
    for words, size in sizes.items():
        # The eps of the port is not known: 0, or the reference's.
        for eps in (0.0, eps_in(x.dtype, spec.eps)):
            if limit.holds(distances(y, wide / (size + eps) * gain.double() + bias.double())):
                return words
    return None


def rounds_elsewhere(place: Place, formula: Formula) -> float | None:
    """The share of the port's outputs with the bits of the reference's program; None where that is as large as its own.

    None also where the two are not in one dtype of 16 bits, or the formula does not give the reference's own bits.
    """
    dtypes = {each.dtype for each in (*place.port_rows, *place.reference_rows)}
    if len(dtypes) > 1 or not dtypes <= {*HALF}:
        return None
    if place.port_rows[0].dim() > 2 or _share(formula, place.reference_rows) < _SAME_BITS:
        return None
    share = _share(formula, place.port_rows)
    return None if share >= _OTHER_BITS else share


def _share(formula: Formula, rows: tuple[Tensor, Tensor]) -> float:
    """The share of outputs that the formula's cast program gives bit for bit."""
    x, y = rows
    shares = (rate([Run(x=x, y=y, weight=weight, bias=bias)], formula.spec).share for weight, bias in _stored(formula))
    return max(shares)


def cause_of_bits(place: Place, formula: Formula, share: float) -> RowCause:
    """The places where the port rounds, at a norm whose reference gives its own bits and not the port's.

    Args:
        place: The norm.
        formula: The reference's formula.
        share: The share of the port's outputs that it gives bit for bit.
    """
    x, y = place.port_rows
    candidates = [
        *programs_of(formula.spec, formula.spec.output_dtype),
        *(each.spec for each in _variants(place, formula)),
    ]
    rated = [
        (rate([Run(x=x, y=y, weight=weight, bias=bias)], each).share, each)
        for weight, bias in _stored(formula)
        for each in candidates
        if (each.has_weight, each.has_bias) == (weight is not None, bias is not None)
    ]
    best, found = max(rated, key=lambda each: each[0])
    words = _difference(found, formula.spec)
    if best < _SAME_BITS or not words:
        words = f"{share:.0%} of the bits are those of the reference's program ({in_words(formula.spec)})"
        return RowCause(kind="casts", paths=(place.path,), words=f"at {{}} the port rounds in another place: {words}")
    kind = "formula" if _difference(found, formula.spec, _ROUNDED_NOWHERE) else "casts"
    return RowCause(kind=kind, paths=(place.path,), words=f"the port's bits at {{}} are the reference's with {words}")


def _stored(formula: Formula) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Gain and bias as they are stored, and in float32, in which a port may store them."""
    parts = tuple(None if part is None else part.flatten() for part in (formula.weight, formula.bias))
    yield parts[0], parts[1]
    if any(part is not None and part.dtype in HALF for part in parts):
        wide = tuple(None if part is None else part.float() for part in parts)
        yield wide[0], wide[1]


def _variants(place: Place, formula: Formula) -> Iterator[Formula]:
    """The reference's formula with what the port's rows show, and with one field changed."""
    x, y = place.port_rows
    spec = formula.spec
    try:
        found = identify_rows(
            x,
            y,
            None if formula.weight is None else formula.weight.flatten(),
            None if formula.bias is None else formula.bias.flatten(),
        )
    except InputError:
        found = None
    changes: list[dict[str, Any]] = []
    if found is not None and found.spec is not None:
        for reading in ("eps", "gain", "centring", "divisor"):
            if reading not in found.undecidable:
                changes.append({name: getattr(found.spec, name) for name in CONVENTIONS[reading]})
    changes += [{"eps": eps} for eps in USUAL_EPS]
    changes += [{"weight_offset": offset} for offset in _OFFSETS if spec.has_weight]
    changes += [{"has_weight": False, "weight_offset": 0.0}, {"has_bias": False}, {"correction": 1 - spec.correction}]
    changes += [{"centre_numerator": centred, "centre_statistics": centred} for centred in (False, True)]
    for change in changes:
        try:
            each = spec.replace(**change)
        except SpecError:
            continue
        if each != spec:
            weight, bias = (formula.weight if each.has_weight else None), (formula.bias if each.has_bias else None)
            yield Formula(spec=each, weight=weight, bias=bias)


def _difference(given: NormSpec, expected: NormSpec, readings: Sequence[str] = tuple(CONVENTIONS)) -> str:
    """The conventions in which two specs differ, in words."""
    parts = []
    for reading in readings:
        mine, theirs = words_of(given, reading), words_of(expected, reading)
        if reading == "eps" and mine != theirs and expected.eps == 0:
            parts.append(f"eps {given.eps:g}, where the reference's rows show none")
        elif mine != theirs:
            common = {*mine} & {*theirs} if len(mine) == len(theirs) else set()
            told = [", ".join(part for part in words if part not in common) for words in (mine, theirs)]
            label = {"gain": "", "casts": "", "offset dtype": "offset "}.get(reading, f"{reading} ")
            parts.append(f"{label}{told[0]} instead of {told[1]}")
    return "; ".join(parts)
