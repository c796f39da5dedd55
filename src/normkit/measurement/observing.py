"""Reports every call of a norm site, a block or an attention function to a listener while a model runs.

Modules with a fused path that calls none of their parts, such as `torch.nn.TransformerEncoderLayer` in
evaluation mode, leave that path while they are hooked. The inside of `torch.nn.MultiheadAttention` stays unseen: to a
mode it is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from normkit.identification.sharding import is_distributed
from normkit.identification.sites import NormSite
from normkit.identification.tracing import ATTENTION_FUNCTIONS, NORM_FUNCTIONS, first_output, first_tensor
from normkit.measurement.blocks import BlockCall


class Listener:
    """Receives the calls of a model. The tensors are the model's own: read them, and do not keep them."""

    def before_site(self, site: NormSite, x: Tensor, /) -> None:
        """A norm is about to be called on x."""

    def after_site(self, site: NormSite, y: Tensor, /) -> Tensor | None:
        """A norm returned y; a tensor returned here takes its place."""

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """A block is about to be called; the first tensor of its arguments is the stream."""

    def after_block(self, block: BlockCall, y: Tensor, /) -> None:
        """A block returned the stream y."""

    def before_parent(self, path: str, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """One of the modules that call norms or attention as functions is about to be called."""

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> None:
        """The module at the path `parent` calls scaled_dot_product_attention ("sdpa") or a softmax."""


@contextmanager
def observed(
    model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], parents: Iterable[str], listener: Listener
) -> Iterator[None]:
    """Have the listener told of every call, until the context is left.

    Args:
        model: The model; left without hooks and mode, also if it raises.
        sites: The norms of the model.
        blocks: The blocks of the model.
        parents: Paths of the modules that call norms or attention as functions; a call belongs to the
            innermost of them that is running.
        listener: Receives the calls.
    """
    calls = FunctionCalls(sites, listener)
    handles: list[RemovableHandle] = []
    parents = sorted(set(parents))
    try:
        for path in parents:
            handles.extend(_hook_parent(path, model.get_submodule(path), calls, listener))
        for block in blocks:
            handles.extend(_hook_block(block, listener))
        for site in sites:
            if site.module is not None:
                handles.extend(_hook_site(site, site.module, listener))
        # A mode is in the way of every function that the model calls.
        with calls if parents else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def every_module(
    model: nn.Module,
    before: Callable[[str, tuple[object, ...], dict[str, object]], None],
    after: Callable[[str, object], None],
) -> Iterator[None]:
    """Tell of every module's calls, until the context is left; the model is left without hooks, also if it raises.

    Args:
        model: The model.
        before: Called with the path of a module and the arguments of a call.
        after: Called with the path and what the call returned.
    """

    def entering(path: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: before(path, args, kwargs)

    def leaving(path: str) -> Callable[..., None]:
        return lambda _module, _args, output: after(path, output)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(entering(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leaving(path)).remove)
        yield


class FunctionCalls(TorchFunctionMode):
    """Tells a listener of the norms and attentions that modules call as functions.

    A call belongs to the innermost module that `begin` told of and `end` has not.

    Args:
        sites: The norms of the model.
        listener: Receives the calls.
    """

    def __init__(self, sites: Sequence[NormSite], listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._sites = {(site.parent, site.function, site.ordinal): site for site in sites if site.module is None}
        self._parent: str | None = None
        self._made: dict[str, int] = {}

    def begin(self, path: str) -> tuple[str | None, dict[str, int]]:
        """The forward of the module at a path begins; returns what `end` takes: the module around it, and its calls."""
        outer = self._parent, self._made
        self._parent, self._made = path, {}
        return outer

    def end(self, outer: tuple[str | None, dict[str, int]]) -> None:
        """That forward has ended."""
        self._parent, self._made = outer

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION_FUNCTIONS:
            self._listener.at_attention(self._parent or "", ATTENTION_FUNCTIONS[function], args, kwargs)
        elif function in NORM_FUNCTIONS:
            return self._norm(NORM_FUNCTIONS[function], function, args, kwargs)
        return function(*args, **kwargs)

    def _norm(self, name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        ordinal = self._made.get(name, 0)
        self._made[name] = ordinal + 1
        site, x = self._sites.get((self._parent or "", name, ordinal)), first_tensor(args, kwargs)
        if site is None or x is None:
            return function(*args, **kwargs)
        self._listener.before_site(site, x)
        y = function(*args, **kwargs)
        replaced = self._listener.after_site(site, y)
        return y if replaced is None else replaced


def _hook_parent(path: str, module: nn.Module, calls: FunctionCalls, listener: Listener) -> Iterator[RemovableHandle]:
    # A forward that raises leaves its caller behind; those of the next one lie on top.
    outer: list[tuple[str | None, dict[str, int]]] = []

    def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        outer.append(calls.begin(path))
        listener.before_parent(path, args, kwargs)

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(lambda *_: calls.end(outer.pop()))


def _hook_site(site: NormSite, module: nn.Module, listener: Listener) -> Iterator[RemovableHandle]:
    # Before and after are two hooks: a norm may overwrite its input.
    def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (x := first_tensor(args, kwargs)) is not None:
            listener.before_site(site, x)

    def after(_module: nn.Module, _args: object, output: object) -> object:
        return listener.after_site(site, output) if isinstance(output, Tensor) else None

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)


def _hook_block(block: BlockCall, listener: Listener) -> Iterator[RemovableHandle]:
    def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        listener.before_block(block, args, kwargs)

    def after(_module: nn.Module, _args: object, output: object) -> None:
        if (y := first_output(output)) is not None:
            listener.after_block(block, y)

    def leave(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (y := first_tensor(args, kwargs)) is not None:
            listener.after_block(block, y)

    # Before the hooks that gather a sharded block's parameters and free them again: a replay goes through these itself.
    is_split = any(map(is_distributed, block.module.parameters()))
    yield block.module.register_forward_pre_hook(before, with_kwargs=True, prepend=is_split)
    if block.leaves is None:
        yield block.module.register_forward_hook(after)
    else:
        yield block.leaves.register_forward_pre_hook(leave, with_kwargs=True)
