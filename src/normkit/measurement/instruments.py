"""The quantities that hooks count into tables: rows of norms and blocks, attention logits, in training gradients.

`Counts` is the same for a text and for a training. `Instruments` are its hooks in a training: they are put in before
the model is compiled and stay, and a compiler traces them twice, once switched on and once off. Off, only a sentinel is
left: whether an element of each norm's and block's output is NaN or infinite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.identification.sharding import local
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
from normkit.measurement.hooks import Failures, Hook, Hooks, Listener
from normkit.measurement.layout import BlockCall, Layout
from normkit.measurement.row_counters import RowCounter, Tables
from normkit.ops import counting

# On, off, and either of them in evaluation and for shapes that change.
_GRAPHS = 8


class Counts(Listener):
    """Counts the rows of norms and blocks, and attention logits, into the tables of a layout."""

    def __init__(self, layout: Layout, tables: Tables) -> None:
        self.layout, self.tables = layout, tables
        self.mask: Tensor | None = None
        """True where a token of the running pass counts, (B, T), or None for all."""
        self.features = [*layout.features]
        """Features of a row of each row counter, as it was last seen."""
        self._norms = {site.path: layout.norm_counters(index) for index, site in enumerate(layout.sites)}
        self._blocks = [layout.block_counters(block.index) for block in layout.blocks]
        self._attentions = {(each.parent, each.function): line for line, each in enumerate(layout.attentions)}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a norm."""
        self._count(self._norms[site.path][0], x, site)

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> Tensor | None:
        """Count what leaves a norm."""
        self._count(self._norms[site.path][1], y)
        return None

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Count the stream that enters a block, where it is another than the one that left the block before."""
        counter = self._blocks[block.index][0]
        if counter is not None and (x := first_tensor(args, kwargs)) is not None:
            self._count(counter, x)

    def after_block(self, block: BlockCall, y: Tensor, _given: object) -> Tensor | None:
        """Count the stream that leaves a block."""
        self._count(self._blocks[block.index][1], y)
        return None

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count an attention call."""
        line = self._attentions.get((parent, function))
        if line is None:
            return
        first = self.layout.attentions[line].first_head
        if function == "sdpa":
            call = queries_and_keys(args, kwargs)
            if call is not None and call.query.numel():
                add_call(self.tables, line, call, self._selected(call, self._tokens_of(call.query)), first)
        elif (logits := softmax_logits(args, kwargs)) is not None and logits.numel():
            add_logits(self.tables, line, logits, self._tokens_of(logits), first)

    def _count(self, counter: RowCounter, x: Tensor, norm: NormSite | None = None) -> None:
        gain = norm.parameters()[0] if norm is not None and norm.spec.gain.is_before else None
        features = counter.add(self.tables, local(x), self.mask, gain)
        if not torch.compiler.is_compiling():
            self.features[counter.place] = features

    def _tokens_of(self, scores: Tensor) -> Tensor | None:
        """The token mask if it tells the query rows of (B, H, T, ...), else None."""
        fits = self.mask is not None and self.mask.shape == (scores.shape[0], scores.shape[2])
        return self.mask if fits else None

    def _selected(self, call: QueriesAndKeys, tokens: Tensor | None) -> Selection:
        return select(call, tokens)


