"""The families that are declared, each by its model type."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files

from normkit.errors import ModelError
from normkit.models import norm_classes
from normkit.models.family import Family, parse


@cache
def names() -> tuple[str, ...]:
    """The model types that have a file, sorted."""
    found = (file.name for file in files("normkit.models").iterdir() if file.name != norm_classes.FILE)
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def family(name: str) -> Family:
    """The family of a model type.

    Raises:
        ModelError: If no file declares it; the message names the nearest that is.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        nearest = f"the nearest is {close[0]!r}" if close else f"declared are {', '.join(names())}"
        raise ModelError(
            f"expected a model of a declared family, got model_type {name!r}: its readers and writers are not known, "
            f"and they are never guessed; {nearest}"
        )
    return parse((files("normkit.models") / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")
