"""What a watch adds up on the device: named tables that are summed, or of which the largest entries are kept.

Processes pool theirs alike: one vector holds all tables, the sums first, then the peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Table:
    """The shape of one table.

    Attributes:
        name: Its name.
        shape: Its shape.
        keeps_largest: Of two tables the larger entries are kept; else they are added.
    """

    name: str
    shape: tuple[int, ...]
    keeps_largest: bool = False

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

    Args:
        layout: Their shapes.
        device: Where they are.

    Example:
        >>> tables = Tables([Table(name="counts", shape=(2,))], torch.device("cpu"))
        >>> tables["counts"].add_(1)
        tensor([1., 1.], dtype=torch.float64)
        >>> tables.packed()
        tensor([1., 1.], dtype=torch.float64)
    """

    def __init__(self, layout: Sequence[Table], device: torch.device) -> None:
        self.layout = tuple(sorted(layout, key=lambda table: table.keeps_largest))
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._tables = {
            table.name: torch.full(table.shape, table.empty, dtype=dtype, device=device) for table in self.layout
        }

    def __getitem__(self, name: str) -> Tensor:
        """The table of this name, to be written to in place."""
        return self._tables[name]

    def clear(self) -> None:
        """Forget everything that was counted."""
        for table in self.layout:
            self._tables[table.name].fill_(table.empty)

    def packed(self) -> Tensor:
        """A copy of all tables as one float64 vector, on their device."""
        return torch.cat([self._tables[table.name].flatten() for table in self.layout])

    def part(self, vector: Tensor, name: str) -> Tensor:
        """One table within a packed vector, to be written to in place."""
        start = 0
        for table in self.layout:
            if table.name == name:
                return vector[start : start + table.size].view(table.shape)
            start += table.size
        raise KeyError(name)

    def stacked(self, vectors: Tensor) -> Mapping[str, Tensor]:
        """The tables within several packed vectors, (vectors, *shape) each, to be written to in place."""
        found, start = {}, 0
        for table in self.layout:
            found[table.name] = vectors[:, start : start + table.size].view(len(vectors), *table.shape)
            start += table.size
        return found

    @property
    def sums(self) -> int:
        """How many entries at the beginning of the packed vector are added; of the rest the largest are kept."""
        return sum(table.size for table in self.layout if not table.keeps_largest)

    def unpacked(self, vector: Tensor) -> Mapping[str, Tensor]:
        """The tables that a vector holds, by name."""
        parts = torch.split(vector, [table.size for table in self.layout])
        return {table.name: part.reshape(table.shape) for table, part in zip(self.layout, parts, strict=True)}


def merged(vectors: Sequence[Tensor], sums: int) -> Tensor:
    """One packed vector for all: the first `sums` entries added, of the others the largest kept."""
    stacked = torch.stack(tuple(vectors))
    return torch.cat([stacked[:, :sums].sum(0), stacked[:, sums:].amax(0)])
