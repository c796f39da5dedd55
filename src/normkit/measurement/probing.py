"""The probe: hooks and one mode that measure every norm, the residual stream and attention while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.identification.sites import NormSite
from normkit.identification.tracing import Trace, first_tensor
from normkit.measurement.attention import (
    QueriesAndKeys,
    Selection,
    add_call,
    add_logits,
    attention_at,
    head_tables,
    queries_and_keys,
    select,
    softmax_logits,
)
from normkit.measurement.blocks import BlockCall, block_of
from normkit.measurement.facts import Attention
from normkit.measurement.observing import Listener, observed
from normkit.measurement.quantities import Peak, RowStatistics, SiteGeometry
from normkit.measurement.sampling import RowFormula, RowPicker, RowSample
from normkit.measurement.site_accumulator import SiteCounter, SiteMeasurement, StreamCounter
from normkit.measurement.tables import Tables

P = ParamSpec("P")
R = TypeVar("R")


class Probe:
    """Streams statistics of every forward pass inside its context; nothing is kept but counts, sums and angles.

    Hooks and mode are gone when the context is left, also by an exception.

    Args:
        model: The model.
        sites: The norms of the model.
        blocks: The blocks of the model.
        trace: One forward pass of it: tells which modules call norms and attention as functions.

    Example:
        >>> from normkit.identification.sites import find_sites
        >>> from normkit.identification.tracing import trace
        >>> from normkit.measurement.blocks import find_blocks
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 3, 4)
        >>> called = trace(model, lambda: model(x))
        >>> sites, _ = find_sites(model, called)
        >>> with Probe(model, sites, find_blocks(model, called), called) as probe:
        ...     probe.batch(None)
        ...     _ = model(x)
        >>> probe.site(sites[0]).input.rows
        6
    """

    def __init__(self, model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], trace: Trace) -> None:
        self._model, self._sites, self._blocks, self._trace = model, sites, blocks, trace
        self._gauges = _Gauges(sites, blocks, trace)
        self._exits = ExitStack()

    def __enter__(self) -> Probe:
        """Begin to measure."""
        parents = {call.parent for call in self._trace.functions}
        self._exits.enter_context(observed(self._model, self._sites, self._blocks, parents, self._gauges))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove hooks and mode; what was measured stays."""
        self._exits.close()

    def batch(self, mask: Tensor | None, ids: Tensor | None = None) -> None:
        """Say which tokens of the next forward pass count.

        Args:
            mask: Boolean, shape (B, T), False for padding; None counts all.
            ids: Their token ids, of the same shape, or None.

        Raises:
            InputError: If the mask is of another shape or dtype.
        """
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
            raise InputError(
                f"the token mask must be boolean of shape (B, T), got {mask.dtype} {tuple(mask.shape)}; use mask.bool()"
            )
        self._gauges.restart(mask, ids)

    def site(self, site: NormSite) -> SiteMeasurement:
        """The measurement of one norm so far."""
        return self._gauges.sites[site.path].result()

    def geometry(self, site: NormSite) -> SiteGeometry | None:
        """The geometry of one norm on its sampled rows so far; None without a row."""
        return self._gauges.samples[site.path].result(site.gain)

    def error(self, site: NormSite) -> float:
        """Error of a norm's outputs against its formula, as in `RowSample.error`; NaN if it was not measured."""
        return self._gauges.samples[site.path].error

    def block(self, block: BlockCall) -> tuple[RowStatistics, RowStatistics]:
        """Statistics of the residual stream entering and leaving one block so far."""
        entering, leaving = self._gauges.blocks[block.path]
        return entering.result(), leaving.result()

    def peak(self, block: BlockCall, decode: Callable[[int], str] | None = None) -> Peak | None:
        """The largest element that left one block so far; `decode` turns a token id into text."""
        return self._gauges.blocks[block.path][1].peak(decode)

    def attentions(self) -> tuple[Attention, ...]:
        """The attention calls seen so far, in forward order."""
        return tuple(
            attention_at(
                tables.read(),
                0,
                path=parent,
                block=block_of(parent, self._blocks),
                source=source,
                heads=heads,
                head_dim=head_dim,
            )
            for (parent, source, heads, head_dim), tables in self._gauges.attentions.items()
        )


