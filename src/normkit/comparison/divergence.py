"""The first difference of two models that run on the same input: at a norm, or between two norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normkit.comparison.effects import Formula, distances, sampled
from normkit.identification.sites import NormSite
from normkit.measurement.observing import Listener
from normkit.measurement.sampling import RowPicker

Where = Literal["at", "before", "after"]

# A difference this many times as large as all before it, and as rounding explains, was not carried over from there.
_JUMP = 8.0


@dataclass(frozen=True, kw_only=True)
class Birth:
    """The first place with a difference; distances are |a - b| over |b| of the worst row."""

    where: Where
    """"at" a norm: its input agrees, its output does not; "before" a norm: its input differs and no output earlier did;
    "after" the last norm: only the model's output differs."""
    path: str | None
    """The norm; None after the last."""
    since: str | None
    """The last norm whose output agrees; None where there is none, and for "at"."""
    agreed: float
    """Distance of the last that agrees: the norm's input, or the output of `since`."""
    differs: float
    """Distance of the first that differs."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first differences of two runs."""

    birth: Birth | None = None
    """The first difference of more than rounding; None if there is none."""
    first_bits: Birth | None = None
    """The first difference in any bit; None if there is none."""
    compared: int = 0
    """At how many norms they were compared."""
    largest: float = 0.0
    """The largest distance at these norms and of the outputs."""
    not_run: str = ""
    """Why they were not compared, or ""."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """A norm at which two runs can be compared."""

    path: str
    """Path of the model's norm."""
    reference: str
    """Path of the reference's norm."""
    formula: Formula
    """The formula of the model's norm."""
    span: int | None
    """Trailing axes of what both normalize on their own."""


class Snapshot(Listener):
    """A few rows of what enters and leaves each norm at its first call.

    Args:
        spans: Path -> trailing axes of a row, of the norms to look at.
        picker: Picks the rows of the batch.

    Attributes:
        entered: Path -> rows.
        left: Likewise.
    """

    def __init__(self, spans: Mapping[str, int | None], picker: RowPicker) -> None:
        self._spans, self._picker = spans, picker
        self.entered: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Copy rows before the norm can overwrite them."""
        self._keep(self.entered, site, x)

    def after_site(self, site: NormSite, y: Tensor) -> None:
        """Copy the same rows of the output."""
        self._keep(self.left, site, y)

    def _keep(self, kept: dict[str, Tensor], site: NormSite, tensor: Tensor) -> None:
        if site.path in self._spans and site.path not in kept:
            rows = sampled(tensor, self._spans[site.path], self._picker)
            if rows is not None:
                kept[site.path] = rows


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    where: Where
    path: str | None
    since: str | None
    apart: Tensor
    inherited: Tensor


def diverged(
    places: Sequence[Place],
    here: Snapshot,
    there: Snapshot,
    outputs: tuple[Tensor, Tensor] | None,
    dtypes: Sequence[torch.dtype],
) -> Divergence:
    """Find the first difference of two runs.

    More than rounding is a distance eight times as large as any before it, as what the norm's formula makes of the
    distance of its inputs, and as one rounding of the coarser dtype makes.

    Args:
        places: The norms that can be compared, in forward order.
        here: Observations of the model.
        there: Observations of the reference.
        outputs: Rows of what the two returned, if they can be compared.
        dtypes: Dtypes of the two models.
    """
    noise = max(map(_rounding, dtypes))
    birth = first_bits = None
    carried = last = 0.0
    compared = 0
    for step in _steps(places, here, there, outputs):
        worst = float(step.apart.max()) if step.apart.numel() else 0.0
        found = Birth(where=step.where, path=step.path, since=step.since, agreed=last, differs=worst)
        explained = _JUMP * step.inherited.clamp_min(max(noise, carried))
        if birth is None and bool((step.apart > explained).any()):
            birth = found
        if first_bits is None and worst > 0:
            first_bits = found
        carried, last = max(carried, worst), worst
        compared += step.where == "at"
    return Divergence(birth=birth, first_bits=first_bits, compared=compared, largest=carried)


def _steps(
    places: Sequence[Place], here: Snapshot, there: Snapshot, outputs: tuple[Tensor, Tensor] | None
) -> Iterator[_Step]:
    since = None
    for place in places:
        tensors = (
            *(here.entered.get(place.path), there.entered.get(place.reference)),
            *(here.left.get(place.path), there.left.get(place.reference)),
        )
        x, other_x, y, other_y = tensors
        if x is None or other_x is None or y is None or other_y is None:
            continue
        if x.shape != other_x.shape or y.shape != other_y.shape:
            continue
        apart = distances(x, other_x)
        yield _Step(where="before", path=place.path, since=since, apart=apart, inherited=torch.zeros_like(apart))
        inherited = distances(place.formula(x, torch.float64), place.formula(other_x, torch.float64))
        yield _Step(where="at", path=place.path, since=None, apart=distances(y, other_y), inherited=inherited)
        since = place.path
    if outputs is not None:
        apart = distances(*outputs)
        yield _Step(where="after", path=None, since=since, apart=apart, inherited=torch.zeros_like(apart))


def _rounding(dtype: torch.dtype) -> float:
    """The distance that one rounding makes; in 32 bits and more, sums of another order make it too."""
    eps = torch.finfo(dtype).eps
    return eps / 4 if torch.finfo(dtype).bits == 16 else eps
