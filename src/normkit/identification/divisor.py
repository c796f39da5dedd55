"""What the sum of squares is divided by, and which eps was meant: from the length of rows and from round numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from normkit.identification.response import RollOff
from normkit.identification.specimen import UnrecognisedError
from normkit.spec import EpsPlacement, Multiplier, NormSpec, Reduction

_UNROUND = 3
_RIVAL = 3
"""A way this much less round is no rival: 1e-5 under a mean is 7.68e-3 under a sum of 768 squares."""
_SAME_LENGTH = 1e-5
_SAME_EPS = 1e-6
"""eps is measured to about 1e-7; five digits are 1e-5 to 1e-4 apart."""
_MACHINE = tuple(2.0**power for power in (-7, -10, -23, -52))
"""Machine epsilons of bfloat16, float16, float32 and float64."""


@dataclass(frozen=True, kw_only=True)
class Divisor:
    """One way to build the length of a row out of its sum of squares.

    Attributes:
        correction: As in `NormSpec`.
        reduction: As in `NormSpec`.
        multiplier: As in `NormSpec`.
    """

    correction: Literal[0, 1] = 0
    reduction: Reduction = "mean"
    multiplier: Multiplier = "one"

    def length(self, n: int) -> float:
        """Root mean square of a normalized row of n features."""
        return math.sqrt(self._over_n(n)) * (math.sqrt(n) if self.multiplier == "sqrt_n" else 1.0)

    def eps(self, felt: float, n: int, placement: EpsPlacement) -> float:
        """The eps that is felt as `felt` by rows of mean square 1."""
        return felt / (self._over_n(n) if placement == "inside" else math.sqrt(self._over_n(n)))

    def _over_n(self, n: int) -> float:
        return 1 / n if self.reduction == "sum" else (n - self.correction) / n

    def surprise(self, placement: EpsPlacement) -> float:
        """How many degrees of roundness of eps this way is behind: L2 norms rarely have eps inside the root."""
        return 2.5 if self.reduction == "sum" and placement == "inside" else 0.0

    def in_words(self) -> str:
        """The divisor and the multiplier."""
        divided = "not divided (L2)" if self.reduction == "sum" else f"divided by n{' - 1' if self.correction else ''}"
        return divided + (", the row multiplied by sqrt(n)" if self.multiplier == "sqrt_n" else "")


# Simplest first: what nothing tells apart stays at the earlier one.
DIVISORS = (
    Divisor(),
    Divisor(correction=1),
    Divisor(reduction="sum"),
    Divisor(reduction="sum", multiplier="sqrt_n"),
    Divisor(multiplier="sqrt_n"),
    Divisor(correction=1, multiplier="sqrt_n"),
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The divisor and the eps that were found.

    Attributes:
        divisor: What the sum of squares is divided by.
        eps: In the spec's units, rounded to the number that was meant.
        evidence: Lines on what decided.
        doubts: Lines on what could not be decided.
    """

    divisor: Divisor
    eps: float
    evidence: tuple[str, ...]
    doubts: tuple[str, ...]

    def apply(self, spec: NormSpec, placement: EpsPlacement) -> NormSpec:
        """The spec with what was found."""
        return spec.replace(
            eps=self.eps,
            eps_placement=placement,
            correction=self.divisor.correction,
            reduction=self.divisor.reduction,
            multiplier=self.divisor.multiplier,
        )


def is_length(value: float, n: int) -> bool:
    """Some divisor gives normalized rows of this root mean square."""
    return any(math.isclose(value, divisor.length(n), rel_tol=_SAME_LENGTH) for divisor in DIVISORS)


def choose(n: int, length: float | None, felt: RollOff) -> Choice:
    """The divisor and eps of rows of n features.

    A known length leaves at most two divisors; among what is left, the one that makes eps the roundest number.

    Args:
        n: Features of a row.
        length: Root mean square of a normalized row, or None where an unknown gain hides it.
        felt: How small rows are shortened.

    Raises:
        UnrecognisedError: If no divisor gives this length.
    """
    # Without the length a multiplier looks like a gain, so only divisors are compared.
    possible = [
        divisor
        for divisor in DIVISORS
        if (math.isclose(length, divisor.length(n), rel_tol=_SAME_LENGTH) if length else divisor.multiplier == "one")
    ]
    if not possible:
        raise UnrecognisedError("norm", f"its rows have the root mean square {length:.6g} without gain: no spec has")
    tolerance = max(_SAME_EPS, 5 * felt.spread)
    read = [(divisor, *roundness(divisor.eps(felt.eps, n, felt.placement), tolerance)) for divisor in possible]
    surprises = [level + divisor.surprise(felt.placement) for divisor, level, _ in read]
    divisor, level, eps = read[surprises.index(min(surprises))]
    rivals = [
        other
        for (other, other_level, _), surprise in zip(read, surprises, strict=True)
        if other != divisor and other_level < _UNROUND and surprise < min(surprises) + _RIVAL
    ]
    evidence = [f"the sum of squares is {divisor.in_words()}{_because(length, len(possible), n, divisor)}"]
    evidence.append(_eps_in_words(eps, divisor.eps(felt.eps, n, felt.placement), felt))
    doubts = []
    # With a known length the rivals are other words for the same function.
    if length is None and (level == _UNROUND or rivals):
        other = rivals[0] if rivals else DIVISORS[1]
        doubts.append(f"the divisor: the sum of squares may as well be {other.in_words()}, eps tells no difference")
    if eps in _MACHINE:
        doubts.append(f"eps = {eps:g} is a machine epsilon: it may be eps=None, which float32 alone cannot tell")
    return Choice(divisor=divisor, eps=eps, evidence=tuple(evidence), doubts=tuple(doubts))


def roundness(value: float, tolerance: float) -> tuple[int, float]:
    """How round a measured number is, and the round number.

    0: 0, a machine epsilon, or 1, 2 or 5 times a power of ten; 1: two digits; 2: five digits; 3: none of these.
    """
    if value == 0:
        return 0, 0.0
    for machine in _MACHINE:
        if math.isclose(value, machine, rel_tol=tolerance):
            return 0, machine
    for digits in (1, 2, 3, 4, 5):
        rounded = float(f"{value:.{digits - 1}e}")
        if math.isclose(value, rounded, rel_tol=tolerance):
            if digits == 1 and f"{rounded:.0e}"[0] in "125":
                return 0, rounded
            return (1 if digits <= 2 else 2), rounded
    return _UNROUND, value


def _because(length: float | None, possible: int, n: int, divisor: Divisor) -> str:
    if length is None:
        return f": at n = {n} this makes eps the roundest number (a gain hides the length of rows; assumed 1)"
    told = f": a normalized row has root mean square {length:.7g} per unit of gain"
    return told if possible == 1 or divisor == DIVISORS[0] else f"{told}, and this makes eps the roundest number"


def _eps_in_words(eps: float, measured: float, felt: RollOff) -> str:
    if felt.eps == 0:
        return "eps = 0"
    return f"eps = {eps:g} (measured {measured:.7g})"
