"""`identify`: from forward calls alone to the spec of a norm, with what was seen and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.errors import NormkitError, ShapeError
from normkit.identification import coupling, divisor, formula, program, structure
from normkit.identification.affine import Affine
from normkit.identification.divisor import Choice
from normkit.identification.response import roll_off
from normkit.identification.specimen import NormLike, Specimen, UnrecognisedError, Verdict, undisturbed
from normkit.identification.structure import Structure
from normkit.spec import NormSpec

_SEED = 0
_AGREES = 3e-5
"""Relative error of a float32 norm against its own formula in float64 is about 1e-6."""
_RATE_NOISE = 0.02
_CERTAINTY = 0.9
"""What each thing that could not be decided leaves of the confidence."""


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What a norm was found to compute.

    Attributes:
        spec: Its conventions, or None if no spec describes it.
        verdict: "norm" (without a spec: it normalizes in a way that no spec describes); "batch" if it
            couples samples; "gated" if it needs a second input; else "not a norm".
        confidence: 1.0 if everything was decided; 0.9 to the number of things that were not.
        evidence: What was seen, one line each; lines on what was not decided begin with "undecided:".
    """

    spec: NormSpec | None
    verdict: Verdict
    confidence: float
    evidence: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        return {
            "verdict": self.verdict,
            "formula": None if self.spec is None else str(self.spec),
            "spec": None if self.spec is None else self.spec.to_json(),
            "confidence": self.confidence,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Examination:
    """A passport, and what else was learnt on the way.

    Attributes:
        passport: The result.
        shape: The input shape it was found on; axes between batch and features may be shorter.
        affine: Which parameters the gain and bias are, or their values.
        rate: Share of the outputs in bfloat16 that are bit for bit the spec's.
    """

    passport: Passport
    shape: tuple[int, ...]
    affine: Affine
    rate: float


def identify(norm: nn.Module | Callable[[Tensor], Tensor], shape: int | Sequence[int]) -> Passport:
    """Find out from forward calls alone which norm something is.

    The module stays as it is, and so does torch's random state: a float32 copy in eval mode is called,
    its parameters set to known values. The formula found is compared with the copy before it is returned.

    Args:
        norm: A module, or a function of one tensor.
        shape: Of an example input, the batch first; a number n means (2, n).

    Returns:
        The passport. A spec with eps = 2**-23 may stand for eps=None: float32 cannot tell.

    Raises:
        ShapeError: If the norm refuses inputs of this shape.

    Example:
        >>> print(identify(nn.LayerNorm(8, eps=1e-6), 8).spec)
        y = weight * (x - mean(x)) / sqrt(var(x) + 1e-06) + bias
        >>> identify(nn.GELU(), 8).verdict
        'not a norm'
    """
    return examine(norm, shape).passport


def examine(norm: NormLike, shape: int | Sequence[int]) -> Examination:
    """`identify`, with what else was learnt."""
    sizes = _checked(shape)
    with undisturbed():
        specimen = Specimen(norm)
        generator = torch.Generator().manual_seed(_SEED)
        small = _convenient(specimen, sizes)
        try:
            return _examined(specimen, small, sizes, generator)
        except UnrecognisedError as seen:
            verdict, reasons = _second_look(specimen, small, generator, seen)
    passport = Passport(spec=None, verdict=verdict, confidence=1.0, evidence=reasons)
    return Examination(passport=passport, shape=sizes, affine=Affine(), rate=0.0)


def _second_look(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, seen: UnrecognisedError
) -> tuple[Verdict, tuple[str, ...]]:
    """What is no norm of one input in eval mode may be one of two, or a batch norm; what seems one may saturate."""
    if seen.verdict == "gated":
        try:
            gated = specimen.gated()
            lines = formula.check_kind(gated, shape, generator), coupling.rows_of(gated, shape, generator).evidence
        except (UnrecognisedError, NormkitError):
            return "not a norm", (seen.reason,)
        return "gated", (seen.reason, *(f"with a constant second one, {line}" for line in lines))
    if seen.verdict == "not a norm" and coupling.couples_samples_in_training(specimen, shape, generator):
        return "batch", (seen.reason, "in training mode, changing one sample moves the others")
    if seen.verdict == "norm" and formula.saturates(specimen, shape, generator):
        return "not a norm", (seen.reason, "it is not the same for small and large inputs: it saturates")
    return seen.verdict, (seen.reason,)


def agrees(norm: nn.Module, known: Examination) -> bool:
    """Whether another module computes what was found for a like one: a few calls, no search."""
    spec = known.passport.spec
    if spec is None or not known.affine.parameters_reached:
        return False
    generator = torch.Generator().manual_seed(_SEED)
    with undisturbed():
        try:
            specimen = Specimen(norm)
            if not known.affine.names <= specimen.parameters.keys():
                return False
            error = disagreement(specimen, spec, known.affine, known.shape, generator)
            rate = program.rate_of(specimen, spec, known.affine, known.shape, generator)
        except (UnrecognisedError, NormkitError, RuntimeError):
            return False
    return error <= _AGREES and rate >= known.rate - _RATE_NOISE


def disagreement(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> float:
    """Largest error of a sample against the formula in float64, relative to the sample's length, on random parameters.

    Samples: with a mean, at input scales from 1e-12 to 1e3 and where eps is felt most; and with one large element.
    """
    specimen.draw(generator)
    eps = reference.machine_eps(torch.empty(0), spec)
    felt = math.sqrt(eps) if spec.eps_placement == "inside" else eps
    # An L2 norm feels its eps in rows whose root mean square is sqrt(n) times smaller.
    near_eps = felt * torch.logspace(-2, 0.5, 6) if felt > 0 else torch.empty(0)
    scales = torch.cat([torch.logspace(-12, 3, 16), near_eps])
    shaped = (-1, *(1,) * (len(shape) - 1))
    rows = torch.randn(len(scales) + 1, *shape[1:], generator=generator)
    x = torch.cat([rows[:-1] + 0.5, rows[-1:]]) * torch.cat([scales, torch.ones(1)]).reshape(shaped)
    x.flatten()[-1] *= 1000.0
    weight, bias = affine.of(specimen.module)
    x = x.to(specimen.device)
    expected = reference.forward(x.double(), spec, weight, bias).flatten(1)
    error = (specimen(x).flatten(1) - expected).square().mean(1).sqrt()
    return float((error / expected.square().mean(1).sqrt()).max())


def _examined(
    specimen: Specimen, shape: tuple[int, ...], given: tuple[int, ...], generator: torch.Generator
) -> Examination:
    found = structure.recover(specimen, shape, given, generator)
    shape = found.shape
    # With gain 1 and no bias, small outputs keep all their digits.
    specimen.fill(found.gain.name, 1.0 - found.spec.weight_offset)
    specimen.fill(found.bias.name, 0.0)
    felt = roll_off(specimen, found.spec, shape, generator)
    choice = divisor.choose(found.n, found.length, felt)
    spec = choice.apply(found.spec, felt.placement)
    affine = _affine(found, choice)
    error = disagreement(specimen, spec, affine, shape, generator)
    if error > _AGREES:
        raise UnrecognisedError("norm", f"the nearest formula, {spec}, is off by {error:.1e}")
    casts = program.recover(specimen, spec, affine, shape, generator)
    doubts = (*found.doubts, *choice.doubts, *casts.doubts)
    evidence = (
        *found.evidence,
        felt.evidence,
        *choice.evidence,
        f"in float32 the formula is matched to {error:.0e}, for inputs from 1e-12 to 1e3",
        *casts.evidence,
        *(f"undecided: {doubt}" for doubt in doubts),
    )
    passport = Passport(spec=casts.spec, verdict="norm", confidence=_CERTAINTY ** len(doubts), evidence=evidence)
    return Examination(passport=passport, shape=shape, affine=affine, rate=casts.rate)


def _affine(found: Structure, choice: Choice) -> Affine:
    weight: str | Tensor | None = found.gain.name
    if weight is None and found.spec.has_weight and found.gain.values is not None:
        weight = found.gain.values / choice.divisor.length(found.n)
    return Affine(weight=weight, bias=found.bias.name or found.bias.values)


def _checked(shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple with at least two samples, which is what tells a batch norm."""
    sizes = (2, shape) if isinstance(shape, int) else tuple(shape)
    if len(sizes) < 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ShapeError(f"shape must be a number of features or at least a batch and a row, got {shape!r}")
    if math.prod(sizes[1:]) == 1:
        raise ShapeError(f"one feature shows nothing: after the batch, shape needs more, got {sizes}")
    return (max(sizes[0], 2), *sizes[1:])


def _convenient(specimen: Specimen, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with 2 to 4 along each axis between batch and features, as far as the norm takes it.

    One row along an axis would hide that rows are coupled along it; many only take time. An axis stays
    as it is if a parameter spans it.
    """
    spanned = {size for parameter in specimen.parameters.values() for size in parameter.shape}
    fixed = [axis for axis in range(1, len(shape) - 1) if shape[axis] in spanned]
    for kept in ((), *((axis,) for axis in fixed), fixed):
        between = (size if axis in kept else min(max(size, 2), 4) for axis, size in enumerate(shape[1:-1], start=1))
        convenient = (2, *between, max(shape[-1], 2))
        try:
            specimen(torch.ones(convenient, device=specimen.device))
        except (ShapeError, UnrecognisedError):
            continue
        return convenient
    return shape
