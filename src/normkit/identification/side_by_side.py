"""Runs of a model side by side, so that weights that lie in files are read once for all of them.

Each run has a thread, of which one works at a time: until it needs the weights of another part of the model. A part is
a block, or a module outside the blocks with weights in files. It is read when no run can go on without it, and all
that wait for it pass through it, in the order in which they were given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import nn

from normkit.identification.offloading import in_memory, offload_hooks
from normkit.identification.state import random_numbers_kept

Result = TypeVar("Result")


class _AbandonedError(BaseException):
    """Another run was interrupted by the user."""


class Run(threading.Thread):
    """A function in a thread of its own, which works only while `go_on` lasts."""

    def __init__(self, body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.needs: Any = None
        """The part of the model that it waits for."""
        self.is_done = self.is_abandoned = False
        self._body = body
        self._result: Any = None
        self._error: BaseException | None = None
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        # Threads have none of these from the one that starts them.
        self._context, self._has_gradients = copy_context(), torch.is_grad_enabled()

    def go_on(self) -> None:
        """Let it work until it needs another part, or is done; random numbers go on where its last ones ended."""
        self._turn.release()
        self._pause.acquire()

    def run(self) -> None:
        """Call the function."""
        self._turn.acquire()
        try:
            with torch.set_grad_enabled(self._has_gradients):
                self._result = self._context.run(self._body)
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._pause.release()

    def wait_for(self, part: nn.Module) -> None:
        """Stop until that part is in memory, and it is this run's turn."""
        self.needs = part
        with random_numbers_kept():
            self._pause.release()
            self._turn.acquire()
        if self.is_abandoned:
            raise _AbandonedError

    def result(self) -> Any:
        """The value that the function returned; an error of the function is raised here."""
        if self._error is not None:
            raise self._error
        return self._result


def is_now(run: Run) -> bool:
    """Whether a run is the one that works."""
    return threading.current_thread() is run


def side_by_side(
    model: nn.Module, blocks: Sequence[nn.Module], runs: Sequence[Callable[[], Result]]
) -> Sequence[Callable[[], Result]]:
    """Call functions side by side, each of which runs the model once.

    Each run passes through a block after those that are given before it. Hooks of `measurement.hooks` are told of the
    calls of their own run alone.

    Args:
        model: The model.
        blocks: Its blocks; none lies in another.
        runs: The functions.

    Returns:
        One function for each, which returns what it returned, or raises what it raised. Where no weights lie in files,
        or there are no blocks, these are the functions themselves, which nothing has called.
    """
    parts = _parts(model, blocks)
    # A thread has neither autocast nor modes of the one that starts it.
    if not parts or len(runs) < 2 or torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack():
        return runs
    started, held, order = [Run(each) for each in runs], set[nn.Module](), dict[Any, int]()
    with random_numbers_kept(), _stopping_at(parts, held):
        try:
            for each in started:
                each.start()
                with random_numbers_kept():
                    each.go_on()
            while left := [each for each in started if not each.is_done]:
                for each in left:
                    order.setdefault(each.needs, len(order))
                # The part that was reached first: those that are behind catch up.
                needed = min((each.needs for each in left), key=order.__getitem__)
                with in_memory(needed):
                    held.add(needed)
                    for each in [each for each in left if each.needs is needed]:
                        each.go_on()
                    held.clear()
        finally:
            held.clear()
            for each in started:
                each.is_abandoned = True
                while each.is_alive() and not each.is_done:
                    each.go_on()
    return [each.result for each in started]


def _parts(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks and, outside them, the modules with weights in files; none where a block lies in one of these."""
    within = {inner: block for block in blocks for inner in block.modules()}
    stored = [module for module in model.modules() if offload_hooks(module)]
    outside = [module for module in stored if module not in within]
    if not blocks or any(True for module in outside for _ in module.children()):
        return []
    return [*dict.fromkeys(within[module] for module in stored if module in within), *outside]


@contextmanager
def _stopping_at(parts: Sequence[nn.Module], held: Collection[nn.Module]) -> Iterator[None]:
    """A run stops in front of each part that is not held in memory."""

    def stop(module: nn.Module, _args: object) -> None:
        run = threading.current_thread()
        while isinstance(run, Run) and module not in held:
            run.wait_for(module)

    with ExitStack() as hooks:
        for part in parts:
            hooks.callback(part.register_forward_pre_hook(stop, prepend=True).remove)
        yield
