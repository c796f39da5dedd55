"""The hooks that a watch puts into a model, and the switch that turns them on and off.

They are put in before the model is compiled and stay: a compiler traces them twice, once with the switch on and once
off. Off, only a sentinel is left: whether an element of each norm's and block's output is NaN or infinite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.identification.sharding import local
from normkit.identification.sites import NormSite
from normkit.identification.tracing import first_tensor
from normkit.measurement.attention import add_call, add_logits, queries_and_keys, select, softmax_logits
from normkit.measurement.hooks import Failures, Forward, Hook
from normkit.measurement.layout import Layout
from normkit.measurement.observing import FunctionCalls, Listener
from normkit.measurement.row_counters import RowCounter, add_gradient
from normkit.measurement.tables import Tables
from normkit.ops import counting

# On, off, and either of them in evaluation and for shapes that change.
_GRAPHS = 8


@dataclass(eq=False, kw_only=True)
class Switch:
    """What the hooks look at before they measure."""

    on: bool = False
    """Everything is measured in this step; otherwise the sentinel alone."""
    live: bool = False
    """A forward pass of training runs. Repetitions by a checkpoint in the backward pass run outside of it."""
    mask: Tensor | None = None
    """True where a token of this pass counts, (B, T), or None for all."""


class Instruments:
    """The hooks of one watch, in a model without its wrappers."""

    def __init__(self, model: nn.Module, layout: Layout, tables: Tables, switch: Switch) -> None:
        self.model, self.layout, self.tables, self.switch = model, layout, tables, switch
        self.sentinel = torch.zeros(len(layout.sentinels), 2, dtype=torch.float32, device=tables["rows"].device)
        """For each place 0 and how often it was looked at; NaN and NaN once an element was not finite."""
        self.failures = Failures()
        self._once = torch.tensor([0.0, 1.0], dtype=torch.float32, device=self.sentinel.device)
        self._handles: list[RemovableHandle] = []
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._settings: dict[str, Any] = {}
        self._in_place: set[str] = set()

    def install(self) -> None:
        """Put the hooks in."""
        begin, end = Hook(self.failures, "the model", self._begin), Hook(self.failures, "the model", self._end)
        self._handles.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles.append(self.model.register_forward_hook(end))
        sites, blocks = self.layout.sites, self.layout.blocks
        for index, site in enumerate(sites):
            if site.module is not None:
                entering, leaving = self.layout.norm_counters(index, has_deviations=False, gain=None)
                self._hook(site.module, index, entering=entering, leaving=leaving)
        for block in blocks:
            stream, leaving = self.layout.block_counters(block.index, has_deviations=False)
            self._hook(block.module, len(sites) + block.index, entering=stream, leaving=leaving)
        self._allow_graphs()
        calls = FunctionCalls(sites, _Counting(self))
        for path in self.layout.callers:
            module = self.model.get_submodule(path)
            forward = Forward(module.forward, self._within(path, calls))
            forward.put_before(module)
            self._forwards.append((module, forward))

    def remove(self) -> None:
        """Take the hooks out; the model is as it was."""
        self.switch.on = self.switch.live = False
        for handle in self._handles:
            handle.remove()
        for module, forward in reversed(self._forwards):
            forward.take_from(module)
        self._handles.clear()
        self._forwards.clear()
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
        self.switch.live = False

    def begin_call(self, kwargs: Mapping[str, Any]) -> None:
        """A call of the model begins: find out whether it is one of training, and which of its tokens count."""
        if not torch.compiler.is_compiling():
            self._allow_graphs()
        self.switch.live = torch.is_grad_enabled() or self.failures.is_rehearsal
        mask = kwargs.get("attention_mask")
        # A mask of floating-point numbers may be one that is added to logits.
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            self.switch.mask = mask.bool()
        else:
            self.switch.mask = None

    def _hook(self, module: nn.Module, line: int, *, entering: RowCounter | None, leaving: RowCounter) -> None:
        """Hook one norm or block, given by its line of the sentinel."""
        path, blocks = self.layout.sentinels[line], len(self.layout.blocks)
        is_block = line >= len(self.layout.sites)
        # Gradients are counted at blocks, or at norms where there is no block.
        gradient = line - len(self.layout.sites) if is_block else None if blocks else line

        def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if entering is not None and self.measures() and (x := first_tensor(args, kwargs)) is not None:
                entering.add(self.tables, local(x), self.switch.mask)

        def after(_module: nn.Module, args: Sequence[object], output: object) -> object:
            place, y = _stream(output)
            if y is None or not (is_block or place is None):
                return None
            is_same = len(args) > 0 and args[0] is y
            if is_same and self.failures.is_rehearsal:
                self._in_place.add(path)
            # A module that returns its very input did not run, unless it works in place, as seen in the rehearsal.
            if not is_same or path in self._in_place:
                self._mark_seen(line, y)
            if self.measures():
                leaving.add(self.tables, local(y), self.switch.mask)
            # Where a re-entrant checkpoint repeats a forward pass, the gradient of the repetition counts.
            if gradient is None or not (self.switch.on and y.requires_grad):
                return None
            table = self.tables["activation gradients"][gradient]
            replaced = gradient_counted(y, table, lambda body, *args: self.failures.run("gradients", body, *args))
            return None if replaced is None else _with_stream(output, place, replaced)

        if entering is not None:
            self._handles.append(module.register_forward_pre_hook(Hook(self.failures, path, before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(Hook(self.failures, path, after)))

    def _within(self, path: str, calls: FunctionCalls) -> Callable[..., Any]:
        """A function that calls the forward of the module at a path, while the calls of that module are counted.

        The mode is entered where the outermost of these modules runs, and only when the switch is on: every call of a
        torch function passes through it.
        """

        def around(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self.measures():
                return forward(*args, **kwargs)
            outer = calls.begin(path)
            try:
                if outer[0] is not None:
                    return forward(*args, **kwargs)
                with calls:
                    return forward(*args, **kwargs)
            finally:
                calls.end(outer)

        return around

    def measures(self) -> bool:
        """Whether the running code is to be counted."""
        return self.switch.on and self.switch.live

    def _mark_seen(self, place: int, y: Tensor) -> None:
        if not self.switch.live:
            return
        y = local(y).detach()
        if counting.can_count(y, self.sentinel):
            counting.mark_seen(y, place, self.sentinel)
            return
        # A sum in 16 bits would leave their range where no element does.
        seen = y.sum(dtype=y.dtype if y.dtype == torch.float64 else torch.float32)
        self.sentinel[place].add_(torch.add(self._once, seen.float(), alpha=0))


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


class _Counting(Listener):
    """Counts at the norms and attentions that modules call as functions."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        layout = instruments.layout
        self._counters = {
            site.path: layout.norm_counters(index, has_deviations=False, gain=None)
            for index, site in enumerate(layout.sites)
            if site.module is None
        }
        self._attentions = {(place.parent, place.function): index for index, place in enumerate(layout.attentions)}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        self._count(site.path, 0, x)

    def after_site(self, site: NormSite, y: Tensor) -> None:
        self._count(site.path, 1, y)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        place = self._attentions.get((parent, function))
        if place is not None:
            failures = self._instruments.failures
            failures.run(f"attention of {parent}", self._add_attention, function, place, args, kwargs)

    def _count(self, path: str, side: int, x: Tensor) -> None:
        instruments, counter = self._instruments, self._counters[path][side]
        instruments.failures.run(path, counter.add, instruments.tables, local(x), instruments.switch.mask)

    def _add_attention(self, name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tables, mask = self._instruments.tables, self._instruments.switch.mask
        first = self._instruments.layout.attentions[place].first_head
        if name == "sdpa":
            call = queries_and_keys(args, kwargs)
            if call is not None and call.query.numel():
                add_call(tables, place, call, select(call, _of_rows(mask, call.query)), first)
        elif (logits := softmax_logits(args, kwargs, None)) is not None and logits.numel():
            add_logits(tables, place, logits, _of_rows(mask, logits), first)


def _of_rows(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """The token mask if it tells the query rows of (B, H, T, ...), else None."""
    return mask if mask is not None and mask.shape == (scores.shape[0], scores.shape[2]) else None


def _stream(output: object) -> tuple[int | None, Tensor | None]:
    """The first floating-point tensor of an output, and its place in a tuple or list."""
    if isinstance(output, Tensor):
        return None, output if output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        for place, member in enumerate(output):
            if isinstance(member, Tensor) and member.is_floating_point():
                return place, member
    return None, None


def _with_stream(output: Any, place: int | None, y: Tensor) -> object:
    if place is None:
        return y
    members: Iterator[object] = (y if index == place else member for index, member in enumerate(output))
    return type(output)(*members) if hasattr(output, "_fields") else type(output)(members)
