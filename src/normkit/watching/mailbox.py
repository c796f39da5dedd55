"""Numbers on their way from a device to the host: posted in the step, read in a later one, waited for by nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Letter(Protocol):
    """Something under way."""

    def has_arrived(self, patience: float = 0.0) -> bool:
        """Whether it can be read without waiting, or after at most so many seconds."""

    def read(self) -> Tensor | None:
        """The numbers, in float64 on the CPU; None if they were lost on the way."""


class CopyLetter:
    """The copy of one tensor to the host.

    Args:
        values: On any device; it may be changed once this returns.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        if values.device.type == "cpu":
            self._values = values.detach().clone()
            return
        # A copy to pageable memory would wait for the device.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
        self._values = pinned.copy_(values.detach(), non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record()

    def has_arrived(self, patience: float = 0.0) -> bool:
        """Whether the copy is complete; with any patience, it is waited for."""
        if self._event is None:
            return True
        if patience:
            self._event.synchronize()
        return bool(self._event.query())

    def read(self) -> Tensor:
        """The copy."""
        return self._values.double()


class Mailbox:
    """Letters in the order in which they were posted, each with the step that it is about.

    Example:
        >>> mailbox = Mailbox()
        >>> mailbox.post(3, CopyLetter(torch.ones(2)))
        >>> [(step, values.tolist()) for step, values in mailbox.arrived()]
        [(3, [1.0, 1.0])]
    """

    def __init__(self) -> None:
        self._letters: deque[tuple[int, Letter]] = deque()

    def __len__(self) -> int:
        """How many have not been taken out."""
        return len(self._letters)

    def post(self, step: int, letter: Letter) -> None:
        """Add a letter."""
        self._letters.append((step, letter))

    def arrived(self, patience: float = 0.0) -> Iterator[tuple[int, Tensor]]:
        """Take out what has arrived, or arrives within so many seconds, the oldest first; what was lost is left out."""
        while self._letters and self._letters[0][1].has_arrived(patience):
            step, letter = self._letters.popleft()
            values = letter.read()
            if values is not None:
                yield step, values
