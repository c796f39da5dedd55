"""The settings of a study: the defaults of a budget, changed by `--set`; each keeps the type of its default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from normkit.errors import InputError
from normkit.study.arm_context import Setting, Settings
from normkit.study.result import Study
from normkit.text import offer

Budget = Literal["quick", "full"]

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def settings_of(study: Study, budget: Budget = "quick", changed: Mapping[str, str] | None = None) -> Settings:
    """All settings of a study.

    Args:
        study: A study.
        budget: Which of its two sets of defaults.
        changed: Name -> text of the value; names that the study does not have are skipped.

    Raises:
        InputError: If a text is not a value of its setting's type.
    """
    defaults = {**study.quick, **(study.full if budget == "full" else {})}
    changed = changed or {}
    settings = {
        name: _typed(name, changed[name], default) if name in changed else default for name, default in defaults.items()
    }
    check_seeds(settings["seeds"])
    return settings


def assignments(texts: Sequence[str], studies: Sequence[Study]) -> dict[str, str]:
    """Name -> text of the value, of each text "name=value" after `--set`.

    Raises:
        InputError: If a text is not of this form, a name comes twice, or none of the studies has it; the nearest name
            is offered.
    """
    known = tuple(dict.fromkeys(name for study in studies for name in study.quick))
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"--set takes name=value, as in steps=100, got {text!r}")
        if name not in known:
            of = f"{studies[0].name} has" if len(studies) == 1 else "these studies have"
            raise InputError(f"{of} no setting {name!r}; {offer(name, known)}")
        if name in found:
            raise InputError(f"--set {name} is given twice: {found[name]} and {value}; give it once")
        found[name] = value
    return found


def check_seeds(seeds: Setting) -> int:
    """The number of seeds.

    Raises:
        InputError: If it is below one.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds must be a whole number from 1, got {seeds}")
    return seeds


def _typed(name: str, text: str, default: Setting) -> Setting:
    try:
        if isinstance(default, bool):
            return _BOOLEANS[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return _finite(text)
        if isinstance(default, str):
            return text
        parts = text.removesuffix(",").split(",")
        return tuple(map(int, parts)) if _is_whole(default) else tuple(map(_finite, parts))
    except (ValueError, KeyError):
        raise InputError(f"{name} takes {_words(default)}, got {text!r}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _is_whole(default: tuple[float, ...]) -> bool:
    return all(isinstance(member, int) for member in default)


def _words(default: Setting) -> str:
    """The values that a setting takes, in words."""
    if isinstance(default, tuple):
        shown = ",".join(f"{member:g}" for member in default)
        return f"{'whole ' if _is_whole(default) else ''}numbers with commas between, as in {shown}"
    if isinstance(default, bool):
        return "true or false"
    return {int: "a whole number", float: "a number", str: "a word"}[type(default)]
