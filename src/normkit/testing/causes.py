"""From a misfit to its cause: what the norm is found to compute, beside what the spec says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normkit import reference
from normkit.identification.passport import CONVENTIONS, Passport
from normkit.spec import NormSpec
from normkit.testing import agreement
from normkit.testing.agreement import Misfit
from normkit.testing.norm_under_test import NormUnderTest, RefusedError, Subject
from normkit.testing.violation import Violation

_FORMULA = ("rows", "centring", "divisor", "eps", "gain", "bias")
_PROGRAM = ("casts", "offset dtype")
_NO_NORM = 0.1
"""A norm's outputs do not grow with its input, but for eps and rounding; a wrong power makes this 1 or more."""


def of_formula(subject: Subject, norm: NormUnderTest, seen: Misfit) -> tuple[tuple[Violation, ...], NormSpec | None]:
    """What is wrong with a formula, and the spec that it is instead, if there is one.

    The norm is identified; where the spec that was found gives its outputs, each convention that differs is named.
    """
    passport = subject.passport()
    if passport is not None and passport.spec is not None:
        # The casts stay the expected ones: they are compared on their own.
        named = _with(norm.spec, passport, _FORMULA)
        for found in (_in_the_words_of(norm.spec, named, norm.row_length), named):
            differing = [reading for reading in _FORMULA if _differs(norm.spec, found, reading)]
            if differing and _explains(subject, passport, found, norm):
                return tuple(_named(reading, norm.spec, found, seen.confirm) for reading in differing), found
    if _is_rescaled(norm):
        eps = _eps_in_words(norm.spec)
        found_words = f"{eps}, after the row is divided by its largest magnitude"
        return (Violation(check="eps", expected=eps, found=found_words, confirm=seen.confirm),), None
    return (_unnamed(norm, seen, passport),), None


def of_rounding(subject: Subject, norm: NormUnderTest, seen: str) -> tuple[tuple[Violation, ...], NormSpec | None]:
    """What is wrong in 16 bits, and the spec that the norm is there instead, if there is one.

    Tried are the casts that it is identified by, its formula (where float32 was not tested), and an eps that is
    another one in 16 bits: a machine epsilon, or none.
    """
    confirm = f"compare norm(x) with normkit.normalize(x, spec, ...) bit for bit in {norm.words}"
    parameter_dtype = next((part.dtype for part in (norm.weight, norm.bias) if part is not None), None)
    for found in _candidates(subject.passport(), norm.spec):
        differing = [reading for reading in CONVENTIONS if _differs(norm.spec, found, reading)]
        if differing and _rounds_so(subject.in_dtype(found, norm.dtype, parameter_dtype)):
            return tuple(_named(reading, norm.spec, found, confirm, norm.words) for reading in differing), found
    misfit = agreement.misfit(norm)
    check, expected = "casts", f"{casts_in_words(norm.spec)}, bit for bit but for near-ties"
    if misfit is not None and misfit.at == "small":
        check, expected = "formula", str(norm.spec)
    unnamed = Violation(check=check, expected=expected, found=f"{seen} ({norm.words})", confirm=confirm)
    return (unnamed,), norm.spec if misfit is None else None


def _candidates(passport: Passport | None, spec: NormSpec) -> Iterator[NormSpec]:
    if passport is not None and passport.spec is not None:
        yield _with(spec, passport, _PROGRAM)
        yield _with(spec, passport, (*_FORMULA, *_PROGRAM))
    for eps in (0.0, *(torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16, torch.float32))):
        yield spec.replace(eps=eps)


def _rounds_so(norm: NormUnderTest) -> bool:
    try:
        if norm.weight is not None and norm.weight.dtype != norm.dtype:
            return agreement.difference_with_wide_parameters(norm) is None
        return agreement.difference_in_bits(norm) is None
    except RefusedError:
        return False


def casts_in_words(spec: NormSpec) -> str:
    """Where a spec rounds to 16 bits."""
    words = {
        "early": "rounded before the gain",
        "late": "rounded once, at the end",
        "weight": "rounded to the weight's dtype before the gain",
        "input": "rounded before the gain, gain and bias rounded too",
        "none": "rounded at every step",
    }[spec.cast]
    if spec.round_rstd:
        words += ", 1/s rounded as well"
    return words if spec.statistics_dtype == "float32" else f"{words}, statistics in the input's dtype"


def _with(spec: NormSpec, passport: Passport, readings: tuple[str, ...]) -> NormSpec:
    """The spec with what the passport knows of these readings."""
    assert passport.spec is not None
    known = [reading for reading in readings if reading not in passport.undecidable]
    return spec.replace(**{name: getattr(passport.spec, name) for reading in known for name in CONVENTIONS[reading]})


