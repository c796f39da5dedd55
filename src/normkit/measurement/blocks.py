"""The repeated blocks of a model: members of its module lists that map the residual stream to itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from normkit.identification.tracing import ModuleCall, Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCall:
    """One block."""

    path: str
    """The module's path."""
    index: int
    """Position among the blocks, from 0, in the order of their first calls."""
    module: nn.Module
    """The module; of a block that is none, the first of its parts, which the stream enters."""
    leaves: nn.Module | None = None
    """None of a block that is a module: its output is the stream. Else the module that the stream enters next."""


def find_blocks(model: nn.Module, trace: Trace, norms: Collection[str] = ()) -> tuple[BlockCall, ...]:
    """The blocks of a model, in forward order.

    A block is a member of a `torch.nn.ModuleList`, of a Sequential inside one or of a Sequential of one class,
    whose called members all have modules of their own and map (B, T, D) to (B, T, D), in a tuple or bare. Lists
    inside a block, such as experts, do not count. Of several lists, such as encoder and decoder, all are kept
    and the index runs on; a list of a single member counts only where there is no longer one.

    Args:
        model: The model.
        trace: One forward pass of it.
        norms: Paths of its norms, which are no blocks, even where a list holds them.
    """
    first_calls: dict[str, ModuleCall] = {}
    for call in trace.modules:
        first_calls.setdefault(call.path, call)
    refused = {_parent(path) for path, call in first_calls.items() if not _is_stream(call)}
    candidates = {
        path: call
        for path, call in first_calls.items()
        if path and path not in norms and _parent(path) not in refused and _in_list(model, path)
    }
    outermost = [path for path in candidates if not any(path.startswith(f"{other}.") for other in candidates)]
    lengths = [sum(_parent(other) == _parent(path) for other in outermost) for path in outermost]
    shortest = min(2, max(lengths, default=1))
    kept = [path for path, length in zip(outermost, lengths, strict=True) if length >= shortest]
    return tuple(BlockCall(path=path, index=index, module=candidates[path].module) for index, path in enumerate(kept))


def block_of(path: str, blocks: Iterable[BlockCall]) -> int | None:
    """The index of the block that a module's path lies in, or None outside the blocks."""
    return next((block.index for block in blocks if f"{path}.".startswith(f"{block.path}.")), None)


def _is_stream(call: ModuleCall) -> bool:
    keeps_shape = len(call.input_shape) == 3 and call.input_shape == call.output_shape
    return keeps_shape and any(call.module.children())


def _in_list(model: nn.Module, path: str) -> bool:
    """The module's parent is a ModuleList, a Sequential inside one or a Sequential of one class."""
    parent = model.get_submodule(_parent(path))
    if isinstance(parent, nn.Sequential):
        if len(parent) > 1 and len({type(member) for member in parent}) == 1:
            return True
        parent = model.get_submodule(_parent(_parent(path)))
    return isinstance(parent, nn.ModuleList)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