class Instruments(Counts):
    """The hooks of one watch, in a model without its wrappers."""

    def __init__(self, model: nn.Module, layout: Layout, tables: Tables) -> None:
        super().__init__(layout, tables)
        self.on = True
        """Everything is measured in this step; otherwise the sentinel alone."""
        self.live = False
        """A forward pass of training runs. Repetitions by a checkpoint in the backward pass run outside of it."""
        self.sentinel = torch.zeros(len(layout.sentinels), 2, dtype=torch.float32, device=tables["rows"].device)
        """For each place 0 and how often it was looked at; NaN and NaN once an element was not finite."""
        self.failures = Failures()
        self._model, self._hooks = model, Hooks(self, self.failures)
        self._once = torch.tensor([0.0, 1.0], dtype=torch.float32, device=self.sentinel.device)
        self._settings: dict[str, Any] = {}
        self._in_place: set[str] = set()
        self._places = {site.path: index for index, site in enumerate(layout.sites)}

    @property
    def handles(self) -> list[RemovableHandle]:
        """The handles of its hooks; `remove` removes others that were added here too."""
        return self._hooks.handles

    def install(self) -> None:
        """Put the hooks in."""
        begin, end = Hook(self.failures, "the model", self._begin), Hook(self.failures, "the model", self._end)
        self._hooks.handles.append(self._model.register_forward_pre_hook(begin, with_kwargs=True))
        self._hooks.handles.append(self._model.register_forward_hook(end))
        self._allow_graphs()
        self._hooks.install(self._model, self.layout.sites, self.layout.blocks, self.layout.callers)

    def remove(self) -> None:
        """Take the hooks out; the model is as it was."""
        self.on = self.live = False
        self._hooks.remove()
        for name, value in self._settings.items():
            setattr(sys.modules["torch._dynamo"].config, name, value)
        self._settings.clear()

    def _allow_graphs(self) -> None:
        """Let a compiler make one graph for each block: the hooks of each write to lines of their own."""
        if self._settings or "torch._dynamo" not in sys.modules:
            return
        config = sys.modules["torch._dynamo"].config
        places = len(self.layout.sentinels) + len(self.layout.callers)
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            self._settings[name] = getattr(config, name)
            setattr(config, name, self._settings[name] + _GRAPHS * places)
        # Repetitions by a checkpoint must not be counted; without this setting a compiler refuses to trace them.
        name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
        self._settings[name] = getattr(config, name)
        setattr(config, name, True)

    def _begin(self, _module: nn.Module, _args: object, kwargs: Mapping[str, Any]) -> None:
        self.begin_call(kwargs)

    def _end(self, _module: nn.Module, _args: object, _output: object) -> None:
        self.live = False

    def begin_call(self, kwargs: Mapping[str, Any]) -> None:
        """A call of the model begins: find out whether it is one of training, and which of its tokens count."""
        if not torch.compiler.is_compiling():
            self._allow_graphs()
        self.live = torch.is_grad_enabled() or self.failures.is_rehearsal
        mask = kwargs.get("attention_mask")
        # A mask of floating-point numbers may be one that is added to logits.
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            self.mask = mask.bool()
        else:
            self.mask = None

    def listens(self) -> bool:
        """Whether the running code is to be counted."""
        return self.on and self.live

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Count what enters a norm in a measured step."""
        if site.module is None:
            self.failures.run(site.path, super().before_site, site, x)
        elif self.listens():
            super().before_site(site, x)

    def after_site(self, site: NormSite, y: Tensor, given: object) -> Tensor | None:
        """Count what leaves a norm in a measured step; look at it in every one."""
        if site.module is None:
            self.failures.run(site.path, super().after_site, site, y, given)
            return None
        line = self._places[site.path]
        self._mark_seen(site.path, line, y, given)
        if self.listens():
            super().after_site(site, y, given)
        # Gradients are counted at blocks, or at norms where there is no block.
        return None if self.layout.blocks else self._gradient_counted(line, y)

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Count the stream that enters a block in a measured step."""
        if self.listens():
            super().before_block(block, args, kwargs)

    def after_block(self, block: BlockCall, y: Tensor, given: object) -> Tensor | None:
        """Count the stream that leaves a block in a measured step; look at it in every one."""
        self._mark_seen(block.path, len(self.layout.sites) + block.index, y, given)
        if self.listens():
            super().after_block(block, y, given)
        return self._gradient_counted(block.index, y)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count an attention call of a measured step."""
        self.failures.run(f"attention of {parent}", super().at_attention, parent, function, args, kwargs)

    def _mark_seen(self, path: str, place: int, y: Tensor, given: object) -> None:
        if given is y and self.failures.is_rehearsal:
            self._in_place.add(path)
        # A module that returns its very input did not run, unless it works in place, as seen in the rehearsal.
        if not self.live or (given is y and path not in self._in_place):
            return
        y = local(y).detach()
        if counting.can_count(y, self.sentinel):
            counting.mark_seen(y, place, self.sentinel)
            return
        # A sum in 16 bits would leave their range where no element does.
        seen = y.sum(dtype=y.dtype if y.dtype == torch.float64 else torch.float32)
        self.sentinel[place].add_(torch.add(self._once, seen.float(), alpha=0))

    def _gradient_counted(self, line: int, y: Tensor) -> Tensor | None:
        # Where a re-entrant checkpoint repeats a forward pass, the gradient of the repetition counts.
        if not (self.on and y.requires_grad):
            return None
        table = self.tables["activation gradients"][line]
        return gradient_counted(y, table, lambda body, *args: self.failures.run("gradients", body, *args))


def add_gradient(table: Tensor, gradient: Tensor) -> None:
    """Count the rows of the loss's gradient with respect to an activation into one line of `gradient_table`."""
    given = gradient.detach()
    given = given if given.dtype == torch.float64 else given.float()
    squares = torch.linalg.vector_norm(given, dim=-1).to(table.dtype).square()
    # NaN is not less than infinity.
    finite = squares < math.inf
    rows, total = finite.sum(), torch.where(finite, squares, 0.0).sum() / gradient.shape[-1]
    table.add_(torch.stack([rows, total, squares.numel() - rows]))


class _GradientCounter(torch.autograd.Function):
    """The identity, which counts the gradient that passes: what a compiler traces where it cannot trace a hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        add_gradient(ctx.table, local(gradient))
        return gradient, None


def gradient_counted(x: Tensor, table: Tensor, guarded: Callable[..., object]) -> Tensor | None:
    """Have the gradient of x counted on its way back; x and its gradient stay as they are.

    Args:
        x: An activation that requires a gradient.
        table: One line of the table "activation gradients".
        guarded: Calls a function with arguments, and never raises.

    Returns:
        The tensor that must replace x where a compiler traces; None where x itself can stay.
    """
    if torch.compiler.is_compiling():
        replaced: Tensor = _GradientCounter.apply(x, table)  # type: ignore[no-untyped-call]
        return replaced

    # A hook would stay on a parameter, and count the next step's gradient too.
    if x.is_leaf:
        return None

    def count(gradient: Tensor) -> None:
        guarded(add_gradient, table, local(gradient))

    x.register_hook(count)  # type: ignore[no-untyped-call]
    return None
