"""Parts without effect: norms whose output nothing reads, and branches that add the same vector to every row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.identification.sharding import local
from normkit.identification.tracing import first_output
from normkit.measurement.blocks import BlockCall
from normkit.measurement.observing import every_module

# Fewer rows may be alike by chance.
_FEWEST_ROWS = 4
# Rows that a matrix makes of equal rows differ by float32's rounding at most; rows of a stream are farther apart.
_SAME, _APART = 1e-6, 1e-2


class IdleParts(TorchFunctionMode):
    """Finds, in one forward pass, what has no effect.

    Args:
        norms: Paths of modules that are norms.
    """

    def __init__(self, norms: Collection[str]) -> None:
        super().__init__()
        self._norms = norms
        self._read: set[int] = set()
        # The tensors themselves: the number of one that is gone is given to another.
        self._made: dict[str, list[Tensor]] = {}
        self._calls: dict[str, tuple[bool, bool, torch.Size | None]] = {}
        self._entered: list[bool] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the forward pass inside; the model is left as it was, also after an exception."""
        with every_module(model, self._enter, self._leave), self:
            yield

    def unread(self, model: nn.Module, output: object, run: Callable[[], object]) -> tuple[str, ...]:
        """Paths of norms whose output nothing reads.

        A norm is first suspected where no function of torch is given its output; that counts where another output in
        its place leaves the model's own as it is, bit for bit.

        Args:
            model: The model; it is left as it was.
            output: What it returned.
            run: Calls the model again on the same input; it is not called if no norm is suspected.
        """
        read = self._read | {id(value) for value in _tensors(output)}
        suspected = [path for path, made in self._made.items() if not any(id(value) in read for value in made)]
        return tuple(path for path in suspected if _changes_nothing(model.get_submodule(path), output, run))

    def constant(self, blocks: Sequence[BlockCall]) -> tuple[str, ...]:
        """Paths of branches whose rows are all one vector.

        A branch is the outermost module inside a block that gives all rows of the stream one vector, though the rows
        that enter it, or a module in it, differ.
        """
        branches = (self._branch_of(block.path) for block in blocks if block.leaves is None)
        return tuple(path for found in branches for path in found if path not in self._norms)

    def _enter(self, _path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        with torch._C.DisableTorchFunction():
            rows = {id(value): value for value in _tensors((args, kwargs)) if _has_rows(value)}
            # With several inputs, such as queries and keys, one of them may have equal rows.
            self._entered.append(len(rows) == 1 and _spread(next(iter(rows.values()))) > _APART)

    def _leave(self, path: str, output: object) -> None:
        y = first_output(output)
        apart = self._entered.pop()
        if y is None:
            return
        if path in self._norms and isinstance(output, Tensor):
            self._made.setdefault(path, []).append(y)
            # The tensor that had this id before no longer exists.
            self._read.discard(id(y))
        with torch._C.DisableTorchFunction():
            self._calls.setdefault(path, (apart, _has_rows(y) and _spread(y) <= _SAME, y.shape))

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Reading a tensor's shape or type is no use of its numbers.
        if getattr(function, "__name__", "") not in ("__get__", "size", "dim"):
            self._read.update(id(value) for value in _tensors((args, kwargs or {})))
        return function(*args, **(kwargs or {}))

    def _branch_of(self, block: str) -> list[str]:
        """The outermost modules of a block whose rows are one vector, where one in them is given rows that differ."""
        _, _, stream = self._calls.get(block, (False, False, None))
        inside = [path for path in self._calls if path.startswith(f"{block}.") and self._calls[path][2] == stream]
        found = []
        for path in inside:
            above = [other for other in inside if f"{path}.".startswith(f"{other}.")]
            if self._calls[path][:2] == (True, True) and all(self._calls[other][1] for other in above):
                found.append(min(above, key=len))
        return list(dict.fromkeys(found))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _tensors(member)


def _has_rows(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() == 3 and value.shape[0] * value.shape[1] >= _FEWEST_ROWS


def _spread(value: Tensor) -> float:
    """The largest difference of any row from the first, over the largest magnitude; 0 where all is 0."""
    rows = local(value.detach()).double().flatten(0, 1)
    return float((rows - rows[0]).abs().max() / rows.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _changes_nothing(norm: nn.Module, output: object, run: Callable[[], object]) -> bool:
    """The model's output is the same where the norm's output is another."""

    def alter(_module: nn.Module, _args: object, output: object) -> object:
        return output * 3 + 1 if isinstance(output, Tensor) else None

    as_it_is = first_output(_plain(output))
    handle = norm.register_forward_hook(alter)
    try:
        altered = first_output(_plain(run()))
    finally:
        handle.remove()
    return as_it_is is not None and altered is not None and torch.equal(as_it_is, altered)


def _plain(output: object) -> object:
    """Outputs in a mapping, as those of transformers, as a tuple."""
    return tuple(output.values()) if isinstance(output, Mapping) else output
