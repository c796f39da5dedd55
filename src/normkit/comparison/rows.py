"""Two recordings of one text: where their first difference is born, how it grows to the logits, and what explains it.

A norm is held against the reference's formula on the port's own rows: what arrives there may differ already. Between
norms the rows are held against each other. The measure is the reference's own rounding, where that was measured
(`own_rounding`); else the rounding of the coarser dtype, and what has grown of it so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from normkit.comparison.effects import Formula, distances
from normkit.comparison.norm_causes import applied, cause_of_bits, causes_at, rounds_elsewhere, takes
from normkit.comparison.own_rounding import JUMP, Limit, OwnRounding, rounding
from normkit.comparison.recording import Recording
from normkit.comparison.row_causes import (
    RowCause,
    cause_of_extra,
    cause_of_head,
    causes_before,
    causes_of_heads,
    causes_of_outputs,
    order_of,
    rotation_of,
    together,
)
from normkit.comparison.row_places import Place, Places, block_between, calls_of, first_tokens, other_text, paired
from normkit.reference import HALF
from normkit.text import counted, shortened

Where = Literal["at", "before", "after"]

_FITS = 0.05
"""A formula that is further from the reference's own rows than this is not its formula."""


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
    block: str = ""
    """The part between `since` and `path`, if their names say: "attention", "MLP" or "residual sum"; "embedding"
    before the first norm, "head" after the last."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The distance of the two runs at one place, |a - b| over |b|."""

    where: Where
    path: str | None
    """The port's norm; None for the outputs."""
    reference: str | None
    """The reference's norm."""
    median: float
    """The difference of the median row."""
    worst: float
    """The difference of the worst row."""
    own: float
    """The reference's own rounding there, of the median row; the rounding of the dtype where it was not measured."""

    @property
    def units(self) -> float:
        """The median row's distance in units of the reference's own rounding."""
        return self.median / self.own


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The comparison of two recordings of one text."""

    birth: Birth | None = None
    """The first difference of more than rounding; None if there is none."""
    first_bits: Birth | None = None
    """The first difference in any bit; None if there is none."""
    compared: int = 0
    """At how many norms they were compared."""
    largest: float = 0.0
    """The largest distance at these norms and of the outputs, of the worst row."""
    outputs_agree: bool | None = None
    """Rounding explains how far the outputs are apart; None if they were not compared, or if a difference was born
    before and nobody measured how far the reference is from itself."""
    not_run: str = ""
    """Why they were not compared, or ""."""
    verdict: str = ""
    """The result in words, such as "as different as the reference is from itself in another batch"."""
    steps: tuple[Step, ...] = ()
    """The distance at each place, in the order of the calls, the outputs last."""
    at_norms: tuple[str, ...] = ()
    """The port's norms whose outputs do not follow the reference's formula on the port's own inputs."""
    causes: tuple[RowCause, ...] = ()
    """The causes of the differences."""
    pairs: tuple[tuple[str, str, str], ...] = ()
    """The port's norm, the reference's, and how they were matched."""
    only_port: tuple[str, ...] = ()
    """Norms of the port without counterpart."""
    only_reference: tuple[str, ...] = ()
    """Norms of the reference without counterpart."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""


def compare_rows(
    port: Recording,
    reference: Recording,
    own: OwnRounding | None = None,
    formulas: Mapping[str, Formula] | None = None,
    folded: Collection[str] = (),
    absorbed: Collection[str] = (),
) -> Rows:
    """Find where the first difference of two runs on one text is born, how it grows, and what explains it.

    At a norm, the port's output is compared with the reference's formula on the port's input. Between two norms, what
    arrives is compared with what arrives in the reference. More than rounding is eight times as much as the reference's
    own rounding, in 16 bits three times as much of the median row; without `own`, eight times as much as the rounding
    of the coarser dtype and as all before it.

    Args:
        port: The port's rows.
        reference: The reference's rows, of the same tokens.
        own: How far the reference is from itself.
        formulas: Path of the reference's norm -> its formula; by default what `identify_rows` finds.
        folded: The port's norms whose gain is folded into what reads them: their outputs differ by design.
        absorbed: The reference's batch norms that are folded into the maps beside them: their rows differ by design.

    Example:
        >>> from normkit.comparison.torch_recorder import recorded
        >>> from torch import nn
        >>> stock = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> port = nn.Sequential(stock[0], nn.LayerNorm(8, eps=1e-2))
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> found = compare_rows(recorded(port, x), recorded(stock, x))
        >>> found.birth.where, found.birth.path
        ('at', '1')
        >>> found.causes[0].words
        "the port's rows at 1 follow the reference's formula with eps 0.01 instead of 1e-05"
    """
    if reason := other_text(port.tokens, reference.tokens):
        return Rows(not_run=reason, verdict="not compared row by row")
    places = paired(port, reference)
    if not places.pairs and (port.norms or reference.norms):
        return Rows(not_run="no norm of the one has as many features as a norm of the other")
    if formulas is None:
        formulas = _found_in(reference)
    # A norm that is called twice has one formula.
    formulas = {
        place.reference: found
        for place in places.pairs
        if (found := formulas.get(place.reference, formulas.get(place.reference.rpartition("#")[0]))) is not None
        and takes(found, place.reference_rows[0])
    }
    scan = _Scan(own, places, formulas, _dtypes(port, reference), folded)
    for place in places.pairs:
        if place.reference not in absorbed:
            scan.enter(place)
    if port.outputs is not None and reference.outputs is not None:
        scan.leave(port.outputs, reference.outputs)
    return Rows(
        birth=scan.birth,
        first_bits=scan.first_bits,
        compared=sum(place.reference not in absorbed for place in places.pairs),
        largest=max((step.worst for step in scan.steps), default=0.0),
        outputs_agree=scan.outputs_agree,
        verdict=_verdict(scan, own),
        steps=tuple(scan.steps),
        at_norms=tuple(scan.limits),
        causes=tuple(together(_causes(scan, places, formulas, port, reference))),
        pairs=tuple((place.path, place.reference, place.matched_by) for place in places.pairs),
        only_port=places.only_port,
        only_reference=places.only_reference,
        notes=tuple(_notes(port, reference)),
    )


def _causes(
    scan: _Scan, places: Places, formulas: Mapping[str, Formula], port: Recording, reference: Recording
) -> Iterator[RowCause]:
    """The causes of the differences that the scan found: at norms, then at the first difference."""
    by_path = {place.path: place for place in places.pairs}
    for path, limit in scan.limits.items():
        yield from causes_at(by_path[path], formulas, places.pairs, limit)
    for path, share in scan.rounded.items():
        place = by_path[path]
        yield cause_of_bits(place, formulas[place.reference], share)
    birth = scan.birth
    if birth is None:
        return
    here, there = calls_of(port, reference.order), calls_of(reference, port.order)
    for path in places.only_reference:
        earlier = [place.path for place in places.pairs if places.turn[place.reference] < places.turn[path]]
        where = f"behind {earlier[-1]}" if earlier else "before the first"
        words = f"the port has no norm {where}, where the reference has {path}"
        yield RowCause(kind="missing norm", paths=(path,), words=words)
    for path in places.only_port:
        yield cause_of_extra(path, here)
    if birth.where == "before":
        place = by_path[birth.path or ""]
        limit, starts = scan.limit, first_tokens(port.tokens, len(place.port_rows[0]))
        moved = order_of(place, limit, sum(map(len, port.tokens))) or rotation_of(place, limit)
        if moved is not None:
            yield moved
            return
        may_be = birth.block in ("attention", "")
        yield from causes_before(place, here, there, limit, starts, may_be_attention=may_be)
    if birth.where == "after":
        limit = scan.limit
        if port.outputs is not None and reference.outputs is not None:
            yield from causes_of_outputs(port.outputs, reference.outputs, limit)
        if len(port.heads) == len(reference.heads) > 1:
            names = {place.path: place.reference for place in places.pairs}
            yield from causes_of_heads(port.heads, reference.heads, here, there, names, limit)
        elif port.head is not None:
            yield from cause_of_head(port.head, here, there, limit)


class _Scan:
    """Walks the places in the order of the calls, and remembers what differed so far."""

    def __init__(
        self,
        own: OwnRounding | None,
        places: Places,
        formulas: Mapping[str, Formula],
        dtypes: Sequence[torch.dtype],
        folded: Collection[str],
    ) -> None:
        self._own, self._formulas, self._folded = own, formulas, folded
        self._turn, self._lost = places.turn, places.only_reference
        self._noise = max(map(rounding, dtypes))
        self._dtype = max(dtypes, key=rounding)
        self.is_half = self._dtype in HALF
        self._carried = self._last = 0.0
        self._since: Place | None = None
        self.steps: list[Step] = []
        self.birth: Birth | None = None
        self.first_bits: Birth | None = None
        self.limit = self.allowed("after", None)
        """The difference that rounding explains where the first one begins."""
        self.outputs_agree: bool | None = None
        self.limits: dict[str, Limit] = {}
        """Path of a norm that does not follow the reference's formula -> what rounding explains there."""
        self.rounded: dict[str, float] = {}
        """Path of a norm that rounds in another place -> the share of its bits that are the reference's."""

    def enter(self, place: Place) -> None:
        """Compare what arrives at a norm, and what leaves it."""
        (x, y), (x0, y0) = place.port_rows, place.reference_rows
        apart = distances(x, x0)
        since = self._since
        lost = [path for path in self._lost if since is None or self._turn[path] > self._turn[since.reference]]
        lost = [path for path in lost if self._turn[path] < self._turn[place.reference]]
        before = lost[-1] if lost else None if since is None else since.reference
        block = "embedding" if before is None else block_between(before, place.reference)
        birth = Birth(
            where="before",
            path=place.path,
            since=None if since is None else since.path,
            agreed=self._last,
            differs=_worst(apart),
            block=block,
        )
        self._step(birth, place.reference, apart, not self.allowed("before", place.reference).holds(apart))
        self._since = place
        if place.path in self._folded:
            return
        entered, apart = self._last, distances(y, y0)
        birth = Birth(where="at", path=place.path, since=None, agreed=entered, differs=_worst(apart))
        formula = self._formulas.get(place.reference)
        own = None if formula is None else distances(y0, applied(formula, x0))
        if formula is None or own is None or float(own.median()) > _FITS:
            is_born = not self.allowed("at", place.reference).holds(apart)
        else:
            limit = Limit.of(own, self._noise, is_half=self.is_half)
            is_born = not limit.holds(distances(y, applied(formula, x)))
            if is_born:
                self.limits[place.path] = limit
            elif (share := rounds_elsewhere(place, formula)) is not None:
                self.rounded[place.path] = share
        self._step(birth, place.reference, apart, is_born)

    def leave(self, outputs: Tensor, expected: Tensor) -> None:
        """Compare what the two models returned."""
        if outputs.shape[1] != expected.shape[1]:
            return
        count = min(len(outputs), len(expected))
        apart = distances(outputs[:count], expected[:count])
        birth = Birth(
            where="after",
            path=None,
            since=None if self._since is None else self._since.path,
            agreed=self._last,
            differs=_worst(apart),
            block="head",
        )
        agree = self.allowed("after", None).holds(apart)
        # Without `own`, what is allowed grows with every difference before: that is no rounding.
        self.outputs_agree = None if self._own is None and self.birth is not None else agree
        self._step(birth, None, apart, not agree)

    def allowed(self, where: Where, reference: str | None) -> Limit:
        """The difference that rounding explains at a place."""
        if self._own is None:
            most = JUMP * max(self._noise, self._carried)
            return Limit(median=most, worst=most)
        limit = self._own.limit(where, reference, self._dtype)
        # A fold rounds every weight once more, independently of all other rounding.
        more = math.sqrt(2) if self._folded else 1.0
        return Limit(median=more * limit.median, worst=more * limit.worst)

    def _step(self, birth: Birth, reference: str | None, apart: Tensor, is_born: bool) -> None:
        worst = birth.differs
        own = self._noise if self._own is None else self._own.median(birth.where, reference, self._dtype)
        self.steps.append(
            Step(
                where=birth.where,
                path=birth.path,
                reference=reference,
                median=float(apart.median()) if apart.numel() else 0.0,
                worst=worst,
                own=own,
            )
        )
        if self.birth is None and is_born:
            self.birth, self.limit = birth, self.allowed(birth.where, reference)
        if self.first_bits is None and worst > 0:
            self.first_bits = birth
        self._carried, self._last = max(self._carried, worst), worst


