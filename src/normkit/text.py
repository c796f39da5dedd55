"""Numbers, names and errors in words: the helpers that the messages of every module share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value", bound=Hashable)


def offer(name: str, known: Collection[str], listing: str = "") -> str:
    """The end of a message on an unknown name: at most five known names, the nearest ones, and how to list all.

    Args:
        name: The name that was given; a part of a known name counts as near.
        known: The known names.
        listing: The command that lists them, or "".

    Example:
        >>> offer("ln1", ["h.0.ln_1", "h.0.ln_2", "wte"])
        'did you mean h.0.ln_1, h.0.ln_2?'
        >>> offer("nope", [f"h.{layer}.ln_1" for layer in range(61)], "normkit identify MODEL")
        'it is none of 61, such as h.0.ln_1, h.1.ln_1, h.2.ln_1; `normkit identify MODEL` lists them'
    """
    # Commands load this file for `--help`, which must take less than 150 ms.
    import re
    from difflib import SequenceMatcher

    asked = name.lower().strip("*")

    def likeness(candidate: str) -> float:
        whole = candidate.lower()
        if len(asked) > 2 and asked in whole:
            return 1.0
        return max(SequenceMatcher(None, asked, part).ratio() for part in (whole, *re.split(r"[\s.:-]+", whole)))

    ranked = sorted(((likeness(each), each) for each in known), key=lambda pair: pair[0], reverse=True)
    near = [each for like, each in ranked[:5] if like > 0.5]
    lists = f"`{listing}` lists them" if listing else ""
    if near:
        return f"did you mean {', '.join(near)}? {lists}".rstrip()
    if len(known) <= 5:
        return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"
    return f"it is none of {len(known)}, such as {', '.join([*known][:3])}" + (f"; {lists}" if lists else "")


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one.

    Example:
        >>> counted(1, "norm"), counted(1300, "row"), counted(2, "query")
        ('1 norm', '1,300 rows', '2 queries')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else several}"


def by_value(found: Mapping[str, Value]) -> dict[Value, tuple[str, ...]]:
    """Each value -> the names that have it, both in their order.

    Example:
        >>> by_value({"a": 1, "b": 2, "c": 1})
        {1: ('a', 'c'), 2: ('b',)}
    """
    names: dict[Value, list[str]] = {}
    for name, value in found.items():
        names.setdefault(value, []).append(name)
    return {value: tuple(each) for value, each in names.items()}


def shortened(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many there are beyond.

    Example:
        >>> shortened(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    beyond = len(names) - most
    return ", ".join(names[:most]) + (f" and {beyond} more" if beyond > 0 else "")


def numbered(steps: Sequence[str]) -> str:
    r"""Steps, one per line; with numbers if there are several.

    Example:
        >>> numbered(["stop"]), numbered(["stop", "look"])
        ('stop', '1. stop\n2. look')
    """
    return "\n".join(f"{place}. {step}" for place, step in enumerate(steps, 1)) if len(steps) > 1 else "".join(steps)


def clipped(text: str, length: int) -> str:
    """The text, or its beginning and three dots if it has more characters than `length`.

    Example:
        >>> clipped("a b c d e f", 8)
        'a b c...'
    """
    return text if len(text) <= length else f"{text[: length - 3]}..."


def quoted(value: object) -> str:
    """The repr of a value from somebody else's file, for a message: on one line, at most 80 characters.

    Example:
        >>> len(quoted("x" * 10**6))
        80
    """
    # All of a long text would be escaped only to be cut.
    return clipped(repr(value[:80] if isinstance(value, str) else value), 80)


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message, or the error's type if it has no message.

    Example:
        >>> first_line(ValueError("no such file\nsee the log")), first_line(ValueError())
        ('no such file', 'ValueError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def typed_line(error: BaseException) -> str:
    r"""The type of an error and the first line of its message.

    Example:
        >>> typed_line(ValueError("no such file\nsee the log")), typed_line(ValueError())
        ('ValueError: no such file', 'ValueError')
    """
    message = str(error).strip()
    return type(error).__name__ + (f": {message.splitlines()[0]}" if message else "")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the module's: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


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
    """A share of one as a percentage in a sentence: three significant digits without zeros behind; whole from 1000 %.

    Example:
        >>> percent(0.5), percent(0.01234), percent(25.0)
        ('50 %', '1.23 %', '2500 %')
    """
    return f"{100 * share:.3g} %" if share < 10 else f"{100 * share:.0f} %"


def rounded_percent(share: float) -> str:
    """A share of one as a percentage in a table or figure: one decimal from 10 % on, two significant digits below.

    Example:
        >>> rounded_percent(0.1234), rounded_percent(0.00312), rounded_percent(1e-7), rounded_percent(0.0)
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


def count_spread(counts: Iterable[float]) -> str:
    """`spread` of whole numbers, with commas.

    Example:
        >>> count_spread([64, 2048])
        '64 to 2,048'
    """
    return _span(counts, lambda count: f"{int(count):,}")


def percent_spread(shares: Iterable[float]) -> str:
    """`spread` of percentages, each as in `rounded_percent`.

    Example:
        >>> percent_spread([0.01, 0.2])
        '1.0 to 20.0 %'
    """
    low, to, high = _span(shares, rounded_percent).partition(" to ")
    return f"{low.removesuffix(' %')}{to}{high}" if to else low


def degree_spread(angles: Iterable[float]) -> str:
    """`spread` of angles, to a tenth of a degree.

    Example:
        >>> degree_spread([88.15, 90.0]), degree_spread([7.02])
        ('88.2 to 90.0°', '7.0°')
    """
    low, to, high = _span(
        angles, lambda angle: f"{angle:.1f}°" if math.isfinite(angle) else significant(angle)
    ).partition(" to ")
    return f"{low.removesuffix('°')}{to}{high}" if to else low


def degrees(angle: float) -> str:
    """An angle to a hundredth of a degree.

    Example:
        >>> degrees(88.153)
        '88.15°'
    """
    return f"{angle:.2f}°" if math.isfinite(angle) else significant(angle)


def own_version() -> str:
    """The version of this package; "unknown" where it runs from its source and no distribution is installed."""
    return installed_version("normkit") or "unknown"


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    # Like `offer`, not loaded for `--help`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _span(values: Iterable[float], word: Callable[[float], str]) -> str:
    ordered = sorted(values, key=lambda value: (math.isnan(value), value))
    if not ordered:
        return "none"
    low, high = word(ordered[0]), word(ordered[-1])
    return low if low == high else f"{low} to {high}"
