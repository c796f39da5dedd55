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
from normkit.explorer.points import BUDGET, drawable_rows, label_text
from normkit.explorer.selection import Places, Selection, by_stream, grouped, left_out, select, telling
from normkit.identification.sites import NormSite, find_sites
from normkit.identification.tracing import trace
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.layout import find_blocks
from normkit.measurement.running import Batch, evaluating, first_tokens, runner, token_mask
from normkit.measurement.sampling import evenly
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
    """The rows that enter the norms of a model for some tokens; `nk.explore` shows them."""

    name: str
    """Name of the model."""
    tokens: tuple[str, ...]
    counted: int
    """Number of tokens of the whole text; the tokens that are kept are spread evenly over it."""
    sites: tuple[SiteActivations, ...]
    """The norms that the page can draw, in forward order."""
    notes: tuple[str, ...]
    """Tokens and norms that were left out, and why, one line each."""


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


class Gatherer(Listener):
    """Keeps the rows that enter some norms for every k-th token of a text; k grows with the text.

    Args:
        sites: The norms.
        most: Number of tokens at the end; up to twice as many are kept meanwhile.
        prefix: Prefix of the arguments that hold the tokens: "" or "decoder_".
        decode: Token id -> its name; tokens without ids are numbered from 1.
    """

    def __init__(self, sites: Sequence[NormSite], most: int, prefix: str, decode: Callable[[int], str]) -> None:
        self.sites = sites
        self.counted = 0
        """Tokens of the text so far."""
        self.rows: dict[str, Tensor | None] = {site.path: torch.empty(0) for site in sites}
        """Path -> rows (N, n) of the tokens kept, in their order; None where no axis is that of tokens."""
        self._most, self._prefix, self._decode = most, prefix, decode
        self._every = 1
        self._names: list[str] = []
        self._shape = (0, 0)
        self._places = torch.empty(0, 2, dtype=torch.int64)
        self._seen: dict[str, Tensor | None] = {}

    def begin(self, batch: Batch) -> None:
        """Choose tokens of the next batch."""
        batch = {key.removeprefix(self._prefix): value for key, value in batch.items() if key.startswith(self._prefix)}
        ids = batch.get("input_ids")
        first = next(iter(batch.values())) if ids is None else ids
        # A batch of single rows has one token per row.
        tokens = first.shape[1] if first.dim() > (2 if first.is_floating_point() else 1) else 1
        self._shape = (first.shape[0], tokens)
        mask = token_mask(batch)
        valid = torch.ones(self._shape, dtype=torch.bool) if mask is None else mask.cpu()
        places = valid.nonzero()
        while len(self._names) + len(places) / self._every > 2 * self._most:
            self._every *= 2
            self._keep(torch.arange(0, len(self._names), 2))
        start = -self.counted % self._every
        self._places = places[start :: self._every]
        if ids is None:
            self._names += [str(self.counted + number + 1) for number in range(start, len(places), self._every)]
        else:
            self._names += [self._decode(token) for token in ids.cpu()[self._places.unbind(1)].tolist()]
        self.counted += len(places)
        self._seen = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Keep the rows of those tokens."""
        if site.path not in self._seen:
            rows = _rows(x.detach(), self._shape, self._places)
            self._seen[site.path] = None if rows is None else rows.cpu()

    def end(self) -> None:
        """Take over the rows of a batch that has passed through the model."""
        for path, kept in self.rows.items():
            rows = self._seen.get(path)
            if kept is None or rows is None:
                self.rows[path] = None
            else:
                self.rows[path] = torch.cat([kept, rows]) if len(kept) else rows

    def finish(self) -> list[str]:
        """Thin the rows to as many tokens as were asked for, and return the names of these."""
        self._keep(evenly(len(self._names), self._most))
        return self._names

    def _keep(self, indices: Tensor) -> None:
        self._names = [self._names[index] for index in indices.tolist()]
        self.rows = {path: rows if rows is None or not len(rows) else rows[indices] for path, rows in self.rows.items()}


def _rows(x: Tensor, shape: tuple[int, int], places: Tensor) -> Tensor | None:
    """The rows (N, n) of some tokens; of the first head if a token has several. None if no axis is that of tokens.

    Args:
        x: What enters a norm: (B, T, n), (B, T, heads, n), (B, heads, T, n) or (B * T, n).
        shape: B and T.
        places: Pairs (row of the batch, position), of shape (N, 2).
    """
    batch, tokens = shape
    row, position = places.to(x.device).unbind(1)
    leading = tuple(x.shape[:-1])
    if leading == (batch, tokens, tokens) and tokens > 1:
        # With as many heads as tokens, the two axes cannot be told apart.
        return None
    if leading[:2] == (batch, tokens):
        rows = x[row, position]
        while rows.dim() > 2:
            rows = rows[:, 0]
        return rows
    if len(leading) == 3 and (leading[0], leading[2]) == (batch, tokens):
        return x[row, 0, position]
    if leading == (batch * tokens,):
        return x[row * tokens + position]
    return None


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
                shown = SiteActivations(
                    path=site.path,
                    formula=str(site.spec),
                    convention=selection.norms[site],
                    layer=places.layer(site.path),
                    leads=places.leads(site.path),
                    rows=rows[kept].double(),
                    tokens=tuple((kept + len(tokens)).tolist()),
                    gain=_of_one_row(site.gain, rows.shape[1]),
                    bias=_of_one_row(site.bias, rows.shape[1]),
                )
                gathered.append(shown)
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


def _of_one_row(parameter: Tensor | None, n: int) -> Tensor | None:
    """The entries that act on a row: those of the first head if each head has its own."""
    if parameter is None or parameter.dim() == 2:
        return None if parameter is None else parameter[0]
    return parameter.expand(n)
