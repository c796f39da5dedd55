"""`compare`: a port against its reference, at each level that both of them offer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.certificate import operations_between
from normkit.comparison.contrasts import (
    Contrast,
    Survey,
    across_dtypes,
    contrast,
    run_model,
    survey_book,
    survey_model,
    unmatched,
    with_counterparts,
    with_swaps,
)
from normkit.comparison.differences import Comparison, Conventions, Level, Pair
from normkit.comparison.effects import Formula
from normkit.comparison.metadata import compare_metadata
from normkit.comparison.own_rounding import OwnRounding, free_memory, own_rounding
from normkit.comparison.pairing import match
from normkit.comparison.recording import Recording
from normkit.comparison.rows import Rows, compare_rows
from normkit.comparison.sides import Side, open_side, shipped
from normkit.comparison.values import Values, compare_values
from normkit.errors import InputError, ModelError, NormkitError
from normkit.identification.sites import matches
from normkit.measurement.running import Batch, arguments, batches_of
from normkit.measurement.texts import Batches, context_length
from normkit.text import dtype_name

Progress = Callable[[str, int, int], None]

_WINDOW = 128
"""Tokens of a window. Of two windows one runs alone too, which shows the reference's own rounding in half the time that
a single window takes beside itself."""

_ROWS = 512
_RUNS_IN = 1.2
"""Memory that a run takes, over the bytes of the weights: activations and recorded rows are the rest."""


def compare(
    port: Any,
    reference: Any,
    batch: Any = None,
    *,
    shape: Any = None,
    site: str | None = None,
    run: bool = True,
    dtype: str = "auto",
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a port with its reference, at each level that both offer: files, norms, and rows of a run.

    Stored gains and biases are compared by their relation, as in "reference + 1"; nothing is run for that. Norms that
    can be called, or whose rows were recorded, are identified, and paired by path, or by forward order and size. Then
    both run on the same input, once, and their first difference is found. Models run in evaluation mode and are left as
    they were. A level that one of them does not offer is left out, and the result says why.

    Args:
        port: A model's folder or Hub id, a .safetensors, .gguf or .onnx file, a recording, a file of passports, or
            "FILE.py:function", which returns a module and is run; an `nn.Module`, a mapping of arrays, a `Recording`, a
            `PassportBook`; or, with `shape`, one norm: a module or a function.
        reference: Likewise.
        batch: What models run on, as one of `inspect`'s; by default the start of a text that ships, or the tokens of a
            recording.
        shape: Of an input of the two, if they are single norms, as `identify` takes it.
        site: List only the norms, of either, whose path this is or matches, as "model.layers.*.input_layernorm" does.
        run: False looks at what is stored, and runs no model.
        dtype: In which models from folders are loaded: "auto" (the checkpoint's own), "float32", "bfloat16", "float16"
            or "float64".
        local_files_only: Do not use the network: take a Hub id from the cache.
        progress: Called with a stage's name, the steps done and the steps in all (0: unknown).

    Returns:
        One part for each level, or the reason why it was not looked at.

    Raises:
        InputError: If a file cannot be used, `site` matches no norm, or the two have nothing that can be compared.
        ModelError: If a model cannot be loaded or run.
        KindError: If one of them is nothing that can be compared.

    Example:
        >>> port = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps=1e-3))
        >>> stock = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        >>> found = compare(port, stock, {"input": torch.randn(2, 4)})
        >>> found.differs, found.conventions.changed[0].changes[0].given
        (True, {'eps': 0.001, 'eps_placement': 'inside'})
    """
    report = progress or (lambda _stage, _done, _total: None)
    sides = [
        open_side(given, shape=shape, dtype=dtype, local_files_only=local_files_only) for given in (port, reference)
    ]
    return compare_sides(sides[0], sides[1], batch, site=site, run=run, progress=report)


