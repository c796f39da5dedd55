"""Gains that a port lacks because they are in the matrices that read the norm: `W * gain` in place of `W`.

Which matrices read a norm is declared for the families of `normkit.models`. Only readers of norms whose gain became a
constant, or has other values, are read, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.checkpoint.plan import FLOATS
from normkit.checkpoint.reader import TORCH
from normkit.comparison.parameter_pairs import pair_paths
from normkit.comparison.weights import Weights
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family
from normkit.models.graph import Linear
from normkit.text import shortened

CHUNK = 2**22
"""The most numbers of a matrix that are held at once."""

# Rows that tell whether to read a matrix at all.
_FEW = 64

NEAR = 0.05
"""The largest relative error of a column's norm in a matrix that is quantized, or whose rows are in another order."""


@dataclass(frozen=True, kw_only=True)
class Folding:
    """The result for one gain."""

    is_folded: bool | None
    """Every reader holds the gain, or none does; None if some do, or if the readers are not known."""
    is_seen: bool
    """Whether a reader holds it."""
    words: str
    """In a few words."""
    held: tuple[str, ...] = ()
    """Names in the port of the matrices whose columns hold it."""
    held_in_rows: tuple[str, ...] = ()
    """Names of those whose rows hold it, as of GPT-2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Readers:
    """The matrices that read each norm of a reference."""

    of: Mapping[str, tuple[Linear, ...]] = field(default_factory=dict)
    """Name of a gain in the reference -> its readers."""
    opaque: Mapping[str, str] = field(default_factory=dict)
    """Name of a gain that no matrix can hold -> what takes the norm's output, in words."""
    reason: str = ""
    """Why they are not known, or ""."""


def readers_of(reference: Weights) -> Readers:
    """The readers of each norm, as the reference's family declares them."""
    try:
        family = declared_family(str(reference.settings.get("model_type", "")))
        if not reference.settings.get("architectures"):
            raise ModelError("its config.json names no class")
        shapes = {name: info.shape for name, info in reference.source.tensors.items()}
        graph = expand(family, reference.settings, shapes)
    except ModelError as error:
        return Readers(reason=f"what reads the norm is not known ({error})")
    return Readers(
        of={norm.weight: graph.readers(norm.gives) for norm in graph.norms if norm.weight is not None},
        opaque={norm.weight: norm.opaque for norm in graph.norms if norm.weight is not None and norm.opaque},
    )


def folding(port: Weights, reference: Weights, readers: Readers, name: str, factor: Tensor) -> Folding:
    """Whether the readers of a norm hold what its gain lost.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        readers: The readers of the reference's norms.
        name: Name of the gain in the reference.
        factor: The gain by which the reference multiplies over that by which the port still does, in float64.

    Raises:
        ModelError: If a file cannot be read to its end.
    """
    if name in readers.opaque:
        return Folding(is_folded=False, is_seen=False, words=f"the norm gives {readers.opaque[name]}")
    found = readers.of.get(name, ())
    if not found:
        return Folding(is_folded=None, is_seen=False, words=readers.reason or "nothing is declared to read the norm")
    held: list[str] = []
    matrices: tuple[list[str], list[str]] = ([], [])
    lacking: list[str] = []
    unknown: list[str] = []
    is_exact = True
    for linear in found:
        theirs = linear.weight if linear.weight in reference.source.tensors else linear.tied_to or linear.weight
        ours = _counterpart(port, reference, linear.weight, theirs)
        how = None if ours is None else _holds(port, reference, ours, theirs, linear.in_axis, factor)
        (unknown if how is None else held if how else lacking).append(linear.name.rpartition(".")[2])
        is_exact &= how == "every number"
        if ours is not None and how:
            matrices[linear.in_axis != len(port.source.tensors[ours].shape) - 1].append(ours)
    if held and not lacking and not unknown:
        words = f"folded into {shortened(held)}"
        return Folding(
            is_folded=True,
            is_seen=True,
            words=words if is_exact else f"{words}, as the norms of their columns show",
            held=tuple(matrices[0]),
            held_in_rows=tuple(matrices[1]),
        )
    if lacking and not held and not unknown:
        return Folding(is_folded=False, is_seen=False, words=f"{shortened(lacking)} do not hold it")
    parts = [(held, "folded into"), (lacking, "lost for"), (unknown, "not told for")]
    words = ", ".join(f"{verb} {shortened(names)}" for names, verb in parts if names)
    return Folding(is_folded=None, is_seen=bool(held), words=words)