def _in_the_words_of(spec: NormSpec, found: NormSpec, n: int) -> NormSpec:
    """What was found with the divisor of the spec, and the eps that is the same one there."""
    eps = reference.machine_eps(torch.empty(0), found)
    ratio = _divisor(found, n) / _divisor(spec, n)
    eps = eps * (ratio if found.eps_placement == "inside" else math.sqrt(ratio))
    return found.replace(
        correction=spec.correction,
        reduction=spec.reduction,
        multiplier=spec.multiplier,
        # The digits that it is measured to.
        eps=float(f"{eps:.6g}"),
    )


def _divisor(spec: NormSpec, n: int) -> int:
    return 1 if spec.reduction == "sum" else n - spec.correction


def _explains(subject: Subject, passport: Passport, found: NormSpec, norm: NormUnderTest) -> bool:
    subject.weight_name = subject.weight_name or passport.weight_name
    subject.bias_name = subject.bias_name or passport.bias_name
    return agreement.misfit(subject.in_dtype(found, norm.dtype)) is None


def _differs(spec: NormSpec, found: NormSpec, reading: str) -> bool:
    if reading == "eps":
        one, other = (reference.machine_eps(torch.empty(0), each) for each in (spec, found))
        same = math.isclose(one, other, rel_tol=1e-5)
        return not same or (one != 0 and spec.eps_placement != found.eps_placement)
    return any(getattr(spec, name) != getattr(found, name) for name in CONVENTIONS[reading])


def _named(reading: str, spec: NormSpec, found: NormSpec, confirm: str, dtype: str = "") -> Violation:
    check = reading
    if reading == "casts" and spec.statistics_dtype != found.statistics_dtype:
        check = "statistics dtype"
    if reading == "gain" and found.has_weight and spec.has_weight and spec.weight_offset != found.weight_offset:
        check = "offset"
    return Violation(
        check=check,
        expected=_in_words(check, spec),
        found=_in_words(check, found) + (f" ({dtype})" if dtype else ""),
        confirm=confirm,
    )


def _in_words(check: str, spec: NormSpec) -> str:
    match check:
        case "rows":
            axes = "all axes but the first" if spec.axes == "all_but_batch" else f"axes {spec.axes}"
            return f"{axes}, {spec.groups} groups" if spec.groups > 1 else axes
        case "centring":
            over = "the standard deviation" if spec.centre_statistics else "the root mean square"
            return f"{'x - mean(x)' if spec.centre_numerator else 'x'} over {over}"
        case "divisor":
            return _divisor_in_words(spec)
        case "eps":
            return _eps_in_words(spec)
        case "gain":
            return f"a gain {spec.weight_placement} normalizing" if spec.has_weight else "no gain"
        case "offset":
            return f"a gain of {spec.weight_offset:g} + weight" if spec.weight_offset else "a gain of weight"
        case "bias":
            return "a bias" if spec.has_bias else "no bias"
        case "offset dtype":
            return f"the offset added in {'float32' if spec.offset_dtype == 'float32' else 'the dtype of the weight'}"
        case "statistics dtype":
            return f"mean and scale in {'float32' if spec.statistics_dtype == 'float32' else 'the dtype of the input'}"
    return casts_in_words(spec)


def _divisor_in_words(spec: NormSpec) -> str:
    words = "sum of squares" if spec.reduction == "sum" else f"sum of squares / {'(n - 1)' if spec.correction else 'n'}"
    return words if spec.multiplier == "one" else f"{words}, the row times sqrt(n)"


def _eps_in_words(spec: NormSpec) -> str:
    eps = reference.machine_eps(torch.empty(0), spec)
    where = {"inside": "inside the root", "outside": "outside the root", "clamp": "as a lower clamp"}
    return f"{eps:g} {where[spec.eps_placement]}" if eps else "none"


def _is_rescaled(norm: NormUnderTest) -> bool:
    """The outputs are those for rows divided by their largest magnitude: eps acts in other units."""
    x = norm.normal(4) * max(norm.felt(), 1e-6)
    rows = reference.to_rows(x, norm.spec)
    scaled = reference.from_rows(rows / rows.abs().amax(-1, keepdim=True), x, norm.spec)
    return float(norm.expected(scaled).units(norm.y(x)).max()) <= agreement.limit(norm)


def _unnamed(norm: NormUnderTest, seen: Misfit, passport: Passport | None) -> Violation:
    """A misfit that no convention explains, with what there is to say."""
    if seen.at == "length":
        expected, check = _eps_in_words(norm.spec), "eps"
    else:
        expected, check = str(norm.spec), "formula"
    found = seen.found
    if abs(power := agreement.degree(norm)) > _NO_NORM:
        found = f"outputs that grow as the input to the power {power:.2f}"
    elif passport is not None and passport.spec is None and passport.evidence:
        found += f" ({passport.evidence[0]})"
    return Violation(check=check, expected=expected, found=found, confirm=seen.confirm)
