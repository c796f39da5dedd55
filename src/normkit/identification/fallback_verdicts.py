"""The verdict on a module or function that no spec describes: a second look, after the search for a spec has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import IdentificationError, NormkitError
from normkit.identification import batch, conditioning, coupling, direction, formula, gating, maps
from normkit.identification.batch import Recover
from normkit.identification.maps import FallbackVerdict, drawn
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of
from normkit.spec import NormSpec

_LARGEST_EPS = 0.1
_FEATURES_TRIED, _MOVED = 16, 1e-3
_RETURNED = 3
"""Number of outputs that are tried, of a function that returns several."""
_ROWS = 16
_SCALE = 4.0
"""Rows of this length are far from eps, and a row that is divided by v^2 is not lost beside a bias."""
_ROUNDS = 20
_FITS = 1e-3
"""Another direction than that of a norm leaves 0.03 or more; rounding beside a bias leaves 1e-5."""
_STRAIGHT = 0.02
_IS_OTHER = 0.05


def second_look(
    specimen: Specimen,
    shape: tuple[int, ...],
    generator: torch.Generator,
    seen: UnrecognisedError,
    recover: Recover,
) -> FallbackVerdict:
    """Name what was seen.

    Args:
        specimen: The norm, its parameters as they are.
        shape: Of inputs that it takes.
        generator: Source of inputs.
        seen: What ended the search for a spec.
        recover: The search, for what is a norm once something is held constant.

    Raises:
        IdentificationError: If it returns several tensors, the first of them a norm of its input.
    """
    match seen.verdict:
        case "undecidable":
            return FallbackVerdict.of("undecidable", seen.reason, **seen.readings)
        case "gated":
            return gating.two_inputs(specimen, shape, generator, seen.reason, recover)
    try:
        found = maps.plain_map(specimen, shape, generator)
    except UnrecognisedError:
        _refuse_several(specimen, shape, generator)
        return FallbackVerdict.of(seen.verdict, seen.reason)
    except NormkitError:
        return FallbackVerdict.of(seen.verdict, seen.reason)
    if found is not None and found.verdict in ("identity", "affine"):
        return batch.running(specimen, shape, generator, recover) or found
    if found is not None:
        return found
    if seen.verdict == "batch":
        return batch.always(specimen, shape, generator, seen.reason, recover)
    if seen.verdict == "norm":
        return _unusual(specimen, shape, generator, seen)
    return FallbackVerdict.of(seen.verdict, seen.reason, **degree_reading(specimen, shape, generator))


def _unusual(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, seen: UnrecognisedError
) -> FallbackVerdict:
    """The verdict on a map that does not grow with its input: it saturates, or is a norm that no spec describes."""
    with drawn(specimen, generator):
        saturates = formula.saturates(specimen, shape, generator)
    if saturates:
        return FallbackVerdict.of(
            "not a norm", seen.reason, "it is not the same for small and large inputs: it saturates"
        )
    readings = {**seen.readings, **coupling.time_reading(specimen, shape, generator, None)}
    try:
        rows = coupling.rows_of(specimen, shape, generator)
    except (UnrecognisedError, NormkitError):
        rows = None
    if rows is not None and (rows.axes, rows.groups) == ((-1,), 1):
        readings |= direction.centring_readings(specimen, shape, generator)
        partial = _partial_statistics(specimen, shape, generator)
        readings = {**(partial or _rescaled_eps(specimen, shape, generator)), **readings}
    return FallbackVerdict.of("norm", seen.reason, **readings)


def _partial_statistics(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "partial statistics" of a norm whose divisor leaves features out: the share of those tried that count."""
    n = shape[-1]
    tried = sorted({round(place * (n - 1) / _FEATURES_TRIED) for place in range(_FEATURES_TRIED + 1)})
    counts = []
    with drawn(specimen, generator):
        x = torch.randn(tuple(shape), generator=generator).to(specimen.device, specimen.dtype)
        y = specimen(x)
        for feature in tried:
            grown, others = x.clone(), torch.arange(n) != feature
            grown[..., feature] = n * x.abs().amax(-1)
            moved = (specimen(grown) - y)[..., others].abs().amax() / y[..., others].abs().amax()
            counts.append(bool(moved > _MOVED))
    if all(counts) or not any(counts):
        return {}
    left_out = [feature for feature, known in zip(tried, counts, strict=True) if not known]
    line = (
        f"its statistics leave features out: {len(left_out)} of {len(tried)} that were tried, such as {left_out[0]}, "
    )
    line += "change no other output"
    return {"partial statistics": Reading(value=sum(counts) / len(counts), evidence=(line,))}


