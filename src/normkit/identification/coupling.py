"""Which outputs move when inputs change: the rows that share statistics, and how positions in time reach others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.conventions.rows import CHANNELS_LAST, Rows
from normkit.errors import ShapeError
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.spec import NormSpec

_HALVES = 6
_MOVED = 1e-6
"""An output moves if it changes by more than this share of the largest change, or of their root mean square."""
_UNEVEN = 1e-4
_ALONE = "no statistics are shared along axis {}"


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """The rows of a norm: the elements that share statistics."""

    choices: tuple[Rows, ...]
    """The axes of gain and bias: where two layouts describe the same rows, these alone tell which is meant: each
    varies."""
    row: tuple[int, ...]
    """The axes of the input that a row spans, counted from 0."""
    evidence: str
    n: int
    """How many features share statistics."""


def rows_of(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Coupling:
    """Find the rows of a norm on inputs of this shape.

    Raises:
        UnrecognisedError: If there are no rows, if samples are coupled, or if no spec has such rows.
        ShapeError: If the whole input is one row.
    """
    moved = _moved(specimen, shape, generator)
    extent = _extent(moved)
    if extent is None or math.prod(extent) == 1:
        _refuse_uneven(specimen, shape, generator)
        raise UnrecognisedError("not a norm", "each output depends on its own input alone: nothing is shared in a row")
    row = tuple(axis for axis, size in enumerate(extent) if size > 1)
    if 0 in row:
        try:
            alone = reach(specimen, (2, *shape), generator)
        except (ShapeError, UnrecognisedError):
            alone = None
        if alone == (1, *shape):
            raise ShapeError(f"shape needs a batch axis in front of the row, got the row itself, {tuple(shape)}")
        raise UnrecognisedError("batch", "changing one sample moves the others")
    sizes = [shape[axis] for axis in row]
    covered = [extent[axis] for axis in row]
    if not bool(moved[tuple(slice(size) for size in extent)].all()):
        raise UnrecognisedError("norm", "its rows are not blocks of adjacent features, which no spec describes")
    axes = f"axis {row[0]}" if len(row) == 1 else f"axes {', '.join(map(str, row))}"
    evidence = f"changing one element moves {' x '.join(map(str, covered))} outputs, along {axes}"
    trailing = row == tuple(range(row[0], len(shape)))
    whole = covered == sizes
    choices: list[Rows] = []
    if whole and trailing:
        choices = [Rows(tuple(range(-len(row), 0)))]
        if len(shape) > 2 and row[0] <= 2:
            choices.append(Rows("all_but_batch", 1 if row[0] == 1 else shape[1]))
    elif whole and row in ((1,), tuple(range(1, len(shape) - 1))):
        choices = [Rows((1,))] if row == (1,) else []
        if row[-1] == len(shape) - 2:
            choices.append(Rows(CHANNELS_LAST, shape[-1]))
    elif trailing and covered[1:] == sizes[1:] and sizes[0] % covered[0] == 0:
        # Groups split the features, or the channels and with them all that follows.
        groups = sizes[0] // covered[0]
        choices = [Rows((-1,), groups)] if len(row) == 1 else [Rows("all_but_batch", groups)] if row[0] == 1 else []
    elif row == tuple(range(1, len(shape))) and covered[:-1] == sizes[:-1] and sizes[-1] % covered[-1] == 0:
        choices = [Rows(CHANNELS_LAST, sizes[-1] // covered[-1])]
    if choices:
        return Coupling(choices=tuple(choices), row=row, evidence=evidence, n=math.prod(extent))
    reading = Reading(value=list(row), evidence=(evidence,))
    raise UnrecognisedError("norm", f"{evidence}: no spec describes such rows", {"coupled axes": reading})


def reach(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> tuple[int, ...] | None:
    """How far along each axis outputs move when the first input element changes, counted from 1; None if none do."""
    return _extent(_moved(specimen, shape, generator))


def moved_outputs(
    norm: Callable[[Tensor], Tensor],
    x: Tensor,
    index: tuple[int, ...],
    step: float,
    is_felt: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Which outputs move when one element of x goes up, or down, by a step.

    Args:
        norm: A norm.
        x: Its input.
        index: Of the element.
        step: In units of x.
        is_felt: Which outputs moved, from the magnitude of their changes and from the outputs for x.
    """
    rest = norm(x)
    moved = torch.zeros_like(rest, dtype=torch.bool)
    # Up and down: by chance, an output may come back to the same value once.
    for change in (step, -step):
        other = x.clone()
        other[index] += change
        moved |= is_felt((norm(other) - rest).abs(), rest)
    return moved


def _moved(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Which outputs move when the first input element does."""
    far = specimen.precision.far
    x = far * torch.randn(tuple(shape), generator=generator).to(specimen.device)
    step = 4 * far * math.sqrt(x.numel())
    return moved_outputs(specimen, x, (0,) * x.dim(), step, lambda change, _: change > _MOVED * change.max())


def _refuse_uneven(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> None:
    """If the first input moves only its own output, other inputs may move more: then the norm is refused."""
    far = specimen.precision.far
    x = far * torch.randn(tuple(shape), generator=generator).to(specimen.device)
    rest = specimen(x)
    for _ in range(_HALVES):
        chosen = torch.zeros(tuple(shape), dtype=torch.bool)
        chosen[-1] = torch.rand(tuple(shape[1:]), generator=generator) < 0.5
        chosen = chosen.to(x.device)
        change = torch.where(chosen, 0.0, (specimen(torch.where(chosen, 2 * x, x)) - rest).abs())
        moved = change > _UNEVEN * rest.abs()
        if bool(moved[:-1].any()):
            raise UnrecognisedError("batch", "changing one sample moves the others")
        if bool(moved.any()):
            raise UnrecognisedError("norm", "the first feature moves its own output alone, others move more of them")


def _extent(moved: Tensor) -> tuple[int, ...] | None:
    """Along each axis, the last position that moved, plus one."""
    positions = moved.nonzero()
    return tuple((positions.amax(0) + 1).tolist()) if len(positions) else None


def time_reading(
    specimen: Specimen, shape: Sequence[int], generator: torch.Generator, spec: NormSpec | None
) -> dict[str, Reading]:
    """Reading "time": for each axis between batch and features, which positions a change at one position reaches.

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
        found = {axis: _coupling_along(specimen, shape, axis, generator) for axis in range(1, dim)}
        last, first = found[dim - 1][0], found[1][0]
        # Features are shared in both directions or not at all: a causal last axis is time, behind the channels.
        features = 1 if last == "causal" and first == "both directions" else dim - 1
        found = {axis: coupling for axis, coupling in found.items() if axis != features}
    else:
        coupled = range(1, dim) if isinstance(spec.axes, str) else [axis % dim for axis in spec.axes]
        found = {
            axis: _coupling_along(specimen, shape, axis, generator)
            if axis in coupled
            else ("none", _ALONE.format(axis))
            for axis in (range(2, dim) if spec.rows.channel_axis == 1 else range(1, dim - 1))
        }
    value = [{"axis": axis, "coupling": coupling} for axis, (coupling, _) in found.items()]
    return {"time": Reading(value=value, evidence=tuple(line for _, line in found.values()))}


def _coupling_along(specimen: Specimen, shape: Sequence[int], axis: int, generator: torch.Generator) -> tuple[str, str]:
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
    match earlier > _MOVED, later > _MOVED:
        case False, False:
            return "none", _ALONE.format(axis)
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