def begins(port: Weights, reference: Weights, readers: Readers, name: str, factor: Tensor) -> bool:
    """Whether the first rows of a norm's first reader hold what its gain lost, to the last digit; as `folding`."""
    for linear in readers.of.get(name, ())[:1]:
        theirs = linear.weight if linear.weight in reference.source.tensors else linear.tied_to or linear.weight
        ours = _counterpart(port, reference, linear.weight, theirs)
        how = None if ours is None else _holds(port, reference, ours, theirs, linear.in_axis, factor, most=_FEW)
        return how == "every number"
    return False


def holds_bias(port: Weights, reference: Weights, readers: Readers, name: str, bias: Tensor) -> bool | None:
    """Whether the biases of a norm's readers hold its bias: `b + W @ bias`; None if one of them is unknown.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        readers: The readers of the reference's norms.
        name: Name of the norm's gain in the reference.
        bias: The reference's bias of the norm, in float64.
    """
    for linear in (found := readers.of.get(name, ())):
        theirs = linear.weight if linear.weight in reference.source.tensors else linear.tied_to or linear.weight
        own = linear.bias if linear.bias in reference.source.tensors else None
        ours = None if own is None else _counterpart(port, reference, own, own)
        info = reference.source.tensors[theirs]
        if (
            own is None
            or ours is None
            or info.dtype not in FLOATS
            or len(info.shape) != 2
            or info.shape[linear.in_axis] != len(bias)
        ):
            return None
        step, parts = max(1, CHUNK // info.matrix[1]), []
        for start in range(0, info.matrix[0], step):
            chunk = reference.source.rows(theirs, start, min(info.matrix[0], start + step)).to(torch.float64)
            parts.append(chunk @ bias if linear.in_axis else bias[start : start + len(chunk)] @ chunk)
        moved = torch.cat(parts) if linear.in_axis else torch.stack(parts).sum(0)
        held = port.source.rows(ours, 0, 1).flatten().to(torch.float64)
        before = reference.source.rows(own, 0, 1).flatten().to(torch.float64)
        if bool(((held - before - moved).abs() > NEAR * (held.abs().max() + moved.abs().max())).any()):
            return False
    return True if found else None


def _counterpart(port: Weights, reference: Weights, name: str, theirs: str) -> str | None:
    """The name of a reader in the port: its own, or that of the table it shares."""
    names = [*port.source.tensors]
    known = [port.names.get(each, (each,)) for each in names]
    for wanted in dict.fromkeys((name, theirs)):
        direct = next((each for each, others in zip(names, known, strict=True) if wanted in (each, *others)), None)
        pairs = [] if direct else pair_paths(names, [wanted])
        found = direct or (names[pairs[0][0]] if pairs else None)
        if found is not None and port.source.tensors[found].shape == reference.source.tensors[theirs].shape:
            return found
    return None


def _holds(
    port: Weights, reference: Weights, ours: str, theirs: str, axis: int, factor: Tensor, most: int | None = None
) -> str | None:
    """How the port's matrix is the reference's times the factor: "every number", "columns", "" if not; None if open.

    With `most`, no more than so many rows of it.
    """
    info, info_there = port.source.tensors[ours], reference.source.tensors[theirs]
    is_last = axis == len(info.shape) - 1
    if info.dtype not in FLOATS or info_there.dtype not in FLOATS or (not is_last and axis != 0):
        return None
    rows, columns = info.matrix
    if len(factor) != (columns if is_last else rows):
        return None
    # 16-bit numbers are compared to one unit of theirs, for which float32 is exact enough.
    wide = torch.float32 if {info.dtype, info_there.dtype} <= {"F16", "BF16"} else torch.float64
    rows = min(rows, most or rows)
    factor = factor.to(wide) if is_last else factor[:rows].to(wide)
    step = max(1, CHUNK // columns)

    def chunks() -> Iterator[tuple[int, Tensor, Tensor]]:
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            one = port.source.rows(ours, start, stop).to(wide)
            other = reference.source.rows(theirs, start, stop).to(wide)
            yield start, one, other * (factor if is_last else factor[start:stop, None])

    # To one unit: rounded once, or twice on the way. Below the smallest normal number the unit is fixed.
    eps, least = (limits := torch.finfo(TORCH[info.dtype])).eps, limits.smallest_normal
    if all(bool(((one - other).abs() <= eps * other.abs().clamp_min(least)).all()) for _, one, other in chunks()):
        return "every number"
    squares, squares_there = torch.zeros_like(factor), torch.zeros_like(factor)
    for start, *both in chunks():
        for total, part in zip((squares, squares_there), both, strict=True):
            if is_last:
                total += part.square().sum(0)
            else:
                total[start : start + len(part)] = part.square().sum(1)
    norms, norms_there = squares.sqrt(), squares_there.sqrt()
    floor = 1e-6 * norms_there.max()
    return "columns" if bool(((norms - norms_there).abs() <= NEAR * norms_there + floor).all()) else ""
