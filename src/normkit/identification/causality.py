"""Over time: whether a position's statistics hold other positions, earlier or later ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec

_FELT = 1e-6
"""Outputs that move less, relative to their root mean square, do not move."""


def time_reading(
    specimen: Specimen, shape: Sequence[int], generator: torch.Generator, spec: NormSpec | None
) -> dict[str, Reading]:
    """Reading "time": for each axis between batch and features, how what happens at one position reaches others.

    "none", "causal" (earlier positions reach later ones), "anti-causal" or "both directions".

    Args:
        specimen: The norm.
        shape: Of an input.
        generator: Source of inputs.
        spec: What it computes, where a spec says so: its rows are known then; else None.
    """
    dim = len(shape)
    if dim < 3:
        return {}
    if spec is None:
        found = {axis: _coupling(specimen, shape, axis, generator) for axis in range(1, dim)}
        last, first = found[dim - 1][0], found[1][0]
        # Features are shared in both directions or not at all: a causal last axis is time, behind the channels.
        features = 1 if last == "causal" and first == "both directions" else dim - 1
        found = {axis: coupling for axis, coupling in found.items() if axis != features}
    else:
        channels = spec.axes in ((1,), "all_but_batch")
        coupled = range(1, dim) if spec.axes == "all_but_batch" else [axis % dim for axis in _trailing(spec)]
        found = {
            axis: _coupling(specimen, shape, axis, generator) if axis in coupled else ("none", _alone(axis))
            for axis in (range(2, dim) if channels else range(1, dim - 1))
        }
    value = [{"axis": axis, "coupling": coupling} for axis, (coupling, _) in found.items()]
    return {"time": Reading(value=value, evidence=tuple(line for _, line in found.values()))}


def _trailing(spec: NormSpec) -> Sequence[int]:
    return () if isinstance(spec.axes, str) else spec.axes


def _alone(axis: int) -> str:
    return f"no statistics are shared along axis {axis}"


def _coupling(specimen: Specimen, shape: Sequence[int], axis: int, generator: torch.Generator) -> tuple[str, str]:
    """Change the last position and the first one along an axis: what moves."""
    x = torch.randn(tuple(shape), generator=generator).to(specimen.device, specimen.dtype)
    change = (1 + torch.rand(tuple(shape), generator=generator)).to(x)
    rest, size = specimen(x), shape[axis]

    def moved(changed: int, start: int) -> float:
        """How far the outputs from `start` on move, all but the changed position."""
        other = x.clone()
        other.select(axis, changed).add_(change.select(axis, changed))
        difference = (specimen(other) - rest).narrow(axis, start, size - 1)
        return _rms(difference) / _rms(rest)

    earlier, later = moved(size - 1, 0), moved(0, 1)
    match earlier > _FELT, later > _FELT:
        case False, False:
            return "none", _alone(axis)
        case False, True:
            line = f"changing the first position moves later outputs by {later:.2g}, the last one no earlier ones"
            return "causal", f"axis {axis}: {line}"
        case True, False:
            line = f"changing the last position moves earlier outputs by {earlier:.2g}: over time, it leaks the future"
            return "anti-causal", f"axis {axis}: {line}; changing the first one moves no later output"
        case _:
            line = f"changing the last position moves earlier outputs by {earlier:.2g}: over time, it leaks the future"
            return "both directions", f"axis {axis}: {line}"


def _rms(values: Tensor) -> float:
    return max(float(values.double().square().mean().sqrt()), 1e-30)