def _found_in(reference: Recording) -> dict[str, Formula]:
    """Path -> the formula that a recording's own rows show."""
    found = {}
    for each in reference.book.entries:
        if (spec := each.passport.spec) is None:
            continue
        formula = Formula.of(spec, each.passport)
        count = reference.norms[each.path].input.dim() - 1
        if count > 1 and formula.weight is None and formula.bias is None:
            # It was found on flat rows, and no parameter tells how many axes a row has.
            formula = replace(formula, spec=spec.replace(axes=tuple(range(-count, 0))))
        found[each.path] = formula
    return found


def _dtypes(*recordings: Recording) -> list[torch.dtype]:
    """The dtypes in which rows were recorded."""
    norms = (norm for recording in recordings for norm in recording.norms.values())
    found = {part.dtype for norm in norms for part in (norm.input, norm.output)}
    found = found or {each.outputs.dtype for each in recordings if each.outputs is not None}
    return sorted(found, key=str) or [torch.float32]


def _verdict(scan: _Scan, own: OwnRounding | None) -> str:
    if scan.birth is not None:
        return "different"
    if scan.first_bits is None:
        return "the same to the bit"
    if scan.rounded:
        count = counted(len(scan.rounded), "norm")
        have = "has" if len(scan.rounded) == 1 else "have"
        return f"within rounding, but {count} of the port {have} other bits ({shortened([*scan.rounded], 2)})"
    if own is None:
        return "no more different than rounding explains"
    limits = ((step, own.in_a_batch(step.where, step.reference)) for step in scan.steps)
    if own.batch and all(step.median <= limit.median and step.worst <= limit.worst for step, limit in limits):
        return "as different as the reference is from itself in another batch"
    if scan.is_half and own.precision:
        return "as different as the reference in bfloat16 is from itself in float32"
    return "no more different than rounding explains"


def _notes(port: Recording, reference: Recording) -> Iterator[str]:
    unknown = [name for name, each in (("port", port), ("reference", reference)) if not each.tokens]
    if unknown and (port.tokens or reference.tokens):
        yield f"the {unknown[0]}'s recording does not say of which tokens its rows are: they are taken to be the same"
    if not port.order or not reference.order:
        yield "a recording does not say in which order its norms were called: that of the names was taken"


def _worst(apart: Tensor) -> float:
    return float(apart.max()) if apart.numel() else 0.0