def compare_sides(
    port: Side,
    reference: Side,
    batch: Any | Callable[..., Batches] = None,
    *,
    site: str | None = None,
    run: bool = True,
    progress: Progress,
) -> Comparison:
    """`compare` of two sides that are open.

    `batch` may be a function, too: it takes a loaded model and the `length` of a window, and returns `Batches`.
    """
    # Their own names, else those that the user gave.
    pairs = ((port.name, reference.name), (port.given, reference.given), ("port", "reference"))
    names = next(pair for pair in pairs if pair[0] != pair[1])
    port, reference = _named(port, names[0]), _named(reference, names[1])
    lacking: dict[Level, str] = {**reference.lacking, **port.lacking}
    found = Comparison(port=names[0], reference=names[1], forms=(port.form, reference.form))
    if port.weights is not None and reference.weights is not None:
        values = compare_values(port.weights, reference.weights, progress)
        paths = [(each.path, each.reference_path) for each in values.tensors]
        metadata = compare_metadata(port.weights, reference.weights, paths, values.holding)
        found = replace(found, metadata=metadata, values=values)
    is_compared = found.values is not None and bool(found.values.tensors or found.values.batch_norms)
    if "conventions" not in lacking:
        try:
            found = _with_norms(found, port, reference, batch, lacking, site=site, run=run, progress=progress)
        except _NotRunError as error:
            lacking |= dict.fromkeys(("conventions", "rows"), str(error))
        except ModelError as error:
            if not is_compared:
                raise
            lacking |= dict.fromkeys(("conventions", "rows"), str(error))
    if "conventions" in lacking and not is_compared:
        reasons = "; ".join(dict.fromkeys([lacking["conventions"], lacking.get("values", "they share no norm")]))
        raise InputError(f"nothing of {names[0]} and {names[1]} can be compared: {reasons}")
    made = () if port.path is None or reference.path is None else operations_between(reference.path, port.path)
    return replace(found, not_looked_at=lacking, folded_by=made)


def _named(side: Side, name: str) -> Side:
    """The side and its tensors under another name."""
    return replace(side, name=name, weights=side.weights and replace(side.weights, name=name))


class _NotRunError(Exception):
    """Models are not run; the message says why."""


def _with_norms(
    found: Comparison,
    port: Side,
    reference: Side,
    batch: Any,
    lacking: dict[Level, str],
    *,
    site: str | None,
    run: bool,
    progress: Progress,
) -> Comparison:
    """The comparison with what norms compute and, if both sides have them, with the rows of a run.

    Raises:
        _NotRunError: If models would have to be run and are not.
    """
    sides = (port, reference)
    if not run and any(side.runs for side in sides):
        raise _NotRunError("running models was switched off")
    if reason := _too_large(sides):
        raise _NotRunError(reason)
    with quiet_libraries(), torch.no_grad():
        for side in sides:
            if side.load is not None:
                progress(f"loading {side.name}", 0, 0)
        port, reference = port.loaded(), reference.loaded()
        given, source = _input(port, reference, batch)
        progress("norms", 0, 0)
        here, there = _survey(port, given), _survey(reference, given)
        here.book.only(site)
        paired = match(here.book, there.book)
        contrasts = with_swaps([contrast(each, here, there) for each in paired], here, there)
        needs_rows = "rows" not in lacking or any(each.has_effect for each in contrasts)
        recordings: list[Recording | str] = []
        # Path -> trailing axes of a row, as both norms of a pair need them.
        known = [(each.pair, each.span) for each in contrasts if each.formulas is not None]
        axes = ({pair.entry.path: span for pair, span in known}, {pair.reference.path: span for pair, span in known})
        for side, survey, spans in zip((port, reference), (here, there), axes, strict=True):
            progress(f"running {side.name}", 0, 0)
            recordings.append(_recording(side, survey, given, spans) if needs_rows else lacking["rows"])
        runs, own = [each for each in recordings if isinstance(each, Recording)], None
        # Where no bit differs, nobody asks what rounding explains.
        if reference.model is not None and len(runs) == 2 and not runs[0].has_the_bits_of(runs[1]):
            progress(f"running {reference.name} against itself", 0, 0)
            own = own_rounding(reference.model, given, runs[1], tokens=_ROWS)
        stored = () if found.values is None else found.values.tensors
        folded = [each.path for each in stored if each.relation.kind == "folded"]
        formulas = _formulas(contrasts, there)
        absorbed = {each.path for each in (() if found.values is None else found.values.batch_norms)}
        rows = _rows(formulas, recordings, own, folded, absorbed)
        # Gains of 1 whose readers nobody declares: where all else agrees to the outputs, the readers hold the gains.
        lost = {each.path for each in stored if each.relation.kind in ("constant", "undecided") and not each.is_right}
        if lost and rows.birth is not None and rows.outputs_agree is not False and found.values is not None:
            without = _rows(formulas, recordings, own, [*folded, *lost], absorbed)
            if without.birth is None and not without.causes and without.outputs_agree:
                rows = without
                found = replace(found, values=found.values.with_folded(lost))
        if rows.not_run:
            lacking.setdefault("rows", rows.not_run)
    in_place = {path: other for path, other, _ in rows.pairs} | {each.path: each.reference_path for each in stored}
    alone = with_counterparts(unmatched(here.book, there.book, paired), in_place)
    # The batch norms that were folded are told of already.
    alone = tuple(each for each in alone if each.owner == "port" or each.path not in absorbed)
    conventions = Conventions(
        pairs=tuple(
            across_dtypes(_observed(each, recordings), _dtypes(each.pair, recordings), were_run=len(runs) == 2)
            for each in contrasts
            if _is_wanted(site, each.pair.entry.path, each.pair.reference.path)
        ),
        unmatched=tuple(each for each in alone if _is_wanted(site, each.path)),
        left_out={
            path: (reason, there.book.left_out[path])
            for path, reason in here.book.left_out.items()
            if path in there.book.left_out and _is_wanted(site, path)
        },
    )
    overflows = (
        side.onnx.overflow(recording)
        for side, recording in zip((port, reference), recordings, strict=True)
        if side.onnx is not None and isinstance(recording, Recording)
    )
    notes = (*port.notes, *reference.notes, *(each for each in overflows if each))
    values = None if found.values is None else _with_acting(found.values, contrasts, here, there)
    return replace(found, source=source, values=values, conventions=conventions, rows=rows, notes=notes)


