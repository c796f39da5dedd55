"""From a misfit to its cause: what the norm is found to compute, beside what the spec says."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from normkit.conventions.eps import eps_in
from normkit.identification.passport import Passport
from normkit.identification.spec_readings import CONVENTIONS, same_eps, words_of
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
    """The violations of a formula, and the spec that the norm is instead, if there is one.

    The norm is identified; where the spec that was found gives its outputs, each convention that differs is named.
    """
    passport = subject.passport()
    if passport is not None and passport.spec is not None:
        # The casts stay the expected ones: they are compared on their own.
        named = _with(norm.spec, passport, _FORMULA)
        for found in (_in_the_words_of(norm.spec, named, norm.row_length), named):
            differing = [reading for reading in _FORMULA if _differs(norm.spec, found, reading)]
            if not differing:
                continue
            subject.weight_name = subject.weight_name or passport.weight_name
            subject.bias_name = subject.bias_name or passport.bias_name
            if agreement.misfit(subject.in_dtype(found, norm.dtype)) is None:
                return tuple(_named(reading, norm.spec, found, seen.confirm) for reading in differing), found
    if passport is not None and "rescaled eps" in passport.readings:
        eps = _in_words("eps", norm.spec)
        found_words = f"{eps}, after the row is divided by its largest magnitude"
        return (Violation(check="eps", expected=eps, found=found_words, confirm=seen.confirm),), None
    return (_unnamed(norm, seen, passport),), None


def of_place(subject: Subject, seen: Violation | None) -> Violation | None:
    """The violation of a row that depends on its batch, with the cause, where the sizes of other axes are that."""
    passport = subject.passport() if seen is not None else None
    if seen is None or passport is None or "other sizes" not in passport.readings:
        return seen
    return replace(seen, found=f"{seen.found} ({passport.readings['other sizes'].evidence[0]})")


def of_rounding(subject: Subject, norm: NormUnderTest, seen: str) -> tuple[tuple[Violation, ...], NormSpec | None]:
    """The violations in 16 bits, and the spec that the norm is there instead, if there is one.

    The candidates: the casts that it is identified by, its formula (where float32 was not tested), and an eps that is
    another one in 16 bits: a machine epsilon, or none.
    """
    confirm = f"compare norm(x) with normkit.normalize(x, spec, ...) bit for bit in {norm.words}"
    parameter_dtype = next((part.dtype for part in (norm.weight, norm.bias) if part is not None), None)
    passport, candidates = subject.passport(), list[NormSpec]()
    if passport is not None and passport.spec is not None:
        candidates += [_with(norm.spec, passport, readings) for readings in (_PROGRAM, (*_FORMULA, *_PROGRAM))]
    machine = (torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16, torch.float32))
    for found in (*candidates, *(norm.spec.replace(eps=eps) for eps in (0.0, *machine))):
        differing = [reading for reading in CONVENTIONS if _differs(norm.spec, found, reading)]
        if differing and _rounds_so(subject.in_dtype(found, norm.dtype, parameter_dtype)):
            return tuple(_named(reading, norm.spec, found, confirm, norm.words) for reading in differing), found
    misfit = agreement.misfit(norm)
    check, expected = "casts", f"{norm.spec.casts.words}, bit for bit but for near-ties"
    if misfit is not None and misfit.at == "small":
        check, expected = "formula", str(norm.spec)
    unnamed = Violation(check=check, expected=expected, found=f"{seen} ({norm.words})", confirm=confirm)
    return (unnamed,), norm.spec if misfit is None else None


def _rounds_so(norm: NormUnderTest) -> bool:
    try:
        if norm.weight is not None and norm.weight.dtype != norm.dtype:
            return agreement.difference_with_wide_parameters(norm) is None
        return agreement.difference_in_bits(norm) is None
    except RefusedError:
        return False


def _with(spec: NormSpec, passport: Passport, readings: tuple[str, ...]) -> NormSpec:
    """The spec with the conventions that the passport decides under these readings."""
    assert passport.spec is not None
    known = [reading for reading in readings if reading not in passport.undecidable]
    return spec.replace(**{name: getattr(passport.spec, name) for reading in known for name in CONVENTIONS[reading]})


def _in_the_words_of(spec: NormSpec, found: NormSpec, n: int) -> NormSpec:
    """The found spec with the divisor of the spec that was asked for, and the eps that acts the same there."""
    longer = math.sqrt(found.divisor.count(n) / spec.divisor.count(n))
    eps = found.placement.rescaled(eps_in("float32", found.eps), longer)
    # The digits that it is measured to.
    return found.replace(**spec.divisor.conventions(), eps=float(f"{eps:.6g}"))


def _differs(spec: NormSpec, found: NormSpec, reading: str) -> bool:
    if reading == "eps":
        return not same_eps(spec, found, 1e-5)
    return any(getattr(spec, name) != getattr(found, name) for name in CONVENTIONS[reading])


def _named(reading: str, spec: NormSpec, found: NormSpec, confirm: str, dtype: str = "") -> Violation:
    check = reading
    if reading == "casts" and spec.casts.statistics != found.casts.statistics:
        check = "statistics dtype"
    if reading == "gain" and found.has_weight and spec.has_weight and spec.gain.offset != found.gain.offset:
        check = "offset"
    return Violation(
        check=check,
        expected=_in_words(check, spec),
        found=_in_words(check, found) + (f" ({dtype})" if dtype else ""),
        confirm=confirm,
    )


def _in_words(check: str, spec: NormSpec) -> str:
    match check:
        case "casts":
            return ", ".join(spec.casts.roundings)
        case "statistics dtype":
            return spec.casts.statistics_words
        case "offset":
            return spec.gain.words
        case "eps":
            return " ".join(spec.placement.parts(spec.eps))
    subject = {"centring": "the mean ", "divisor": "the sum of squares ", "offset dtype": "the offset "}
    return subject.get(check, "") + ", ".join(words_of(spec, check))


def _unnamed(norm: NormUnderTest, seen: Misfit, passport: Passport | None) -> Violation:
    """The violation for a misfit that no convention explains."""
    if seen.at == "length":
        expected, check = _in_words("eps", norm.spec), "eps"
    else:
        expected, check = str(norm.spec), "formula"
    found = seen.found
    if abs(power := agreement.degree(norm)) > _NO_NORM:
        found = f"outputs that grow as the input to the power {power:.2f}"
    elif passport is not None and passport.spec is None and passport.cause is not None:
        found += f" ({passport.cause})"
    elif passport is not None and "gain" in passport.undecidable and passport.readings["gain"].evidence:
        found += f" ({passport.readings['gain'].evidence[0]})"
    return Violation(check=check, expected=expected, found=found, confirm=seen.confirm)
