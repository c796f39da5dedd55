"""The hooks of every measurement: a listener is told of each call of a norm, a block or an attention function.

Norms and blocks are hooked as modules. Norms and attention that modules call as functions are seen by a mode, which is
entered where the outermost of these modules runs, and only while the listener listens: every call of a torch function
passes through it. In a training a failure is recorded and not raised, and a copy of the model holds no hook.

Modules with a fused path that calls none of their parts, such as `torch.nn.TransformerEncoderLayer` in evaluation mode,
leave that path while they are hooked. The inside of `torch.nn.MultiheadAttention` stays unseen: to a mode it is one
function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from normkit.identification.sharding import is_distributed
from normkit.identification.side_by_side import Run, is_now
from normkit.identification.sites import NormSite
from normkit.identification.tracing import ATTENTION_FUNCTIONS, NORM_FUNCTIONS, first_output, first_tensor
from normkit.text import first_line

if TYPE_CHECKING:
    from normkit.measurement.layout import BlockCall


class Failures:
    """The measurements that failed."""

    def __init__(self) -> None:
        self.by_place: dict[str, str] = {}
        """The first failure of each place, on one line."""
        self.is_rehearsal = False
        """A place that fails in the rehearsal is given up, so that no compiler has to trace it."""
        self._given_up: set[str] = set()

    def run(self, place: str, body: Callable[..., Any], *args: Any) -> Any:
        """Call a measurement of a place with its arguments; None where it fails."""
        if place in self._given_up:
            return None
        if torch.compiler.is_compiling():
            return body(*args)
        try:
            return body(*args)
        # A model may pass anything, such as the tensors of `torch.func`; the training must not end because of it.
        except Exception as error:
            self.by_place.setdefault(place, first_line(error))
            if self.is_rehearsal:
                self._given_up.add(place)
            return None


class Hook:
    """One hook of a module, which measures one place; `body` is called with the hook's arguments."""

    def __init__(self, failures: Failures, place: str, body: Callable[..., Any]) -> None:
        self._failures, self._place, self._body = failures, place, body

    def __call__(self, *args: Any) -> Any:
        """Measure; None where that fails."""
        return self._failures.run(self._place, self._body, *args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Callable[..., None]]]:
        """A copied or pickled hook does nothing: it would count another model's rows."""
        return partial, (_does_nothing,)


def _does_nothing(*_args: object, **_kwargs: object) -> None:
    return None