def _rescaled_eps(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "rescaled eps" of a norm whose eps is too large for its rows to fit any formula."""
    with drawn(specimen, generator):
        specimen.fill(specimen.parameters, 1.0)
        for centred in (False, True):
            spec = NormSpec(centre_numerator=centred, centre_statistics=centred)
            found = conditioning.rescaled_eps(specimen, spec, shape, generator)
            # More is no eps: a division by the largest element itself looks like one without end.
            if found is not None and 0 < found < _LARGEST_EPS:
                line = f"eps is multiplied by the square of a row's largest element: {found:.3g} after a division by it"
                return {"rescaled eps": Reading(value=float(f"{found:.3g}"), evidence=(line,))}
    return {}


def _one_of_returned(index: int, run: Callable[..., object], x: Tensor) -> object:
    return one_of(run(x), index)


def _refuse_several(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> None:
    """Ask for a call where one of several things that are returned is a norm of the input."""
    for index in range(_RETURNED):
        one = specimen.adapted(partial(_one_of_returned, index))
        try:
            formula.check_kind(one, shape, generator)
            coupling.rows_of(one, shape, generator)
        except (UnrecognisedError, NormkitError):
            continue
        raise IdentificationError(
            f"the norm returns several things, and that at {index} is a norm of its input; "
            f"pass call=lambda norm, x: norm(x)[{index}]"
        )


def degree_reading(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "degree" of a map that turns a row as a norm does, but whose output grows or shrinks with the row.

    f(x) = g * (x - m) / s * s**degree + b with m and s of a norm: -3 where v**2 divides in place of its root, -1 where
    v does, 2 where the reciprocal root divides in place of the root. Nothing for anything else, a power of 1 included.
    """
    lengths = _SCALE * 2 ** (3 * torch.rand(_ROWS, *shape[1:-1], 1, generator=generator) - 1.5)
    x = lengths * torch.randn(_ROWS, *shape[1:], generator=generator)
    with drawn(specimen, generator):
        odd = (specimen(x.to(specimen.device)) - specimen(-x.to(specimen.device))).cpu().double() / 2
    rows, odd = x.double().flatten(0, -2), odd.flatten(0, -2)
    size = odd.square().mean(-1, keepdim=True).sqrt()
    if not bool(torch.isfinite(odd).all()) or not bool((size > 0).all()):
        return {}
    for centred in (True, False):
        spec = NormSpec(centre_numerator=centred, centre_statistics=centred, eps=0.0, has_weight=False, has_bias=False)
        factors = _factors(odd / size, reference.forward(rows, spec))
        if factors is None:
            continue
        scale = reference.statistics(rows, spec, 0.0).scale
        degree, residual = _slope(scale.log().flatten(), (factors.abs() * size).log().flatten())
        if residual < _STRAIGHT and min(abs(degree), abs(degree - 1)) > _IS_OTHER:
            divides = "standard deviation" if centred else "root mean square"
            line = f"a row turns as in a norm, and leaves as long as its {divides} to the power {degree:.2f}, not 0"
            return {"degree": Reading(value=round(degree, 2), evidence=(line,))}
    return {}


def _factors(odd: Tensor, normalized: Tensor) -> Tensor | None:
    """The c in odd = c * gain * normalized, one for each row, with one gain for each feature; None if nothing fits."""
    gain = torch.ones_like(normalized[:1])
    factors = gain[:, :1]
    for _ in range(_ROUNDS):
        along = gain * normalized
        factors = (odd * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
        along = factors * normalized
        gain = (odd * along).sum(0, keepdim=True) / along.square().sum(0, keepdim=True)
    residual = float((odd - factors * gain * normalized).square().mean().sqrt())
    return factors if residual < _FITS else None


def _slope(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Slope of the straight line through y over x, and the root mean square of the residual."""
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / x.square().sum())
    return slope, float((y - slope * x).square().mean().sqrt())
