"""Named tables on one device that hooks add to: some are summed, of others the largest entries are kept.

Processes pool their tables in the same way: one vector holds all tables, the summed ones first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    def read(self) -> Mapping[str, Tensor]:
        """The tables as they are, by name, in float64 on the CPU."""
        return self.unpacked(self.packed().double().cpu())