def _unseen(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose own tensor operations bypass the mode, which would look at each of them first."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


class _Gauges(Listener):
    """Adds what it hears of to the accumulators."""

    def __init__(self, sites: Sequence[NormSite], blocks: Sequence[BlockCall], trace: Trace) -> None:
        self.sites = {site.path: SiteCounter(site.spec, site.gain) for site in sites}
        self.samples = {site.path: RowSample(site.spec, RowFormula.of(site.passport)) for site in sites}
        self.blocks = {block.path: (StreamCounter(), StreamCounter()) for block in blocks}
        self.attentions: dict[tuple[str, Literal["sdpa", "softmax"], int, int], Tables] = {}
        self._sdpa_parents = {call.parent for call in trace.functions if call.function == "sdpa"}
        self._batches = 0
        self.restart(None, None)

    def restart(self, mask: Tensor | None, ids: Tensor | None) -> None:
        """Begin a forward pass with this token mask and these token ids."""
        self._ids = ids
        self._mask = None if mask is None or bool(mask.all()) else mask
        self._tokens = None if mask is None else (mask.shape[0], mask.shape[1])
        self._last_selection: _Last[Selection] = _Last()
        self._picker = RowPicker(self._batches, self._mask)
        self._batches += 1

    @_unseen
    def before_site(self, site: NormSite, x: Tensor) -> None:
        self.sites[site.path].enter(x, self._mask)
        self.samples[site.path].enter(x, self._picker)

    @_unseen
    def after_site(self, site: NormSite, y: Tensor) -> None:
        self.sites[site.path].leave(y, self._mask)
        self.samples[site.path].leave(y, self._picker)

    @_unseen
    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (x := first_tensor(args, kwargs)) is not None:
            self._tokens = (x.shape[0], x.shape[1])
            self.blocks[block.path][0].add(x, self._mask, self._ids)

    @_unseen
    def after_block(self, block: BlockCall, y: Tensor) -> None:
        self.blocks[block.path][1].add(y, self._mask, self._ids)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if function == "sdpa":
            if (call := queries_and_keys(args, kwargs)) is not None and self._fits(call.query):
                tables = self._attention(parent, "sdpa", call.query, call.query.shape[-1])
                add_call(tables, 0, call, self._selection(call))
        elif parent not in self._sdpa_parents:
            logits = softmax_logits(args, kwargs, self._tokens)
            if logits is not None and self._fits(logits):
                add_logits(self._attention(parent, "softmax", logits, 0), 0, logits, self._mask)

    def _fits(self, scores: Tensor) -> bool:
        """The token mask fits the query rows of (B, H, T, ...)."""
        return self._mask is None or self._mask.shape == (scores.shape[0], scores.shape[2])

    def _selection(self, call: QueriesAndKeys) -> Selection:
        """The sampled rows of a call; most layers have the same mask, so the rows of the last call are often reused."""
        key = (call.causal, call.query.shape, call.key.shape)
        return self._last_selection.of(call.mask, key, lambda: select(call, self._mask))

    def _attention(self, parent: str, source: Literal["sdpa", "softmax"], scores: Tensor, head_dim: int) -> Tables:
        key = (parent, source, scores.shape[1], head_dim)
        if key not in self.attentions:
            self.attentions[key] = Tables(head_tables(1, scores.shape[1]), scores.device)
        return self.attentions[key]


class _Last(Generic[R]):
    """The last result, for as long as the tensor that it came from is asked for again and was not written to."""

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor] | None, object, R] | None = None

    def of(self, tensor: Tensor | None, key: object, compute: Callable[[], R]) -> R:
        """The result for a tensor, or for None, under a key."""
        # Inference tensors do not count how often they were written to; nothing equals a new object.
        version = None if tensor is None else object() if tensor.is_inference() else tensor._version
        if self._held is not None:
            reference, held_key, result = self._held
            if held_key == (key, version) and (reference is None or reference() is tensor):
                return result
        result = compute()
        self._held = (None if tensor is None else weakref.ref(tensor), (key, version), result)
        return result
