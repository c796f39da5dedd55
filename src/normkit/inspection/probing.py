"""The probe: hooks and one mode that measure every norm, the residual stream and attention while a model runs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.errors import InputError
from normkit.identification.sites import NormSite
from normkit.identification.tracing import Trace, first_tensor
from normkit.inspection.attention import AttentionAccumulator, queries_and_keys, softmax_logits
from normkit.inspection.blocks import BlockCall
from normkit.inspection.moments import AttenuationAccumulator, RowAccumulator, RowMoments, row_moments, token_rows
from normkit.inspection.observing import Listener, observed
from normkit.inspection.result import Attention, Attenuation, RowStatistics
from normkit.spec import NormSpec

P = ParamSpec("P")
R = TypeVar("R")

_HALF = (torch.float16, torch.bfloat16)
_STREAM = NormSpec()


@dataclass(frozen=True, kw_only=True)
class SiteMeasurement:
    """What one norm was seen to do.

    Attributes:
        input: Statistics of what enters; empty if it was never called.
        output: Statistics of what leaves.
        attenuation: What its eps does.
        calls: Calls seen.
        left_out: Tensors that no statistic counts, because the token mask fits none of their axes.
        dtype: Of the input, as in "float32"; "" if it was never called.
        headroom_bits: log2 of the dtype's largest number over the largest magnitude seen; infinite for zeros.
        statistics_headroom_bits: The same for the sum of squares if that is accumulated in 16 bits, else None.
    """

    input: RowStatistics
    output: RowStatistics
    attenuation: Attenuation
    calls: int
    left_out: int
    dtype: str
    headroom_bits: float
    statistics_headroom_bits: float | None


class Probe:
    """Streams statistics of every forward pass inside its context; nothing is kept but counts and sums.

    Hooks and mode are gone when the context is left, also by an exception.

    Args:
        model: The model.
        sites: Its norms.
        blocks: Its blocks.
        trace: One forward pass of it: tells which modules call norms and attention as functions.

    Example:
        >>> from normkit.identification.sites import find_sites
        >>> from normkit.identification.tracing import trace
        >>> from normkit.inspection.blocks import find_blocks
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
        self._gauge = _Gauge(sites, blocks, trace)
        self._exits = ExitStack()

    def __enter__(self) -> Probe:
        """Begin to measure."""
        parents = {call.parent for call in self._trace.functions}
        self._exits.enter_context(observed(self._model, self._sites, self._blocks, parents, self._gauge))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove hooks and mode; what was measured stays."""
        self._exits.close()

    def batch(self, mask: Tensor | None) -> None:
        """Say which tokens of the next forward pass count.

        Args:
            mask: Boolean, shape (B, T), False for padding; None counts all.

        Raises:
            InputError: If the mask is of another shape or dtype.
        """
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
            raise InputError(
                f"the token mask must be boolean of shape (B, T), got {mask.dtype} {tuple(mask.shape)}; use mask.bool()"
            )
        self._gauge.restart(mask)

    def site(self, site: NormSite) -> SiteMeasurement:
        """What was measured at one norm so far."""
        return self._gauge.sites[site.path].result()

    def block(self, block: BlockCall) -> tuple[RowStatistics, RowStatistics]:
        """Statistics of the residual stream entering and leaving one block so far."""
        entering, leaving = self._gauge.blocks[block.path]
        return entering.result(), leaving.result()

    def attentions(self) -> tuple[Attention, ...]:
        """The attention calls seen so far, in forward order."""
        return tuple(accumulator.result() for accumulator in self._gauge.attentions.values())


def _unseen(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose own tensor operations bypass the mode, which would look at each of them first."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


class _SiteGauge:
    """The accumulators of one norm."""

    def __init__(self, spec: NormSpec) -> None:
        self.input, self.output = RowAccumulator(), RowAccumulator()
        self.attenuation = AttenuationAccumulator(spec, 0.0)
        self.calls = self.left_out = 0
        self.dtype: torch.dtype | None = None
        self._spec = spec

    def begin_call(self, x: Tensor) -> None:
        """Count a call; what the first one gives decides dtype and machine eps."""
        self.calls += 1
        if self.dtype is None:
            self.dtype = x.dtype
            self.attenuation = AttenuationAccumulator(self._spec, reference.machine_eps(x, self._spec))

    def result(self) -> SiteMeasurement:
        """What was measured so far."""
        entering, leaving = self.input.result(), self.output.result()
        in_half = self.dtype in _HALF and self._spec.statistics_dtype == "input"
        return SiteMeasurement(
            input=entering,
            output=leaving,
            attenuation=self.attenuation.result(),
            calls=self.calls,
            left_out=self.left_out,
            dtype=str(self.dtype).removeprefix("torch.") if self.dtype else "",
            headroom_bits=self._headroom(max(entering.absmax, leaving.absmax)),
            statistics_headroom_bits=self._headroom(self.attenuation.largest_sum) if in_half else None,
        )

    def _headroom(self, largest: float) -> float:
        if self.dtype is None or largest == 0:
            return math.inf
        return math.log2(torch.finfo(self.dtype).max) - math.log2(largest)


class _Gauge(Listener):
    """Adds what it hears of to the accumulators."""

    def __init__(self, sites: Sequence[NormSite], blocks: Sequence[BlockCall], trace: Trace) -> None:
        self.sites = {site.path: _SiteGauge(site.spec) for site in sites}
        self.blocks = {block.path: (RowAccumulator(), RowAccumulator()) for block in blocks}
        self.attentions: dict[tuple[str, str, int], AttentionAccumulator] = {}
        self._block_index = {block.path: block.index for block in blocks}
        self._sdpa_parents = {call.parent for call in trace.functions if call.function == "sdpa"}
        self._last: tuple[weakref.ref[Tensor], int, object, RowMoments | None] | None = None
        self.restart(None)

    def restart(self, mask: Tensor | None) -> None:
        """Begin a forward pass with this token mask."""
        self._mask = None if mask is None or bool(mask.all()) else mask
        self._tokens = None if mask is None else (mask.shape[0], mask.shape[1])
        self._last = None

    @_unseen
    def before_site(self, site: NormSite, x: Tensor) -> None:
        gauge = self.sites[site.path]
        gauge.begin_call(x)
        moments = self._moments(x, site.spec)
        if moments is None:
            gauge.left_out += 1
            return
        gauge.input.add(moments)
        if site.spec.weight_placement == "before" and site.gain is not None:
            rows = self._rows(x, site.spec)
            assert rows is not None
            moments = row_moments(rows * site.gain.to(rows))
        gauge.attenuation.add(moments)

    @_unseen
    def after_site(self, site: NormSite, y: Tensor) -> None:
        gauge = self.sites[site.path]
        if (moments := self._moments(y, site.spec)) is not None:
            gauge.output.add(moments)

    @_unseen
    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (x := first_tensor(args, kwargs)) is not None:
            self._tokens = (x.shape[0], x.shape[1])
            self._add_stream(x, self.blocks[block.path][0])

    @_unseen
    def after_block(self, block: BlockCall, y: Tensor) -> None:
        self._add_stream(y, self.blocks[block.path][1])

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if function == "sdpa":
            if (call := queries_and_keys(args, kwargs)) is not None and self._fits(call.query):
                self._attention(parent, "sdpa", call.query).add_call(call, self._mask)
        elif parent not in self._sdpa_parents:
            logits = softmax_logits(args, kwargs, self._tokens)
            if logits is not None and self._fits(logits):
                self._attention(parent, "softmax", logits).add_logits(logits, self._mask)

    def _fits(self, scores: Tensor) -> bool:
        """Whether the token mask tells the query rows of (B, H, T, ...)."""
        return self._mask is None or self._mask.shape == (scores.shape[0], scores.shape[2])

    def _attention(self, parent: str, source: Literal["sdpa", "softmax"], scores: Tensor) -> AttentionAccumulator:
        key = (parent, source, scores.shape[1])
        if key not in self.attentions:
            block = next(
                (index for path, index in self._block_index.items() if f"{parent}.".startswith(f"{path}.")), None
            )
            self.attentions[key] = AttentionAccumulator(parent, block, source, scores.shape[1])
        return self.attentions[key]

    def _add_stream(self, stream: Tensor, accumulator: RowAccumulator) -> None:
        if (moments := self._moments(stream, _STREAM)) is not None:
            accumulator.add(moments)

    def _moments(self, x: Tensor, spec: NormSpec) -> RowMoments | None:
        """Moments of the rows that count, or None where the token mask does not fit.

        The stream that leaves a block enters the next one and its first norm: a tensor measured last is
        not measured again.
        """
        layout = (spec.axes, spec.groups)
        # Inference tensors do not count their changes.
        version = -1 if x.is_inference() else x._version
        if self._last is not None and version >= 0 and self._last[1:3] == (version, layout) and self._last[0]() is x:
            return self._last[3]
        rows = self._rows(x, spec)
        moments = None if rows is None else row_moments(rows)
        self._last = (weakref.ref(x), version, layout, moments)
        return moments

    def _rows(self, x: Tensor, spec: NormSpec) -> Tensor | None:
        if self._mask is not None and spec.axes == "all_but_batch":
            return None
        rows = reference.to_rows(x, spec)
        return token_rows(rows.squeeze(-2) if spec.groups == 1 else rows, self._mask)