class Forward:
    """Stands in for the forward of one module.

    `around` is called with that forward, its arguments and its keywords.
    """

    def __init__(self, original: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.__wrapped__, self._around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `around` with the forward."""
        return self._around(self.__wrapped__, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Callable[..., Any]]]:
        """A copy, or what is pickled, is the forward alone: where it is a method, that of the copied module."""
        return _itself, (self.__wrapped__,)

    def put_before(self, module: nn.Module) -> None:
        """Replace the module's forward."""
        self._is_own = "forward" in module.__dict__
        module.forward = self

    def take_from(self, module: nn.Module) -> None:
        """Restore the forward; if others have replaced it since, theirs stays, and leaves this one out."""
        outer = module.__dict__.get("forward")
        if outer is not self:
            while isinstance(outer, Forward) and outer.__wrapped__ is not self:
                outer = outer.__wrapped__
            if isinstance(outer, Forward):
                outer.__wrapped__, outer._is_own = self.__wrapped__, self._is_own
            return
        if self._is_own:
            module.forward = self.__wrapped__
        else:
            del module.forward


def _told_in(owner: threading.Thread, body: Callable[..., Any]) -> Callable[..., Any]:
    """A hook; one that is put in by a run beside others is told of the calls of that run alone."""
    return (lambda *args: body(*args) if is_now(owner) else None) if isinstance(owner, Run) else body


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class Listener:
    """Receives the calls of a model. The tensors are the model's own: read them, and do not keep them."""

    def listens(self) -> bool:
        """Whether calls of functions are to be told now."""
        return True

    def before_site(self, site: NormSite, x: Tensor, /) -> None:
        """A norm is about to be called on x."""

    def after_site(self, site: NormSite, y: Tensor, given: object, /) -> Tensor | None:
        """A norm returned y; `given` is its first positional argument. A tensor returned here takes the place of y."""

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """A block is about to be called; the first tensor of its arguments is the stream."""

    def after_block(self, block: BlockCall, y: Tensor, given: object, /) -> Tensor | None:
        """A block returned the stream y; the rest as for a norm."""

    def before_parent(self, path: str, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """One of the modules that call norms or attention as functions begins its forward."""

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> None:
        """The module at the path `parent` calls scaled_dot_product_attention ("sdpa") or a softmax."""


class Hooks:
    """The hooks of one listener in a model; without `failures` a failure in the listener is raised."""

    def __init__(self, listener: Listener, failures: Failures | None = None) -> None:
        self._listener, self._failures = listener, failures
        self.handles: list[RemovableHandle] = []
        """Those of the hooks; `remove` removes others that were added here too."""
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._owner = threading.current_thread()

    def install(
        self, model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], callers: Iterable[str]
    ) -> None:
        """Put the hooks in.

        Args:
            model: The model.
            sites: The norms to tell of.
            blocks: The blocks to tell of.
            callers: Paths of the modules that call norms or attention as functions; a call belongs to the innermost of
                them that is running.
        """
        # Where a block ends with the norm that the stream enters next, the block is told first.
        for block in blocks:
            self._hook_block(block)
        for site in sites:
            if site.module is not None:
                self._hook_site(site, site.module)
        calls = _FunctionCalls(sites, self._listener)
        for path in sorted(set(callers)):
            module = model.get_submodule(path)
            # No mode sees the inside of a scripted module, and its forward cannot be replaced.
            if not isinstance(module, torch.jit.ScriptModule):
                forward = Forward(module.forward, _within(path, calls, self._listener))
                forward.put_before(module)
                self._forwards.append((module, forward))

    def _hook_site(self, site: NormSite, module: nn.Module) -> None:
        def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if (x := first_tensor(args, kwargs)) is not None:
                self._listener.before_site(site, x)

        def after(_module: nn.Module, args: tuple[object, ...], _kwargs: dict[str, object], output: object) -> object:
            given = args[0] if args else None
            return self._listener.after_site(site, output, given) if isinstance(output, Tensor) else None

        # Before and after are two hooks: a norm may overwrite its input.
        self._add_before(site.path, module, before)
        self._add_after(site.path, module, after)

    def _hook_block(self, block: BlockCall) -> None:
        def before(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._listener.before_block(block, args, kwargs)

        def after(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
            y = first_output(output, (*args, *kwargs.values()))
            replaced = None if y is None else self._listener.after_block(block, y, args[0] if args else None)
            return None if replaced is None else _with_stream(output, y, replaced)

        def leave(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if (y := first_tensor(args, kwargs)) is not None:
                self._listener.after_block(block, y, None)

        # Before the hooks that gather a sharded block's parameters and free them: a replay goes through those.
        is_split = any(map(is_distributed, block.module.parameters()))
        self._add_before(block.path, block.module, before, prepend=is_split)
        if block.leaves is None:
            self._add_after(block.path, block.module, after)
        else:
            self._add_before(block.path, block.leaves, leave)

    def _add_before(self, place: str, module: nn.Module, body: Callable[..., Any], *, prepend: bool = False) -> None:
        hook = _told_in(self._owner, body) if self._failures is None else Hook(self._failures, place, body)
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend))

    def _add_after(self, place: str, module: nn.Module, body: Callable[..., Any]) -> None:
        hook = _told_in(self._owner, body) if self._failures is None else Hook(self._failures, place, body)
        self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks out; the model is as it was."""
        for handle in self.handles:
            handle.remove()
        for module, forward in reversed(self._forwards):
            forward.take_from(module)
        self.handles.clear()
        self._forwards.clear()


@contextmanager
def observed(
    model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], callers: Iterable[str], listener: Listener
) -> Iterator[None]:
    """Have a listener told of every call until the context is left; the arguments are those of `Hooks.install`.

    The model is left as it was, also after an exception.
    """
    hooks = Hooks(listener)
    try:
        hooks.install(model, sites, blocks, callers)
        yield
    finally:
        hooks.remove()


def _within(path: str, calls: _FunctionCalls, listener: Listener) -> Callable[..., Any]:
    """A function that calls the forward of the module at a path, while the calls of that module are told."""
    owner = threading.current_thread()
    listens: Callable[[], bool] = partial(is_now, owner) if isinstance(owner, Run) else listener.listens

    def around(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not listens():
            return forward(*args, **kwargs)
        outer = calls.parent, calls.made
        calls.parent, calls.made = path, {}
        try:
            if outer[0] is not None:
                listener.before_parent(path, args, kwargs)
                return forward(*args, **kwargs)
            with calls:
                listener.before_parent(path, args, kwargs)
                return forward(*args, **kwargs)
        finally:
            calls.parent, calls.made = outer

    return around


class _FunctionCalls(TorchFunctionMode):
    """Tells a listener of the norms and attentions that modules call as functions."""

    def __init__(self, sites: Sequence[NormSite], listener: Listener) -> None:
        super().__init__()
        self.parent: str | None = None
        """Path of the innermost caller that is running."""
        self.made: dict[str, int] = {}
        """Calls of each norm function that it has made."""
        self._listener = listener
        self._sites = {(site.parent, site.function, site.ordinal): site for site in sites if site.module is None}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION_FUNCTIONS:
            self._listener.at_attention(self.parent or "", ATTENTION_FUNCTIONS[function], args, kwargs)
        elif function in NORM_FUNCTIONS:
            name = NORM_FUNCTIONS[function]
            ordinal = self.made.get(name, 0)
            self.made[name] = ordinal + 1
            site, x = self._sites.get((self.parent or "", name, ordinal)), first_tensor(args, kwargs)
            if site is not None and x is not None:
                self._listener.before_site(site, x)
                y = function(*args, **kwargs)
                replaced = self._listener.after_site(site, y, x)
                return y if replaced is None else replaced
        return function(*args, **kwargs)


def _with_stream(output: Any, stream: Tensor | None, y: Tensor) -> object:
    if output is stream:
        return y
    members: Iterator[object] = (y if member is stream else member for member in output)
    return type(output)(*members) if hasattr(output, "_fields") else type(output)(members)


@contextmanager
def every_module(
    model: nn.Module,
    before: Callable[[str, tuple[object, ...], dict[str, object]], None],
    after: Callable[[str, object], None],
) -> Iterator[None]:
    """Tell of every module's calls, until the context is left; the model is left without hooks, also if it raises."""
    owner = threading.current_thread()

    def entering(path: str) -> Callable[..., None]:
        return _told_in(owner, lambda _module, args, kwargs: before(path, args, kwargs))

    def leaving(path: str) -> Callable[..., None]:
        return _told_in(owner, lambda _module, _args, output: after(path, output))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(entering(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leaving(path)).remove)
        yield
