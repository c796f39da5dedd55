"""Which norms the page can draw, and how it describes them: a mode, an epsilon and its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from normkit import reference
from normkit.errors import SpecError
from normkit.spec import NormSpec

_SMALLEST_EPS, _LARGEST_EPS = 1e-12, 10.0


@dataclass(frozen=True, kw_only=True)
class Convention:
    """A norm as the page knows it: y = g (x - m) / s + b."""

    mode: Literal["layer", "rms", "length"]
    """"layer" (m = mean, s from the variance), "rms" (m = 0, s from the mean square) or "length" (m = 0, s from the sum
    of squares)."""
    eps: float
    """0, or from 1e-12 to 10."""
    place: Literal["inside", "outside"]
    """s = sqrt(v + eps) if "inside", sqrt(v) + eps if "outside"."""

    def to_json(self) -> dict[str, Any]:
        """The fields that the page's state and its sites share."""
        return {"mode": self.mode, "eps": self.eps, "place": self.place}


def convention_of(spec: NormSpec, n: int, dtype: torch.dtype = torch.float32) -> Convention:
    """The page's name for a spec; the page rounds nothing.

    A norm that gives rows the length sqrt(n) is an RMSNorm or LayerNorm with its eps in units of the root mean
    square: sqrt(n) x / sqrt(sum(x^2) + eps) is one with eps / n, or with eps / sqrt(n) outside the root.

    Args:
        spec: What the norm computes.
        n: Features of a row.
        dtype: The dtype of its input, on which eps=None depends.

    Raises:
        SpecError: If the page cannot draw it; the message is the reason.
    """
    placement, divisor, is_centred = spec.placement, spec.divisor, spec.centring.numerator
    eps, radius = reference.machine_eps(torch.empty(0, dtype=dtype), spec), divisor.radius(n)
    has_root_length = radius == math.sqrt(n)
    is_length = radius == 1 and not has_root_length and not is_centred
    if has_root_length:
        eps = placement.rescaled(eps, math.sqrt(divisor.count(n) / n))
    obstacles = (
        (not spec.rows.are_last, f"its rows are not the last axis, whole: {', '.join(spec.rows.notes())}"),
        (spec.gain.is_before, "its gain acts before it normalizes"),
        (eps != 0 and not placement.shortens_every_row, "its eps is a clamp"),
        (spec.centring.is_half, f"the mean is {spec.centring.words}"),
        (
            not has_root_length and not is_length,
            f"it gives rows the length {divisor.radius_in_words}, and the page draws sqrt(n), or 1 without centring",
        ),
        (
            eps != 0 and not _SMALLEST_EPS <= eps <= _LARGEST_EPS,
            f"its eps is {eps:g}, and the page shows 0 or {_SMALLEST_EPS:g} to {_LARGEST_EPS:g}",
        ),
    )
    for holds, reason in obstacles:
        if holds:
            raise SpecError(reason)
    is_outside = placement.power == 1 and placement.shortens_every_row
    mode: Literal["layer", "rms", "length"] = "layer" if is_centred else "length" if is_length else "rms"
    return Convention(mode=mode, eps=eps, place="outside" if is_outside else "inside")
