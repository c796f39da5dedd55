"""The conventions of a norm in words: each alone, and how two norms differ in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from normkit.inspection.pairing import Change, said
from normkit.text import counted

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
_CENTRING = {
    (True, True): "subtracted",
    (False, False): "not subtracted",
    (True, False): "subtracted, but not for the statistics",
    (False, True): "subtracted for the statistics only",
}
_PLACEMENTS = {"inside": "inside the root", "outside": "outside the root", "clamp": "as a lower bound"}
_CASTS = {
    "early": "rounded before the gain",
    "late": "rounded once at the end",
    "weight": "rounded before the gain to the weight's dtype",
    "input": "rounded before the gain, gain and bias too",
    "none": "rounded at every step",
}
_OUTPUTS = {
    "input": "in the input's dtype",
    "promote": "in the wider dtype of input and parameters",
    "weight": "in the weight's dtype",
    "float32": "in float32",
}


def in_words(reading: str, value: Any) -> str:
    """What a norm does in one respect.

    Args:
        reading: A key of `CONVENTIONS`, or another reading of a passport.
        value: The conventions that it decides, as plain JSON; of another reading its value.

    Example:
        >>> in_words("eps", {"eps": 1e-6, "eps_placement": "inside"})
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
        >>> values = {"eps": 1e-6, "eps_placement": "inside"}, {"eps": 1e-5, "eps_placement": "inside"}
        >>> difference(Change(reading="eps", given=values[0], expected=values[1]))
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
    words = _WORDS.get(reading)
    return _plain(value) if words is None else words(value)


def _plain(value: Any) -> tuple[str, ...]:
    """A reading that has no wording here, as its names and values."""
    if isinstance(value, Mapping):
        return tuple(f"{name} {', '.join(_plain(member))}" for name, member in value.items())
    if isinstance(value, list):
        return tuple(part for member in value for part in _plain(member)) or ("none",)
    return ({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value),)


def _rows(values: Mapping[str, Any]) -> tuple[str, ...]:
    axes, groups = values["axes"], values["groups"]
    if axes == "all_but_batch":
        where = "a whole sample"
    elif axes == [1]:
        where = "the channels at one place"
    else:
        where = "the last axis" if len(axes) == 1 else f"the last {len(axes)} axes"
    return (where, f"in {counted(groups, 'group')}") if groups > 1 else (where,)


def _centring(values: Mapping[str, Any]) -> tuple[str, ...]:
    return (_CENTRING[values["centre_numerator"], values["centre_statistics"]],)


def _divisor(values: Mapping[str, Any]) -> tuple[str, ...]:
    divided = "divided by n - 1" if values["correction"] else "divided by n"
    words = "summed" if values["reduction"] == "sum" else divided
    return (words, "the row times sqrt(n)") if values["multiplier"] == "sqrt_n" else (words,)


def _eps(values: Mapping[str, Any]) -> tuple[str, ...]:
    eps = values["eps"]
    if eps == 0:
        return ("none",)
    return ("the machine epsilon" if eps is None else f"{eps:.6g}", _PLACEMENTS[values["eps_placement"]])


def _gain(values: Mapping[str, Any]) -> tuple[str, ...]:
    if not values["has_weight"]:
        return ("none",)
    offset = values["weight_offset"]
    words = f"{offset:g} + weight" if offset else "weight"
    return (words, "before normalizing") if values["weight_placement"] == "before" else (words,)


def _bias(values: Mapping[str, Any]) -> tuple[str, ...]:
    return ("added" if values["has_bias"] else "none",)


def _offset_dtype(values: Mapping[str, Any]) -> tuple[str, ...]:
    return ("added in float32" if values["offset_dtype"] == "float32" else "added in the weight's dtype",)


def _casts(values: Mapping[str, Any]) -> tuple[str, ...]:
    statistics = "float32" if values["statistics_dtype"] == "float32" else "the input's dtype"
    rounded = ("1/s rounded",) if values["round_rstd"] else ()
    return (f"statistics in {statistics}", *rounded, _CASTS[values["cast"]])


def _output(values: Mapping[str, Any]) -> tuple[str, ...]:
    return (_OUTPUTS[values["output_dtype"]],)


_WORDS: dict[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    "rows": _rows,
    "centring": _centring,
    "divisor": _divisor,
    "eps": _eps,
    "gain": _gain,
    "bias": _bias,
    "offset dtype": _offset_dtype,
    "casts": _casts,
    "output dtype": _output,
}
