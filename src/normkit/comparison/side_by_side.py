"""Two models of torch: which norms differ, what that does to the numbers, where the difference begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.comparison.contrasts import Survey, contrast, unmatched, with_swaps
from normkit.comparison.differences import Conventions
from normkit.comparison.divergence import Divergence, Place, Snapshot, diverged
from normkit.comparison.effects import EffectGauge, sampled
from normkit.comparison.pairing import match
from normkit.comparison.torch_recorder import fitted
from normkit.errors import InputError, ModelError, NormkitError
from normkit.identification.book import PassportBook
from normkit.identification.sites import NormSite, find_sites, matches
from normkit.identification.tracing import first_output, trace
from normkit.measurement.observing import Listener, observed
from normkit.measurement.running import (
    Batch,
    arguments,
    batches_of,
    evaluating,
    first_tokens,
    name_of_ids,
    runner,
    token_ids,
    token_mask,
    vocabulary,
)
from normkit.measurement.sampling import RowPicker
from normkit.text import first_line

Progress = Callable[[str, int, int], None]


def compare_models(
    model: nn.Module,
    reference: nn.Module | PassportBook,
    batches: Any,
    *,
    name: str = "",
    reference_name: str = "",
    site: str | None = None,
    progress: Progress | None = None,
) -> tuple[Conventions, Divergence]:
    """Compare every norm of a model with its counterpart in the reference.

    Norms are paired by path, or by forward order and size if the paths differ. Each pair is reported with the
    conventions that differ, and the distance of the two formulas on the very rows that arrive at the model's norm.
    Then both models run on the first batch, and their first difference is found. Both run in evaluation mode and are
    left as they were. Only a few rows of each norm are kept.

    Args:
        model: The model, on any device.
        reference: The reference: another model, or the passports of one.
        batches: As for `inspect`. Token ids are given to each of the two as it names its first argument.
        name: Name of the model.
        reference_name: Name of the reference; that of its passports by default.
        site: List only the norms, of either, whose path this is or matches, as "model.layers.*.input_layernorm" does.
        progress: Called with a stage's name, the steps done and the steps in all (0: unknown).

    Raises:
        InputError: If there is no batch, `site` matches no norm of the model, or the model takes no such arguments.
        ModelError: If the reference cannot be run at all.

    Example:
        >>> port = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, bias=False))
        >>> stock = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> conventions, _ = compare_models(port, stock, {"input": torch.randn(2, 4)})
        >>> conventions.changed[0].changes[0].given
        {'has_bias': False}
    """
    stream = (arguments(model, batch) for batch in batches_of(batches))
    first = next(stream, None)
    if first is None:
        raise InputError("a comparison needs at least one batch, got none")
    report = progress or (lambda _stage, _done, _total: None)
    report("norms", 0, 0)
    with ExitStack() as exits, torch.no_grad():
        exits.enter_context(evaluating(model))
        here, there = _surveyed(model, first, name), None
        here.book.only(site)
        if isinstance(reference, nn.Module):
            exits.enter_context(evaluating(reference))
            there = _surveyed_reference(reference, first, reference_name)
            book = there.book
        else:
            book = replace(reference, model=reference_name or reference.model)
        matches = match(here.book, book)
        contrasts = with_swaps([contrast(each, here, there) for each in matches], here, there)
        gauges = {each.pair.entry.path: gauge for each in contrasts if (gauge := each.gauge())}
        places = [] if there is None else [each.place() for each in contrasts if each.is_comparable]
        snapshot, outputs = _snapshot(places, first, of_reference=False), None
        first_of_all = [first] if gauges or there else []
        for index, batch in enumerate(chain(first_of_all, stream if gauges else ())):
            report("text", index, 0)
            picker = RowPicker(index, token_mask(batch))
            rows = _run(here, batch, picker, _Watcher(gauges, picker, None if index else snapshot))
            outputs = outputs if index else rows
        report("reference", 0, 0)
        divergence = _diverged(here, there, first, places, snapshot, outputs)
    pairs = (each.observed(gauges.get(each.pair.entry.path)) for each in contrasts)
    conventions = Conventions(
        pairs=tuple(pair for pair in pairs if _is_wanted(site, pair.entry.path, pair.reference.path)),
        unmatched=tuple(each for each in unmatched(here.book, book, matches) if _is_wanted(site, each.path)),
        left_out={
            path: (reason, book.left_out[path])
            for path, reason in here.book.left_out.items()
            if path in book.left_out and _is_wanted(site, path)
        },
    )
    return conventions, divergence


class _Watcher(Listener):
    """Hands on what arrives at the norms of the model."""

    def __init__(self, gauges: Mapping[str, EffectGauge], picker: RowPicker, snapshot: Snapshot | None) -> None:
        self._gauges, self._picker, self._snapshot = gauges, picker, snapshot

    def before_site(self, site: NormSite, x: Tensor) -> None:
        if site.path in self._gauges:
            self._gauges[site.path].enter(x, self._picker)
        if self._snapshot is not None:
            self._snapshot.before_site(site, x)

    def after_site(self, site: NormSite, y: Tensor) -> None:
        if self._snapshot is not None:
            self._snapshot.after_site(site, y)


def _surveyed(model: nn.Module, batch: Batch, name: str) -> Survey:
    called = trace(model, runner(model, fitted(model, first_tokens(batch))))
    sites, left_out = find_sites(model, called)
    book = PassportBook.of(name or type(model).__name__, sites, left_out)
    return Survey(model=model, trace=called, sites={site.path: site for site in sites}, book=book)


def _surveyed_reference(model: nn.Module, batch: Batch, name: str) -> Survey:
    """As above, on token ids that the model has, whichever they are."""
    size = vocabulary(model)
    ids = name_of_ids(batch)
    known = {key: value.remainder(size) if size and key == ids else value for key, value in batch.items()}
    try:
        return _surveyed(model, known, name)
    except NormkitError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"{name or type(model).__name__} cannot be run on what the model runs on ({first_line(error)}); give "
            "another reference, or the file of its passports"
        ) from error


def _snapshot(places: Sequence[Place], batch: Batch, *, of_reference: bool) -> Snapshot:
    spans = {place.reference if of_reference else place.path: place.span for place in places}
    return Snapshot(spans, RowPicker(0, token_mask(batch)))


def _run(survey: Survey, batch: Batch, picker: RowPicker, listener: Listener) -> Tensor | None:
    """Run a model on a batch; returns rows of its first output."""
    parents = {call.parent for call in survey.trace.functions}
    with observed(survey.model, tuple(survey.sites.values()), (), parents, listener):
        output = runner(survey.model, fitted(survey.model, batch))()
    y = first_output(tuple(output.values()) if isinstance(output, Mapping) else output)
    return None if y is None or y.dim() < 2 else sampled(y, 1, picker)


def _diverged(
    here: Survey,
    there: Survey | None,
    batch: Batch,
    places: Sequence[Place],
    snapshot: Snapshot,
    outputs: Tensor | None,
) -> Divergence:
    """Run the reference on the batch that the model has run on, and compare."""
    if there is None:
        return Divergence(not_run="a file of passports cannot be run")
    if not places and (here.sites or there.sites):
        return Divergence(not_run="no norm of the one has as many features as a norm of the other")
    size = vocabulary(there.model)
    ids = token_ids(batch)
    highest = 0 if ids is None else int(ids.max())
    if size is not None and highest >= size:
        return Divergence(not_run=f"{there.book.model} embeds {size:,} tokens, and the text has token {highest:,}")
    other = _snapshot(places, batch, of_reference=True)
    try:
        rows = _run(there, batch, RowPicker(0, token_mask(batch)), other)
    except Exception as error:  # whatever the model's own code raises
        return Divergence(not_run=f"{there.book.model} cannot be run on what the model runs on ({first_line(error)})")
    pair = None if outputs is None or rows is None or outputs.shape != rows.shape else (outputs, rows)
    dtypes = {each.dtype for survey in (here, there) for each in survey.model.parameters() if each.is_floating_point()}
    return diverged(places, snapshot, other, pair, sorted(dtypes, key=str) or [torch.float32])


def _is_wanted(pattern: str | None, *paths: str) -> bool:
    return any(matches(path, pattern) for path in paths)
