"""The conventions of a spec that each reading of a passport decides, as JSON and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normkit.conventions.eps import eps_in
from normkit.spec import NormSpec

CONVENTIONS: dict[str, tuple[str, ...]] = {
    "rows": ("axes", "groups"),
    "centring": ("centre_numerator", "centre_statistics"),
    "divisor": ("correction", "reduction", "multiplier"),
    "eps": ("eps", "eps_placement"),
    "gain": ("has_weight", "weight_offset", "weight_placement"),
    "bias": ("has_bias",),
    "offset dtype": ("offset_dtype",),
    "casts": ("statistics_dtype", "round_rstd", "cast"),
    "output dtype": ("output_dtype",),
}
"""The conventions of `NormSpec` that each reading decides."""


def words_of(spec: NormSpec, reading: str) -> tuple[str, ...]:
    """The words of a spec for one key of `CONVENTIONS`, which can be compared one by one."""
    gain, casts = spec.gain, spec.casts
    return {
        "rows": spec.rows.parts,
        "centring": (spec.centring.words,),
        "divisor": spec.divisor.parts,
        "eps": spec.placement.parts(spec.eps),
        "gain": gain.parts,
        "bias": (gain.bias_words,),
        "offset dtype": (gain.offset_words,),
        "casts": casts.parts,
        "output dtype": (casts.output_words,),
    }[reading]


def same_eps(spec: NormSpec, other: NormSpec, tolerance: float) -> bool:
    """Whether eps is the same for float32 input, within a relative tolerance, and in the same place unless it is 0."""
    eps, expected = (eps_in("float32", each.eps) for each in (spec, other))
    is_placed_alike = spec.placement is other.placement or eps == expected == 0
    return is_placed_alike and math.isclose(eps, expected, rel_tol=tolerance)


def value_of(spec: NormSpec, reading: str) -> dict[str, Any]:
    """The conventions of a spec that a reading decides, as plain JSON."""
    plain = spec.to_json()
    return {name: plain[name] for name in CONVENTIONS[reading]}


def said(value: Any) -> Any:
    """A reading without its numbers, which are measured or count axes; lists hold each value once."""
    if isinstance(value, Mapping):
        kept = {name: said(member) for name, member in value.items()}
        return {name: member for name, member in kept.items() if member is not None}
    if isinstance(value, list):
        members = [said(member) for member in value]
        return [member for place, member in enumerate(members) if member not in members[:place]]
    return value if isinstance(value, (str, bool)) else None
