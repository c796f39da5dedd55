"""Small inputs: how rows are shortened, where eps enters, what divides the sum of squares, which eps was meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.divisor import DIVISORS, Divisor
from normkit.conventions.eps import EPS, PLACEMENTS, EpsPlacement, machine_epsilon
from normkit.conventions.gain import NO_GAIN
from normkit.conventions.rows import CENTRINGS
from normkit.errors import NormkitError
from normkit.identification import half_precision_calls
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec
from normkit.text import dtype_name

_CLIPS = 0.1
"""A clamp that rows of ordinary length feel is the purpose, not a guard."""
_MOST_SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class RollOff:
    """How a norm's output falls for small rows."""

    placement: EpsPlacement
    eps: float
    """For rows whose centred mean square is 1; 0.0 if the output does not fall."""
    error: float
    """Relative error of eps."""
    evidence: str
    undecidable: str | None = None
    """Why placement and eps could not be told."""


def roll_off(
    specimen: Specimen,
    spec: NormSpec,
    shape: Sequence[int],
    generator: torch.Generator,
    elements: int | None = None,
) -> RollOff:
    """Call the norm on rows scaled to rms k from 2e-19 to 1e3 and fit r(k), the output over that of a large input.

    r is k / sqrt(k**2 + eps) for eps inside the root, k / (k + eps) outside, min(1, k / eps) for a clamp.

    Args:
        specimen: The norm, with gain 1 and no bias where these are parameters.
        spec: Axes, groups and centring.
        shape: Of an input.
        generator: Source of the rows.
        elements: Numbers of a scale, at least one row; more where the dtype has few digits, unless given.

    Raises:
        UnrecognisedError: If none of the three explains r.
    """
    precision = specimen.precision
    low, high = precision.window
    first, last = precision.scales
    narrow = specimen.dtype == torch.float16 and half_precision_calls.overflows(specimen, shape, generator)
    if narrow:
        # A norm whose large rows overflow has small rows that underflow, which looks like a clamp.
        first = math.ceil(math.log2(precision.smallest))
    samples = min(_MOST_SAMPLES, max(1, math.ceil((elements or precision.rows) / math.prod(shape[1:]))))
    k, r = _responses(specimen, spec, (samples, *shape[1:]), generator, range(first, last + 1))
    if not bool(torch.isfinite(r).all()):
        raise UnrecognisedError("norm", "its output is not finite for small inputs that are not zero")
    means = r.mean(1)
    felt = (means > low) & (means < high)
    smallest = f"{float(k.min()):.0e}"
    if not bool(felt.any()) and bool((means > low).all()):
        # No row is shortened: eps is absent, or too small for the dtype's smallest rows.
        evidence, reason = f"inputs down to {smallest} are not shortened", None
        if specimen.dtype == torch.float16:
            reason = "eps is absent or too small for float16, which has no smaller inputs with digits enough"
        elif bool(torch.isfinite(specimen(torch.zeros(tuple(shape), device=specimen.device))).all()):
            reason = "eps is too small to be felt, or zeros are treated in another way"
        else:
            evidence += ", and zeros are divided by zero: no eps"
        return RollOff(placement="inside", eps=0.0, error=0.0, evidence=evidence, undecidable=reason)
    inside = (r[felt] > low) & (r[felt] < high)
    found = {each.name: _constant(each.eps_of(k[felt], r[felt]), inside) for each in PLACEMENTS.values()}
    placement = min(found, key=lambda name: found[name][1])
    eps, spread = found[placement]
    scales = int(felt.sum())
    if scales < 3 and specimen.dtype == torch.float16:
        evidence = f"inputs of rms {smallest} are shortened to {float(means.min()):.2f}"
        reason = "eps is felt only where float16 has too few digits left to tell where it enters"
        return RollOff(placement="inside", eps=0.0, error=0.0, evidence=evidence, undecidable=reason)
    if scales < 2 or spread > precision.constant:
        raise UnrecognisedError("norm", "the way it shortens small inputs fits no eps, inside, outside or as a clamp")
    if placement == "clamp" and eps > _CLIPS:
        raise UnrecognisedError("norm", f"it leaves rows shorter than rms {eps:.3g} as they are: a clip")
    runner_up = min(other for name, (_, other) in found.items() if name != placement)
    evidence = (
        f"eps {PLACEMENTS[placement].words} explains how small inputs are shortened: computed at each of {scales} "
    )
    evidence += f"input scales, it is constant to {spread:.0e} (next best place: {runner_up:.2f})"
    # The mean over the scales is better than each of them.
    error = max(precision.eps, 5 * spread / math.sqrt(scales)) + (precision.least / 2 / eps if narrow else 0.0)
    return RollOff(placement=placement, eps=eps, error=error, evidence=evidence)


