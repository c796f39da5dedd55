"""Copies of tensors to the host: one is started in one step and read in a later one, so no step waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Numbers on their way to the host."""

    def is_ready(self, patience: float = 0.0) -> bool:
        """Whether they can be read without waiting, or after at most so many seconds."""

    def read(self) -> Tensor | None:
        """The numbers, in float64 on the CPU; None if they were lost."""


class AsyncCopy:
    """The copy of one tensor to the host; the tensor may be changed as soon as the copy is made."""

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

    def is_ready(self, patience: float = 0.0) -> bool:
        """Whether the copy is complete; any patience waits until it is."""
        if self._event is None:
            return True
        if patience:
            self._event.synchronize()
        return bool(self._event.query())

    def read(self) -> Tensor:
        """The copied numbers."""
        return self._values.double()


class CopyQueue:
    """Pending numbers in the order in which they were put in, each with its training step.

    Example:
        >>> queue = CopyQueue()
        >>> queue.put(3, AsyncCopy(torch.ones(2)))
        >>> [(step, values.tolist()) for step, values in queue.take_ready()]
        [(3, [1.0, 1.0])]
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Pending]] = deque()

    def __len__(self) -> int:
        """How many have not been taken out."""
        return len(self._pending)

    def put(self, step: int, values: Pending) -> None:
        """Append the numbers of a step."""
        self._pending.append((step, values))

    def take_ready(self, patience: float = 0.0) -> Iterator[tuple[int, Tensor]]:
        """Take out the oldest entries that are ready, or become ready in so many seconds; lost ones are skipped."""
        while self._pending and self._pending[0][1].is_ready(patience):
            step, pending = self._pending.popleft()
            values = pending.read()
            if values is not None:
                yield step, values
