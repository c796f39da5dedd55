"""`identify`: from forward calls alone to the spec of a norm, with evidence and confidence.

`examine` tries how the norm can be called and what a call does beside its result. `_search` then makes the experiments
in order: large rows show the structure, small ones eps and the divisor; the formula is compared with the norm; 16-bit
calls show the casts; rows that are hard on a norm come last. Where one ends the search, `other_verdicts` looks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.errors import NormkitError, ShapeError
from normkit.identification import (
    calling,
    cast_program,
    conditioning,
    coupling,
    gating,
    maps,
    other_sizes,
    other_verdicts,
    side_effects,
    structure,
)
from normkit.identification.eps_and_divisor import choose, roll_off, row_rms, settle_machine_eps
from normkit.identification.gain_and_bias import Affine, Gathered, made_of
from normkit.identification.passport import Passport, Reading
from normkit.identification.specimen import Call, NormLike, Specimen, UnrecognisedError
from normkit.identification.state import function_state_kept, undisturbed
from normkit.spec import NormSpec
from normkit.text import dtype_name

_SEED = 0
_RATE_NOISE = 0.02
_LARGE = 64.0
"""Trained gains are this large: one that is clamped below is no plain parameter."""
_FEW = 1024
"""So many rounded numbers tell one machine epsilon from another, which is 65,536 times as large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examination:
    """A passport, and what the search for it found besides."""

    passport: Passport
    """Its shape is that of the inputs that were used: axes between batch and features may be shorter than given."""
    affine: Affine
    """The parameters that are gain and bias, or the values of these."""
    rate: float
    """Share of the bfloat16 outputs that equal those of the spec bit for bit."""


