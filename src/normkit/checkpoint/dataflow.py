"""One run of a model: which module gives a tensor, and all that reads it.

Each operation of torch is seen below Python, also those of scripted modules and of autograd functions. A tensor and its
views are one place in memory, so that a read of a view is a read of the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normkit.identification.state import hooked
from normkit.identification.tracing import first_tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module with a tensor in and a tensor out."""

    end: int
    """Operations before its return."""
    input: Tensor
    """The first tensor argument. Tensors are held, so that no other takes their memory."""
    output: Tensor
    """The returned tensor."""


@dataclass(frozen=True, eq=False)
class Read:
    """One operation that took a tensor or a view of it."""

    order: int
    """Operations before it."""
    modules: frozenset[nn.Module]
    """The modules that were running."""
    operation: str
    """Its name, such as "add"."""
    is_write: bool
    """It may change its arguments in place."""


@dataclass(eq=False)
class Dataflow:
    """The calls of some modules in one run, and every read of a tensor in it."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls of the modules asked for; a call that gives or takes no tensor is left out."""
    reads: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    """Place in memory -> its reads, in order. Views alone are no reads."""
    makers: dict[int, str] = field(default_factory=dict)
    """Place in memory -> the operation that made it, "" outside of the modules asked for."""
    outputs: set[int] = field(default_factory=set)
    """Places in memory of the model's outputs."""

    def other_reader(self, tensor: Tensor, since: int, module: nn.Module) -> str | None:
        """The reader of a tensor from an operation on, outside of a module; None if there is none."""
        place = place_of(tensor)
        for read in self.reads[place]:
            if read.order >= since and module not in read.modules:
                return read.operation
        return "the model's output" if place in self.outputs else None


def place_of(tensor: Tensor) -> int:
    """The memory of a tensor, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def observed(run: Callable[[], Any], modules: Collection[nn.Module]) -> Dataflow:
    """Run a model once and record the calls of some of its modules and the reads of every tensor.

    Memory: inputs and outputs of these modules are held until the result is dropped.
    """
    seen = Dataflow()
    recorder = _Recorder(seen)
    with torch.no_grad(), _hooked(modules, recorder), recorder:
        output = run()
    seen.outputs.update(place_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return seen


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Dataflow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.order = seen, 0
        self.running: list[nn.Module] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            name = func.name().partition("::")[2].partition(".")[0]
            read = Read(self.order, frozenset(self.running), name.strip("_"), func._schema.is_mutable)
            taken = {place_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for place in taken:
                self.seen.reads[place].append(read)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and (place := place_of(leaf)) not in taken:
                    # Memory that was freed and taken again: earlier reads were those of another tensor.
                    self.seen.reads.pop(place, None)
                    # Operations on a batch before the model takes it are none of the model's.
                    self.seen.makers[place] = read.operation if self.running else ""
        self.order += 1
        return output


@contextmanager
def _hooked(modules: Collection[nn.Module], recorder: _Recorder) -> Iterator[None]:
    given: list[Tensor | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.running.append(module)
        given.append(first_tensor(args, kwargs))

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        recorder.running.pop()
        taken = given.pop()
        if taken is not None and isinstance(output, Tensor):
            recorder.seen.calls[module].append(Call(recorder.order, taken, output))

    each = dict.fromkeys(modules)
    begins = (module.register_forward_pre_hook(before, with_kwargs=True) for module in each)
    ends = (module.register_forward_hook(after) for module in each)
    with hooked([*begins, *ends]):
        yield
