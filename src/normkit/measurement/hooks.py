"""Hooks that never end a training: a failure in one is recorded, and a copy of the model holds none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normkit.text import first_line


class Failures:
    """What could not be measured."""

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
    """One hook of a module, which measures one place.

    Args:
        failures: Records a failure.
        place: What it measures.
        body: Called with the hook's arguments.
    """

    def __init__(self, failures: Failures, place: str, body: Callable[..., Any]) -> None:
        self._failures, self._place, self._body = failures, place, body

    def __call__(self, *args: Any) -> Any:
        """Measure; None where that fails."""
        return self._failures.run(self._place, self._body, *args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """A copied or pickled hook does nothing: it would count another model's rows."""
        return _nothing, ()


class Forward:
    """Stands in for the forward of one module.

    Args:
        original: That forward.
        around: Called with it, its arguments and its keywords.
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
        """Restore the forward; if others have replaced it since, theirs stays and calls through this one."""
        if module.__dict__.get("forward") is not self:
            return
        if self._is_own:
            module.forward = self.__wrapped__
        else:
            del module.forward


def _nothing() -> Callable[..., None]:
    return _does_nothing


def _does_nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
