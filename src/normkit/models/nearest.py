"""The declared families that are nearest to an undeclared one, by the names and axes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from normkit.models.family import Family, declared_family, declared_types
from normkit.models.settings import Settings
from normkit.text import shortened

_NUMBER = re.compile(r"(?<=\.)(\d+|\{[^{}]*\})(?=\.|$)")
# A family of which fewer tensors are alike says nothing about a model.
_LEAST = 1 / 3

Tensors = set[tuple[str, bool]]
"""Names, with stars for numbers, and whether the tensor is a vector."""


def nearest_families(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """In words, the declared families with most tensors in common, and what differs; "" if none has a third of them.

    Two tensors are alike if their names are, but for the numbers of layers and for the first word that all layers of
    their model have in common, and both or neither of them are vectors.
    """
    here = _without_beginning({(_NUMBER.sub("*", name), len(shape) == 1) for name, shape in shapes.items()})
    families = {name: _without_beginning(set(_tensors(declared_family(name)))) for name in declared_types()}
    likeness = {name: len(here & there) / max(1, len(here | there)) for name, there in families.items()}
    best = [name for name in likeness if likeness[name] == max(likeness.values())]
    if likeness[best[0]] < _LEAST:
        return ""
    there = families[best[0]]
    differs = [
        f"; {shortened(names, 3)} {'is' if len(names) == 1 else 'are'} {place}"
        for each, place in ((here - there, "here alone"), (there - here, "there alone"))
        if (names := sorted(name for name, _ in each))
    ]
    alike = f"{len(here & there)} of {len(here)} are alike"
    return f"nearest by its tensors {'is' if len(best) == 1 else 'are'} {shortened(best, 4)}: {alike}{''.join(differs)}"


def _tensors(family: Family) -> Iterator[tuple[str, bool]]:
    """The tensors of the first class of a family, under the settings that a missing key means."""
    name = next(iter(family.classes))
    settings = Settings(family, {"architectures": [name]})
    for part in family.parts:
        if not settings.holds(part.when) or (part.only and name not in part.only):
            continue
        at = _NUMBER.sub("*", part.at)
        for key, norm in part.norm.items():
            if settings.holds(norm.when):
                yield from (
                    (_joined(at, key, f".{word}"), True)
                    for word in ("weight", "bias")
                    if settings.flag(getattr(norm, word))
                )
        for key, linear in part.linear.items():
            if settings.holds(linear.when) and (not linear.only or name in linear.only):
                yield _joined(at, key, linear.weight), False
                if settings.flag(linear.bias):
                    yield _joined(at, key, linear.bias_name), True
        yield from ((_joined(at, key, ""), not table.writes) for key, table in part.table.items())


def _joined(at: str, key: str, ending: str) -> str:
    return _NUMBER.sub("*", ".".join(word for word in (at, key) if word) + ending)


def _without_beginning(tensors: Tensors) -> Tensors:
    """The tensors without the word that begins the names of all layers, such as "model." or "transformer."."""
    starts = {name.partition(".*")[0].partition(".") for name, _ in tensors if "*" in name}
    words = {first for first, _, rest in starts if rest}
    if len(words) != 1 or any(not rest for _, _, rest in starts):
        return tensors
    return {(name.removeprefix(f"{next(iter(words))}."), is_vector) for name, is_vector in tensors}
