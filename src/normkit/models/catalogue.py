"""The declared families, by model type."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from normkit.errors import ModelError
from normkit.models import norm_classes
from normkit.models.family import Family, parse
from normkit.text import quoted


@cache
def names() -> tuple[str, ...]:
    """The model types that have a file, sorted."""
    found = (file.name for file in files("normkit.models").iterdir() if file.name != norm_classes.FILE)
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def family(name: str) -> Family:
    """The family of a model type.

    Raises:
        ModelError: If no file declares it; the message lists the declared ones. It suggests none of them, because a
            similar name says nothing about readers and writers.
    """
    if name not in names():
        raise ModelError(
            f"expected a model of a declared family, got model_type {quoted(name)}: its readers and writers are not "
            f"known, and they are never guessed; declared are {', '.join(names())}"
        )
    return parse((files("normkit.models") / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")
