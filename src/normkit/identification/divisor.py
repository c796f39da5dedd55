"""The divisor of the sum of squares, and the eps that was meant: from the length of rows and from round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from normkit.conventions.divisor import DIVISORS, Divisor
from normkit.conventions.eps import EPS, PLACEMENTS, EpsPlacement, machine_epsilon
from normkit.errors import NormkitError
from normkit.identification.eps_response import RollOff
from normkit.identification.passport import Reading
from normkit.identification.specimen import UnrecognisedError
from normkit.spec import NormSpec
from normkit.text import dtype_name

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

    def with_rival(self, evidence: str) -> Choice:
        """The rival in place of the divisor, decided by this evidence."""
        assert self.rival is not None
        reading = Reading(value=self.rival.conventions(), evidence=(evidence,))
        return replace(self, divisor=self.rival, rival=None, readings={**self.readings, "divisor": reading})

    def confirmed(self, evidence: str) -> Choice:
        """The same divisor, decided by this evidence."""
        reading = Reading(value=self.divisor.conventions(), evidence=(evidence,))
        return replace(self, rival=None, readings={**self.readings, "divisor": reading})

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
        raise UnrecognisedError("norm", f"its rows have the root mean square {length:.6g} without gain: no spec has")
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
