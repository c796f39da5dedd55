"""What something is that no spec describes: a second look, after the search for a spec has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normkit.errors import IdentificationError, NormkitError
from normkit.identification import batch, conditioning, coupling, direction, formula, gating, maps, power
from normkit.identification.batch import Recover
from normkit.identification.maps import FallbackVerdict, drawn
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of
from normkit.spec import NormSpec

_LARGEST_EPS = 0.1
_FEATURES_TRIED, _MOVED = 16, 1e-3
_RETURNED = 3
"""So many of several outputs are looked at."""


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
    return FallbackVerdict.of(seen.verdict, seen.reason, **power.degree_reading(specimen, shape, generator))


def _unusual(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, seen: UnrecognisedError
) -> FallbackVerdict:
    """What does not grow with its input: it saturates, or is a norm of another kind than a spec's."""
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
