"""Numbers as a reader wants them: three significant digits, percentages without false precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def significant(value: float) -> str:
    """The value to three significant digits: 0.00123, 1.23, 12.3, 1,230; powers of ten outside 0.001 to 1e5.

    Example:
        >>> significant(0.012345), significant(1234.5), significant(1.5e-9)
        ('0.0123', '1,230', '1.5e-9')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    rounded = float(f"{value:.2e}")
    if rounded == 0:
        return "0"
    exponent = math.floor(math.log10(abs(rounded)))
    if -3 <= exponent < 5:
        return f"{rounded:,.{max(0, 2 - exponent)}f}"
    digits, power = f"{rounded:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def percent(share: float) -> str:
    """A share of one as a percentage: a digit after the point from 10 % on, two significant digits below.

    Example:
        >>> percent(0.1234), percent(0.00312), percent(1e-7), percent(0.0)
        ('12.3 %', '0.31 %', '<0.001 %', '0 %')
    """
    if not math.isfinite(share):
        return significant(share)
    value = 100 * share
    if value == 0 or value == 100:
        return f"{value:.0f} %"
    if abs(value) < 0.001:
        return "<0.001 %" if value > 0 else ">-0.001 %"
    if 99.95 <= value < 100:
        return ">99.9 %"
    if abs(value) >= 9.95:
        return f"{value:.1f} %"
    rounded = float(f"{value:.1e}")
    return f"{rounded:.{1 - math.floor(math.log10(abs(rounded)))}f} %"


def spread(values: Iterable[float]) -> str:
    """The smallest to the largest value, or the one value if they read the same.

    Example:
        >>> spread([0.5, 0.1, 2.0]), spread([1.0, 1.0001])
        ('0.100 to 2.00', '1.00')
    """
    return _span(values, significant)


def percent_spread(shares: Iterable[float]) -> str:
    """The same for percentages.

    Example:
        >>> percent_spread([0.01, 0.2])
        '1.0 to 20.0 %'
    """
    low, to, high = _span(shares, percent).partition(" to ")
    return f"{low.removesuffix(' %')}{to}{high}" if to else low


def degree_spread(angles: Iterable[float]) -> str:
    """The same for angles, to a tenth of a degree.

    Example:
        >>> degree_spread([88.15, 90.0]), degree_spread([7.02])
        ('88.2 to 90.0°', '7.0°')
    """
    low, to, high = _span(angles, _tenths).partition(" to ")
    return f"{low.removesuffix('°')}{to}{high}" if to else low


def degrees(angle: float) -> str:
    """An angle to a hundredth of a degree.

    Example:
        >>> degrees(88.153)
        '88.15°'
    """
    return f"{angle:.2f}°" if math.isfinite(angle) else significant(angle)


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one.

    Example:
        >>> counted(1, "norm"), counted(1300, "row")
        ('1 norm', '1,300 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tenths(angle: float) -> str:
    return f"{angle:.1f}°" if math.isfinite(angle) else significant(angle)


def _span(values: Iterable[float], word: Callable[[float], str]) -> str:
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    if not ordered:
        return "none"
    low, high = word(ordered[0]), word(ordered[-1])
    return low if low == high else f"{low} to {high}"