def _with_acting(values: Values, contrasts: Sequence[Contrast], here: Survey, there: Survey) -> Values:
    """The values, judged by what both norms were seen to multiply by, where that is known."""
    same, apart = set[str](), set[tuple[str, str]]()
    for each in contrasts:
        path = each.pair.entry.path
        if path not in here.acting or each.pair.reference.path not in there.acting:
            continue
        same |= set() if each.pair.parameters else {path}
        if not any(change.reading == "gain" for change in each.pair.changes):
            apart |= {(path, change.role) for change in each.pair.parameters}
    tensors = []
    for value in values.tensors:
        if value.is_right is not True and value.path in same:
            value = replace(value, is_right=True, verdict="the norm adds what it lacks, so the same gain acts")
        elif value.is_right is None and (value.path, value.role) in apart:
            value = replace(value, is_right=False, verdict="both norms add the same to it")
        tensors.append(value)
    return replace(values, tensors=tuple(tensors))


def _too_large(sides: Sequence[Side]) -> str:
    """Why the models of folders are not loaded, or ""."""
    tensors = [
        side.weights.source.tensors.values() for side in sides if side.load is not None and side.weights is not None
    ]
    needed = _RUNS_IN * sum(info.nbytes for each in tensors for info in each)
    free = free_memory()
    if free is None or needed <= free:
        return ""
    return f"running them takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; files alone are compared"


def _input(port: Side, reference: Side, batch: Any) -> tuple[Batch, str]:
    """The batch that models are run on, and its source in words; an empty batch if nothing has to be run.

    Raises:
        _NotRunError: If there are models and nothing to run them on.
        InputError: If it is no batch.
    """
    runs = [side for side in (port, reference) if side.runs]
    recorded = next((side for side in (port, reference) if side.recording is not None), None)
    if not runs:
        return {}, ""
    if batch is not None and not callable(batch):
        first = next(batches_of(batch), None)
        if first is None:
            raise InputError("a comparison needs at least one batch, got none")
        model = next((side.model for side in runs if side.model is not None), None)
        given = {"input_ids": first} if isinstance(first, Tensor) else first
        return given if model is None else arguments(model, first), "a batch that was given"
    if recorded is not None and recorded.recording is not None:
        if not recorded.recording.tokens:
            raise _NotRunError(f"{recorded.name} does not say its tokens; record them, or give a batch")
        return _padded(recorded.recording.tokens), f"the tokens of {recorded.name}"
    # The reference's tokenizer or processor is the right one; a port may have none.
    folders = [side.folder for side in (reference, port) if side.folder is not None]
    if not folders:
        raise _NotRunError("no batch was given to run on")
    loaded = next(
        (each for each in folders if each.tokenizer or not isinstance(each.processor, str | None)), folders[0]
    )
    limits = (context_length(each.model, each.tokenizer) for each in folders)
    length = min(limit for limit in (*limits, _WINDOW) if limit is not None)
    chosen: Batches = (batch or shipped)(loaded, length=length)
    return chosen.batches[0], chosen.source


