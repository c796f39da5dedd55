"""Hooks that never end a training: what fails in one is noted, and a copy of the model holds none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normkit.identification.specimen import first_line


class Failures:
    """What could not be measured.

    Attributes:
        of: The first failure of each place, on one line.
        is_rehearsal: A place that fails now is given up: no compiler will be made to trace it.
    """

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.is_rehearsal = False
        self._given_up: set[str] = set()

    def run(self, place: str, body: Callable[..., Any], *args: Any) -> Any:
        """Call a measurement; None where it fails.

        Args:
            place: What it is of.
            body: What measures.
            *args: Its arguments.
        """
        if place in self._given_up:
            return None
        if torch.compiler.is_compiling():
            return body(*args)
        try:
            return body(*args)
        # A model may hand us what no one foresaw, such as the tensors of `torch.func`; the training does not end by it.
        except Exception as error:
            self.of.setdefault(place, first_line(error))
            if self.is_rehearsal:
                self._given_up.add(place)
            return None


class Hook:
    """One hook of a module.

    Args:
        failures: Where a failure is noted.
        place: What it measures.
        body: Called with the hook's arguments.
    """

    def __init__(self, failures: Failures, place: str, body: Callable[..., Any]) -> None:
        self._failures, self._place, self._body = failures, place, body

    def __call__(self, *args: Any) -> Any:
        """Measure."""
        return self._failures.run(self._place, self._body, *args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """A copy, or what is pickled, does nothing: it would count another model's rows."""
        return _nothing, ()


class Forward:
    """Stands before the forward of one module.

    Args:
        original: That forward.
        around: Called with it, its arguments and its keywords.
    """

    def __init__(self, original: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.__wrapped__, self._around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward."""
        return self._around(self.__wrapped__, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Callable[..., Any]]]:
        """A copy, or what is pickled, is the forward alone: where it is a method, that of the copied module."""
        return _itself, (self.__wrapped__,)

    def put_before(self, module: nn.Module) -> None:
        """Begin to stand before the module's forward."""
        self._is_own = "forward" in module.__dict__
        module.forward = self

    def take_from(self, module: nn.Module) -> None:
        """Leave; what others have put before the forward since stays, and calls through."""
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
