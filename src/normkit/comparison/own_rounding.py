"""How far a model is from itself: alone or in a batch, in 16 bits or in 32; and what rounding may explain by that."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.comparison.effects import distances
from normkit.comparison.recording import Recording
from normkit.comparison.row_places import calls_of
from normkit.comparison.torch_recorder import recorded
from normkit.measurement.running import arguments, first_of, mapped, rows
from normkit.reference import HALF
from normkit.text import dtype_name, first_line

JUMP = 8.0
"""The worst row may be so many times as far apart as the worst row of the reference's own rounding."""
MEDIAN_JUMP = 3.0
"""The same of the median row: two roundings that do not know of each other are sqrt(2) apart, and rows are many."""
_MEMORY = 0.8
"""Share of the free memory that a copy of the model may take."""
_TOKENS = 128
"""Tokens that run in another precision; a row of a batch runs whole."""


Distances = dict[str, tuple[float, float]]
"""Place -> distance of the median row, and of the worst."""


@dataclass(frozen=True)
class Limit:
    """Distances that rounding explains."""

    median: float
    """The difference of the median row."""
    worst: float
    """The difference of the worst row."""

    @classmethod
    def of(cls, own: Tensor, noise: float, *, is_half: bool) -> Limit:
        """The limit for rows that are so far from what they would be unrounded; and one rounding at least."""
        median, worst = _summary(own)
        # In 32 bits the order of sums makes as much as the rounding of the results.
        return cls(median=(MEDIAN_JUMP if is_half else JUMP) * max(median, noise), worst=JUMP * max(worst, noise))

    def holds(self, apart: Tensor) -> bool:
        """Whether rounding explains these distances of rows."""
        median, worst = _summary(apart)
        return median <= self.median and worst <= self.worst


@dataclass(frozen=True, kw_only=True)
class OwnRounding:
    """Distances of a model's rows from its own rows: of the median row and of the worst, by place.

    A place is "before" or "at" and the path of a norm, or "after" for the outputs.
    """

    dtype: str
    """In which the model computes."""
    batch: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A row in the batch against the row alone; in a batch of two, where the batch is one row."""
    precision: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The model in bfloat16 against the model in float32."""
    not_measured: str = ""
    """Why one of them was not measured, or ""."""

    def median(self, where: str, path: str | None, dtype: torch.dtype) -> float:
        """The distance of the median row at a place, where the coarser of port and reference computes in this dtype."""
        return self._sizes(where, path, dtype)[0]

    def limit(self, where: str, path: str | None, dtype: torch.dtype) -> Limit:
        """The difference that rounding explains at a place."""
        median, worst = self._sizes(where, path, dtype)
        # In 32 bits the size is not measured, but scaled from that of 16 bits.
        return Limit(median=(MEDIAN_JUMP if dtype in HALF else JUMP) * median, worst=JUMP * worst)

    def in_a_batch(self, where: str, path: str | None) -> Limit:
        """The difference that another batch explains at a place."""
        median, worst = self.batch.get(_key(where, path), (0.0, 0.0))
        return Limit(median=MEDIAN_JUMP * median, worst=JUMP * worst)

    def _sizes(self, where: str, path: str | None, dtype: torch.dtype) -> tuple[float, float]:
        key = _key(where, path)
        # Rounding grows with depth as the machine epsilon does, which 16 bits show.
        share = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
        by_precision = (share * size for size in self.precision.get(key, (0.0, 0.0)))
        by_batch = self.batch.get(key, (0.0, 0.0))
        median, worst = (max(one, other, rounding(dtype)) for one, other in zip(by_batch, by_precision, strict=True))
        return median, worst