def _padded(tokens: Sequence[Sequence[int]]) -> Batch:
    """Tokens of several lengths as one batch, with a mask."""
    length = max(map(len, tokens))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in tokens])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in tokens])
    return {"input_ids": ids, "attention_mask": mask}


def _survey(side: Side, batch: Batch) -> Survey:
    if side.model is not None:
        return survey_model(side.model, batch, side.name)
    if side.onnx is not None:
        return survey_book(replace(side.onnx.norms(), model=side.name))
    book = side.book if side.recording is None else side.recording.book
    assert book is not None
    return survey_book(replace(book, model=side.name))


def _recording(side: Side, survey: Survey, batch: Batch, spans: Mapping[str, int | None]) -> Recording | str:
    """The rows that entered and left the norms of a side, or why they are not known."""
    if side.recording is not None:
        return side.recording
    if not survey.book.entries and not survey.book.left_out:
        return f"{side.name} has no norm"
    if side.model is not None:
        return run_model(side.model, batch, spans, rows=_ROWS, name=side.name)
    if side.onnx is not None:
        try:
            return side.onnx.record(batch, rows=_ROWS)
        except NormkitError as error:
            return str(error)
    return side.lacking.get("rows", "it cannot be run")


def _formulas(contrasts: Sequence[Contrast], there: Survey) -> dict[str, Formula]:
    """Path -> formula of each norm of the reference, that of a norm without a counterpart too if its numbers are known.

    What stands in its place in the port is then compared with it.
    """
    alone = {
        each.path: Formula.of(spec, each.passport)
        for each in there.book.entries
        if each.path in there.acting and (spec := each.passport.spec) is not None
    }
    return alone | {each.pair.reference.path: each.formulas[1] for each in contrasts if each.formulas is not None}


def _rows(
    formulas: Mapping[str, Formula],
    recordings: Sequence[Recording | str],
    own: OwnRounding | None,
    folded: Sequence[str],
    absorbed: Collection[str],
) -> Rows:
    here, there = recordings
    if isinstance(here, str) or isinstance(there, str):
        return Rows(not_run=here if isinstance(here, str) else str(there))
    return compare_rows(here, there, own, formulas, folded, absorbed)


def _observed(each: Contrast, recordings: Sequence[Recording | str]) -> Pair:
    """A pair, with the effect of what differs on the rows that arrive at the port's norm, else at the reference's."""
    paths = (each.pair.entry.path, each.pair.reference.path)
    for recording, path in zip(recordings, paths, strict=True):
        if each.has_effect and not isinstance(recording, str) and path in recording.norms:
            return each.observed(recording.norms[path].normalized)
    return each.pair


def _dtypes(pair: Pair, recordings: Sequence[Recording | str]) -> tuple[str, str]:
    """The dtypes of what leaves two norms, else of their gains or biases; "" where neither is known."""
    found = []
    for entry, recording in zip((pair.entry, pair.reference), recordings, strict=True):
        rows = None if isinstance(recording, str) else recording.norms.get(entry.path)
        stored = [each["dtype"] for each in entry.passport.parameters.values() if each]
        found.append(dtype_name(rows.output.dtype) if rows is not None else stored[0] if stored else "")
    return found[0], found[1]


def _is_wanted(pattern: str | None, *paths: str) -> bool:
    return any(matches(path, pattern) for path in paths)
