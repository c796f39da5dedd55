"""Comparison of two norms, and of norms without a counterpart, before anything is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normkit.comparison.differences import Owner, Pair, ParameterChange, Unmatched
from normkit.comparison.divergence import Place
from normkit.comparison.effects import EffectGauge, Formula, common_span
from normkit.comparison.pairing import Match, changes, digests, undecided
from normkit.identification.book import PassportBook
from normkit.identification.sites import NormSite
from normkit.identification.tracing import Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """A model and its norms."""

    model: nn.Module
    """The model."""
    trace: Trace
    """One forward pass of it."""
    sites: Mapping[str, NormSite]
    """Path -> norm."""
    book: PassportBook
    """Their passports."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contrast:
    """A pair, and its two formulas."""

    pair: Pair
    """The pair without the results of a run."""
    formulas: tuple[Formula, Formula] | None
    """Formulas of the model's norm and of the reference's; None where no spec describes either."""

    @property
    def is_comparable(self) -> bool:
        """Inputs and outputs of the two norms have the same size."""
        return self.formulas is not None and self.pair.entry.features == self.pair.reference.features

    def gauge(self) -> EffectGauge | None:
        """Measures the distance of the two formulas; None if nothing differs or nothing can be computed."""
        if self.formulas is None or not (self.pair.changes or self.pair.parameters):
            return None
        given, expected = self.formulas
        if not self.pair.with_parameters and given.spec == expected.spec:
            # Only gain or bias differ, and both are left out: all differences would be 0.
            return None
        return EffectGauge(given, expected)

    def place(self) -> Place:
        """The pair as a place where two runs are compared."""
        assert self.formulas is not None
        return Place(
            path=self.pair.entry.path,
            reference=self.pair.reference.path,
            formula=self.formulas[0],
            span=common_span(*self.formulas),
        )

    def observed(self, gauge: EffectGauge | None) -> Pair:
        """The pair, with what its gauge has seen."""
        return self.pair if gauge is None else replace(self.pair, observed=gauge.result())


def contrast(each: Match, here: Survey, there: Survey | None) -> Contrast:
    """Differences between two norms that show without a run."""
    entry, other = each.entry, each.reference
    site, other_site = here.sites[entry.path], None if there is None else there.sites[other.path]
    parameters = _parameter_changes(each, site, other_site)
    same_width = entry.features == other.features
    with_parameters = same_width and (other_site is not None or digests(entry) == digests(other))
    spec, other_spec = entry.passport.spec, other.passport.spec
    formulas = None
    if spec is not None and other_spec is not None:
        # A file holds no parameters; where the digests agree they are the model's own.
        source = other.passport if other_site is not None else entry.passport
        formulas = (
            (Formula.of(spec, entry.passport), Formula.of(other_spec, source))
            if with_parameters
            else (Formula.bare(spec), Formula.bare(other_spec))
        )
    pair = Pair(
        entry=entry,
        reference=other,
        matched_by=each.matched_by,
        changes=changes(entry, other),
        undecided=undecided(entry.passport, other.passport),
        parameters=parameters,
        with_parameters=with_parameters,
    )
    return Contrast(pair=pair, formulas=formulas)


def with_swaps(contrasts: Sequence[Contrast], here: Survey, there: Survey | None) -> list[Contrast]:
    """The pairs again, with the parameters named that two norms of the model have exchanged."""
    exchanged: dict[tuple[str, str], str] = {}
    for role in ("weight", "bias"):
        values = {}
        for each in contrasts:
            if any(change.role == role for change in each.pair.parameters):
                values[each.pair.entry.path] = _values(each.pair, role, here, there)
        for path, (given, expected) in values.items():
            others = (other for other, pair in values.items() if other != path and pair == (expected, given))
            if (other := next(others, None)) is not None:
                exchanged[path, role] = other
    found = []
    for each in contrasts:
        path = each.pair.entry.path
        changed = [replace(one, swapped_with=exchanged.get((path, one.role))) for one in each.pair.parameters]
        found.append(replace(each, pair=replace(each.pair, parameters=tuple(changed))))
    return found


def _values(pair: Pair, role: str, here: Survey, there: Survey | None) -> tuple[object, object]:
    """Digests of one parameter of the model's norm and of the reference's norm."""
    if there is None:
        digest, expected = ((entry.passport.parameters[role] or {}) for entry in (pair.entry, pair.reference))
        return digest.get("sha256"), expected.get("sha256")
    site, other = here.sites[pair.entry.path], there.sites[pair.reference.path]
    parts = (site.gain, other.gain) if role == "weight" else (site.bias, other.bias)
    mine, theirs = (None if part is None else part.numpy().tobytes() for part in parts)
    return mine, theirs


def _parameter_changes(each: Match, site: NormSite, other: NormSite | None) -> tuple[ParameterChange, ...]:
    found = []
    for role, mine in (("weight", site.gain), ("bias", site.bias)):
        if other is None:
            digest, expected = ((entry.passport.parameters[role] or {}) for entry in (each.entry, each.reference))
            # The same values in another dtype have another digest.
            if digest and expected and digest.get("dtype") == expected.get("dtype") and digest != expected:
                found.append(ParameterChange(role=role, difference=None))
            continue
        theirs = other.gain if role == "weight" else other.bias
        if mine is not None and theirs is not None and mine.shape == theirs.shape and not torch.equal(mine, theirs):
            apart = (mine - theirs).abs().max() / theirs.abs().max()
            found.append(ParameterChange(role=role, difference=float(apart)))
    return tuple(found)


def unmatched(model: PassportBook, reference: PassportBook, matches: Sequence[Match]) -> tuple[Unmatched, ...]:
    """The norms of either that have no counterpart; what both leave out at one path is none of these."""
    here = _alone("port", model, reference, {each.entry.path for each in matches})
    return (*here, *_alone("reference", reference, model, {each.reference.path for each in matches}))


def _alone(owner: Owner, book: PassportBook, other: PassportBook, matched: set[str]) -> Iterator[Unmatched]:
    for entry in book.entries:
        if entry.path not in matched:
            reason = other.left_out.get(entry.path, "")
            yield Unmatched(path=entry.path, owner=owner, class_name=entry.class_name, reason=reason)
    for path, reason in book.left_out.items():
        if path not in other.left_out and path not in {entry.path for entry in other.entries}:
            yield Unmatched(path=path, owner=owner, class_name="", reason=reason)