def _responses(
    specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator, exponents: range
) -> tuple[Tensor, Tensor]:
    """The lengths k of rows and the responses r(k), of shape (scales, rows); `shape` is that of one scale's rows."""
    precision = specimen.precision
    plain = spec.replace(eps=0.0, **NO_GAIN.conventions())
    samples = shape[0]
    centred = plain.replace(**CENTRINGS[True, True].conventions())
    sample = reference.forward(torch.randn(*shape, generator=generator, dtype=torch.float64), centred)
    if samples > 1:
        # Rows of different lengths are rounded up as often as down.
        sample = sample * 2.0 ** torch.rand(samples, *(1,) * (sample.dim() - 1), generator=generator)
    # Powers of two leave all digits of a row as they are.
    scales = torch.tensor([*(2.0**exponent for exponent in exponents), precision.far], dtype=torch.float64)
    x = (scales.reshape(-1, *(1,) * sample.dim()) * sample).flatten(0, 1).to(specimen.dtype)
    sent = x.to(specimen.device)
    odd = (specimen(sent).double() - specimen(-sent).double()).div_(2).cpu()
    # Where the dtype has small numbers enough, all rows are multiples of the far ones, in each digit.
    exact = (x if precision.least else x[-samples:]).double()
    normalized = reference.forward(exact, plain)
    lengths = reference.statistics(reference.to_rows(exact, plain), plain, 0.0).scale
    gain = (odd[-samples:] * normalized[-samples:]).sum(0) / normalized[-samples:].square().sum(0)
    expected = reference.to_rows(gain * normalized, plain)
    products = reference.to_rows(odd, plain).reshape(-1, *expected.shape) * expected
    projections = products.sum(-1) / expected.square().sum(-1)
    k, r = lengths.reshape(len(exact) // samples, -1), projections.reshape(len(scales), -1)
    k = k if precision.least else k * (scales / precision.far)[:, None]
    return k[:-1], (r / r[-1:].mean())[:-1]


def _constant(values: Tensor, valid: Tensor) -> tuple[float, float]:
    """Mean and relative standard deviation over the scales of values that ought to be one, as far as they are valid."""
    over_scales = torch.where(valid, values, 0.0).sum(1) / valid.sum(1).clamp_min(1)
    mean = float(over_scales.mean())
    return mean, float(over_scales.std(correction=0)) / mean if mean > 0 else math.inf


_UNROUND = 3
_RARE = 2.5
"""A rare way is behind by so many degrees of roundness of its eps."""
_RIVAL = 3
"""A way this much less round is no rival: 1e-5 under a mean is 7.68e-3 under a sum of 768 squares."""
_SAME_LENGTH = 1e-5
_COARSE = 1e-4
"""An eps measured no better than this is told by being near a round number."""
_TOO_COARSE = 0.02
"""From here on, a round number near by says nothing."""
_BY_ROUNDNESS = 0.95
"""Confidence in a number that was rounded to the roundest one near by."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The divisor and the eps that were found."""

    divisor: Divisor
    """Divides the sum of squares."""
    eps: float | None
    """In the spec's units, rounded to the number that was meant; None as in `NormSpec`."""
    readings: dict[str, Reading]
    """Under "divisor" and "eps"."""
    rival: Divisor | None = None
    """Another divisor that explains the outputs as well."""

    def reread(self, eps: float | None, reading: Reading) -> Choice:
        """The same divisor with another eps and its reading."""
        return replace(self, eps=eps, readings={**self.readings, "eps": reading})

    def decided(self, divisor: Divisor, evidence: str) -> Choice:
        """This divisor or its rival, decided by this evidence."""
        reading = Reading(value=divisor.conventions(), evidence=(evidence,))
        return replace(self, divisor=divisor, rival=None, readings={**self.readings, "divisor": reading})

    def apply(self, spec: NormSpec, placement: EpsPlacement) -> NormSpec:
        """The spec with what was found."""
        return spec.replace(**PLACEMENTS[placement].conventions(self.eps), **self.divisor.conventions())


def row_rms(divisor: Divisor, n: int) -> float:
    """Root mean square of a normalized row of n features, without eps."""
    return divisor.radius(n) / math.sqrt(n)


def is_length(value: float, n: int, tolerance: float = _SAME_LENGTH) -> bool:
    """Some divisor gives normalized rows of this root mean square."""
    return any(math.isclose(value, row_rms(divisor, n), rel_tol=tolerance) for divisor in DIVISORS.values())


def choose(
    n: int, length: float | None, felt: RollOff, tolerance: float = _SAME_LENGTH, centred: bool = True
) -> Choice:
    """The divisor and eps of rows of n features.

    A known length leaves at most two divisors. Of the divisors that are left, the one with the roundest eps is chosen.

    Args:
        n: Features of a row.
        length: Root mean square of a normalized row, or None where an unknown gain hides it.
        felt: How small rows are shortened.
        tolerance: Relative error of the length.
        centred: What is squared are deviations from the mean.

    Raises:
        UnrecognisedError: If no divisor gives this length.
    """
    # Without the length a factor sqrt(n) looks like a gain, so only divisors are compared.
    possible = [
        divisor
        for divisor in DIVISORS.values()
        if (math.isclose(length, row_rms(divisor, n), rel_tol=tolerance) if length else not divisor.is_multiplied)
    ]
    if not possible:
        words = _as_if(n, length, tolerance)
        raise UnrecognisedError(
            "norm", f"its rows have the root mean square {length:.6g} without gain{words}: no spec has"
        )
    read = [(divisor, *roundness(_eps(divisor, felt, n), felt.error)) for divisor in possible]
    # L2 norms rarely have eps inside the root.
    is_inside = PLACEMENTS[felt.placement].power == 2
    surprises = [level + (_RARE if is_inside and divisor.is_sum else 0.0) for divisor, level, _ in read]
    divisor, level, eps = read[surprises.index(min(surprises))]
    # With a known length, most others are other words for the same function.
    others = [
        (other, other_level, surprise)
        for (other, other_level, _), surprise in zip(read, surprises, strict=True)
        if other != divisor and (length is None or not _are_alike(other, divisor, n))
    ]
    if length is not None and not centred:
        # n - 1 corrects for a mean. Without a mean it is accepted only where the length is exact enough.
        others = [each for each in others if not each[0].correction]
    rivals = [each for each, rounded, surprise in others if rounded < _UNROUND and surprise < min(surprises) + _RIVAL]
    divided = f"the sum of squares is {divisor.words}"
    if length is None:
        divided += f": at n = {n} this makes eps the roundest number (a gain hides the length of rows; assumed 1)"
    else:
        divided += f": a normalized row has root mean square {length:.7g} per unit of gain"
        divided += "" if len(possible) == 1 or divisor == Divisor() else ", and this makes eps the roundest number"
    if rivals or (others and level == _UNROUND):
        rival = rivals[0] if rivals else others[0][0]
        reading = Reading.open(f"the sum of squares may as well be {rival.words}, eps tells no difference", divided)
    else:
        rival = None
        reading = Reading(value=divisor.conventions(), evidence=(divided,))
    eps_reading = _eps_reading(eps, _eps(divisor, felt, n), felt)
    if rival is not None and length is None and eps:
        line = f"with the other divisor it is {_eps(rival, felt, n):.6g}"
        eps_reading = Reading.open(line, *eps_reading.evidence)
    # Other words for the same function may be as likely.
    for (other, _, other_eps), surprise in zip(read, surprises, strict=True):
        is_twin = other != divisor and _are_alike(other, divisor, n) and surprise == min(surprises)
        if is_twin and length is not None and eps and level < _UNROUND:
            reason = f"at n = {n} the same function is: {other.words}, eps = {other_eps:g}, no less round"
            reading, eps_reading = (Reading.open(reason, *each.evidence) for each in (reading, eps_reading))
            break
    return Choice(divisor=divisor, eps=eps, readings={"divisor": reading, "eps": eps_reading}, rival=rival)


def _as_if(n: int, length: float | None, tolerance: float) -> str:
    """In words, what would divide the sum of squares of n features where rows leave with this root mean square."""
    # A kernel that fills a row up divides by the length of its block.
    counts = {n - 2: "n - 2", n + 1: "n + 1", n + 2: "n + 2", 1 << (n - 1).bit_length(): "the next power of two"}
    for count, words in counts.items():
        if length and math.isclose(length**2, count / n, rel_tol=2 * tolerance):
            return f", as where the sum of squares is divided by {count}, {words}, in place of n = {n}"
    return ""


def _are_alike(a: Divisor, b: Divisor, n: int) -> bool:
    """Whether their normalized rows are equally long."""
    return math.isclose(row_rms(a, n), row_rms(b, n), rel_tol=1e-9)


def _eps(divisor: Divisor, felt: RollOff, n: int) -> float:
    """The eps of a norm with this divisor that acts on rows of mean square 1 as `felt.eps` does."""
    return PLACEMENTS[felt.placement].rescaled(felt.eps, math.sqrt(n / divisor.count(n)))


def settle_machine_eps(choice: Choice, n: int, dtype: torch.dtype, felt_in: Callable[[torch.dtype], RollOff]) -> Choice:
    """The choice; the response in other dtypes decides whether an eps that is a machine epsilon means eps=None.

    Args:
        choice: What `choose` found in `dtype`.
        n: Features of a row.
        dtype: In which it was found.
        felt_in: The response of the same norm in another dtype.
    """
    wide = dtype == torch.float64
    own, other = machine_epsilon(is_float64=wide), machine_epsilon(is_float64=not wide)
    reading = choice.readings["eps"]
    if choice.eps != own or reading.undecidable is not None:
        return choice
    beside = torch.float32 if wide else torch.float64
    there = _eps_in(beside, choice, n, felt_in)
    if there is None:
        unknown = f"it may be eps=None, and it does not run in {dtype_name(beside)} to tell"
        return choice.reread(own, Reading.open(f"eps = {own:g} is a machine epsilon: {unknown}", *reading.evidence))
    line = f"in {dtype_name(beside)} eps is {there:g}"
    if there == own:
        return choice.reread(own, replace(reading, evidence=(*reading.evidence, f"{line} as well")))
    half = _eps_in(torch.bfloat16, choice, n, felt_in)
    if there != other or half not in (None, EPS["float32"]):
        reason = f"eps changes with the input's dtype as no spec does: {line}"
        reason += "" if half is None else f", in bfloat16 {half:g}"
        return choice.reread(own, Reading.open(reason, *reading.evidence))
    evidence = (*reading.evidence, f"{line}: the machine epsilon of the arithmetic (eps=None)")
    return choice.reread(None, replace(reading, value={**reading.value, "eps": None}, evidence=evidence))


def _eps_in(dtype: torch.dtype, choice: Choice, n: int, felt_in: Callable[[torch.dtype], RollOff]) -> float | None:
    """The eps of the same norm in another dtype, or None where it does not run so."""
    try:
        felt = felt_in(dtype)
    except (UnrecognisedError, NormkitError):
        return None
    return None if felt.undecidable else roundness(_eps(choice.divisor, felt, n), felt.error)[1]


def roundness(value: float, tolerance: float) -> tuple[int, float]:
    """How round a measured number is, and the round number.

    0: 0, a machine epsilon, or 1, 2 or 5 times a power of ten; 1: two digits; 2: five digits; 3: none of these.
    """
    if value == 0:
        return 0, 0.0
    power = 10.0 ** math.floor(math.log10(value))
    roundest = (*EPS.values(), *(float(f"{digit * power:.0e}") for digit in (1, 2, 5, 10)))
    nearest = min(roundest, key=lambda each: abs(each - value))
    if math.isclose(value, nearest, rel_tol=tolerance):
        return 0, nearest
    for digits in (1, 2, 3, 4, 5):
        if tolerance > 10.0**-digits:
            # At this tolerance every value is close to some number with this many digits.
            break
        rounded = float(f"{value:.{digits - 1}e}")
        if math.isclose(value, rounded, rel_tol=tolerance):
            return (1 if digits <= 2 else 2), rounded
    return _UNROUND, value


def _eps_reading(eps: float, measured: float, felt: RollOff) -> Reading:
    if felt.undecidable is not None:
        return Reading.open(felt.undecidable, felt.evidence)
    value = PLACEMENTS[felt.placement].conventions(eps)
    if felt.eps == 0:
        return Reading(value=value, evidence=(felt.evidence, "eps = 0"))
    if felt.error <= _COARSE:
        return Reading(value=value, evidence=(felt.evidence, f"eps = {eps:g} (measured {measured:.7g})"))
    line = f"eps = {eps:g} (measured {measured:.3g}, good to {felt.error:.1%})"
    if felt.error > _TOO_COARSE:
        return Reading.open(f"eps is measured to {felt.error:.0%} only", felt.evidence, line)
    return Reading(value=value, confidence=_BY_ROUNDNESS, evidence=(felt.evidence, line))
