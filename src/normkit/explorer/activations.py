"""The rows that enter the norms of a model for some tokens of a text, gathered in one pass over the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.explorer.conventions import Convention
from normkit.explorer.gathering import Gatherer
from normkit.explorer.points import BUDGET, drawable_rows, label_text
from normkit.explorer.selection import Places, Selection, by_stream, grouped, left_out, select, telling
from normkit.identification.sites import NormSite, find_sites
from normkit.identification.tracing import trace
from normkit.measurement.blocks import find_blocks
from normkit.measurement.observing import observed
from normkit.measurement.running import Batch, evaluating, first_tokens, runner
from normkit.text import shortened

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteActivations:
    """The rows that enter one norm."""

    path: str
    formula: str
    convention: Convention
    layer: int
    """The block that the norm is in, from 0; for a norm outside, the number of blocks before it."""
    leads: bool
    """Whether it is the first norm of its block or the last of all, on the residual stream."""
    rows: Tensor
    """Shape (N, n), finite, in float64; of the first head if a token has one row per head."""
    tokens: tuple[int, ...]
    """For each row an index into `Activations.tokens`."""
    gain: Tensor | None
    """Effective gain, shape (n,), in float64."""
    bias: Tensor | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Activations:
    """What enters the norms of a model for some tokens; `nk.explore` shows it."""

    name: str
    """Name of the model."""
    tokens: tuple[str, ...]
    counted: int
    """Number of tokens of the whole text; the tokens that are kept are spread evenly over it."""
    sites: tuple[SiteActivations, ...]
    """The norms that the page can draw, in forward order."""
    notes: tuple[str, ...]
    """What was left out and why, one line each."""


def activations(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    *,
    name: str = "",
    decode: Callable[[int], str] | None = None,
    site: str | None = None,
    points: int = BUDGET,
    progress: Progress | None = None,
) -> Activations:
    """Gather what enters each norm of a model for some tokens, spread evenly over a text.

    The model runs in evaluation mode without gradients, once over the text, and is left as it was. Of what passes
    through it, at most twice `points` rows are kept at a time. Of a norm that is called several times in a pass, the
    first call counts.

    Args:
        model: A transformer, on any device.
        batches: Keyword arguments for `model(**batch)`, as in a tokenizer's output: tensors of shape (B, T). Tokens
            whose "attention_mask" is 0 are left out.
        name: What to call the model; its class by default.
        decode: Token id -> text; without it the ids are the names.
        site: Gather only the norms whose path this is or matches, as "model.layers.*.input_layernorm" does; all by
            default. Of more than 48, 48 are gathered, spread evenly.
        points: Rows over all norms.
        progress: Called with a stage's name, the steps done and the steps in all (0: unknown).

    Returns:
        The activations, and notes on the norms that no page can draw.

    Raises:
        InputError: If there is no batch, `site` matches no norm of the model, or there is no norm that can be drawn.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> activations(model, {"input": torch.randn(2, 5, 8)}).sites[0].rows.shape
        torch.Size([10, 8])
    """
    stream = iter([batches] if isinstance(batches, Mapping) else batches)
    if (first := next(stream, None)) is None:
        raise InputError("activations needs at least one batch, got none")
    report = progress or (lambda _stage, _done, _total: None)
    name = name or type(model).__name__
    with evaluating(model), torch.no_grad(), ExitStack() as stack:
        report("norms", 0, 0)
        small = telling(first_tokens(first))
        called = trace(model, runner(model, small))
        found, unrecognised = find_sites(model, called)
        blocks = find_blocks(model, called)
        selection = select(name, found, unrecognised, called, site)
        parents = [path for path, _ in model.named_modules() if any(site.function for site in selection.norms)]
        gatherers = []
        for prefix, read in by_stream(selection.norms, called, small).items():
            gatherers.append(Gatherer(read, max(points // len(selection.norms), 1), prefix, decode or str))
            stack.enter_context(observed(model, read, [], parents, gatherers[-1]))
        for index, batch in enumerate(chain([first], stream)):
            report("text", index, 0)
            for gatherer in gatherers:
                gatherer.begin(batch)
            runner(model, batch)()
            for gatherer in gatherers:
                gatherer.end()
    return _described(name, selection, gatherers, Places(found, blocks))


def _described(name: str, selection: Selection, gatherers: Sequence[Gatherer], places: Places) -> Activations:
    """The gathered rows without those that are not finite, with notes on everything that is missing."""
    tokens: list[str] = []
    gathered: list[SiteActivations] = []
    reasons, spoilt = dict(selection.reasons), {}
    for gatherer in gatherers:
        names = [label_text(token) for token in gatherer.finish()]
        for site in gatherer.sites:
            rows = gatherer.rows[site.path]
            if rows is None:
                reasons[site.path] = "its rows are not those of single tokens"
                continue
            kept = drawable_rows(rows.double()).nonzero().flatten()
            if len(kept) < len(rows):
                spoilt[site.path] = f"{len(rows) - len(kept):,} of {len(rows):,} tokens hold NaN or infinity"
            if len(kept):
                gathered.append(_described_site(site, selection.norms[site], places, rows, kept, len(tokens)))
        tokens += names
    notes = [*selection.notes, *left_out(reasons)]
    notes += [f"{why} as they enter {shortened(paths)}, and are not shown there." for why, paths in grouped(spoilt)]
    if not gathered:
        raise InputError(f"{name} has no norm that the page can draw: {' '.join(notes)}")
    return Activations(
        name=label_text(name),
        tokens=tuple(tokens),
        counted=gatherers[0].counted,
        sites=tuple(gathered),
        notes=tuple(notes),
    )


def _described_site(
    site: NormSite, convention: Convention, places: Places, rows: Tensor, kept: Tensor, first: int
) -> SiteActivations:
    """One norm with its rows of the indices `kept`; the tokens of all its rows count from `first`."""
    return SiteActivations(
        path=site.path,
        formula=str(site.spec),
        convention=convention,
        layer=places.layer(site.path),
        leads=places.leads(site.path),
        rows=rows[kept].double(),
        tokens=tuple((kept + first).tolist()),
        gain=_of_one_row(site.gain, rows.shape[1]),
        bias=_of_one_row(site.bias, rows.shape[1]),
    )


def _of_one_row(parameter: Tensor | None, n: int) -> Tensor | None:
    """The entries that act on a row: those of the first head if each head has its own."""
    if parameter is None or parameter.dim() == 2:
        return None if parameter is None else parameter[0]
    return parameter.expand(n)
