"""The norms of two sides before their runs are compared: what each computes, pairs of them, and those without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normkit.comparison.differences import Owner, Pair, ParameterChange, Unmatched
from normkit.comparison.effects import Formula, observed
from normkit.comparison.pairing import Change, Match, changes, digests, undecided
from normkit.comparison.recording import Recording
from normkit.comparison.torch_recorder import recorded
from normkit.errors import ModelError, NormkitError
from normkit.identification.book import PassportBook
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.running import Batch, evaluating, first_tokens, fitted, name_of_ids, runner, vocabulary
from normkit.text import first_line

Acting = tuple[Tensor | None, Tensor | None]
"""The gain of a norm, its offset included, and its bias; in float64, None where there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """The norms of one side."""

    book: PassportBook
    """Their passports."""
    acting: Mapping[str, Acting] = field(default_factory=dict)
    """Path -> gain and bias, of the norms whose numbers are at hand."""


def survey_model(model: nn.Module, batch: Batch, name: str) -> Survey:
    """The norms of a model that is called on the first few tokens of a batch, whichever tokens it has.

    Raises:
        ModelError: If it cannot be run.
        InputError: If it takes no such arguments.
    """
    size, ids, small = vocabulary(model), name_of_ids(batch), first_tokens(batch)
    known = {key: value.remainder(size) if size and key == ids else value for key, value in small.items()}
    try:
        with torch.no_grad(), evaluating(model):
            sites, left_out = find_sites(model, trace(model, runner(model, fitted(model, known))))
    except NormkitError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"{name} cannot be run on this input ({first_line(error)}); give a batch that both models take"
        ) from error
    return Survey(
        book=PassportBook.of(name, sites, left_out),
        acting={site.path: (_flat(site.gain), _flat(site.bias)) for site in sites},
    )


def survey_book(book: PassportBook) -> Survey:
    """The norms of passports; those of a file say nothing of the numbers."""
    acting = {}
    for entry in book.entries:
        spec, weight, bias = entry.passport.spec, entry.passport.weight, entry.passport.bias
        if spec is None or (spec.has_weight and weight is None) or (spec.has_bias and bias is None):
            continue
        gain = spec.gain.effective(weight, torch.float64) if spec.has_weight and weight is not None else None
        acting[entry.path] = (_flat(gain), _flat(bias) if spec.has_bias else None)
    return Survey(book=book, acting=acting)


def run_model(
    model: nn.Module, batch: Batch, spans: Mapping[str, int | None], *, rows: int, name: str
) -> Recording | str:
    """The rows that enter and leave the norms of a model on a batch, or why it could not be run.

    Raises:
        InputError: If it takes no such arguments, or calls no norm.
    """
    size, ids = vocabulary(model), name_of_ids(batch)
    highest = 0 if ids is None else int(batch[ids].max())
    if size is not None and highest >= size:
        return f"{name} embeds {size:,} tokens, and the text has token {highest:,}"
    try:
        return recorded(model, batch, rows=rows, name=name, spans=spans)
    except NormkitError:
        raise
    except Exception as error:  # whatever the model's own code raises
        return f"{name} cannot be run on this input ({first_line(error)})"


