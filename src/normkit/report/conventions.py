"""The conventions of a norm in words: each alone, and how two norms differ in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normkit.comparison.pairing import Change, said
from normkit.identification.passport import CONVENTIONS, words_of
from normkit.spec import NormSpec

LABELS = {
    "kind": "kind",
    "features": "features",
    "rows": "a row is",
    "centring": "mean",
    "divisor": "squares",
    "eps": "eps",
    "gain": "gain",
    "offset dtype": "offset",
    "bias": "bias",
    "casts": "in 16 bits",
    "output dtype": "output",
    "input": "its input",
    "repeatable": "repeatable",
    "training": "in training",
    "time": "along time",
    "degenerate rows": "odd rows",
    "conditioning": "large means",
}
"""What each reading is called before its words."""

_ORDINARY: dict[str, Any] = {
    "input": "kept",
    "repeatable": True,
    "training": {"output": "as in eval", "updates": []},
    "time": [{"coupling": "none"}],
    "conditioning": {"cancels": False},
}


def in_words(reading: str, value: Any) -> str:
    """What a norm does in one respect.

    Args:
        reading: A key of `CONVENTIONS`, or another reading of a passport.
        value: The conventions that it decides, as plain JSON; of another reading its value.

    Example:
        >>> from normkit.identification.passport import value_of
        >>> in_words("eps", value_of(NormSpec(eps=1e-6), "eps"))
        '1e-06, inside the root'
    """
    return ", ".join(_parts(reading, value))


def is_ordinary(reading: str, value: Any) -> bool:
    """Whether a reading that is no convention has its usual value."""
    if reading == "degenerate rows":
        return set(said(value).values()) <= {"finite"}
    return reading in _ORDINARY and said(value) == _ORDINARY[reading]


def difference(change: Change) -> str:
    """How a norm differs from its reference in one respect; what both do alike is left out, or said to be alike.

    Example:
        >>> from normkit.identification.passport import value_of
        >>> given, expected = (value_of(NormSpec(eps=eps), "eps") for eps in (1e-6, 1e-5))
        >>> difference(Change(reading="eps", given=given, expected=expected))
        'eps 1e-06 instead of 1e-05, inside the root both'
    """
    given, expected = _parts(change.reading, change.given), _parts(change.reading, change.expected)
    common: tuple[str, ...] = ()
    if len(given) == len(expected):
        common = tuple(part for part, other in zip(given, expected, strict=True) if part == other)
    words, other = (", ".join(part for part in parts if part not in common) for parts in (given, expected))
    both = f", {', '.join(common)} both" if common and change.reading == "eps" else ""
    return f"{LABELS.get(change.reading, change.reading)} {words} instead of {other}{both}"


def _parts(reading: str, value: Any) -> tuple[str, ...]:
    return words_of(NormSpec.from_json(value), reading) if reading in CONVENTIONS else _plain(value)


def _plain(value: Any) -> tuple[str, ...]:
    """A reading that has no wording here, as its names and values."""
    if isinstance(value, Mapping):
        return tuple(f"{name} {', '.join(_plain(member))}" for name, member in value.items())
    if isinstance(value, list):
        return tuple(part for member in value for part in _plain(member)) or ("none",)
    return ({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value),)
