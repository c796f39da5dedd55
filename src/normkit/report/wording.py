"""The words for roles, placements and conventions, and strings made safe to print anywhere."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence
from typing import TypeVar, cast

from normkit.measurement.facts import Placement
from normkit.rules.finding import Severity
from normkit.spec import NormSpec

T = TypeVar("T")

PLACEMENTS: dict[Placement, str] = {
    "pre": "pre-norm",
    "post": "post-norm",
    "peri": "peri-norm",
    "output-only": "norm on the branch's output",
    "none": "no norm",
    "residual-after-norm": "residual taken after the norm",
    "unknown": "unknown",
}
"""Placement of the norms of a block -> its name in reports."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""


def formula_name(spec: NormSpec) -> str:
    """A spec in a few words: the family, its eps, and what is unusual.

    Example:
        >>> formula_name(NormSpec(eps=1e-12)), formula_name(NormSpec(eps=None, correction=1))
        ('LayerNorm, eps 1e-12', 'LayerNorm, machine eps, n - 1')
    """
    unusual = (*spec.divisor.labels, *spec.gain.labels, *spec.rows.labels)
    return ", ".join((_family(spec), spec.placement.label(spec.eps), *unusual))


def tail(text: str, width: int) -> str:
    """The text, or an ellipsis and its end if it is longer: the end of a path tells most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def fitting(paths: Sequence[str], width: int) -> list[str]:
    """Paths shortened in their middle to a width, all still different; whole paths if that is impossible.

    The outermost parts go first, as they are the same in all; then the middle of the last part, as names of norms
    differ at both ends; then the number of the block before it.

    Example:
        >>> fitting(["model.layers.{0-17}.pre_feedforward_layernorm", "model.layers.{0-17}.mlp.norm"], 24)
        ['…{0-17}.pre_feedfo…rnorm', '…layers.{0-17}.mlp.norm']
    """
    for with_block in (True, False):
        short = [_cut(path, width, with_block=with_block) for path in paths]
        if len(set(short)) == len(set(paths)):
            return short
    return list(paths)


def _cut(path: str, width: int, *, with_block: bool) -> str:
    if len(path) <= width:
        return path
    parts = path.split(".")
    for first in range(1, len(parts) - 1):
        rest = ".".join(parts[first:])
        if len(rest) < width:
            return f"…{rest}"
    # The number of the block is kept before the name if it fits into half of the room.
    block = f"{parts[-2]}." if with_block and len(parts) > 1 and len(parts[-2]) + 2 <= width // 2 else ""
    head, last = "…" + block if len(parts) > 1 else "", parts[-1]
    room = width - len(head) - 1
    return f"{head}{last}" if len(last) <= room + 1 else f"{head}{last[: room - room // 3]}…{last[-(room // 3) :]}"


def printable(part: T) -> T:
    """A part with every string in it made safe: invisible characters become escape sequences.

    Control characters could move a terminal's cursor, direction marks could reorder a page, and lone
    surrogates cannot be written to a file.
    """
    if isinstance(part, str):
        return cast(T, "".join(map(_visible, part)))
    if isinstance(part, tuple):
        return cast(T, tuple(printable(member) for member in part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type) and not isinstance(part, NormSpec):
        fields = {field.name: printable(getattr(part, field.name)) for field in dataclasses.fields(part)}
        return cast(T, dataclasses.replace(part, **fields))
    return part


def _visible(character: str) -> str:
    # C: control, format, surrogate, private, unassigned. Zl, Zp: line and paragraph separators.
    category = unicodedata.category(character)
    if category[0] != "C" and category not in ("Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


def _family(spec: NormSpec) -> str:
    is_centred = spec.centring.numerator
    if spec.centring.is_half:
        return "half-centred norm"
    if spec.divisor.is_unit:
        return "centred L2 norm" if is_centred else "L2 norm"
    if spec.rows.are_samples or spec.rows.groups > 1:
        return "GroupNorm" if is_centred else "group RMSNorm"
    return "LayerNorm" if is_centred else "RMSNorm"