def identify(
    norm: NormLike,
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    call: Call | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Passport:
    """Find out from forward calls alone which norm something is.

    A module stays as it is, and so does the state of the random generators: a copy in eval mode is called,
    without hooks, its parameters set to known values. The formula found is compared with the copy before it is
    returned.

    Args:
        norm: A module, or a function of one tensor; of tensors f(x, weight, bias), if its parameters are given. A
            function may take or return numpy arrays, or others that numpy or DLPack can read.
        shape: Of an example input, the batch first; a number n means (2, n). Of a norm that takes no other
            number of samples it must have that number.
        dtype: In which the formula is sought. A norm that runs only in 16 bits shows less of it.
        device: Of the inputs; by default that of the module's parameters, or the CPU.
        call: Called with the norm (or its copy) and x where norm(x) will not do: to give further
            arguments, or to take one tensor out of several. Given parameters follow x.
        weight: A function's gain. Without it, a gain and where it is rounded cannot be told.
        bias: A function's bias.

    Returns:
        The passport; what could not be decided is in its `undecidable`.

    Raises:
        IdentificationError: If it cannot be called with such an input.
        ShapeError: If the norm refuses inputs of this shape.
        InputError: If parameters are given, and the norm is a module.

    Example:
        >>> print(identify(nn.LayerNorm(8, eps=1e-6), 8).spec)
        y = weight * (x - mean(x)) / sqrt(var(x) + 1e-06) + bias
        >>> def scaled(x, g):
        ...     return g * torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
        >>> print(identify(scaled, 8, weight=torch.ones(8)).spec)
        y = weight * x / sqrt(mean(x^2) + 1e-06) [early cast, promoted output]
        >>> identify(nn.GELU(), 8).verdict
        'elementwise'
    """
    return examine(norm, shape, dtype=dtype, device=device, call=call, weight=weight, bias=bias).passport


def examine(
    norm: NormLike,
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    call: Call | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Examination:
    """`identify`, with the further results of the search."""
    calling.check_arguments(norm, dtype, device)
    given = _checked(shape)
    # A batch norm shows itself only with two samples or more.
    sizes = (max(given[0], 2), *given[1:])
    parameters = calling.parameters_of(norm, weight, bias)
    with undisturbed(), function_state_kept(norm):
        if _owner(norm) is None:
            norm = calling.on_tensors(norm, call, torch.ones(given, device=device, dtype=dtype), parameters)
        if parameters:
            norm, call = calling.Parameterised(norm, parameters, call), None
        specimen = Specimen(norm, dtype=dtype, device=device, call=call)
        generator = torch.Generator().manual_seed(_SEED)
        small, beside = sizes, dict[str, Reading]()
        try:
            small, specimen.samples = calling.convenient(specimen, given, call)
            beside = side_effects.side_effect_readings(specimen, small, generator)
            fresh = Specimen(norm, dtype=dtype, device=device, call=call, samples=specimen.samples)
            found = _search_twice(specimen, fresh, small, sizes, generator)
            other_sizes.refuse(specimen, small, found.passport.spec, found.affine)
            beside |= coupling.time_reading(specimen, small, generator, found.passport.spec)
            beside |= gating.optional_gate(specimen, small, generator) if call is None else {}
        except UnrecognisedError as seen:
            # The search has drawn parameters anew.
            fresh = Specimen(norm, dtype=dtype, device=device, call=call, samples=specimen.samples)
            seen_again = other_verdicts.verdict_without_spec(fresh, small, generator, seen, _recovered)
            affine = Affine(weight=seen_again.weight_name, bias=seen_again.bias_name)
            acting = (seen_again.weight, seen_again.bias) if seen_again.spec is None else affine.of(_owner(norm))
            passport = replace(
                seen_again,
                readings={**seen_again.readings, **beside},
                shape=sizes,
                dtype=dtype_name(dtype),
                weight=_kept(acting[0]),
                bias=_kept(acting[1]),
            )
            return Examination(passport=passport, affine=affine, rate=0.0)
    acting = found.affine.of(_owner(norm))
    readings = {**found.passport.readings, **beside}
    if specimen.samples is not None:
        line = f"it takes batches of {specimen.samples} and no other size: other batches went in pieces of that size"
        line += ", so whether samples feel each other is not seen" if specimen.samples == 1 else ""
        readings["kind"] = replace(readings["kind"], evidence=(*readings["kind"].evidence, line))
    passport = replace(found.passport, readings=readings, weight=_kept(acting[0]), bias=_kept(acting[1]))
    return replace(found, passport=passport)


def agrees(norm: nn.Module, known: Examination) -> bool:
    """Whether a module computes what was found for another one like it. This takes a few calls and no search."""
    spec = known.passport.spec
    if spec is None or not known.affine.parameters_reached:
        return False
    generator = torch.Generator().manual_seed(_SEED)
    with undisturbed():
        try:
            specimen = Specimen(norm, dtype=getattr(torch, known.passport.dtype))
            if not known.affine.names <= specimen.parameters.keys():
                return False
            error = disagreement(specimen, spec, known.affine, known.passport.shape, generator, drawn=None)
            error = max(error, disagreement(specimen, spec, known.affine, known.passport.shape, generator))
            rate = cast_program.rate_of(specimen, spec, known.affine, known.passport.shape, generator)
        except (UnrecognisedError, NormkitError, RuntimeError):
            return False
    return error <= specimen.precision.agrees and rate >= known.rate - _RATE_NOISE


def grows(norm: nn.Module, known: Examination) -> bool:
    """Whether a module's output is finite and grows as its input does: then it normalizes nothing by its input."""
    shape, generator = known.passport.shape, torch.Generator().manual_seed(_SEED)
    with undisturbed():
        try:
            specimen = Specimen(norm, dtype=getattr(torch, known.passport.dtype))
            precision = specimen.precision
            x = precision.far * torch.randn(shape, generator=generator).to(specimen.device)
            near, far = (
                float(specimen(scale * x).double().square().mean().sqrt()) for scale in (1.0, precision.growth)
            )
        except (UnrecognisedError, NormkitError, RuntimeError):
            return False
    return math.isfinite(far) and far > precision.growth / 2 * near > 0


def as_like(norm: nn.Module, known: Examination) -> Examination | None:
    """The result for a module that runs the code of one that is known to grow; None where this one may not.

    The known one is no norm, or a batch norm, whose slopes in evaluation mode are then looked up anew.
    """
    if not grows(norm, known):
        return None
    if known.passport.verdict != "batch":
        return known
    with undisturbed():
        in_eval = maps.affine_map(Specimen(norm, dtype=getattr(torch, known.passport.dtype)), known.passport.shape)
    kind = known.passport.readings["kind"]
    # The third line tells the slopes: `running_batch_norm` writes them.
    lines = (*kind.evidence[:2], *in_eval.readings["kind"].evidence, *kind.evidence[3:])
    readings = {**known.passport.readings, "kind": replace(kind, evidence=lines)}
    return replace(known, passport=replace(known.passport, weight=in_eval.weight, bias=in_eval.bias, readings=readings))


def disagreement(
    specimen: Specimen,
    spec: NormSpec,
    affine: Affine,
    shape: Sequence[int],
    generator: torch.Generator,
    smallest: float | None = None,
    *,
    drawn: float | None = _LARGE,
) -> float:
    """Largest error of a sample against the formula in float64, relative to the sample's length.

    On random parameters of about so large a magnitude and either sign, or (None) on those it has: then samples with
    an output that is not finite are no test.

    Samples: with a mean, at all input scales that the dtype shows, or from the smallest given, and where eps is
    felt most; and with one large element.
    """
    precision = specimen.precision
    if drawn is not None:
        specimen.draw(generator, drawn)
        for parameter in specimen.parameters.values():
            parameter.mul_((torch.rand(parameter.shape, generator=generator) - 0.5).sign())
    eps = reference.machine_eps(torch.empty(0, dtype=specimen.dtype), spec)
    felt = spec.placement.length(eps)
    # An L2 norm feels its eps in rows whose root mean square is sqrt(n) times smaller.
    near_eps = felt * torch.logspace(-2, 0.5, 6) if felt > precision.least else torch.empty(0)
    near_eps = near_eps[near_eps > precision.smallest] if precision.least else near_eps
    least, largest = smallest or precision.smallest, min(1000.0, precision.far)
    scales = torch.cat([torch.logspace(math.log10(least), math.log10(largest), 16), near_eps])
    shaped = (-1, *(1,) * (len(shape) - 1))
    rows = torch.randn(len(scales) + 1, *shape[1:], generator=generator)
    x = torch.cat([rows[:-1] + 0.5, rows[-1:]]) * torch.cat([scales, torch.ones(1)]).reshape(shaped)
    x.flatten()[-1] *= precision.spike
    weight, bias = affine.of(specimen.module)
    x = x.to(specimen.device, specimen.dtype)
    expected = reference.forward(x.double(), spec.replace(eps=eps), weight, bias).flatten(1)
    y = specimen(x).flatten(1)
    error = (y - expected).square().mean(1).sqrt() / expected.square().mean(1).sqrt()
    if drawn is None:
        error = torch.where(y.isfinite().all(1) & ~error.isnan(), error, 0.0)
    return float(error.max())


def _search_twice(
    specimen: Specimen,
    fresh: Specimen,
    shape: tuple[int, ...],
    given: tuple[int, ...],
    generator: torch.Generator,
) -> Examination:
    """The search; where gain or bias is computed from parameters, a second one with these as they are."""
    try:
        found = _search(specimen, shape, given, generator)
        spec = found.passport.spec
        if spec is None or not fresh.parameters:
            return found
        # The formula holds for the parameters that were drawn. It may not hold for those it has: one may be clamped.
        smallest = 1.0 if "eps" in found.passport.undecidable else None
        again = torch.Generator().manual_seed(_SEED)
        error = disagreement(fresh, spec, found.affine, found.passport.shape, again, smallest, drawn=None)
        if error > fresh.precision.agrees:
            reason = f"with other parameters it is {spec}, with those it has this is off by {error:.1e}"
            raise structure.ComputedAffineError("norm", reason)
        return found
    except structure.ComputedAffineError as seen:
        try:
            found = _search(fresh.as_function(), shape, given, generator)
        except UnrecognisedError as error:
            further = "" if error.reason == seen.reason else f"; with these as they are, {error.reason}"
            raise UnrecognisedError("norm", f"{seen.reason}{further}", error.readings) from error
        names = ", ".join(fresh.parameters)
        reading = Reading.open(f"it is made of {names} in a way that no spec describes; taken as it acts", seen.reason)
        readings = {**found.passport.readings, "gain": reading, "bias": reading, **seen.readings}
        if (line := made_of(*found.affine.of(None), fresh.parameters)) is not None:
            readings["affine"] = Reading(value=line, evidence=(line,))
        spec = found.passport.spec
        if names and spec is not None:
            # As a function, its parameters keep their dtype whatever the input's.
            readings |= cast_program.open_readings(spec, cast_program.NO_PARAMETER)
            spec = spec.replace(cast="late", round_rstd=False, output_dtype="input")
        return replace(found, passport=replace(found.passport, spec=spec, readings=readings))


def _search(
    specimen: Specimen, shape: tuple[int, ...], given: tuple[int, ...], generator: torch.Generator
) -> Examination:
    """The experiments in order; `UnrecognisedError` where one shows that no spec describes the norm."""
    precision = specimen.precision
    found = structure.recover(specimen, shape, given, generator)
    shape = found.shape
    # With gain 1 and no bias, small outputs keep all their digits.
    found.gain.set(specimen.parameters, found.spec.gain.neutral)
    found.bias.set(specimen.parameters, 0.0)
    felt = roll_off(specimen, found.spec, shape, generator)
    rescaled = conditioning.rescaled_eps(specimen, found.spec, shape, generator) if felt.eps == 0 else None
    if rescaled is not None:
        value = Reading(value=float(f"{rescaled:.3g}"))
        raise UnrecognisedError("norm", conditioning.RESCALED_EPS.format(rescaled), {"rescaled eps": value})
    choice = choose(found.n, found.length, felt, precision.length, found.spec.centre_statistics)
    choice = settle_machine_eps(
        choice,
        found.n,
        specimen.dtype,
        lambda dtype: roll_off(specimen.in_dtype(dtype), found.spec, shape, generator, _FEW),
    )
    spec = choice.apply(found.spec, felt.placement)
    weight: str | Gathered | Tensor | None = found.gain.name or found.gain.gathered
    if weight is None and found.spec.gain.is_present and found.gain.values is not None:
        weight = found.gain.values / row_rms(choice.divisor, found.n)
    affine = Affine(weight=weight, bias=found.bias.name or found.bias.gathered or found.bias.values)
    # If eps was not decided, rows that are small enough to feel it are no test.
    smallest = precision.smallest if felt.undecidable is None else 1.0
    error = disagreement(specimen, spec, affine, shape, generator, smallest)
    if error > precision.agrees:
        usual = disagreement(specimen, spec, affine, shape, generator, smallest, drawn=1.0)
        if usual <= precision.agrees:
            reason = f"it is {spec} for parameters of about 1; for those of about {_LARGE:g} this is off by {error:.1e}"
            raise structure.ComputedAffineError("norm", reason)
        raise UnrecognisedError("norm", f"the nearest formula, {spec}, is off by {usual:.1e}")
    specimen.draw(generator)
    casts = cast_program.recover(specimen, spec, affine, shape, generator)
    if choice.rival is not None:
        # Two divisors that are too near for the length of rows to tell: the bits may be those of one only.
        line = "the bits of its outputs are those of this divisor alone"
        rival = choice.decided(choice.rival, line)
        other = cast_program.recover(specimen, rival.apply(found.spec, felt.placement), affine, shape, generator)
        if casts.is_matched and not other.is_matched:
            choice = choice.decided(choice.divisor, line)
        elif other.is_matched and not casts.is_matched:
            choice, casts = rival, other
    hard = conditioning.readings(specimen, spec, shape, generator)
    matched = f"in {dtype_name(specimen.dtype)} the formula is matched to {error:.0e}"
    matched += f", for inputs from {smallest:.0e} to {min(1000.0, precision.far):.0e}"
    kind = found.readings["kind"]
    kind = replace(kind, evidence=(*kind.evidence, matched))
    passport = Passport(
        verdict="norm",
        spec=casts.spec,
        readings={**found.readings, "kind": kind, **choice.readings, **casts.readings, **hard},
        shape=shape,
        dtype=dtype_name(specimen.dtype),
        weight_name=", ".join(found.gain.names) or None,
        bias_name=", ".join(found.bias.names) or None,
    )
    return Examination(passport=passport, affine=affine, rate=casts.rate)


def _recovered(specimen: Specimen, shape: tuple[int, ...]) -> Passport | None:
    """The passport of a norm on which the second look came, or None."""
    try:
        return _search(specimen, shape, shape, torch.Generator().manual_seed(_SEED)).passport
    except (UnrecognisedError, NormkitError, RuntimeError):
        return None


def _owner(norm: NormLike) -> nn.Module | None:
    """The module itself, or the one whose method it is."""
    owner = norm if isinstance(norm, nn.Module) else getattr(norm, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _kept(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.detach().clone()


def example_sizes(shape: object, samples: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of an example input, the batch first; a number n stands for `samples` rows of n features."""
    sizes = (*samples, shape) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) < 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        given = f"a tensor; give tuple(x.shape), {tuple(shape.shape)}" if isinstance(shape, Tensor) else repr(shape)
        raise ShapeError(f"shape must be a number of features, or sizes with the batch first as (2, 64), got {given}")
    return sizes


def _checked(shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple."""
    sizes = example_sizes(shape, (2,))
    if math.prod(sizes[1:]) == 1:
        raise ShapeError(f"one feature shows nothing: after the batch, shape needs more, got {sizes}")
    return sizes
