"""The response to small inputs: where eps enters, and how large it is in units of the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.specimen import FAR, Specimen, UnrecognisedError
from normkit.spec import EpsPlacement, NormSpec

_SCALES = torch.logspace(-16, 3, 58, dtype=torch.float64)
_WINDOW = (0.03, 0.98)
"""Between these responses eps can be read off: below, the output drowns; above, eps is not felt."""
_CONSTANT = 2e-3
"""The right model's eps is constant over the window to about 1e-6; the wrong ones' change by over 0.28."""
_CLIPS = 0.1
"""A clamp that rows of ordinary length feel is the purpose, not a guard."""

MODELS: dict[EpsPlacement, Callable[[Tensor, Tensor], Tensor]] = {
    "inside": lambda k, r: k.square() * (r.reciprocal().square() - 1),
    "outside": lambda k, r: k * (r.reciprocal() - 1),
    "clamp": lambda k, r: k / r,
}


@dataclass(frozen=True, kw_only=True)
class RollOff:
    """How a norm's output falls for small rows.

    Attributes:
        placement: Where eps enters.
        eps: Its size for rows whose centred mean square is 1; 0.0 if the output does not fall.
        spread: Relative standard deviation of eps over the scales it was read from.
        evidence: One line.
    """

    placement: EpsPlacement
    eps: float
    spread: float
    evidence: str


def roll_off(specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator) -> RollOff:
    """Call the norm on one sample scaled by k from 1e-16 to 1e3 and fit r(k), the output over that of a large input.

    r is k / sqrt(k**2 + eps) for eps inside the root, k / (k + eps) outside, min(1, k / eps) for a clamp.

    Args:
        specimen: The norm, with gain 1 and no bias where these are parameters.
        spec: Axes and groups.
        shape: Of an input.
        generator: Source of the sample.

    Raises:
        UnrecognisedError: If none of the three explains r.
    """
    ks, ratios = _ratios(specimen, spec, shape, generator)
    if not bool(torch.isfinite(ratios).all()):
        raise UnrecognisedError("norm", "its output is not finite for small inputs that are not zero")
    felt = (ratios > _WINDOW[0]) & (ratios < _WINDOW[1])
    if not bool(felt.any()) and bool((ratios > _WINDOW[1]).all()):
        return RollOff(
            placement="inside", eps=0.0, spread=0.0, evidence="inputs down to 1e-16 are not shortened: no eps"
        )
    spreads = {name: _constant(model(ks[felt], ratios[felt])) for name, model in MODELS.items()}
    placement = min(spreads, key=lambda name: spreads[name][1])
    eps, spread = spreads[placement]
    if int(felt.sum()) < 2 or spread > _CONSTANT:
        raise UnrecognisedError("norm", "the way it shortens small inputs fits no eps, inside, outside or as a clamp")
    if placement == "clamp" and eps > _CLIPS:
        raise UnrecognisedError("norm", f"it leaves rows shorter than rms {eps:.3g} as they are: a clip")
    runner_up = min(other for name, (_, other) in spreads.items() if name != placement)
    where = {"inside": "inside the root", "outside": "outside the root", "clamp": "as a lower clamp"}[placement]
    evidence = (
        f"small inputs are shortened as by eps {where}: its value is constant to {spread:.0e} over "
        f"{int(felt.sum())} input scales (next best model: {runner_up:.2f})"
    )
    return RollOff(placement=placement, eps=eps, spread=spread, evidence=evidence)


def _ratios(
    specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The scales k and the responses r(k)."""
    plain = NormSpec(axes=spec.axes, groups=spec.groups, eps=0.0, has_weight=False, has_bias=False)
    sample = reference.forward(torch.randn(1, *shape[1:], generator=generator, dtype=torch.float64), plain)
    ks = torch.cat([_SCALES, torch.tensor([FAR], dtype=torch.float64)])
    x = (ks.reshape(-1, *(1,) * (sample.dim() - 1)) * sample).float().to(specimen.device)
    odd = ((specimen(x).double() - specimen(-x).double()) / 2).flatten(1).cpu()
    projections = odd @ odd[-1]
    return _SCALES, (projections / projections[-1])[:-1]


def _constant(values: Tensor) -> tuple[float, float]:
    """Mean and relative standard deviation of values that ought to be one."""
    mean = float(values.mean())
    return mean, float(values.std(correction=0)) / mean if mean > 0 and len(values) else math.inf
