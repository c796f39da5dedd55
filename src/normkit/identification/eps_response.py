"""The response to small inputs: where eps enters, and how large it is in units of the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.eps import EpsPlacement
from normkit.conventions.gain import NO_GAIN
from normkit.conventions.rows import CENTRINGS
from normkit.identification import half_precision_calls
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec

_CLIPS = 0.1
"""A clamp that rows of ordinary length feel is the purpose, not a guard."""
_MOST_SAMPLES = 256

MODELS: dict[EpsPlacement, Callable[[Tensor, Tensor], Tensor]] = {
    "inside": lambda k, r: k.square() * (r.reciprocal().square() - 1),
    "outside": lambda k, r: k * (r.reciprocal() - 1),
    "clamp": lambda k, r: k / r,
}


@dataclass(frozen=True, kw_only=True)
class RollOff:
    """How a norm's output falls for small rows."""

    placement: EpsPlacement
    eps: float
    """For rows whose centred mean square is 1; 0.0 if the output does not fall."""
    error: float
    """Relative error of eps."""
    evidence: str
    undecidable: str | None = None
    """Why placement and eps could not be told."""


def roll_off(specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator) -> RollOff:
    """Call the norm on rows scaled to rms k from 2e-19 to 1e3 and fit r(k), the output over that of a large input.

    r is k / sqrt(k**2 + eps) for eps inside the root, k / (k + eps) outside, min(1, k / eps) for a clamp.

    Args:
        specimen: The norm, with gain 1 and no bias where these are parameters.
        spec: Axes, groups and centring.
        shape: Of an input.
        generator: Source of the rows.

    Raises:
        UnrecognisedError: If none of the three explains r.
    """
    precision = specimen.precision
    low, high = precision.window
    first, last = precision.scales
    narrow = specimen.dtype == torch.float16 and half_precision_calls.overflows(specimen, shape, generator)
    if narrow:
        # A norm whose large rows overflow has small rows that underflow, which looks like a clamp.
        first = math.ceil(math.log2(precision.smallest))
    k, r = _responses(specimen, spec, shape, generator, range(first, last + 1))
    if not bool(torch.isfinite(r).all()):
        raise UnrecognisedError("norm", "its output is not finite for small inputs that are not zero")
    means = r.mean(1)
    felt = (means > low) & (means < high)
    smallest = f"{float(k.min()):.0e}"
    if not bool(felt.any()) and bool((means > low).all()):
        # No row is shortened: eps is absent, or too small for the dtype's smallest rows.
        evidence, reason = f"inputs down to {smallest} are not shortened", None
        if specimen.dtype == torch.float16:
            reason = "eps is absent or too small for float16, which has no smaller inputs with digits enough"
        elif bool(torch.isfinite(specimen(torch.zeros(tuple(shape), device=specimen.device))).all()):
            reason = "eps is too small to be felt, or zeros are treated in another way"
        else:
            evidence += ", and zeros are divided by zero: no eps"
        return RollOff(placement="inside", eps=0.0, error=0.0, evidence=evidence, undecidable=reason)
    inside = (r[felt] > low) & (r[felt] < high)
    found = {name: _constant(model(k[felt], r[felt]), inside) for name, model in MODELS.items()}
    placement = min(found, key=lambda name: found[name][1])
    eps, spread = found[placement]
    scales = int(felt.sum())
    if scales < 3 and specimen.dtype == torch.float16:
        evidence = f"inputs of rms {smallest} are shortened to {float(means.min()):.2f}"
        reason = "eps is felt only where float16 has too few digits left to tell where it enters"
        return RollOff(placement="inside", eps=0.0, error=0.0, evidence=evidence, undecidable=reason)
    if scales < 2 or spread > precision.constant:
        raise UnrecognisedError("norm", "the way it shortens small inputs fits no eps, inside, outside or as a clamp")
    if placement == "clamp" and eps > _CLIPS:
        raise UnrecognisedError("norm", f"it leaves rows shorter than rms {eps:.3g} as they are: a clip")
    runner_up = min(other for name, (_, other) in found.items() if name != placement)
    where = {"inside": "inside the root", "outside": "outside the root", "clamp": "as a lower clamp"}[placement]
    evidence = f"eps {where} explains how small inputs are shortened: computed at each of {scales} input scales, it is "
    evidence += f"constant to {spread:.0e} (next best model: {runner_up:.2f})"
    # The mean over the scales is better than each of them.
    error = max(precision.eps, 5 * spread / math.sqrt(scales)) + (precision.least / 2 / eps if narrow else 0.0)
    return RollOff(placement=placement, eps=eps, error=error, evidence=evidence)


def _responses(
    specimen: Specimen, spec: NormSpec, shape: Sequence[int], generator: torch.Generator, exponents: range
) -> tuple[Tensor, Tensor]:
    """The lengths k of rows and the responses r(k), of shape (scales, rows)."""
    precision = specimen.precision
    plain = spec.replace(eps=0.0, **NO_GAIN.conventions())
    samples = min(_MOST_SAMPLES, max(1, math.ceil(precision.rows / math.prod(shape[1:]))))
    centred = plain.replace(**CENTRINGS[True, True].conventions())
    sample = reference.forward(torch.randn(samples, *shape[1:], generator=generator, dtype=torch.float64), centred)
    if samples > 1:
        # Rows of different lengths are rounded up as often as down.
        sample = sample * 2.0 ** torch.rand(samples, *(1,) * (sample.dim() - 1), generator=generator)
    # Powers of two leave all digits of a row as they are.
    scales = torch.tensor([*(2.0**exponent for exponent in exponents), precision.far], dtype=torch.float64)
    x = (scales.reshape(-1, *(1,) * sample.dim()) * sample).flatten(0, 1).to(specimen.dtype)
    sent = x.to(specimen.device)
    odd = ((specimen(sent).double() - specimen(-sent).double()) / 2).cpu()
    normalized = reference.forward(x.double(), plain)
    lengths = reference.statistics(reference.to_rows(x.double(), plain), plain, 0.0).scale
    far = slice(len(x) - samples, None)
    gain = (odd[far] * normalized[far]).sum(0) / normalized[far].square().sum(0)
    expected = reference.to_rows(gain * normalized, plain)
    projections = (reference.to_rows(odd, plain) * expected).sum(-1) / expected.square().sum(-1)
    k, r = lengths.reshape(len(scales), -1), projections.reshape(len(scales), -1)
    return k[:-1], (r / r[-1:].mean())[:-1]


def _constant(values: Tensor, valid: Tensor) -> tuple[float, float]:
    """Mean and relative standard deviation over the scales of values that ought to be one, as far as they are valid."""
    over_scales = torch.where(valid, values, 0.0).sum(1) / valid.sum(1).clamp_min(1)
    mean = float(over_scales.mean())
    return mean, float(over_scales.std(correction=0)) / mean if mean > 0 else math.inf
