"""Which norms the page can draw, and how it calls them: a mode, an epsilon and its place."""

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
    """How the page calls what a spec computes, its casts left aside.

    sqrt(n) x / sqrt(sum(x^2) + eps) is an RMSNorm with eps / n, or with eps / sqrt(n) outside the root.

    Args:
        spec: What the norm computes.
        n: Features of a row.
        dtype: Of its input, on which eps=None depends.

    Raises:
        SpecError: If the page cannot draw it; the message is the reason.
    """
    if (reason := _obstacle(spec)) is not None:
        raise SpecError(reason)
    eps = reference.machine_eps(torch.empty(0, dtype=dtype), spec)
    place: Literal["inside", "outside"] = "outside" if spec.eps_placement == "outside" else "inside"
    of_sum = spec.reduction == "sum"
    if of_sum and spec.multiplier == "sqrt_n":
        eps /= n if place == "inside" else math.sqrt(n)
    if eps and not _SMALLEST_EPS <= eps <= _LARGEST_EPS:
        raise SpecError(f"its eps is {eps:g}, and the page shows 0 or {_SMALLEST_EPS:g} to {_LARGEST_EPS:g}")
    if spec.centre_numerator:
        return Convention(mode="layer", eps=eps, place=place)
    return Convention(mode="length" if of_sum and spec.multiplier == "one" else "rms", eps=eps, place=place)


def _obstacle(spec: NormSpec) -> str | None:
    """What of a spec the page has no picture for; None where it has one for all of it."""
    obstacles = (
        (spec.axes != (-1,), "its rows do not lie along the last axis"),
        (spec.groups > 1, f"it normalizes {spec.groups} groups of features apart"),
        (spec.weight_placement == "before", "its gain acts before it normalizes"),
        (spec.eps_placement == "clamp" and spec.eps != 0, "its eps is a clamp"),
        (spec.correction == 1, "it divides by n - 1"),
        (
            spec.centre_numerator != spec.centre_statistics,
            "the mean counts above its fraction bar or below it, not both",
        ),
        (spec.reduction == "mean" and spec.multiplier == "sqrt_n", "it multiplies a root mean square by sqrt(n)"),
        (
            spec.reduction == "sum" and spec.multiplier == "one" and spec.centre_numerator,
            "it centres and then divides by a length",
        ),
    )
    return next((reason for holds, reason in obstacles if holds), None)