def _flat(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.detach().cpu().double().flatten()


@dataclass(frozen=True, kw_only=True, eq=False)
class Contrast:
    """A pair, and its two formulas."""

    pair: Pair
    """The pair without the results of a run."""
    formulas: tuple[Formula, Formula] | None
    """Formulas of the model's norm and of the reference's; None where no spec describes either."""

    @property
    def span(self) -> int | None:
        """Trailing axes of a row that both formulas take; None if one of them takes whole samples."""
        assert self.formulas is not None
        spans = [each.span for each in self.formulas if each.span is not None]
        return max(spans) if len(spans) == 2 else None

    @property
    def has_effect(self) -> bool:
        """The two formulas differ and can be computed."""
        if self.formulas is None or not (self.pair.changes or self.pair.parameters):
            return False
        # Where only gain or bias differ, and both are left out, all differences would be 0.
        return self.pair.with_parameters or self.formulas[0].spec != self.formulas[1].spec

    def observed(self, rows: Tensor) -> Pair:
        """The pair, with what the two formulas make of the rows that arrive."""
        assert self.formulas is not None
        return replace(self.pair, observed=observed(*self.formulas, rows))


def contrast(each: Match, here: Survey, there: Survey) -> Contrast:
    """Differences between two norms that show without a run."""
    entry, other = each.entry, each.reference
    mine, theirs = here.acting.get(entry.path), there.acting.get(other.path)
    parameters = _parameter_changes(each, mine, theirs)
    are_known = mine is not None and theirs is not None
    with_parameters = entry.features == other.features and (are_known or digests(entry) == digests(other))
    spec, other_spec = entry.passport.spec, other.passport.spec
    formulas = None
    if spec is not None and other_spec is not None:
        # A file holds no parameters; where the digests agree they are those of the other side.
        sources = entry.passport if mine else other.passport, other.passport if theirs else entry.passport
        formulas = (
            (Formula.of(spec, sources[0]), Formula.of(other_spec, sources[1]))
            if with_parameters
            else (Formula.bare(spec), Formula.bare(other_spec))
        )
    found = changes(entry, other)
    if are_known and not parameters:
        # The one stores what the other adds: the same gain acts.
        found = tuple(change for change in found if not _is_offset_alone(change))
    pair = Pair(
        entry=entry,
        reference=other,
        matched_by=each.matched_by,
        changes=found,
        undecided=undecided(entry.passport, other.passport),
        parameters=parameters,
        with_parameters=with_parameters,
    )
    return Contrast(pair=pair, formulas=formulas)


def across_dtypes(pair: Pair, dtypes: tuple[str, str], *, were_run: bool) -> Pair:
    """The pair, with a note in place of a change of casts that the dtypes in which the two run do not feel.

    A model in float32 has one rounding; where its port in 16 bits has them, the model does not say. Statistics that a
    port takes in 16 bits are a change then, too. Where both were run in 32 bits or more, no cast is one.
    """
    pair = replace(pair, dtypes=dtypes)
    are_wide = were_run and {*dtypes} <= {"float32", "float64"}
    if not all(dtypes) or (dtypes[0] == dtypes[1] and not are_wide):
        return pair
    casts = ("casts", "output dtype", "offset dtype")
    noted = tuple(change for change in pair.changes if _is_cast_alone(change) or (are_wide and change.reading in casts))
    left = tuple(change for change in pair.changes if change not in noted)
    return replace(pair, changes=left, casts=noted, observed=pair.observed if left or pair.parameters else None)


def _is_cast_alone(change: Change) -> bool:
    """Whether two norms differ in nothing but where they round the row."""
    if change.reading == "casts":
        return {**change.given, "cast": None} == {**change.expected, "cast": None}
    return change.reading in ("output dtype", "offset dtype")


def _is_offset_alone(change: Change) -> bool:
    """Whether two norms differ in nothing but the number that they add to their weight."""
    if change.reading == "offset dtype":
        return True
    if change.reading != "gain":
        return False
    return {**change.given, "weight_offset": 0.0} == {**change.expected, "weight_offset": 0.0}


def with_swaps(contrasts: Sequence[Contrast], here: Survey, there: Survey) -> list[Contrast]:
    """The pairs again, with the parameters named that two norms of the port have exchanged."""
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


def _values(pair: Pair, role: str, here: Survey, there: Survey) -> tuple[object, object]:
    """Bytes of one parameter of the port's norm and of the reference's norm, or the digests of both."""
    mine, theirs = here.acting.get(pair.entry.path), there.acting.get(pair.reference.path)
    if mine is None or theirs is None:
        digest, expected = ((entry.passport.parameters[role] or {}) for entry in (pair.entry, pair.reference))
        return digest.get("sha256"), expected.get("sha256")
    parts = (each[role == "bias"] for each in (mine, theirs))
    given, wanted = (None if part is None else part.numpy().tobytes() for part in parts)
    return given, wanted


def _parameter_changes(each: Match, mine: Acting | None, theirs: Acting | None) -> tuple[ParameterChange, ...]:
    found = []
    for place, role in enumerate(("weight", "bias")):
        if mine is None or theirs is None:
            digest, expected = ((entry.passport.parameters[role] or {}) for entry in (each.entry, each.reference))
            # The same values in another dtype have another digest.
            if (
                digest
                and expected
                and digest.get("dtype") == expected.get("dtype")
                and digest["sha256"] != expected["sha256"]
            ):
                found.append(ParameterChange(role=role, difference=None))
            continue
        given, wanted = mine[place], theirs[place]
        if given is None or wanted is None or given.shape != wanted.shape or torch.equal(given, wanted):
            continue
        apart = (given - wanted).abs().max() / wanted.abs().max()
        found.append(ParameterChange(role=role, difference=float(apart)))
    return tuple(found)


def unmatched(model: PassportBook, reference: PassportBook, matches: Sequence[Match]) -> tuple[Unmatched, ...]:
    """The norms of either that have no counterpart; what both leave out at one path is none of these."""
    here = _alone("port", model, reference, {each.entry.path for each in matches})
    return (*here, *_alone("reference", reference, model, {each.reference.path for each in matches}))


def with_counterparts(alone: Sequence[Unmatched], pairs: Mapping[str, str]) -> tuple[Unmatched, ...]:
    """The norms without a counterpart; one in whose place stands something that no spec describes is told with it.

    Args:
        alone: The norms of either.
        pairs: Path in the port -> path in the reference, as stored gains or recorded rows were paired.
    """
    norms = {(each.owner, each.path): each for each in alone}
    found, taken = dict(norms), set[tuple[Owner, str]]()
    places = [(path, other) for (owner, path) in norms if owner == "port" and (other := pairs.get(path)) is not None]
    for path, other in places:
        here, there = norms["port", path], norms.get(("reference", other))
        # Exactly one of the two is a norm that a spec describes: the other one has a reason and no class.
        if there is None or bool(here.class_name) == bool(there.class_name):
            continue
        strange, norm = (here, there) if there.class_name else (there, here)
        found[norm.owner, norm.path] = replace(norm, reason=strange.reason, counterpart=strange.path)
        taken.add((strange.owner, strange.path))
    for key, each in found.items():
        # At the same path the reason is what the other side leaves out there.
        if each.class_name and each.reason and not each.counterpart:
            found[key] = replace(each, counterpart=each.path)
    return tuple(each for key, each in found.items() if key not in taken)


def _alone(owner: Owner, book: PassportBook, other: PassportBook, matched: set[str]) -> Iterator[Unmatched]:
    for entry in book.entries:
        if entry.path not in matched:
            reason = other.left_out.get(entry.path, "")
            yield Unmatched(path=entry.path, owner=owner, class_name=entry.class_name, reason=reason)
    for path, reason in book.left_out.items():
        if path not in other.left_out and path not in {entry.path for entry in other.entries}:
            yield Unmatched(path=path, owner=owner, class_name="", reason=reason)