def own_rounding(model: nn.Module, batch: Any, base: Recording | None = None, *, tokens: int = 512) -> OwnRounding:
    """Measure how far a model is from itself: the same rows in another batch, and in another precision.

    The first row of the batch runs alone; a batch of one runs beside itself. The first 128 tokens run in another
    precision: a model in 16 bits as a float32 copy, one in float32 as a bfloat16 copy, if memory permits.

    Args:
        model: The model; it is left as it was.
        batch: As for `inspect`.
        base: What `recorded` returned for this batch, if it is at hand.
        tokens: Tokens that are compared.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> own = own_rounding(model, torch.randn(16, 4))
        >>> 1e-3 < own.precision["at 1"][0] < 1e-2
        True
    """
    given = arguments(model, batch)
    base = recorded(model, given, rows=tokens) if base is None else base
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    first = first_of(given)
    is_text = first.dim() == 2 and not first.is_floating_point()
    few = rows(given, 0, max(1, _TOKENS // max(first.shape[1], 1))) if is_text else given
    other = torch.float32 if dtype in HALF else torch.bfloat16

    def in_a_batch() -> Distances:
        if len(first) > 1:
            return _distances(base, recorded(model, rows(given, 0), rows=tokens))
        # A batch of one is put beside itself.
        two = mapped(dict(given), lambda _, each: torch.cat([each, each]))
        return _distances(recorded(model, two, rows=2 * tokens), base)

    def in_another_precision() -> Distances:
        inputs = mapped(dict(few), lambda _, each: each.to(other) if each.dtype == dtype else each)
        return _distances(recorded(_copied(model, other), inputs, rows=tokens), base)

    apart: list[Distances] = []
    reasons = []
    for measure, how in ((in_a_batch, "in another batch"), (in_another_precision, f"in {dtype_name(other)}")):
        try:
            apart.append(measure())
        except Exception as error:  # whatever the model's own code raises
            reasons.append(f"{base.name} could not be run {how}: {first_line(error)}")
            apart.append({})
    return OwnRounding(dtype=dtype_name(dtype), batch=apart[0], precision=apart[1], not_measured="; ".join(reasons))


def rounding(dtype: torch.dtype) -> float:
    """The distance that one rounding makes; in 32 bits and more, sums of another order make it too."""
    eps = torch.finfo(dtype).eps
    return eps / 4 if torch.finfo(dtype).bits == 16 else eps


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its parameters in another dtype; buffers keep their dtype or get a wider one.

    To a narrower dtype buffers are rounded the wrong way, by half a unit to one, if they have to be rounded at all: two
    right programs have other last bits in the frequencies of rotary positions, and a position of a thousand makes a
    thousand times as much of that.

    Raises:
        MemoryError: If memory does not suffice.
    """
    parameters = [*model.parameters()]
    needed = sum(each.numel() for each in parameters) * dtype.itemsize
    is_cuda = bool(parameters) and parameters[0].is_cuda
    free = torch.cuda.mem_get_info(parameters[0].device)[0] if is_cuda else free_memory()
    if free is not None and needed > _MEMORY * free:
        raise MemoryError(f"a copy takes {needed / 2**30:.1f} GiB")
    converted: dict[int, Any] = {
        id(each): nn.Parameter(each.detach().to(dtype), requires_grad=False)
        for each in parameters
        if each.is_floating_point()
    }
    for each in model.buffers():
        if each.is_floating_point() and each.dtype.itemsize <= dtype.itemsize:
            converted[id(each)] = each.to(dtype)
        elif each.is_floating_point():
            near = each.to(dtype)
            far = torch.nextafter(near, torch.where(near > each, -torch.inf, torch.inf).to(dtype)).to(each.dtype)
            # Ones, powers of two and the like are exact in every program; a mask may hold what overflows.
            converted[id(each)] = torch.where((near == each) | ~far.isfinite(), each, far)
    # deepcopy takes as they are the objects that it is told to have copied already.
    return copy.deepcopy(model, converted)


def free_memory() -> int | None:
    """Bytes of memory that are free here, or None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _distances(given: Recording, expected: Recording) -> Distances:
    """The distances of two recordings of one model at each place, where both have rows."""
    found: Distances = {}
    norms, others = calls_of(given), calls_of(expected)
    for path in norms.keys() & others.keys():
        x, x0 = norms[path].normalized, others[path].normalized
        y, y0 = norms[path].output, others[path].output
        count = min(len(x), len(x0))
        found[_key("before", path)] = _summary(distances(x[:count], x0[:count]))
        found[_key("at", path)] = _summary(distances(y[:count], y0[:count]))
    if given.outputs is not None and expected.outputs is not None:
        count = min(len(given.outputs), len(expected.outputs))
        found[_key("after", None)] = _summary(distances(given.outputs[:count], expected.outputs[:count]))
    return found


def _key(where: str, path: str | None) -> str:
    return where if path is None else f"{where} {path}"


def _summary(apart: Tensor) -> tuple[float, float]:
    """The median and the worst of some distances."""
    return (float(apart.median()), float(apart.max())) if apart.numel() else (0.0, 0.0)
