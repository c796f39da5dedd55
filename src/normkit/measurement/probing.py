"""The probe: hooks and one mode that measure every norm, the residual stream and attention while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.identification.sites import NormSite
from normkit.identification.tracing import first_tensor
from normkit.measurement.attention import (
    QueriesAndKeys,
    Selection,
    add_call,
    add_logits,
    queries_and_keys,
    select,
    softmax_logits,
)
from normkit.measurement.blocks import BlockCall
from normkit.measurement.layout import Layout, MeasuredStep
from normkit.measurement.observing import Listener, observed
from normkit.measurement.quantities import Peak
from normkit.measurement.row_counters import ROW_PEAKS, RowCounter, TableReader
from normkit.measurement.sampling import RowFormula, RowPicker, RowSample
from normkit.measurement.tables import Tables

P = ParamSpec("P")
R = TypeVar("R")


class Probe:
    """Streams statistics of every forward pass inside its context; nothing is kept but counts, sums and angles.

    Hooks and mode are gone when the context is left, also by an exception.

    Args:
        model: The model.
        layout: What is measured, and where.

    Example:
        >>> from normkit.measurement.structure import survey
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 3, 4)
        >>> structure = survey(model, lambda: model(x))
        >>> with Probe(model, structure.layout(is_pooled=False)) as probe:
        ...     probe.batch(None)
        ...     _ = model(x)
        >>> probe.measured().sites(structure, {})[0].input.rows
        6
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self._counts = _Counts(model, layout)
        self._exits = ExitStack()

    def __enter__(self) -> Probe:
        """Begin to measure."""
        layout = self._layout
        self._exits.enter_context(observed(self._model, layout.sites, layout.blocks, layout.callers, self._counts))
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
        self._counts.restart(mask, ids)

    def measured(self, decode: Callable[[int], str] | None = None) -> MeasuredStep:
        """What was measured so far; `decode` turns a token id into text."""
        counts = self._counts
        return MeasuredStep(
            layout=self._layout,
            reader=TableReader(step=0, tables=counts.tables.read()),
            features=counts.features,
            samples=counts.samples,
            peaks={path: peak.found(decode) for path, peak in counts.peaks.items()},
        )


def _unseen(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose own tensor operations bypass the mode, which would look at each of them first."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


class _Counts(Listener):
    """Counts what it hears of into tables, and samples rows of norms and the largest elements of blocks."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.tables = Tables(layout.tables(), device)
        self.features = list(layout.features)
        self.samples = {site.path: RowSample(site.spec, RowFormula.of(site.passport)) for site in layout.sites}
        self.peaks = {block.path: _LargestElement() for block in layout.blocks}
        self._norms = {
            site.path: layout.norm_counters(index, has_deviations=True, gain=site.gain)
            for index, site in enumerate(layout.sites)
        }
        self._blocks = [layout.block_counters(block.index, has_deviations=True) for block in layout.blocks]
        self._attentions = {(each.parent, each.function): line for line, each in enumerate(layout.attentions)}
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

    def _add(self, counter: RowCounter, x: Tensor) -> None:
        self.features[counter.place] = counter.add(self.tables, x, self._mask, leaves_out_unfit=True)

    @_unseen
    def before_site(self, site: NormSite, x: Tensor) -> None:
        self._add(self._norms[site.path][0], x)
        self.samples[site.path].enter(x, self._picker)

    @_unseen
    def after_site(self, site: NormSite, y: Tensor) -> None:
        self._add(self._norms[site.path][1], y)
        self.samples[site.path].leave(y, self._picker)

    @_unseen
    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (x := first_tensor(args, kwargs)) is not None:
            self._tokens = (x.shape[0], x.shape[1])
            if (counter := self._blocks[block.index][0]) is not None:
                self._add(counter, x)

    @_unseen
    def after_block(self, block: BlockCall, y: Tensor) -> None:
        counter = self._blocks[block.index][1]
        self._add(counter, y)
        largest = float(self.tables["row peaks"][counter.place, ROW_PEAKS.index("absmax")])
        self.peaks[block.path].add(y, largest, self._mask, self._ids)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        line = self._attentions.get((parent, function))
        if line is None:
            return
        if function == "sdpa":
            if (call := queries_and_keys(args, kwargs)) is not None and self._fits(call.query):
                add_call(self.tables, line, call, self._selection(call))
        else:
            logits = softmax_logits(args, kwargs, self._tokens)
            if logits is not None and self._fits(logits):
                add_logits(self.tables, line, logits, self._mask)

    def _fits(self, scores: Tensor) -> bool:
        """The token mask fits the query rows of (B, H, T, ...)."""
        return self._mask is None or self._mask.shape == (scores.shape[0], scores.shape[2])

    def _selection(self, call: QueriesAndKeys) -> Selection:
        """The sampled rows of a call; most layers have the same mask, so the rows of the last call are often reused."""
        key = (call.causal, call.query.shape, call.key.shape)
        return self._last_selection.of(call.mask, key, lambda: select(call, self._mask))


class _LargestElement:
    """Finds the largest element of a stream (B, T, n)."""

    def __init__(self) -> None:
        self._largest = 0.0
        self._peak: Peak | None = None
        self._token: int | None = None

    def add(self, stream: Tensor, largest: float, mask: Tensor | None, ids: Tensor | None) -> None:
        """Look for it in one tensor, if a larger one than before was counted.

        Args:
            stream: The stream.
            largest: The largest magnitude that was counted so far, this tensor's among them.
            mask: Token mask (B, T), or None for all rows.
            ids: Token ids, or None; those of another shape than (B, T) are not its own.
        """
        before, self._largest = self._largest, max(largest, self._largest)
        if stream.dim() != 3 or not largest > before:
            return
        stream = stream.detach()
        is_largest = stream.abs().double() == largest
        if mask is not None:
            is_largest &= mask.to(stream.device)[..., None]
        sample, position, feature = is_largest.nonzero()[0].tolist()
        self._peak = Peak(value=float(stream[sample, position, feature]), feature=feature, position=position)
        self._token = int(ids[sample, position]) if ids is not None and ids.shape == stream.shape[:2] else None

    def found(self, decode: Callable[[int], str] | None) -> Peak | None:
        """The largest element so far, with its token in words where `decode` is given; None without one."""
        if self._peak is None or self._token is None or decode is None:
            return self._peak
        return replace(self._peak, token=decode(self._token))


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
