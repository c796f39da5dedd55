"""What a watch adds up on the device: named tables, one packed vector of them, and the copy of it to the host.

Some tables are summed, of others the largest entries are kept. Processes pool their tables in the same way: one vector
holds all tables, the summed ones first. A copy is started in one step and read in a later one, so no step waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of all sums on a device: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, kw_only=True)
class Table:
    """The shape of one table."""

    name: str
    shape: tuple[int, ...]
    keeps_largest: bool = False
    """Two tables are merged by keeping the larger entries; otherwise they are added."""

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def empty(self) -> float:
        """An entry before anything was counted."""
        return -math.inf if self.keeps_largest else 0.0


class Tables:
    """Tables on one device.

    Example:
        >>> tables = Tables([Table(name="counts", shape=(2,))], torch.device("cpu"))
        >>> tables["counts"].add_(1)
        tensor([1., 1.], dtype=torch.float64)
        >>> tables.packed()
        tensor([1., 1.], dtype=torch.float64)
    """

    def __init__(self, layout: Sequence[Table], device: torch.device) -> None:
        self.layout = tuple(sorted(layout, key=lambda table: table.keeps_largest))
        dtype = widest_dtype(device)
        self._tables = {
            table.name: torch.full(table.shape, table.empty, dtype=dtype, device=device) for table in self.layout
        }

    def __getitem__(self, name: str) -> Tensor:
        """The table of this name, to be written to in place."""
        return self._tables[name]

    def clear(self) -> None:
        """Reset all tables."""
        for table in self.layout:
            self._tables[table.name].fill_(table.empty)

    def packed(self) -> Tensor:
        """A copy of all tables as one vector, on their device."""
        return torch.cat([self._tables[table.name].flatten() for table in self.layout])

    def part(self, vector: Tensor, name: str) -> Tensor:
        """One table within a packed vector, to be written to in place."""
        return self.stacked(vector[None])[name][0]

    def stacked(self, vectors: Tensor) -> Mapping[str, Tensor]:
        """The tables within several packed vectors, (vectors, *shape) each, to be written to in place."""
        found, start = {}, 0
        for table in self.layout:
            found[table.name] = vectors[:, start : start + table.size].view(len(vectors), *table.shape)
            start += table.size
        return found

    def merged(self, vectors: Tensor) -> Tensor:
        """Several packed vectors, (vectors, entries), as one: sums added, of the other tables the largest kept."""
        sums = sum(table.size for table in self.layout if not table.keeps_largest)
        return torch.cat([vectors[:, :sums].sum(0), vectors[:, sums:].amax(0)])

    def unpacked(self, vector: Tensor) -> Mapping[str, Tensor]:
        """The tables that a vector holds, by name."""
        parts = torch.split(vector, [table.size for table in self.layout])
        return {table.name: part.reshape(table.shape) for table, part in zip(self.layout, parts, strict=True)}


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
